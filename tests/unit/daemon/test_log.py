"""What a daemon's log tells, and what it is silent about."""

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fusecache.daemon.log import begin_log, is_relevant
from tests.support import ROOT


@pytest.fixture(autouse=True)
def begun() -> Iterator[None]:
    libraries = [logging.getLogger(name) for name in ("boto3", "botocore", "urllib3", "pyfuse3")]
    levels = [library.level for library in libraries]
    begin_log("INFO")
    yield
    for library, level in zip(libraries, levels, strict=True):
        library.setLevel(level)
        library.removeFilter(is_relevant)


def place_of(stderr: int, journal: str = "") -> str:
    """Return where a process with this stderr says that its log goes."""
    program = "from fusecache.daemon.log import log_place; print(log_place())"
    environment = {**os.environ, "JOURNAL_STREAM": journal}
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr, env=environment
    )
    return done.stdout.decode().strip()


def test_the_place_of_the_log_is_a_file_or_the_journal(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:
        assert place_of(file.fileno(), "8:12345") == str(tmp_path / "log")
    reader, writer = os.pipe()
    try:
        stream = os.fstat(writer)
        assert place_of(writer, f"{stream.st_dev}:{stream.st_ino}") == "journalctl -t fusecache"
        assert place_of(writer, "8:12345") == ""
    finally:
        os.close(reader)
        os.close(writer)
    assert "\nSyslogIdentifier=fusecache\n" in (ROOT / "systemd/fusecache@.service").read_text()


@pytest.mark.parametrize(("number", "lines"), [(errno.ENOENT, 0), (errno.EINVAL, 1)])
def test_an_answer_that_the_kernel_awaits_no_longer_is_not_news(
    caplog: pytest.LogCaptureFixture, number: int, lines: int
) -> None:
    # pyfuse3's words when the mount is taken away between a release and its answer.
    logging.getLogger("pyfuse3").error("fuse_release(): fuse_reply_* failed with %s", os.strerror(number))
    assert len(caplog.records) == lines


def test_keys_cannot_forge_lines_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """The process is another one, because pytest captures this one's records."""
    program = (
        "import logging; from fusecache.daemon.log import begin_log; begin_log('INFO');"
        "key = 'a\\n2026-01-01 00:00:00 WARNING b\\x1b[2J';"
        "logging.getLogger('x').info('published key=%s', key)\n"
        "try: raise ValueError('\\x1b[2J')\n"
        "except ValueError: logging.exception('failed')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].endswith(r"x published key=a\n2026-01-01 00:00:00 WARNING b\x1b[2J")
    assert lines[1].endswith("failed")
    assert lines[-1] == r"ValueError: \x1b[2J"


def test_json_log_has_one_object_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import logging; from fusecache.daemon.log import begin_log; begin_log('INFO', 'json');"
        "logging.getLogger('x').info('published key=%s', 'a\\nb\\u2028\\udcff')\n"
        "try: raise ValueError('why')\n"
        "except ValueError: logging.getLogger('y').exception('failed')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    published, failed = map(json.loads, capfd.readouterr().err.splitlines())
    assert list(published) == ["time", "level", "logger", "message"]
    assert published["message"] == "published key=a\nb\u2028\udcff"
    assert datetime.fromisoformat(published["time"]).utcoffset() == timedelta(0)
    assert (failed["level"], failed["logger"]) == ("ERROR", "y")
    assert failed["error"].endswith("ValueError: why")
