"""Decisions by name patterns: which names are temporary, which paths never change. Pure.

Finds the keys of a bucket that no path on the mount can name. Pure.

Decides which symlinks are followed. Pure.
"""

import re
from collections.abc import Sequence
from enum import Enum
from fnmatch import fnmatchcase, translate
from functools import lru_cache

from fusecache.model.names import CONTROL_NAME, unusable_name


class UnusableKeys:
    """Finds the keys that the mount cannot show, in one pass over the bucket in key order, with bounded memory."""

    def __init__(self) -> None:
        # Keys that may be prefixes of later ones. Each begins with the one before it.
        self._stems: list[str] = []

    def see(self, key: str, size: int = 0) -> list[tuple[str, str]]:
        """Return (key, reason) of the keys that this key shows to be unusable: itself or earlier ones.

        key: without the mount's prefix. size: of its object. Keys come in the order of their UTF-8 bytes, as LIST
        returns them.
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
            why = "this name in the mount's root is reserved for the daemon's control files"
        if why is None and size and key.endswith("/"):
            why = "it is a directory, whose content no path shows"
        if why is not None:
            found.append((key, why))
        elif not key.endswith("/"):
            self._stems.append(key)
        return found


class SymlinkRule(Enum):
    """Which symlinks the kernel may follow: the option `symlinks`."""

    INSIDE = "inside"
    ALL = "all"
    NONE = "none"


def is_followed(rule: SymlinkRule, target: str, *, depth: int) -> bool:
    """Return whether a symlink is followed. depth: how many directories of the mount the link lies below its root."""
    if rule is SymlinkRule.INSIDE:
        return _stays_inside(target, depth)
    return rule is SymlinkRule.ALL


def _stays_inside(target: str, depth: int) -> bool:
    """Return whether a target leads nowhere but into the mount, whatever other links are in the mount.

    `..` counts only at the start, where it leads through the link's own directories. After a name it may lead anywhere
    above: the name may be a link to the mount's root, and the kernel goes up from where that link leads.
    """
    if target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return climbs <= depth and ".." not in parts[climbs:]


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
    """Return whether one of an option's patterns covers a path below the mountpoint.

    A pattern ending in '/' covers that directory and everything below it. Others are shell patterns, for the whole path
    if they contain a '/', else for the name alone.
    """
    name = path.rpartition("/")[2]
    for pattern in patterns:
        if pattern.endswith("/"):
            if path.startswith(pattern) or path == pattern[:-1]:
                return True
        elif fnmatchcase(path if "/" in pattern else name, pattern):
            return True
    return False


class PinnedKeys:
    """The keys that match the option `pin`: their blocks are evicted only for writes, after all others."""

    def __init__(self, patterns: tuple[str, ...], prefix: str) -> None:
        """prefix: of all keys, which the patterns do not have."""
        names = [pattern.lstrip("/") for pattern in patterns]
        # A directory's name covers what is below it, too.
        self._patterns = (*names, *(f"{name}/" for name in names if not name.endswith("/")))
        self._prefix = prefix

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def __contains__(self, key: str) -> bool:
        return is_at_or_below_any(self._patterns, key[len(self._prefix) :])
