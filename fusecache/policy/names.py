"""Decisions by name: which names are temporary, which directories never change, which keys no path can name."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase, translate
from functools import lru_cache

from fusecache.model.names import CONTROL_NAME, unusable_name

# In a directory that nothing is known of: from the third name on it is listed.
PROBES_UNLISTED = 2
# A long listing that only lookups ask for is followed by a pause of so many times its own duration.
LISTING_REST = 10


def matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a file name (not a path) matches one of the shell patterns."""
    return bool(patterns) and _any_of(patterns).match(name) is not None


@lru_cache(maxsize=64)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(pattern) for pattern in patterns))


def is_immutable(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a path below the mountpoint never changes."""
    return covers(patterns, path)


def covers(patterns: Sequence[str], path: str) -> bool:
    """Return whether one of the patterns of an option covers a path below the mountpoint.

    A pattern ending in '/' covers everything below that directory, and the directory; others are shell patterns on
    the whole path, or on the name alone if they hold no '/'.
    """
    name = path.rpartition("/")[2]
    for pattern in patterns:
        if pattern.endswith("/"):
            if path.startswith(pattern) or path == pattern[:-1]:
                return True
        elif fnmatchcase(path if "/" in pattern else name, pattern):
            return True
    return False


def listing_pays(probes: int, pages: int, seconds: float, idle_seconds: float) -> bool:
    """Return whether a directory in which names are looked up should be listed, rather than asked for this name alone.

    probes: other names that were asked for since the last listing was begun. pages, seconds: what that one took, 0
    pages if there was none; idle_seconds: since it ended. A listing of one page costs what a probe does; a longer one
    is worth it once as many requests were spent, but never takes more than a small part of the time.
    """
    if pages == 0:
        return probes >= PROBES_UNLISTED
    return pages == 1 or (probes >= pages and idle_seconds >= seconds * LISTING_REST)


class UnusableKeys:
    """Finds the keys that the mount cannot show, in one pass over the bucket's order with bounded memory."""

    def __init__(self) -> None:
        # Keys that may turn out to be prefixes of later ones: each begins with the one before it.
        self._stems: list[str] = []

    def see(self, key: str) -> list[tuple[str, str]]:
        """Return (key, why) of what this key shows to be unusable: itself, or an earlier one.

        key: without the mount's prefix; keys come in the order of their UTF-8 bytes, as LIST gives them.
        """
        if not key:
            return []  # the marker of the mount's own prefix
        found = []
        while self._stems and not key.startswith(self._stems[-1]):
            self._stems.pop()
        for stem in list(self._stems):
            if key.startswith(stem + "/"):
                found.append((stem, "it is also a directory, which shows instead"))
                self._stems.remove(stem)
        parts = key.removesuffix("/").split("/")
        why = next((reason for part in parts if (reason := unusable_name(part))), None)
        if why is None and parts[0] == CONTROL_NAME:
            why = "this name in the mount's root is the daemon's"
        if why is not None:
            found.append((key, why))
        elif not key.endswith("/"):
            self._stems.append(key)
        return found
