"""Decisions by name: which names are temporary, which directories never change, which keys no path can name."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from math import exp

from fusecache.model.names import CONTROL_NAME, unusable_name

# In a directory that nothing is known of: from the third name on it is listed.
PROBES_UNLISTED = 2
# A directory is in use until so long after the last lookup in it.
IN_USE_SECONDS = 3.0
# No part of a directory is listed ahead of lookups more often: LISTs are paid for one by one.
LISTS_PER_SECOND = 1.3
# What a busy node may be late with.
_LATE_SECONDS = 0.05
# A page of a large directory costs the CPU of so many questions for a name (some 10 ms): this many lookups in
# `IN_USE_SECONDS` are worth one.
HEAT_OF_A_PAGE = 8.0
# Where lookups wait for so much of the time, a directory counts as in use that is visited as seldom as this: a program
# that goes round through thirty directories, and waits for a listing of each, would have no listing made ahead else.
WAITING_SHARE = 0.3
WAITING_SECONDS = 6.0
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
    return is_at_or_below_any(patterns, path)


def is_at_or_below_any(patterns: Sequence[str], path: str) -> bool:
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


def is_listing_cheaper(probes: int, pages: int, seconds: float, idle_seconds: float) -> bool:
    """Return whether a directory in which names are looked up should be listed, rather than asked for this name alone.

    probes: other names that were asked for since the last listing was begun. pages, seconds: what that one took, 0
    pages if there was none; idle_seconds: since it ended. A listing of one page costs what a probe does; a longer one
    is worth it once as many requests were spent, but never takes more than a small part of the time.
    """
    if pages == 0:
        return probes >= PROBES_UNLISTED
    return pages == 1 or (probes >= pages and idle_seconds >= seconds * LISTING_REST)


def relist_after_seconds(fresh_seconds: float, list_seconds: float) -> float:
    """Return how old a listing may be before it is made again ahead of lookups; inf: it is not worth it.

    list_seconds: that it takes; some more are allowed for, so that the new one is there in time.
    """
    seconds = max(fresh_seconds - 1.5 * list_seconds - _LATE_SECONDS, 1 / LISTS_PER_SECOND)
    return seconds if seconds < fresh_seconds else float("inf")


def decayed_heat(heat: float, seconds: float) -> float:
    """Return what is left, some time later, of a count of lookups or a sum of waits."""
    return heat * exp(-seconds / IN_USE_SECONDS)


def is_in_use(idle_seconds: float, fresh_seconds: float, waiting_share: float) -> bool:
    """Return whether lookups so far apart make it worth to list a directory ahead of the next one.

    Each listing then answers at least one; or lookups come so seldom only because each of them waits for a listing.
    waiting_share: of the last few seconds, that somebody waited for names.
    """
    if idle_seconds <= fresh_seconds:
        return True
    return idle_seconds <= WAITING_SECONDS and waiting_share >= WAITING_SHARE


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
