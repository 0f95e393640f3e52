"""Bytes of samples out of shard files: open files, offset tables and decompressed shards, each within a
bound.

Raw shards are read with pread, one call a sample, or many in one where all samples have one size (`gather`): a mapped
file would answer an I/O error with SIGBUS.
Compressed shards are decompressed as a whole, once, into memory or into a folder that the user names, and
never beside the source.

Safe for threads and for fork: the caches are ordered dicts whose single operations are atomic, at worst two
threads open the same file twice, but one alone unpacks a shard; an open file is closed when its last user lets go of
it. A pickled copy starts with empty caches.
"""

import contextlib
import errno
import hashlib
import os
import stat
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.compression import decompress
from loader.encodings import Buffer, makes_views
from loader.errors import DatasetError, LoaderError, ShardError
from loader.gather import gather
from loader.hashing import mismatch
from loader.index import Index
from loader.order.spec import Ids
from loader.unpacked import Repetitions, SingleFlight, UnpackedFolder
from loader.watchdog import STALL_SECONDS, Watchdog

# Well below the usual limit of 1024 open files a process, of which the trainer wants some, too.
OPEN_FILES = 256
# 4 bytes a sample: the tables of 16 million samples, or of 8 000 shards of 2 048.
OFFSET_CACHE_BYTES = 64 << 20
# 64 MiB shards: enough for the few that a py1e block has in use at a time; each worker process has its own.
DECOMPRESSED_CACHE_BYTES = 1 << 30

# Part of an error's way out; the tool itself leaves it away.
VERIFY_HINT = ", or check the dataset with `python -m loader verify`"
_RESTORE = f"Restore the shard{VERIFY_HINT}."
_AGAIN_AND_AGAIN = (
    "compressed shards are unpacked again and again: %d times for %d samples, at %d samples each. Raise "
    "decompressed_cache_bytes (%d), which bounds the memory of each process or, with a cache_folder, a "
    "folder on disk that all processes share; or choose an order with fewer shards in use at a time: a "
    "smaller block_size, canonical_nodes near the number of nodes"
)
_RAISE_LIMIT = "Raise the process's limit of open files (`ulimit -n`)."

# A little less than the largest piece that raises glibc's thresholds. It is mapped, and never touched.
_LARGEST_MALLOC = (32 << 20) - (64 << 10)
# Up to so many, one by one is faster than by arrays.
_FEW = 16
# A sample begins with the size of each value that varies.
_SIZE_BYTES = 4

Offsets = NDArray[np.uint32] | range


class _OpenFile:
    """A descriptor that closes when nobody uses it any more: eviction cannot pull it from under a reader."""

    __slots__ = ("fd",)

    def __init__(self, path: str) -> None:
        self.fd = -1
        # A FIFO in a shard's place shall be an error, not a wait for its writer.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # Samples come in shuffled order: where two neighbours are read, the kernel would ask a mount for 1 MiB more.
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.fd >= 0:
            # Nothing was written: a close that fails, on a mount that is gone, has lost nothing.
            with contextlib.suppress(OSError):
                os.close(self.fd)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a dataset is read; all bounds are per process, but the cache folder's.

    open_files: descriptors kept, and as many more while a thread reads. offset_cache_bytes: tables of offsets kept.
    decompressed_cache_bytes: decompressed shards kept, in memory or in cache_folder, which a machine's processes share;
    the dataset's own directory is refused. check_hashes: compare each shard with the hashes of the index before its
    first sample is read.
    """

    open_files: int = OPEN_FILES
    offset_cache_bytes: int = OFFSET_CACHE_BYTES
    decompressed_cache_bytes: int = DECOMPRESSED_CACHE_BYTES
    cache_folder: str | None = None
    check_hashes: bool = False
    stall_seconds: float = STALL_SECONDS


class ShardReader:
    """Reads samples' bytes of one dataset. Raises LoaderError if the cache folder cannot be used."""

    def __init__(self, index: Index, options: ReadOptions | None = None) -> None:
        self._index = index
        self._options = options or ReadOptions()
        folder = self._options.cache_folder
        for directory in index.directories if folder else ():
            if os.path.realpath(f"{folder}/.").startswith(os.path.realpath(f"{directory}/.") + "/") or (
                os.path.realpath(folder or "") == os.path.realpath(directory)
            ):
                raise LoaderError(
                    f"the cache folder {folder} lies in the dataset, to which nothing is written"
                )
        self._forget()

    def _forget(self) -> None:
        _keep_freed_memory()
        options = self._options
        self._writable = [any(map(makes_views, schema.encodings)) for schema in self._index.schemas]
        self._some_packed = any(self._index.compressions)
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._offsets: OrderedDict[int, Offsets] = OrderedDict()
        self._offset_bytes = 0
        self._decompressed: OrderedDict[int, bytes] = OrderedDict()
        self._unpacking: SingleFlight[bytes] = SingleFlight()
        self._unpacking_into_folder: SingleFlight[str] = SingleFlight()
        samples = self._index.samples
        self._repetitions = Repetitions(
            _AGAIN_AND_AGAIN, float(samples.mean()) if samples.size else 0.0, options.decompressed_cache_bytes
        )
        self._checked: set[int] = set()
        self._sized: set[int] = set()
        self._watchdog = Watchdog(partial(_describe, self._index), stall_seconds=options.stall_seconds)
        self._folder = (
            UnpackedFolder(options.cache_folder, options.decompressed_cache_bytes)
            if options.cache_folder
            else None
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"_index": self._index, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._index, self._options = state["_index"], state["_options"]
        self._forget()

    def read(self, shard: int, sample: int) -> Buffer:
        """Return the bytes of one sample. Raises ShardError, naming shard, bytes and sample, if it cannot."""
        return self.read_many(shard, [sample])[0]

    def read_many(self, shard: int, samples: list[int]) -> list[Buffer]:
        """Return the bytes of several samples of a shard, in the order asked for, each a buffer by itself.

        They are bytearrays where the shard has columns whose values are views into them.
        """
        self._watchdog.begin(shard)
        try:
            return self._read_many(shard, samples)
        finally:
            self._watchdog.end()

    def read_records(self, shards: Ids, samples: Ids, block: NDArray[np.uint8]) -> bool:
        """Fill each row of a block with a sample of one size, whichever shards they are of.

        shards, samples: (rows,), samples counted within their shards. block: (rows, record bytes). Returns False,
        with nothing read, if the index does not say where these shards' samples are.
        """
        index, size = self._index, block.shape[1]
        used, which = np.unique(shards, return_inverse=True)
        counts = index.samples[used]
        firsts = index.raw_bytes[used] - counts * size
        if (firsts < 4 * (counts + 2)).any():
            return False
        self._watchdog.begin(int(shards[0]), used.size)
        try:
            if self._some_packed:
                if any(map(self._in_memory, used.tolist())):
                    return False
                self._repetitions.given += len(block)
            starts = firsts[which] + samples * size
            if used.size <= self._options.open_files:
                self._gather(used, which, starts, block, shards, samples)
            else:
                # Rows in a row, not those of the same shards: these would have to be copied into their places.
                for first in range(0, len(block), self._options.open_files):
                    part = slice(first, first + self._options.open_files)
                    some, where = np.unique(shards[part], return_inverse=True)
                    self._gather(some, where, starts[part], block[part], shards[part], samples[part])
        finally:
            self._watchdog.end()
        return True

    def _gather(
        self, used: Ids, which: Ids, starts: Ids, block: NDArray[np.uint8], shards: Ids, samples: Ids
    ) -> None:
        # Held until this returns: nobody closes them meanwhile.
        held = [self._file(shard) for shard in used.tolist()]
        files = np.fromiter((file.fd for file in held), np.int32, used.size)[which]
        for row in gather(files, starts, block).tolist():
            block[row] = np.frombuffer(self._read_many(int(shards[row]), [int(samples[row])])[0], np.uint8)

    def read_blobs(
        self, shards: list[int], samples: list[int], head: int, tail: int
    ) -> list[tuple[bytes, bytearray]] | None:
        """Return [(value, all else)] of samples with one value that varies in size, which is copied once only.

        shards, samples: one of each a sample, counted within its shard; those of one shard come in a row. head, tail:
        bytes of the other columns before and after the value. Its size is taken from the table of offsets; None if
        that contradicts a sample itself, or a shard is in memory, or cannot be read: then read_many has to look.
        Raises ShardError for a shard that cannot be opened.
        """
        lead, around = _SIZE_BYTES + head, _SIZE_BYTES + head + tail
        pread, begin = os.pread, self._watchdog.begin
        found: list[tuple[bytes, bytearray]] = []
        rest = bytearray()
        last, fd = -1, -1
        begin(shards[0], 1)
        try:
            for shard, sample in zip(shards, samples, strict=True):
                if shard != last:
                    if self._some_packed and self._in_memory(shard):
                        return None
                    begin(shard, 1)
                    file, offsets = self._file(shard), self._table(shard)
                    offset = offsets.__getitem__ if isinstance(offsets, range) else offsets.item
                    last, fd = shard, file.fd  # the file is held, so that nobody closes it
                start = offset(sample)
                size = offset(sample + 1) - start - around
                if size < 0 or (shard not in self._sized and not self._is_sized(shard, fd, start, size)):
                    return None
                value = pread(fd, size, start + lead)
                if around > _SIZE_BYTES:
                    rest = bytearray(
                        pread(fd, head, start + _SIZE_BYTES) + pread(fd, tail, start + lead + size)
                    )
                if len(value) != size or len(rest) != head + tail:
                    return None
                found.append((value, rest))
        except OSError:
            return None
        finally:
            self._watchdog.end()
        if self._some_packed:
            self._repetitions.given += len(found)
        return found

    def _is_sized(self, shard: int, fd: int, start: int, size: int) -> bool:
        # An index that belongs to another dataset: once a shard is enough.
        if os.pread(fd, _SIZE_BYTES, start) != size.to_bytes(_SIZE_BYTES, "little"):
            return False
        self._sized.add(shard)
        return True

    def _read_many(self, shard: int, samples: list[int]) -> list[Buffer]:
        writable = self._writable[self._index.schema_number(shard)]
        if self._some_packed:
            self._repetitions.given += len(samples)
        if self._in_memory(shard):
            whole = memoryview(self._whole(shard))
            kind = bytearray if writable else bytes
            return [kind(whole[start:stop]) for start, stop in self._extents(shard, samples)]
        file = self._file(shard)
        extents = self._extents(shard, samples)
        fill = self._read_writable if writable else self._read_immutable
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
        if len(samples) <= _FEW:
            item = offsets.item
            return [(item(sample), item(sample + 1)) for sample in samples]
        which = np.array(samples)
        return list(zip(offsets[which].tolist(), offsets[which + 1].tolist(), strict=True))

    def path(self, shard: int) -> str:
        """The file that holds a shard."""
        return _path(self._index, shard)

    def check_size(self, shard: int) -> None:
        """Raise ShardError if the shard's file is missing, or not as long as the index says."""
        stored = self._index.zip_bytes if self._is_packed(shard) else self._index.raw_bytes
        self._open(shard, self.path(shard), int(stored[shard]))

    def _is_packed(self, shard: int) -> bool:
        return self._some_packed and bool(self._index.compression(shard))

    def _in_memory(self, shard: int) -> bool:
        return self._is_packed(shard) and self._folder is None

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
            try:  # noqa: SIM105 -- half a microsecond a sample, where each is of another shard
                self._files.move_to_end(shard)
            except KeyError:  # another thread has evicted it just now; ours stays open
                pass
            return file
        if self._is_packed(shard):
            file = self._open(shard, self._unpacked_path(shard), int(self._index.raw_bytes[shard]))
        else:
            file = self._open(shard, self.path(shard), int(self._index.raw_bytes[shard]))
        if self._options.check_hashes and shard not in self._checked:
            size = os.fstat(file.fd).st_size
            self._check_hashes(shard, self._index.hashes_of(shard)[0], self._rest(shard, file, 0, size, 0))
            self._checked.add(shard)
        self._files[shard] = file
        with contextlib.suppress(KeyError):  # another thread makes room too
            while len(self._files) > self._options.open_files:
                self._files.popitem(last=False)
        return file

    def _open(self, shard: int, path: str, expected: int) -> _OpenFile:
        samples = range(int(self._index.samples[shard]))
        try:
            file = _OpenFile(path)
            found = os.fstat(file.fd)
        except OSError as problem:
            way_out = _RAISE_LIMIT if problem.errno == errno.EMFILE else _RESTORE
            raise self._failed(shard, 0, expected, samples, _cause(problem), way_out) from problem
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
                while self._offset_bytes > self._options.offset_cache_bytes and len(self._offsets) > 1:
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
        if self._in_memory(shard):
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
            with contextlib.suppress(KeyError):
                self._decompressed.move_to_end(shard)
            return whole
        return self._unpacking.do(shard, partial(self._into_memory, shard))

    def _into_memory(self, shard: int) -> bytes:
        whole = self._decompressed.get(shard)
        if whole is not None:
            return whole  # by a thread that was done with it just now
        whole = self._decompressed[shard] = self._unpack(shard)
        with contextlib.suppress(KeyError):  # another thread makes room too
            while (
                len(self._decompressed) > 1
                and self._decompressed_bytes() > self._options.decompressed_cache_bytes
            ):
                self._decompressed.popitem(last=False)
        return whole

    def _decompressed_bytes(self) -> int:
        # Counted, not kept: a count that two threads change drifts, and there are few of them.
        return sum(map(len, list(self._decompressed.values())))

    def _unpack(self, shard: int) -> bytes:
        index = self._index
        self._repetitions.count(shard)
        samples = range(int(index.samples[shard]))
        raw_hashes, zip_hashes = index.hashes_of(shard) if self._options.check_hashes else ({}, {})
        path = self.path(shard)
        raw_path = os.path.join(index.directory(shard), index.raw_names[shard])
        if not os.path.lexists(path) and os.path.isfile(raw_path):
            # StreamingDataset's local directory: it unpacks beside the source, and removes that.
            file = self._open(shard, raw_path, int(index.raw_bytes[shard]))
            whole = self._rest(shard, file, 0, os.fstat(file.fd).st_size, 0)
        else:
            file = self._open(shard, path, int(index.zip_bytes[shard]))
            size = os.fstat(file.fd).st_size
            packed = self._rest(shard, file, 0, size, 0)
            self._check_hashes(shard, zip_hashes, packed)
            try:
                whole = decompress(index.compression(shard), packed)
            except ValueError as problem:
                raise self._failed(shard, 0, size, samples, f"it does not decompress: {problem}") from problem
            expected = int(index.raw_bytes[shard])
            if expected and len(whole) != expected:
                raise self._failed(
                    shard, 0, size, samples, f"it unpacks to {len(whole)} bytes, not {expected}"
                )
        self._check_hashes(shard, raw_hashes, whole)
        return whole

    def _unpacked_path(self, shard: int) -> str:
        """The file in the cache folder that holds a compressed shard, decompressed."""
        assert self._folder is not None
        path, index = self.path(shard), self._index
        try:
            found = os.stat(path)
            identity: tuple[object, ...] = (found.st_size, found.st_mtime_ns)
        except OSError:
            identity = ()  # `_unpack` says what is wrong with it
        # Another dataset, or a shard written anew, must not be taken for this one.
        about = repr((os.path.realpath(path), identity, index.raw_bytes[shard], index.samples[shard]))
        key = hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
        make = partial(self._folder.path, key, int(index.raw_bytes[shard]), partial(self._unpack, shard))
        try:
            return self._unpacking_into_folder.do(shard, make)
        except OSError as problem:
            raise LoaderError(
                f"the cache folder {self._options.cache_folder} cannot take shard {path}: {problem.strerror}"
            ) from problem

    def _check_hashes(self, shard: int, hashes: dict[str, str], data: bytes) -> None:
        wrong = mismatch(hashes, data)
        if wrong:
            cause = f"its {wrong} is not that of the index; it was damaged or replaced"
            raise self._failed(shard, 0, len(data), range(int(self._index.samples[shard])), cause)

    def _failed(
        self,
        shard: int,
        start: int,
        stop: int,
        samples: range | list[int],
        cause: str,
        way_out: str = _RESTORE,
    ) -> ShardError:
        first = int(self._index.samples[:shard].sum())
        ids = [first + min(samples), first + max(samples)] if len(samples) else [first, first]
        which = f"sample {ids[0]}" if ids[0] == ids[1] else f"samples {ids[0]} to {ids[1]}"
        return ShardError(
            f"{self.path(shard)} (shard {shard}): bytes {start} to {stop}, {which}: {cause}. {way_out}"
        )


def _keep_freed_memory() -> None:
    """Have malloc keep up to 64 MiB that are freed, instead of giving them back and faulting them in again.

    mallopt(3): whoever frees a mapped piece raises both thresholds to it; at first, 128 KiB at the heap's end go back.
    A batch of 64 samples of 100 KB took 12 page faults a sample, 35 µs, and takes none now, 7 µs (2 cores, 6.18).
    """
    np.empty(_LARGEST_MALLOC, np.uint8)


def _path(index: Index, shard: int) -> str:
    return os.path.join(index.directory(shard), index.zip_names[shard] or index.raw_names[shard])


def _describe(index: Index, shard: int) -> str:
    # Not a method: a watchdog that knows its reader would keep it, and its files, from closing when it is dropped.
    first = int(index.samples[:shard].sum())
    last = first + int(index.samples[shard]) - 1
    return f"path={_path(index, shard)} shard={shard} samples={first}..{last}"


def _hull(extents: list[tuple[int, int]]) -> tuple[int, int]:
    return min(start for start, _ in extents), max(stop for _, stop in extents)


def _cause(problem: OSError) -> str:
    """Put an error in words; the path is said already."""
    if isinstance(problem, FileNotFoundError):
        return "the file is missing"
    return f"{problem.strerror}{'; it was replaced' if problem.errno == errno.ESTALE else ''}"


def _table_bytes(offsets: Offsets) -> int:
    return 64 if isinstance(offsets, range) else offsets.nbytes


def dataset_directory(path: str | Path, split: str | None) -> str:
    """Return the directory of a dataset or of one of its splits.

    Raises DatasetError for a split that leaves it.
    """
    if split and (split.startswith("/") or ".." in Path(split).parts):
        raise DatasetError(f"split {split!r} lies outside the dataset")
    return os.path.join(path, split) if split else os.fspath(path)
