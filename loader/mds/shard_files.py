"""Opens and checks the shards of a dataset; caches open files, offset tables and decompressed shards, each bounded.

A compressed shard is decompressed as a whole, once, into memory or into a folder that the user names, and never beside
the source.

Safe for threads and for fork. The caches are ordered dicts with atomic single operations. At worst two threads open
the same file twice, but only one thread decompresses a shard. An open file is closed when its last user releases it.

A folder of decompressed shards that all processes of a machine share, and a detector of repeated decompression.

Each file appears complete, by a rename to its final name. A reader that has opened a file keeps it, even if another
process evicts it. There are no locks: two processes that miss the same shard concurrently both decompress it, and the
second rename changes nothing.
"""

import contextlib
import errno
import hashlib
import logging
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loader.base.cached_files import CachedFiles, HeldMount
from loader.base.compression import decompress, mismatch
from loader.base.paths import mount_advice
from loader.base.pulled_files import open_pulled
from loader.base.single_flight import SingleFlight
from loader.errors import LoaderError, ShardError
from loader.mds.index import Index

log = logging.getLogger("loader")

ENDING = ".mds"
# Warn after this many repeated loads (shards decompressed, row groups decoded) if fewer than 1/THRASHING_PART of their
# samples were read: the cache is too small for the order.
THRASHING_LOADS = 64
THRASHING_PART = 8


class ThrashingDetector:
    """Warns once if the same shards are decompressed, or row groups decoded, repeatedly: the cache thrashes.

    message: the message, formatted with: repetitions, samples read, rows, limit_bytes. rows: mean samples of a shard.
    limit_bytes: the cache limit that is too small. Concurrent threads may lose a count, which does no harm.
    """

    def __init__(self, message: str, rows: float, limit_bytes: int) -> None:
        self._message, self._rows, self._limit_bytes = message, rows, limit_bytes
        self._seen: set[int] = set()
        self._again = 0
        self._has_warned = False
        self.samples_read = 0  # samples of such shards; the readers add to it

    def count(self, shard: int) -> None:
        """Record that a shard was decompressed, or a row group decoded."""
        self._again += shard in self._seen
        self._seen.add(shard)
        if self._again < THRASHING_LOADS:
            return
        if self.samples_read < self._again * self._rows / THRASHING_PART and not self._has_warned:
            self._has_warned = True
            log.warning(self._message, self._again, self.samples_read, self._rows, self._limit_bytes)
        self._again = self.samples_read = 0


class DecompressedCache:
    """Stores data in files up to `limit_bytes`; beyond that, the least recently used files are evicted.

    Raises LoaderError if the folder cannot be created.
    """

    def __init__(self, folder: str | Path, limit_bytes: int) -> None:
        self._folder = Path(folder)
        self._limit_bytes = limit_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise LoaderError(f"the cache folder {folder} cannot be made: {problem.strerror}") from problem

    def path(self, key: str, expected_bytes: int, unpack: Callable[[], bytes]) -> str:
        """Return the path of the file with the result of `unpack` for this key; calls it only if the file is missing.

        key: letters and digits, different for different content. expected_bytes: 0 if unknown; a file of another size
        (after a full disk or a power cut) is made again. Raises OSError if the folder is full or not writable, and
        what `unpack` raises.
        """
        path = self._folder / (key + ENDING)
        try:
            found_bytes = path.stat().st_size
            os.utime(path)  # marks it as recently used
        except FileNotFoundError:
            found_bytes = -1
        if found_bytes != (expected_bytes or max(found_bytes, 0)):
            data = unpack()
            self._evict_for(len(data))
            # Not the process id: containers that share the folder have equal process ids.
            temporary = path.with_suffix(f".{os.urandom(8).hex()}.tmp")
            try:
                temporary.write_bytes(data)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        return str(path)

    def _evict_for(self, needed: int) -> None:
        found: list[tuple[float, int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(ENDING):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue  # another process evicted it
                    found.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + needed <= self._limit_bytes:
                return
            Path(path).unlink(missing_ok=True)
            total -= size


# Well below the usual limit of 1024 open files a process, which leaves descriptors for the trainer.
OPEN_FILES = 256
# 4 bytes a sample: the tables of 16 million samples, or of 8 000 shards of 2 048.
OFFSET_CACHE_BYTES = 64 << 20
# Shards of 64 MiB: enough for the few that a py1e block uses at a time. Each worker process has its own cache.
DECOMPRESSED_CACHE_BYTES = 1 << 30

# Part of the remedy in an error; `fusecache dataset verify` itself omits it.
VERIFY_HINT = ", or check the dataset with `fusecache dataset verify`"
_RESTORE = f"Restore the shard{VERIFY_HINT}."
_THRASHING_TEXT = (
    "compressed shards are unpacked again and again: %d times for %d samples, at %d samples each. Raise "
    "decompressed_cache_bytes (%d), which bounds the memory of each process or, with a cache_folder, a "
    "folder on disk that all processes share; or choose an order with fewer shards in use at a time: a "
    "smaller block_size, canonical_nodes near the number of nodes"
)
_RAISE_LIMIT = "Raise the process's limit of open files (`ulimit -n`)."

Offsets = NDArray[np.uint32] | range


class OpenShardFile:
    """A file descriptor that is closed with its last reference, so eviction cannot close it under a reader.

    cached: if it is not that of the path, but of the file in the cache of the mount's daemon.
    """

    __slots__ = ("cached", "fd")

    def __init__(self, path: str, files: CachedFiles | None) -> None:
        """files: where to look first; None to open the path."""
        self.fd = -1
        self.cached: HeldMount | None = None
        given = None if files is None else files.open(path)
        if given is not None:
            self.fd, self.cached = given
        else:
            # O_NONBLOCK: a FIFO in place of a shard is an error rather than a wait for its writer.
            self.fd = open_pulled(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # Samples come in shuffled order. Otherwise two adjacent reads would trigger 1 MiB of read-ahead on a mount.
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.fd >= 0:
            # Only reads happened, so a close that fails (the mount is gone) loses nothing.
            with contextlib.suppress(OSError):
                os.close(self.fd)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a dataset is read. All limits are per process, except that of the cache folder.

    open_files: cached descriptors; during a read, a thread may hold as many more. offset_cache_bytes: cached offset
    tables. decompressed_cache_bytes: decompressed shards, in memory or in cache_folder, which all processes of a
    machine share; the dataset's own directory is refused. check_hashes: compare each shard with the hashes in the
    index before its first sample is read.
    """

    open_files: int = OPEN_FILES
    offset_cache_bytes: int = OFFSET_CACHE_BYTES
    decompressed_cache_bytes: int = DECOMPRESSED_CACHE_BYTES
    cache_folder: str | None = None
    check_hashes: bool = False


class ShardFiles:
    """Opens and checks the shards of one dataset. Raises LoaderError if the cache folder cannot be used.

    some_packed: whether any shard is compressed. thrashing: detects repeated decompression; callers that read
    samples of compressed shards add their number to `thrashing.samples_read`.
    """

    def __init__(self, index: Index, options: ReadOptions) -> None:
        self._index, self._options = index, options
        folder = options.cache_folder
        self.some_packed = any(index.compressions)
        self._files: OrderedDict[int, OpenShardFile] = OrderedDict()
        self._offsets: OrderedDict[int, Offsets] = OrderedDict()
        self._offset_bytes = 0
        self._decompressed: OrderedDict[int, bytes] = OrderedDict()
        self._unpacking: SingleFlight[bytes] = SingleFlight()
        self._unpacking_into_folder: SingleFlight[str] = SingleFlight()
        samples = index.samples
        self.thrashing = ThrashingDetector(
            _THRASHING_TEXT, float(samples.mean()) if samples.size else 0.0, options.decompressed_cache_bytes
        )
        self._checked: set[int] = set()
        self._cached_files = CachedFiles()
        # Shards that could not be read where the daemon has them.
        self._only_by_mount: set[int] = set()
        self._folder = DecompressedCache(folder, options.decompressed_cache_bytes) if folder else None

    def path(self, shard: int) -> str:
        """Return the path of a shard's file."""
        return path_of(self._index, shard)

    def check_size(self, shard: int) -> None:
        """Raise ShardError if the shard's file is missing, or its size differs from the index."""
        stored = self._index.zip_bytes if self._is_packed(shard) else self._index.raw_bytes
        self._open(shard, self.path(shard), int(stored[shard]))

    def _is_packed(self, shard: int) -> bool:
        return self.some_packed and bool(self._index.compression(shard))

    def is_in_memory(self, shard: int) -> bool:
        """Return whether a shard is compressed and cached in memory as a `whole`; all others have a `file`."""
        return self._is_packed(shard) and self._folder is None

    def file(self, shard: int) -> OpenShardFile:
        """Return the open file with a shard's samples. Raises ShardError if it does not match the index."""
        file = self._files.get(shard)
        if file is not None:
            try:  # noqa: SIM105 -- saves half a microsecond a sample if each sample is in another shard
                self._files.move_to_end(shard)
            except KeyError:  # another thread has just evicted it; this reference keeps it open
                pass
            return file
        if self._is_packed(shard):
            file = self._open(shard, self._unpacked_path(shard), int(self._index.raw_bytes[shard]))
        else:
            file = self._open(shard, self.path(shard), int(self._index.raw_bytes[shard]))
        if self._options.check_hashes and shard not in self._checked:
            hashes = self._index.hashes_of(shard)[0]
            try:
                if hashes:
                    size = os.fstat(file.fd).st_size
                    self._check_hashes(shard, hashes, self.rest(shard, file, 0, size, 0))
            except ShardError:
                if self.avoid_cached(shard, file):
                    return self.file(shard)
                raise
            self._checked.add(shard)
        self._files[shard] = file
        with contextlib.suppress(KeyError):  # another thread evicts concurrently
            while len(self._files) > self._options.open_files:
                self._files.popitem(last=False)
        return file

    def reopen(self) -> None:
        """Open each file again when it is read next. Reads in progress keep theirs."""
        self._files.clear()

    def avoid_cached(self, shard: int, file: OpenShardFile) -> bool:
        """After a read failed, read a shard only through the mount. Return whether it was not read so before."""
        if file.cached is None:
            return False
        self._only_by_mount.add(shard)
        self._files.pop(shard, None)
        return True

    def _open(self, shard: int, path: str, expected: int, *, by_mount: bool = False) -> OpenShardFile:
        samples = range(int(self._index.samples[shard]))
        try:
            by_mount = by_mount or shard in self._only_by_mount
            file = OpenShardFile(path, None if by_mount else self._cached_files)
            found = os.fstat(file.fd)
        except OSError as problem:
            raise self.unread(shard, 0, expected, samples, problem) from problem
        if not stat.S_ISREG(found.st_mode):
            kind = "a directory" if stat.S_ISDIR(found.st_mode) else "something else"
            raise self.failed(shard, 0, expected, samples, f"this is {kind}, not a file")
        size = found.st_size
        if expected and size != expected:
            if self.avoid_cached(shard, file):
                return self._open(shard, path, expected)
            cause = "it was truncated" if size < expected else "it was replaced"
            raise self.failed(
                shard, 0, expected, samples, f"the file has {size} bytes, the index says {expected}; {cause}"
            )
        return file

    def rest(self, shard: int, file: OpenShardFile, start: int, stop: int, sample: int) -> bytes:
        """Return bytes [start, stop) of a shard. Raises ShardError, naming the sample, if they are missing."""
        # A short read is legal (a signal, an unusual file system); only an empty read means the end of the file.
        parts = []
        while start < stop:
            try:
                part = os.pread(file.fd, stop - start, start)
            except OSError as problem:
                if self.avoid_cached(shard, file):
                    file = self.file(shard)
                    continue
                raise self.unread(shard, start, stop, [sample], problem) from problem
            if not part:
                raise self.failed(shard, start, stop, [sample], f"the file ends at {start}; it was truncated")
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def table(self, shard: int) -> Offsets:
        """Return the offset of each sample and of the end of the last one. Raises ShardError for a damaged table."""
        offsets = self._offsets.get(shard)
        if offsets is None:
            try:
                offsets = self._load_table(shard)
            except ShardError:
                file = self._files.get(shard)
                if file is None or not self.avoid_cached(shard, file):
                    raise
                offsets = self._load_table(shard)
            self._offsets[shard] = offsets
            self._offset_bytes += _table_bytes(offsets)
            with contextlib.suppress(KeyError):
                while self._offset_bytes > self._options.offset_cache_bytes and len(self._offsets) > 1:
                    self._offset_bytes -= _table_bytes(self._offsets.popitem(last=False)[1])
        return offsets

    def _load_table(self, shard: int) -> Offsets:
        if (fixed := self._index.fixed_offsets(shard)) is not None:
            return fixed
        count = int(self._index.samples[shard])
        head_bytes = 4 * (count + 2)
        if self.is_in_memory(shard):
            whole = self.whole(shard)
            head, size = whole[:head_bytes], len(whole)
        else:
            file = self.file(shard)
            size = os.fstat(file.fd).st_size
            head = self.rest(shard, file, 0, min(head_bytes, size), 0)
        if len(head) < head_bytes:
            raise self.failed(
                shard, 0, head_bytes, range(count), f"the file ends at {len(head)}, within its header"
            )
        words = np.frombuffer(head, "<u4")
        offsets = words[1:].astype(np.uint32, copy=False)
        if int(words[0]) != count:
            raise self.failed(
                shard, 0, 4, range(count), f"it holds {words[0]} samples, the index says {count}"
            )
        if int(offsets[0]) < head_bytes or int(offsets[-1]) > size or (offsets[1:] < offsets[:-1]).any():
            raise self.failed(shard, 4, head_bytes, range(count), "its table of offsets is damaged")
        return offsets

    def whole(self, shard: int) -> bytes:
        """Return a compressed shard, decompressed. Raises ShardError if it does not decompress."""
        whole = self._decompressed.get(shard)
        if whole is not None:
            with contextlib.suppress(KeyError):
                self._decompressed.move_to_end(shard)
            return whole
        return self._unpacking.do(shard, partial(self._into_memory, shard))

    def _into_memory(self, shard: int) -> bytes:
        whole = self._decompressed.get(shard)
        if whole is not None:
            return whole  # another thread has just loaded it
        whole = self._decompressed[shard] = self._unpack(shard)
        with contextlib.suppress(KeyError):  # another thread evicts concurrently
            while (
                len(self._decompressed) > 1
                and self._decompressed_bytes() > self._options.decompressed_cache_bytes
            ):
                self._decompressed.popitem(last=False)
        return whole

    def _decompressed_bytes(self) -> int:
        # Summed each time: a counter that two threads change would drift, and the cache has few entries.
        return sum(map(len, list(self._decompressed.values())))

    def _unpack(self, shard: int) -> bytes:
        index = self._index
        self.thrashing.count(shard)
        samples = range(int(index.samples[shard]))
        raw_hashes, zip_hashes = index.hashes_of(shard) if self._options.check_hashes else ({}, {})
        path = self.path(shard)
        raw_path = os.path.join(index.directory(shard), index.raw_names[shard])
        if not os.path.lexists(path) and os.path.isfile(raw_path):
            # A local directory of StreamingDataset, which decompresses beside the source and deletes the source.
            file = self._open(shard, raw_path, int(index.raw_bytes[shard]), by_mount=True)
            whole = self.rest(shard, file, 0, os.fstat(file.fd).st_size, 0)
        else:
            file = self._open(shard, path, int(index.zip_bytes[shard]), by_mount=True)
            size = os.fstat(file.fd).st_size
            packed = self.rest(shard, file, 0, size, 0)
            self._check_hashes(shard, zip_hashes, packed)
            try:
                whole = decompress(index.compression(shard), packed, int(index.raw_bytes[shard]))
            except ValueError as problem:
                raise self.failed(shard, 0, size, samples, f"it does not decompress: {problem}") from problem
            expected = int(index.raw_bytes[shard])
            if expected and len(whole) != expected:
                raise self.failed(
                    shard, 0, size, samples, f"it unpacks to {len(whole)} bytes, not {expected}"
                )
        self._check_hashes(shard, raw_hashes, whole)
        return whole

    def _unpacked_path(self, shard: int) -> str:
        """Return the path of a shard's decompressed file in the cache folder."""
        assert self._folder is not None
        path, index = self.path(shard), self._index
        try:
            found = os.stat(path)
            identity: tuple[object, ...] = (found.st_size, found.st_mtime_ns)
        except OSError:
            identity = ()  # `_unpack` reports what is wrong with it
        # The key must differ for another dataset, and for a shard that was written again.
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
        failed = partial(self.failed, shard, 0, len(data), range(int(self._index.samples[shard])))
        try:
            wrong = mismatch(hashes, data)
        except LoaderError as problem:
            raise failed(str(problem), "Or read the dataset without check_hashes.") from problem
        if wrong:
            raise failed(f"its {wrong} is not that of the index; it was damaged or replaced")

    def unread(
        self, shard: int, start: int, stop: int, samples: range | list[int], problem: OSError
    ) -> ShardError:
        """Return the error for a failed read: like `failed`, with the remedy that fits."""
        remedy = mount_advice(problem, self.path(shard))
        if problem.errno == errno.EMFILE:
            remedy = _RAISE_LIMIT
        return self.failed(shard, start, stop, samples, cause_of(problem), remedy or _RESTORE)

    def failed(
        self,
        shard: int,
        start: int,
        stop: int,
        samples: range | list[int],
        cause: str,
        remedy: str = _RESTORE,
    ) -> ShardError:
        """Return the error that names a shard, its bytes [start, stop), the samples and the remedy."""
        first = int(self._index.samples[:shard].sum())
        # Not min() and max(): they would walk through all samples that a damaged index claims.
        ordered = samples if isinstance(samples, range) else sorted(samples)
        ids = [first + ordered[0], first + ordered[-1]] if len(ordered) else [first, first]
        which = f"sample {ids[0]}" if ids[0] == ids[1] else f"samples {ids[0]} to {ids[1]}"
        return ShardError(
            f"{self.path(shard)} (shard {shard}): bytes {start} to {stop}, {which}: {cause}. {remedy}"
        )


def path_of(index: Index, shard: int) -> str:
    """Return the path of a shard's file."""
    return os.path.join(index.directory(shard), index.zip_names[shard] or index.raw_names[shard])


def cause_of(problem: OSError) -> str:
    """Return an error's text without the path, which the message names already."""
    if isinstance(problem, FileNotFoundError):
        return "the file is missing"
    return f"{problem.strerror}{'; it was replaced' if problem.errno == errno.ESTALE else ''}"


def _table_bytes(offsets: Offsets) -> int:
    return 64 if isinstance(offsets, range) else offsets.nbytes
