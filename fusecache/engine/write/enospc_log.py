"""Remembers for an hour which writes failed with ENOSPC: the program got the error, `status` also shows it to you."""

from dataclasses import dataclass
from typing import Any

import trio

# By then a program that got ENOSPC has long ended, or tried again.
REMEMBERED_SECONDS = 3600.0
# Paths remembered at most; the oldest event is dropped first.
_PATHS_MAX = 1000


@dataclass(frozen=True, slots=True)
class EnospcEvent:
    """One file that got ENOSPC. size: the size that it was to reach, 0 if unknown; moment: loop time."""

    path: str
    size: int
    moment: float
    cause: str


class EnospcLog:
    """The newest ENOSPC event of each path. Paths are below the mountpoint."""

    def __init__(self) -> None:
        # In the order of the events, the newest last.
        self._files: dict[str, EnospcEvent] = {}

    def record(self, path: str, size: int, error: Exception) -> None:
        """Record an ENOSPC event. If a file had one before, the larger size counts."""
        before = self._files.pop(path, None)
        size = max(size, before.size if before is not None else 0)
        self._files[path] = EnospcEvent(path, size, trio.current_time(), str(error))
        if len(self._files) > _PATHS_MAX:
            del self._files[next(iter(self._files))]

    def on_closed(self, path: str, size: int) -> None:
        """A file was closed, so it had room: forget its event, and those of files that are no larger."""
        if self._files:
            self._files = {
                each.path: each for each in self._files.values() if each.path != path and each.size > size
            }

    def at(self, path: str = "") -> list[EnospcEvent]:
        """Return the events at or below a path, the newest first."""
        since = trio.current_time() - REMEMBERED_SECONDS
        self._files = {each.path: each for each in self._files.values() if each.moment >= since}
        below = f"{path}/" if path else ""
        found = [each for each in self._files.values() if each.path == path or each.path.startswith(below)]
        return found[::-1]

    def facts(self, path: str = "") -> dict[str, Any]:
        """Return how many files at or below a path got ENOSPC, and the newest event, as plain values."""
        found = self.at(path)
        if not found:
            return {"files": 0}
        last = found[0]
        return {
            "files": len(found),
            "path": last.path,
            "bytes": last.size,
            "seconds": round(trio.current_time() - last.moment, 1),
            "cause": last.cause,
        }
