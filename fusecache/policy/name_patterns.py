"""Decisions by name patterns: which names are temporary, which paths never change. Pure."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase, translate
from functools import lru_cache


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
