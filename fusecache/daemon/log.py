"""The daemon's log on stderr: which messages it has, and their format."""

import errno
import json
import logging
import os
import sys
from datetime import UTC, datetime
from types import TracebackType

from fusecache.model.format_text import printable

_ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def begin_log(level: str, log_format: str = "text") -> None:
    """Log to stderr from now on. level: the name of the lowest level. log_format: `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter()
        if log_format == "json"
        else _LineFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler])
    for library in ("azure", "boto3", "botocore", "google", "urllib3", "pyfuse3"):
        logging.getLogger(library).setLevel(logging.WARNING)  # at DEBUG they log every request
    logging.getLogger("pyfuse3").addFilter(is_relevant)


def log_place() -> str:
    """Return where this process's stderr goes: a file, or the command that shows the journal; "" for anything else."""
    try:
        stderr, path = os.fstat(2), os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    # systemd.exec(5): the device and inode of the journal's stream.
    if os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}":
        return "journalctl -t fusecache"  # SyslogIdentifier= of the units
    return path if os.path.isfile(path) else ""


def is_relevant(record: logging.LogRecord) -> bool:
    """Return False for pyfuse3's error that the kernel expects no answer any more, normal during an unmount."""
    return "fuse_reply_*" not in str(record.msg) or os.strerror(errno.ENOENT) not in record.getMessage()


class _LineFormatter(logging.Formatter):
    """Writes each message as one line, so that no key can forge one; only tracebacks have several."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExceptionInfo) -> str:
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


class _JsonFormatter(logging.Formatter):
    """Writes each message as one line of JSON with the keys `time`, `level`, `logger`, `message`, `error`.

    time: ISO 8601 in UTC. error: the traceback, only of an unexpected failure.
    """

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)
        # ASCII: a key with a line separator of Unicode, or with bytes that are no UTF-8, stays in its line.
        return json.dumps(row)
