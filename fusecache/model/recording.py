"""Recordings: what was read from a mount, in the order of the first reads, as plans that another mount can fetch by.

A recording is one compressed file: a line of JSON, then the plans as `hints` encodes them, window by window. Each
extent is a step of its own.
"""

import gzip
import json
import sys
import zlib
from array import array
from itertools import islice
from typing import Final

from fusecache.model.hints import HintError, encode_plan

VERSION: Final = 1
# As many extents as a daemon takes of all jobs together.
MOST_EXTENTS: Final = 1_000_000
# A daemon counts an extent with a longer path as several: by the memory of the path, above some 100 characters.
_EXTENT_BYTES: Final = 150
# Extents end at borders of 8 MiB, so that files that are read side by side are fetched side by side.
PIECE_BYTES: Final = 8 << 20
# Reads that the page cache answers leave holes: as large as the kernel's read-ahead of one read.
_GAP_BYTES = 256 << 10
# Pieces whose later reads are joined to the earlier ones; 512 GiB of large files.
_RECENT_PIECES = 1 << 16
# Of one window: few windows, as each costs time on every read, and messages of less than 16 MiB.
_PLAN_EXTENTS = 1 << 15
_PLAN_PATH_BYTES = 8 << 20


class Recorder:
    """Joins reads to extents. left_out: reads for which there was no room."""

    def __init__(self) -> None:
        self.left_out = 0
        self._numbers: dict[str, int] = {}
        self._path, self._start, self._stop = array("q"), array("q"), array("q")
        self._recent: dict[tuple[int, int], int] = {}
        self._weight_bytes = 0

    def __len__(self) -> int:
        return len(self._path)

    @property
    def files(self) -> int:
        """How many files were read."""
        return len(self._numbers)

    @property
    def nbytes(self) -> int:
        """How many bytes the extents have."""
        return sum(self._stop) - sum(self._start)

    def add(self, path: str, start: int, nbytes: int) -> None:
        """Add a read. path: below the mountpoint."""
        stop = start + nbytes
        while start < stop:
            end = min(stop, (start // PIECE_BYTES + 1) * PIECE_BYTES)
            self._add_piece(path, start, end)
            start = end

    def _add_piece(self, path: str, start: int, stop: int) -> None:
        number = self._numbers.get(path, len(self._numbers))
        piece = number, start // PIECE_BYTES
        row = self._recent.get(piece)
        if (
            row is not None
            and self._start[row] - _GAP_BYTES <= stop
            and start <= self._stop[row] + _GAP_BYTES
        ):
            self._start[row] = min(self._start[row], start)
            self._stop[row] = max(self._stop[row], stop)
            return
        weight_bytes = self._weight_bytes + max(_EXTENT_BYTES, sys.getsizeof(path))
        if weight_bytes > MOST_EXTENTS * _EXTENT_BYTES:
            self.left_out += 1
            return
        self._weight_bytes = weight_bytes
        self._numbers[path] = number
        if row is None and len(self._recent) >= _RECENT_PIECES:
            del self._recent[next(iter(self._recent))]
        self._recent[piece] = len(self)
        for column, value in ((self._path, number), (self._start, start), (self._stop, stop)):
            column.append(value)

    def encode(self) -> bytes:
        """Return the recording as the bytes of its file."""
        plans: list[bytes] = []
        first = 0
        names = list(self._numbers)
        while first < len(self):
            last, path_bytes = first, 0
            for number in islice(self._path, first, first + _PLAN_EXTENTS):
                path_bytes += len(names[number].encode())
                if path_bytes > _PLAN_PATH_BYTES:
                    break
                last += 1
            plans.append(self._plan(len(plans), names, first, last))
            first = last
        header = {"fusecache": "recording", "version": VERSION, "files": self.files, "bytes": self.nbytes}
        header |= {"extents": len(self), "plans": [len(plan) for plan in plans]}
        return gzip.compress(json.dumps(header).encode() + b"\n" + b"".join(plans), mtime=0)

    def _plan(self, window: int, names: list[str], first: int, last: int) -> bytes:
        rows = range(first, last)
        paths = sorted({names[self._path[row]] for row in rows})
        place = {path: number for number, path in enumerate(paths)}
        return encode_plan(
            window=window,
            step=0,
            paths=paths,
            path=[place[names[self._path[row]]] for row in rows],
            start=self._start[first:last],
            length=[self._stop[row] - self._start[row] for row in rows],
            first=rows,
            span=[0] * len(rows),
        )


class Recording:
    """A recording that was read: its plans as messages, and its counts. Raises HintError if it is none."""

    def __init__(self, content: bytes) -> None:
        try:
            line, _, rest = gzip.decompress(content).partition(b"\n")
            header = json.loads(line)
        except (OSError, EOFError, zlib.error, ValueError, RecursionError) as problem:
            raise HintError(f"not a recording, or damaged: {problem}") from problem
        if not isinstance(header, dict) or header.get("fusecache") != "recording":
            raise HintError("not a recording: write one with `fusecache record`")
        if header.get("version") != VERSION:
            raise HintError(
                f"a recording of version {header.get('version')!r}; this fusecache reads version {VERSION}: "
                "record again"
            )
        try:
            self.files, self.extents, self.nbytes = (
                int(header[key]) for key in ("files", "extents", "bytes")
            )
            sizes = [int(size) for size in header["plans"]]
        except (KeyError, TypeError, ValueError) as problem:
            raise HintError(f"the recording is damaged: {problem!r}") from problem
        if min(sizes, default=0) < 0 or sum(sizes) != len(rest):
            raise HintError(f"the recording is damaged: its plans have {len(rest)} bytes, not {sum(sizes)}")
        self.plans: list[bytes] = []
        for size in sizes:
            self.plans.append(rest[:size])
            rest = rest[size:]
