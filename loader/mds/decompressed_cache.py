"""A folder of decompressed shards that all processes of a machine share, and a detector of repeated decompression.

Each file appears complete, by a rename to its final name. A reader that has opened a file keeps it, even if another
process evicts it. There are no locks: two processes that miss the same shard concurrently both decompress it, and the
second rename changes nothing.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from loader.errors import LoaderError

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
