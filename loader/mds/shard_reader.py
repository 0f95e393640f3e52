"""Reads the bytes of samples from shard files.

Raw shards are read with pread, one call a sample, or one call for many samples of equal size (`batched_reads`). They
are not mapped into memory, because a mapped file answers an I/O error with SIGBUS. `shard_files` opens the files and
caches tables and decompressed shards.

Safe for threads and for fork. A pickled copy starts with empty caches.
"""

import os
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.base.paths import check_is_local
from loader.errors import DatasetError, LoaderError
from loader.mds.batched_reads import read_batched
from loader.mds.encodings import Buffer, makes_views
from loader.mds.index import Index
from loader.mds.shard_files import (
    DECOMPRESSED_CACHE_BYTES,
    VERIFY_HINT,
    OpenShardFile,
    ReadOptions,
    ShardFiles,
)
from loader.order.spec import Ids

__all__ = ["DECOMPRESSED_CACHE_BYTES", "VERIFY_HINT", "ReadOptions", "ShardReader", "dataset_directory"]

# Just below the largest size that raises glibc's thresholds. The memory is mapped, but never touched.
_LARGEST_MALLOC = (32 << 20) - (64 << 10)
# Up to this many samples, a plain loop is faster than array operations.
_FEW = 16
# Up to this many records, one read each is cheaper than preparing one system call for all. CPU a record of 8 KiB,
# through a DataLoader, one read each against one call: 7.0 and 7.9 µs for 96 records, 5.9 and 6.4 for 192, 5.5 and 5.4
# for 256 (2 busy cores, Linux 6.18).
_FEW_RECORDS = 192
# Values that are read at once: as many files stay open.
_BLOBS_TOGETHER = 32
# A sample begins with the size of each variable value.
_SIZE_BYTES = 4

# (descriptor, what returns an offset of the table, the file: while it is referenced, no eviction closes it)
_OpenedShard = tuple[int, Callable[[int], int], OpenShardFile]


class ShardReader:
    """Reads the bytes of one dataset's samples. Raises LoaderError if the cache folder cannot be used.

    files: of the shards.
    """

    def __init__(self, index: Index, options: ReadOptions | None = None) -> None:
        self._index = index
        self._options = options or ReadOptions()
        folder = self._options.cache_folder
        for directory in index.directories if folder else ():
            if os.path.realpath(f"{folder}/.").startswith(os.path.realpath(f"{directory}/.") + "/") or (
                os.path.realpath(folder or "") == os.path.realpath(directory)
            ):
                raise LoaderError(
                    f"the cache folder {folder} lies in the dataset, which the loader never writes to: choose another"
                )
        self._reset()

    def _reset(self) -> None:
        _keep_freed_memory()
        self._writable = [any(map(makes_views, schema.encodings)) for schema in self._index.schemas]
        self.files = ShardFiles(self._index, self._options)
        self._some_packed = self.files.some_packed
        self._sized: set[int] = set()
        # Shard -> the offset of its first record, where all records have one size.
        self._first_records: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_index": self._index, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._index, self._options = state["_index"], state["_options"]
        self._reset()

    def read_many(self, shard: int, samples: list[int]) -> list[Buffer]:
        """Return the bytes of several samples of a shard, in the requested order, each in its own buffer.

        The buffers are bytearrays if the shard has columns whose values are views into them. Raises ShardError, naming
        shard, bytes and samples, if that fails.
        """
        writable = self._writable[self._index.schema_number(shard)]
        if self._some_packed:
            self.files.thrashing.samples_read += len(samples)
        if self.files.is_in_memory(shard):
            whole = memoryview(self.files.whole(shard))
            kind = bytearray if writable else bytes
            return [kind(whole[start:stop]) for start, stop in self._extents(shard, samples)]
        file = self.files.file(shard)
        extents = self._extents(shard, samples)
        fill = self._read_writable if writable else self._read_immutable
        try:
            found = fill(file.fd, extents)
        except OSError as problem:
            if self.files.avoid_cached(shard, file):
                return self.read_many(shard, samples)
            raise self.files.unread(shard, *_hull(extents), samples, problem) from problem
        for number, (start, stop) in enumerate(extents):
            if len(found[number]) != stop - start:
                part = found[number]
                found[number] = part + self.files.rest(shard, file, start + len(part), stop, samples[number])
        return found

    def read_records(self, shards: Ids, samples: Ids, block: NDArray[np.uint8]) -> bool:
        """Fill each row of a block with a fixed-size sample; the samples may come from several shards.

        shards, samples: (rows,) int64, samples counted within their shards. block: (rows, record bytes). Returns
        False, with nothing read, if the index does not give the offsets of these samples, or a shard is in memory.
        """
        if len(block) <= min(_FEW_RECORDS, self._options.open_files) and not self._some_packed:
            return self._read_few_records(shards.tolist(), samples.tolist(), block)
        index, size = self._index, block.shape[1]
        used, which = np.unique(shards, return_inverse=True)
        counts = index.samples[used]
        firsts = index.raw_bytes[used] - counts * size
        if (firsts < 4 * (counts + 2)).any():
            return False
        if self._some_packed:
            if any(map(self.files.is_in_memory, used.tolist())):
                return False
            self.files.thrashing.samples_read += len(block)
        starts = firsts[which] + samples * size
        if used.size <= self._options.open_files:
            self._read_batched(used, which, starts, block, shards, samples)
        else:
            # Consecutive rows, not rows of the same shards: those would have to be copied into place.
            for first in range(0, len(block), self._options.open_files):
                part = slice(first, first + self._options.open_files)
                some, where = np.unique(shards[part], return_inverse=True)
                self._read_batched(some, where, starts[part], block[part], shards[part], samples[part])
        return True

    def _read_few_records(self, shards: list[int], samples: list[int], block: NDArray[np.uint8]) -> bool:
        """Like `read_records`, by a system call a record. Array operations would cost a small batch more than these."""
        size, firsts = block.shape[1], self._first_records
        used = set(shards)
        for shard in used.difference(firsts):
            if (offsets := self._index.fixed_offsets(shard)) is None:
                return False
            firsts[shard] = offsets.start
        view, preadv = memoryview(block.reshape(-1).data), os.preadv
        # Hold the files until this returns, so that an eviction does not close them.
        files = {shard: self.files.file(shard) for shard in used}
        start = 0
        for shard, sample in zip(shards, samples, strict=True):
            stop = start + size
            try:
                got = preadv(files[shard].fd, (view[start:stop],), firsts[shard] + sample * size)
            except OSError:
                got = -1
            if got != size:
                view[start:stop] = self.read_many(shard, [sample])[0]
            start = stop
        return True

    def _read_batched(
        self, used: Ids, which: Ids, starts: Ids, block: NDArray[np.uint8], shards: Ids, samples: Ids
    ) -> None:
        # Hold the files until this returns, so that an eviction does not close them.
        held = [self.files.file(shard) for shard in used.tolist()]
        files = np.fromiter((file.fd for file in held), np.int32, used.size)[which]
        for row in read_batched(files, starts, block).tolist():
            block[row] = np.frombuffer(self.read_many(int(shards[row]), [int(samples[row])])[0], np.uint8)

    def read_blobs(
        self, shards: list[int], samples: list[int], head: int, tail: int
    ) -> list[tuple[bytes, bytearray]] | None:
        """Return [(value, rest)] of samples with one variable value, in the requested order; it is copied only once.

        shards, samples: the shard of each sample, and its number there. head, tail: bytes of the other columns before
        and after the value. The offset table gives its size. Returns None if that contradicts the sample, a shard is
        in memory, or a read fails; the caller must then use read_many. Raises ShardError for a shard that cannot be
        opened.
        """
        found: list[tuple[bytes, bytearray]] = []
        together = min(_BLOBS_TOGETHER, self._options.open_files)
        for first in range(0, len(shards), together):
            part = slice(first, first + together)
            try:
                blobs = self._read_few_blobs(shards[part], samples[part], head, tail)
            except OSError:
                return None
            if blobs is None:
                return None
            found += blobs
        if self._some_packed:
            self.files.thrashing.samples_read += len(found)
        return found

    def _read_few_blobs(
        self, shards: list[int], samples: list[int], head: int, tail: int
    ) -> list[tuple[bytes, bytearray]] | None:
        """Like `read_blobs`, for at most `open_files` samples. Raises OSError too."""
        lead, around = _SIZE_BYTES + head, _SIZE_BYTES + head + tail
        opened: dict[int, _OpenedShard] = {}
        blobs: list[tuple[int, int, int]] = []
        # First all places, then all reads: a read of 100 KB evicts the interpreter's code and data from the CPU caches.
        # Reads without Python code between them took 5 % less CPU.
        for shard, sample in zip(shards, samples, strict=True):
            if shard not in opened:
                visit = self._opened(shard, sample, around)
                if visit is None:
                    return None
                opened[shard] = visit
            fd, offset, _ = opened[shard]
            start = offset(sample)
            blobs.append((fd, offset(sample + 1) - start - around, start + lead))
        pread = os.pread
        values = [pread(fd, size, start) for fd, size, start in blobs]  # OSError for a size below 0
        if [*map(len, values)] != [size for _, size, _ in blobs]:
            return None
        if around == _SIZE_BYTES:
            return list(zip(values, repeat(bytearray())))
        rests = [
            bytearray(pread(fd, head, start - head) + pread(fd, tail, start + size))
            for fd, size, start in blobs
        ]
        return list(zip(values, rests, strict=True)) if set(map(len, rests)) == {head + tail} else None

    def _opened(self, shard: int, sample: int, around: int) -> "_OpenedShard | None":
        """Open a shard; None if it is in memory, or if its table contradicts this sample."""
        if self._some_packed and self.files.is_in_memory(shard):
            return None
        file, offsets = self.files.file(shard), self.files.table(shard)
        offset = offsets.__getitem__ if isinstance(offsets, range) else offsets.item
        if shard not in self._sized:
            # Detects an index that belongs to another dataset; one check a shard suffices.
            start, size = offset(sample), offset(sample + 1) - offset(sample) - around
            if size < 0 or os.pread(file.fd, _SIZE_BYTES, start) != size.to_bytes(_SIZE_BYTES, "little"):
                return None
            self._sized.add(shard)
        return file.fd, offset, file

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
        offsets = self.files.table(shard)
        if isinstance(offsets, range):
            return [(offsets[sample], offsets[sample + 1]) for sample in samples]
        if len(samples) <= _FEW:
            item = offsets.item
            return [(item(sample), item(sample + 1)) for sample in samples]
        which = np.array(samples)
        return list(zip(offsets[which].tolist(), offsets[which + 1].tolist(), strict=True))


def _keep_freed_memory() -> None:
    """Make malloc keep up to 64 MiB of freed memory, instead of returning it and faulting it in again.

    mallopt(3): freeing a mapped chunk raises both thresholds to its size; initially, 128 KiB at the heap's end are
    returned. A batch of 64 samples of 100 KB took 12 page faults a sample, 35 µs, and takes none now, 7 µs (2 cores,
    Linux 6.18).
    """
    np.empty(_LARGEST_MALLOC, np.uint8)


def _hull(extents: list[tuple[int, int]]) -> tuple[int, int]:
    return min(start for start, _ in extents), max(stop for _, stop in extents)


def dataset_directory(path: str | Path, split: str | None) -> str:
    """Return the directory of a dataset or of one of its splits.

    Raises DatasetError for a split outside of the dataset, ArgumentError for a URL.
    """
    check_is_local(path)
    if split and (split.startswith("/") or ".." in Path(split).parts):
        raise DatasetError(f"split {split!r} lies outside the dataset")
    return os.path.join(path, split) if split else os.fspath(path)
