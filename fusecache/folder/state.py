"""What a folder has of its bucket: one row for each file that was pulled or pushed. A log of JSON lines.

The log is only appended to, so a process that is killed loses at most the last line. Thread-safe.

Invariants:
1. A row is written before its file gets its name (pull), or after the bucket accepted it (push).
2. A file with the size and time of its row has the content of the row's version.
"""

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from fusecache.disk.native import replace_synced
from fusecache.model.errors import FolderError, StateError

FORMAT_VERSION = 1
# The log is rewritten at the start if it has more lines than this for each row.
_LINES_PER_ROW = 3


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one content of a local file from another: size in bytes, and time of the last change."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """Return the stamp of a stat result."""
        return cls(found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Row:
    """A file's stamp, and the version of the object that has the same content."""

    stamp: Stamp
    etag: str


@dataclass(frozen=True, slots=True)
class SentContent:
    """Content that was handed over for upload. uuid: in the metadata of the object that it becomes."""

    stamp: Stamp
    uuid: str


class FolderState:
    """The rows of one folder, by name: the path below the folder. Raises FolderError, StateError."""

    def __init__(self, path: Path, identity: str) -> None:
        """identity: endpoint, bucket and prefix; a folder belongs to one."""
        self.rows: dict[str, Row] = {}
        self.sent: dict[str, SentContent] = {}
        self._path = path
        self._lock = threading.Lock()
        lines = self._load(identity)
        if not lines or lines > _LINES_PER_ROW * (len(self.rows) + len(self.sent) + 10):
            self._rewrite(identity)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the log, with everything on the disk."""
        os.fdatasync(self._file)
        os.close(self._file)

    def have(self, name: str, row: Row) -> None:
        """Record that file and object have the same content."""
        with self._lock:
            self._append(_have_line(name, row))
            self.rows[name] = row
            self.sent.pop(name, None)

    def send(self, name: str, sent: SentContent) -> None:
        """Record that content was handed over for upload."""
        with self._lock:
            self._append(_sent_line(name, sent))
            self.sent[name] = sent

    def forget(self, name: str) -> None:
        """Record that the bucket has nothing of this folder under the name."""
        with self._lock:
            self._append(["gone", name])
            self.rows.pop(name, None)
            self.sent.pop(name, None)

    def _append(self, line: list[object]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def _load(self, identity: str) -> int:
        """Read the log; return its number of lines. A last line that is cut is removed."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        lines = whole.splitlines()
        try:
            for number, line in enumerate(map(json.loads, lines)):
                if number == 0:
                    self._check_header(line, identity)
                else:
                    self._take(line)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise StateError(
                f"{self._path} is damaged ({exc}): remove it. Then a pull recognises files by size and time, and "
                "names the others instead of replacing them"
            ) from exc
        return len(lines)

    def _check_header(self, line: dict[str, object], identity: str) -> None:
        if line["format"] != FORMAT_VERSION:
            raise StateError(
                f"{self._path} has format {line['format']}, this fusecache supports {FORMAT_VERSION}: "
                "use the version that made it, or another folder"
            )
        if line["identity"] != identity:
            raise FolderError(
                f"{self._path.parents[1]} belongs to {line['identity']}, not to {identity}; choose another folder"
            )

    def _take(self, line: list[object]) -> None:
        match line:
            case ["have", str(name), int(size), int(mtime_ns), str(etag)]:
                self.rows[name] = Row(Stamp(size, mtime_ns), etag)
                self.sent.pop(name, None)
            case ["sent", str(name), int(size), int(mtime_ns), str(uuid)]:
                self.sent[name] = SentContent(Stamp(size, mtime_ns), uuid)
            case ["gone", str(name)]:
                self.rows.pop(name, None)
                self.sent.pop(name, None)
            case _:
                raise ValueError(f"unknown line {line!r}")

    def _rewrite(self, identity: str) -> None:
        lines: list[object] = [{"format": FORMAT_VERSION, "identity": identity}]
        lines += [_have_line(name, row) for name, row in self.rows.items()]
        lines += [_sent_line(name, sent) for name, sent in self.sent.items()]
        replace_synced(self._path, (json.dumps(line) + "\n" for line in lines))


def _have_line(name: str, row: Row) -> list[object]:
    return ["have", name, row.stamp.size, row.stamp.mtime_ns, row.etag]


def _sent_line(name: str, sent: SentContent) -> list[object]:
    return ["sent", name, sent.stamp.size, sent.stamp.mtime_ns, sent.uuid]
