"""What objects and parts are made of: pieces of files and of synthetic streams.

Invariant: a file belongs to one object or part. A copy is a hard link under another name.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.s3server.synthetic import synthetic_bytes, synthetic_etag
from tests.s3server.wire import Connection

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileSegment:
    """Bytes [offset, offset + size) of a file in the bucket's directory of bodies."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class SyntheticSegment:
    """Bytes [offset, offset + size) of the stream named `seed`."""

    seed: int
    offset: int
    size: int


Segment = FileSegment | SyntheticSegment
Segments = tuple[Segment, ...]


def segments_to_json(segments: Segments) -> list[list[str | int]]:
    """Return what a sidecar holds."""
    return [
        ["file", part.name, part.offset, part.size]
        if isinstance(part, FileSegment)
        else ["synthetic", part.seed, part.offset, part.size]
        for part in segments
    ]


def segments_from_json(rows: list[list[str | int]]) -> Segments:
    """Return the segments that a sidecar names."""
    return tuple(
        FileSegment(str(name), int(offset), int(size))
        if kind == "file"
        else SyntheticSegment(int(name), int(offset), int(size))
        for kind, name, offset, size in rows
    )


def slice_segments(segments: Segments, start: int, count: int) -> Segments:
    """Return the segments that make up bytes [start, start + count)."""
    found: list[Segment] = []
    stop = start + count
    at = 0
    for part in segments:
        first, last = max(start, at), min(stop, at + part.size)
        if first < last:
            offset, size = part.offset + first - at, last - first
            if isinstance(part, FileSegment):
                found.append(FileSegment(part.name, offset, size))
            else:
                found.append(SyntheticSegment(part.seed, offset, size))
        at += part.size
    return tuple(found)


class OpenBody:
    """An object's bytes, held open: deleting or replacing the object does not disturb a GET in progress."""

    def __init__(self, directory: Path, segments: Segments) -> None:
        self._segments = segments
        self._files: dict[str, int] = {}
        try:
            for part in segments:
                if isinstance(part, FileSegment) and part.name not in self._files:
                    self._files[part.name] = os.open(directory / part.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    def send(self, connection: Connection, start: int, count: int) -> None:
        """Send bytes [start, start + count)."""
        for part in slice_segments(self._segments, start, count):
            if isinstance(part, FileSegment):
                connection.send_file(self._files[part.name], part.offset, part.size)
            else:
                connection.send_synthetic(part.seed, part.offset, part.size)

    def chunks(self, start: int, count: int) -> Iterator[bytes]:
        """Yield bytes [start, start + count) in pieces."""
        for part in slice_segments(self._segments, start, count):
            for offset in range(part.offset, part.offset + part.size, READ_BYTES):
                size = min(READ_BYTES, part.offset + part.size - offset)
                if isinstance(part, FileSegment):
                    yield os.pread(self._files[part.name], size, offset)
                else:
                    yield synthetic_bytes(part.seed, offset, size)

    def etag(self) -> str:
        """Return the MD5 of all bytes; for one synthetic piece its fixed ETag."""
        if len(self._segments) == 1 and isinstance(part := self._segments[0], SyntheticSegment):
            return synthetic_etag(part.seed, part.offset, part.size)
        digest = hashlib.md5(usedforsecurity=False)
        for chunk in self.chunks(0, sum(part.size for part in self._segments)):
            digest.update(chunk)
        return digest.hexdigest()

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
