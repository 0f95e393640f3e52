"""Checksums of a file that is still being written: computed at each fsync, only for what changed since the last one.

So a close after an fsync finds its bytes already verified, however often the file was synced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fusecache.model.objects import GRANULE_BYTES, MIB

_CHECKSUM_BYTES = 8
# This much is checksummed at every fsync: it takes a fraction of the time that the disk needs for the sync.
_ALWAYS_BYTES = MIB
_EVERYTHING = (0, 1 << 62)
_NOTHING = (1 << 62, 0)


@dataclass(eq=False, slots=True)
class IncrementalChecksums:
    """Checksums of all granules, 8 bytes each, and the range that changed since they were computed.

    summed_bytes: bytes read for checksums so far.
    """

    checksums: bytes = field(default=b"", repr=False)
    summed_bytes: int = 0
    _changed: tuple[int, int] = _EVERYTHING
    _is_taking: bool = False

    @property
    def are_current(self) -> bool:
        """Whether the checksums match the current bytes, and those are on disk."""
        return self._changed == _NOTHING and not self._is_taking

    def change(self, start: int, stop: int) -> None:
        """Record that bytes [start, stop) are about to change, or have changed."""
        self._changed = min(self._changed[0], start), max(self._changed[1], stop)

    def may_take(self, size: int, written: int) -> bool:
        """Return whether to compute checksums now, for a file of `size` bytes after `written` bytes in all.

        So a database that syncs after each scattered change never checksums much more than it writes.
        """
        start, stop = self._clip(self._changed, size)
        return not self._is_taking and (stop - start <= _ALWAYS_BYTES or self.summed_bytes <= written)

    @contextmanager
    def taking(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield the extent [start, stop) to compute for `put`. Changes during the computation are kept."""
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
        """Store the checksums of an extent of the file, which has `size` bytes."""
        first, stop, count = extent[0] // GRANULE_BYTES, _granules(extent[1]), _granules(size)
        before = self.checksums[: first * _CHECKSUM_BYTES]
        after = self.checksums[stop * _CHECKSUM_BYTES : count * _CHECKSUM_BYTES]
        self.checksums = before + checksums + after

    @staticmethod
    def _clip(changed: tuple[int, int], size: int) -> tuple[int, int]:
        """Return the changed range in whole granules; the file's last granule may be partial."""
        start = min(changed[0], size) // GRANULE_BYTES * GRANULE_BYTES
        stop = min(_granules(changed[1]) * GRANULE_BYTES, size)
        return start, max(start, stop)


def _granules(size: int) -> int:
    return -(-size // GRANULE_BYTES)
