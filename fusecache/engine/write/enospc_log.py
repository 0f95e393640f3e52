"""What was written here and found no room, remembered for a while: the program was told, a person should be too."""

from dataclasses import dataclass
from typing import Any

import trio

# A program that was refused has ended, or has tried again, long before.
REMEMBERED_SECONDS = 3600.0
_MOST = 1000


@dataclass(frozen=True, slots=True)
class EnospcEvent:
    """A file that found no room. size: how far it was to reach, 0 if nobody knows; moment: loop time."""

    path: str
    size: int
    moment: float
    cause: str


class EnospcLog:
    """The newest refusals for lack of room, by path. Paths are below the mountpoint."""

    def __init__(self) -> None:
        # The newest last.
        self._files: dict[str, EnospcEvent] = {}

    def record(self, path: str, size: int, error: Exception) -> None:
        """A file was refused; of one that is refused again and again the largest size counts."""
        before = self._files.pop(path, None)
        size = max(size, before.size if before is not None else 0)
        self._files[path] = EnospcEvent(path, size, trio.current_time(), str(error))
        if len(self._files) > _MOST:
            del self._files[next(iter(self._files))]

    def on_closed(self, path: str, size: int) -> None:
        """A file of that size was closed, and has room: what is no larger would have, too."""
        if self._files:
            self._files = {
                each.path: each for each in self._files.values() if each.path != path and each.size > size
            }

    def at(self, path: str = "") -> list[EnospcEvent]:
        """Return what was refused at or below a path, the newest first."""
        since = trio.current_time() - REMEMBERED_SECONDS
        self._files = {each.path: each for each in self._files.values() if each.moment >= since}
        below = f"{path}/" if path else ""
        found = [each for each in self._files.values() if each.path == path or each.path.startswith(below)]
        return found[::-1]

    def facts(self, path: str = "") -> dict[str, Any]:
        """Return how many writes at or below a path were refused, and the last of them, as plain values."""
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
