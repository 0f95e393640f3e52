"""Checksums of a file that is still written: taken beside each fsync, and only of what changed since the one before.

So a close that follows an fsync finds its bytes verified, however often the file was synced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fusecache.model.objects import GRANULE_BYTES, MIB

_CHECKSUM_BYTES = 8
# So much is summed at every fsync: it takes a fraction of what the disk needs to sync it.
_ALWAYS_BYTES = MIB
_EVERYTHING = (0, 1 << 62)
_NOTHING = (1 << 62, 0)


@dataclass(eq=False, slots=True)
class IncrementalChecksums:
    """Checksums of all granules, 8 bytes each, and where bytes changed since they were taken.

    summed_bytes: read for them so far.
    """

    checksums: bytes = field(default=b"", repr=False)
    summed_bytes: int = 0
    _changed: tuple[int, int] = _EVERYTHING
    _is_taking: bool = False

    @property
    def are_current(self) -> bool:
        """Whether they are those of the bytes as they are now, and those are on the disk."""
        return self._changed == _NOTHING and not self._is_taking

    def change(self, start: int, stop: int) -> None:
        """Bytes [start, stop) are about to be others, or are others now."""
        self._changed = min(self._changed[0], start), max(self._changed[1], stop)

    def may_take(self, size: int, written: int) -> bool:
        """Say whether now is the time, for a file of `size` bytes of which so many were written in all.

        A database that syncs each of its scattered changes does not wait for more than it writes.
        """
        start, stop = self._clip(self._changed, size)
        return not self._is_taking and (stop - start <= _ALWAYS_BYTES or self.summed_bytes <= written)

    @contextmanager
    def taking(self, size: int) -> Iterator[tuple[int, int]]:
        """Give the extent [start, stop) whose checksums `put` is to be told; what changes meanwhile is not lost."""
        changed, self._changed = self._changed, _NOTHING
        start, stop = extent = self._clip(changed, size)
        self.summed_bytes += stop - start
        self._is_taking = True
        try:
            yield extent
        except BaseException:
            self.change(*changed)
            raise
        finally:
            self._is_taking = False

    def put(self, extent: tuple[int, int], size: int, checksums: bytes) -> None:
        """Enter the checksums of an extent of the file, which has `size` bytes."""
        first, stop, count = extent[0] // GRANULE_BYTES, _granules(extent[1]), _granules(size)
        before = self.checksums[: first * _CHECKSUM_BYTES]
        after = self.checksums[stop * _CHECKSUM_BYTES : count * _CHECKSUM_BYTES]
        self.checksums = before + checksums + after

    @staticmethod
    def _clip(changed: tuple[int, int], size: int) -> tuple[int, int]:
        """Return whole granules of a file of `size` bytes, its last perhaps cut."""
        start = min(changed[0], size) // GRANULE_BYTES * GRANULE_BYTES
        stop = min(_granules(changed[1]) * GRANULE_BYTES, size)
        return start, max(start, stop)


def _granules(size: int) -> int:
    return -(-size // GRANULE_BYTES)
