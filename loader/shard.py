"""Bytes of samples out of shard files: open files, offset tables and decompressed shards, each within a
bound.

Raw shards are read with pread, one call a sample: a mapped file would answer an
I/O error with SIGBUS. Compressed shards are decompressed as a whole into memory and never beside the source.
Nothing is written.

Safe for threads and for fork: the caches are ordered dicts whose single operations are atomic, at worst two
threads do the same work twice; an open file is closed when its last user lets go of it. A pickled copy starts
with empty caches.
"""

import contextlib
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.compression import decompress
from loader.encodings import Buffer, makes_views
from loader.errors import DatasetError, ShardError
from loader.index import Index

# Well below the usual limit of 1024 open files a process, of which the trainer wants some, too.
OPEN_FILES = 256
# 4 bytes a sample: the tables of 16 million samples, or of 8 000 shards of 2 048.
OFFSET_CACHE_BYTES = 64 << 20
# 64 MiB shards: enough for the few that a py1e block has in use at a time; each worker process has its own.
DECOMPRESSED_CACHE_BYTES = 1 << 30

# Part of an error's way out; the tool itself leaves it away.
VERIFY_HINT = ", or check the dataset with `python -m loader verify`"

Offsets = NDArray[np.uint32] | range


class _OpenFile:
    """A descriptor that closes when nobody uses it any more: eviction cannot pull it from under a reader."""

    __slots__ = ("fd",)

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class ShardReader:
    """Reads samples' bytes of one dataset."""

    def __init__(
        self,
        index: Index,
        *,
        open_files: int = OPEN_FILES,
        offset_cache_bytes: int = OFFSET_CACHE_BYTES,
        decompressed_cache_bytes: int = DECOMPRESSED_CACHE_BYTES,
    ) -> None:
        self._index = index
        self._limits = (open_files, offset_cache_bytes, decompressed_cache_bytes)
        self._forget()

    def _forget(self) -> None:
        self._writable = [any(map(makes_views, schema.encodings)) for schema in self._index.schemas]
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._offsets: OrderedDict[int, Offsets] = OrderedDict()
        self._offset_bytes = 0
        self._decompressed: OrderedDict[int, bytes] = OrderedDict()
        self._decompressed_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_index": self._index, "_limits": self._limits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._index, self._limits = state["_index"], state["_limits"]
        self._forget()

    def read(self, shard: int, sample: int) -> Buffer:
        """Return the bytes of one sample. Raises ShardError, naming shard, bytes and sample, if it cannot."""
        return self.read_many(shard, [sample])[0]

    def read_many(self, shard: int, samples: list[int]) -> list[Buffer]:
        """Return the bytes of several samples of a shard, in the order asked for, each a buffer by itself.

        They are bytearrays where the shard has columns whose values are views into them.
        """
        schema = int(self._index.schema_of[shard])
        if self._index.zip_names[shard]:
            whole = memoryview(self._whole(shard))
            kind = bytearray if self._writable[schema] else bytes
            return [kind(whole[start:stop]) for start, stop in self._extents(shard, samples)]
        file = self._file(shard)
        extents = self._extents(shard, samples)
        fill = self._read_writable if self._writable[schema] else self._read_immutable
        try:
            found = fill(file.fd, extents)
        except OSError as problem:
            raise self._failed(shard, *_hull(extents), samples, _cause(problem)) from problem
        for number, (start, stop) in enumerate(extents):
            if len(found[number]) != stop - start:
                part = found[number]
                found[number] = part + self._rest(shard, file, start + len(part), stop, samples[number])
        return found

    @staticmethod
    def _read_writable(fd: int, extents: list[tuple[int, int]]) -> list[Buffer]:
        preadv = os.preadv
        found: list[Buffer] = []
        for start, stop in extents:
            data = bytearray(stop - start)
            got = preadv(fd, [data], start)
            found.append(data if got == stop - start else data[:got])
        return found

    @staticmethod
    def _read_immutable(fd: int, extents: list[tuple[int, int]]) -> list[Buffer]:
        pread = os.pread
        return [pread(fd, stop - start, start) for start, stop in extents]

    def _extents(self, shard: int, samples: list[int]) -> list[tuple[int, int]]:
        offsets = self._table(shard)
        if isinstance(offsets, range):
            return [(offsets[sample], offsets[sample + 1]) for sample in samples]
        if len(samples) == 1:
            return [(int(offsets[samples[0]]), int(offsets[samples[0] + 1]))]
        which = np.array(samples)
        return list(zip(offsets[which].tolist(), offsets[which + 1].tolist(), strict=True))

    def path(self, shard: int) -> str:
        """The file that holds a shard."""
        return os.path.join(
            self._index.directory, self._index.zip_names[shard] or self._index.raw_names[shard]
        )

    def _rest(self, shard: int, file: _OpenFile, start: int, stop: int, sample: int) -> bytes:
        # A short read is legal (a signal, an odd file system); only an empty one means the end of the file.
        parts = []
        while start < stop:
            try:
                part = os.pread(file.fd, stop - start, start)
            except OSError as problem:
                raise self._failed(shard, start, stop, [sample], _cause(problem)) from problem
            if not part:
                raise self._failed(
                    shard, start, stop, [sample], f"the file ends at {start}; it was truncated"
                )
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def _file(self, shard: int) -> _OpenFile:
        file = self._files.get(shard)
        if file is not None:
            with contextlib.suppress(
                KeyError
            ):  # another thread may have evicted it just now; ours stays open
                self._files.move_to_end(shard)
            return file
        file = self._open(shard, self.path(shard), int(self._index.raw_bytes[shard]))
        self._files[shard] = file
        with contextlib.suppress(KeyError):  # another thread makes room too
            while len(self._files) > self._limits[0]:
                self._files.popitem(last=False)
        return file

    def _open(self, shard: int, path: str, expected: int) -> _OpenFile:
        samples = range(int(self._index.samples[shard]))
        try:
            file = _OpenFile(path)
            found = os.fstat(file.fd)
        except OSError as problem:
            raise self._failed(shard, 0, expected, samples, _cause(problem)) from problem
        if not stat.S_ISREG(found.st_mode):
            kind = "a directory" if stat.S_ISDIR(found.st_mode) else "something else"
            raise self._failed(shard, 0, expected, samples, f"this is {kind}, not a file")
        size = found.st_size
        if expected and size != expected:
            cause = "it was truncated" if size < expected else "it was replaced"
            raise self._failed(
                shard, 0, expected, samples, f"the file has {size} bytes, the index says {expected}; {cause}"
            )
        return file

    def _table(self, shard: int) -> Offsets:
        """Return where each sample begins, and where the last one ends."""
        offsets = self._offsets.get(shard)
        if offsets is None:
            offsets = self._offsets[shard] = self._load_table(shard)
            self._offset_bytes += _table_bytes(offsets)
            with contextlib.suppress(KeyError):
                while self._offset_bytes > self._limits[1] and len(self._offsets) > 1:
                    self._offset_bytes -= _table_bytes(self._offsets.popitem(last=False)[1])
        return offsets

    def _load_table(self, shard: int) -> Offsets:
        index = self._index
        count, record = int(index.samples[shard]), index.schema(shard).record_bytes
        size = int(index.raw_bytes[shard])
        first = size - count * record
        if record and size and first >= 4 * (count + 2):
            # Every sample has the same size: the table follows from the index, and needs no read.
            return range(first, size + 1, record)
        head_bytes = 4 * (count + 2)
        if index.zip_names[shard]:
            whole = self._whole(shard)
            head, size = whole[:head_bytes], len(whole)
        else:
            file = self._file(shard)
            size = os.fstat(file.fd).st_size
            head = self._rest(shard, file, 0, min(head_bytes, size), 0)
        if len(head) < head_bytes:
            raise self._failed(
                shard, 0, head_bytes, range(count), f"the file ends at {len(head)}, within its header"
            )
        words = np.frombuffer(head, "<u4")
        offsets = words[1:].astype(np.uint32, copy=False)
        if int(words[0]) != count:
            raise self._failed(
                shard, 0, 4, range(count), f"it holds {words[0]} samples, the index says {count}"
            )
        if int(offsets[0]) < head_bytes or int(offsets[-1]) > size or (offsets[1:] < offsets[:-1]).any():
            raise self._failed(shard, 4, head_bytes, range(count), "its table of offsets is damaged")
        return offsets

    def _whole(self, shard: int) -> bytes:
        """Return a compressed shard, decompressed."""
        whole = self._decompressed.get(shard)
        if whole is not None:
            return whole
        index = self._index
        samples = range(int(index.samples[shard]))
        file = self._open(shard, self.path(shard), int(index.zip_bytes[shard]))
        size = os.fstat(file.fd).st_size
        packed = self._rest(shard, file, 0, size, 0)
        try:
            whole = decompress(index.compression(shard), packed)
        except ValueError as problem:
            raise self._failed(shard, 0, size, samples, f"it does not decompress: {problem}") from problem
        expected = int(index.raw_bytes[shard])
        if expected and len(whole) != expected:
            raise self._failed(shard, 0, size, samples, f"it unpacks to {len(whole)} bytes, not {expected}")
        self._decompressed[shard] = whole
        self._decompressed_bytes += len(whole)
        while self._decompressed_bytes > self._limits[2] and len(self._decompressed) > 1:
            self._decompressed_bytes -= len(self._decompressed.popitem(last=False)[1])
        return whole

    def _failed(
        self, shard: int, start: int, stop: int, samples: range | list[int], cause: str
    ) -> ShardError:
        first = int(self._index.samples[:shard].sum())
        ids = [first + min(samples), first + max(samples)] if len(samples) else [first, first]
        which = f"sample {ids[0]}" if ids[0] == ids[1] else f"samples {ids[0]} to {ids[1]}"
        return ShardError(
            f"{self.path(shard)} (shard {shard}): bytes {start} to {stop}, {which}: {cause}. "
            f"Restore the shard{VERIFY_HINT}."
        )


def _hull(extents: list[tuple[int, int]]) -> tuple[int, int]:
    return min(start for start, _ in extents), max(stop for _, stop in extents)


def _cause(problem: OSError) -> str:
    """Put an error in words; the path is said already."""
    return "the file is missing" if isinstance(problem, FileNotFoundError) else str(problem.strerror)


def _table_bytes(offsets: Offsets) -> int:
    return 64 if isinstance(offsets, range) else offsets.nbytes


def dataset_directory(path: str | Path, split: str | None) -> str:
    """Return the directory of a dataset or of one of its splits.

    Raises DatasetError for a split that leaves it.
    """
    if split and (split.startswith("/") or ".." in Path(split).parts):
        raise DatasetError(f"split {split!r} lies outside the dataset")
    return os.path.join(path, split) if split else os.fspath(path)
