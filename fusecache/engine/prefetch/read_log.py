"""The reads of all files, for a recording: in memory until they are reported. Used on the trio loop."""

from typing import Any

# Reads between two reports, which come twice a second: some times what a daemon can answer.
MOST_READS = 1 << 16


class ReadLog:
    """Reads since the last report, in their order. Reads beyond MOST_READS are only counted."""

    def __init__(self) -> None:
        self._reads: list[tuple[str, int, int]] = []
        self._lost = 0

    def add(self, path: str, start: int, nbytes: int) -> None:
        """Log a read. path: below the mountpoint."""
        if len(self._reads) < MOST_READS:
            self._reads.append((path, start, nbytes))
        else:
            self._lost += 1

    def take(self) -> dict[str, Any]:
        """Return the reads since the last call, and how many are missing, as plain values."""
        found = {"reads": self._reads, "lost": self._lost}
        self._reads, self._lost = [], 0
        return found
