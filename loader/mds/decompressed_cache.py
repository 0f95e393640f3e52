"""Decompressed shards: a folder of them that all processes of a machine share, and what they cost in time.

Each file appears whole, under its final name, by a rename; who opens it keeps it for as long as it is open,
also when another process makes room. No locks: two processes that miss the same shard at once both unpack
it, and the second rename changes nothing.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from loader.errors import LoaderError

log = logging.getLogger("loader")

ENDING = ".mds"
# So many shards unpacked, or row groups decoded, again for less than this part of their samples: the cache is too small
# for the order.
THRASHING_LOADS = 64
THRASHING_PART = 8


class Repetitions:
    """Warns, once, of an order for which the same shards are unpacked, or row groups decoded, again and again.

    words: what to say, of: times, samples given, rows, limit_bytes. rows: samples of a shard, on average. limit_bytes:
    the bound that is too small then. Threads may lose a count.
    """

    def __init__(self, words: str, rows: float, limit_bytes: int) -> None:
        self._words, self._rows, self._limit_bytes = words, rows, limit_bytes
        self._seen: set[int] = set()
        self._again = 0
        self._told = False
        self.given = 0  # samples of such shards; who reads them counts

    def count(self, shard: int) -> None:
        """Note that a shard, or row group, was unpacked."""
        self._again += shard in self._seen
        self._seen.add(shard)
        if self._again < THRASHING_LOADS:
            return
        if self.given < self._again * self._rows / THRASHING_PART and not self._told:
            self._told = True
            log.warning(self._words, self._again, self.given, self._rows, self._limit_bytes)
        self._again = self.given = 0


class DecompressedCache:
    """Keeps what it is given until the folder holds more than `limit_bytes`; then the longest unused go.

    Raises LoaderError if the folder cannot be made.
    """

    def __init__(self, folder: str | Path, limit_bytes: int) -> None:
        self._folder = Path(folder)
        self._limit_bytes = limit_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise LoaderError(f"the cache folder {folder} cannot be made: {problem.strerror}") from problem

    def path(self, key: str, expected_bytes: int, unpack: Callable[[], bytes]) -> str:
        """Return the file that holds what `unpack` returns for this key, calling it only if there is none.

        key: of letters and digits, different for different content. expected_bytes: 0 if unknown; a file of
        another size (a disk that was full, a power cut) is made anew. Raises OSError if the folder is full or
        not writable, and what `unpack` raises.
        """
        path = self._folder / (key + ENDING)
        try:
            found_bytes = path.stat().st_size
            os.utime(path)  # it is in use: the last to be removed
        except FileNotFoundError:
            found_bytes = -1
        if found_bytes != (expected_bytes or max(found_bytes, 0)):
            data = unpack()
            self._evict_for(len(data))
            # No process's number: containers that share the folder have the same ones.
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
                        continue  # another process made room
                    found.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + needed <= self._limit_bytes:
                return
            Path(path).unlink(missing_ok=True)
            total -= size
