"""Decisions by name: which names are temporary, which directories never change."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache


@lru_cache(maxsize=4096)
def matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a file name (not a path) matches one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_immutable(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a path below the mountpoint never changes.

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
