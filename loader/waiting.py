"""Waits for files that other nodes write.

    paths = wait_for([f"/mnt/gradients/window-7/peer-{peer}.npy.zst" for peer in range(4)], timeout=30)

It lists directories and opens no file. On a mount, a listing costs one LIST per 1 000 names, or nothing while the
daemon has one that is at most `attribute_seconds` [1 s] old. An object of another node is there as a whole or not at
all. A file that a process of this machine writes shows before it is whole: write it under a name that ends in `.tmp`
or `.part`, and rename it. Such names, and names with a leading dot, are never found.
"""

import contextlib
import errno
import fnmatch
import os
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from loader.base.paths import HOLD_FLAGS, check_is_local, mount_advice, natural_key
from loader.errors import ArgumentError, FilesMissingError, LoaderError

# (seconds waited, pause between two listings). A directory that is listed every 5 s all day costs 17 280 LISTs, which
# is $0.08 at the price of Cloudflare R2 ($4.50 per million).
_PAUSES = ((20.0, 5.0), (5.0, 2.5), (0.0, 0.5))
_UNFINISHED = (".tmp", ".part")
# The directory may be made again under the same name.
_GONE = (errno.ENOENT, errno.ESTALE)
# The bucket has not answered for 60 s, in which the daemon repeated its request.
_MAY_PASS = (errno.EIO, errno.ETIMEDOUT)
_NAMES_IN_ERROR = 20
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def wait_for(
    pattern: str | Path | Sequence[str | Path],
    *,
    timeout: float,
    at_least: int = 1,
    newer_than: float | None = None,
) -> list[str]:
    """Return the paths of the files that match, as soon as each pattern has at_least of them.

    pattern: a path, or several. Its last part may have `*`, `?` and `[…]`, as in `fnmatch`. Its directory may not exist
    yet. timeout: in seconds; 0 looks once. newer_than: seconds since 1970; files that are not newer do not count. The
    time of an object is that of its upload. The paths come in the order of the patterns, those of one pattern in
    natural order (2 before 10). Only files count, and links to files.

    One listing of a directory serves all its patterns. It is repeated every 0.5 s, after 5 s every 2.5 s, and after
    20 s every 5 s. All processes list at the same moments, so those on one mount share the daemon's LIST. An object is
    found at most this pause and `attribute_seconds` after the bucket has it.
    Raises FilesMissingError, a TimeoutError, with what was there and what was missing; ArgumentError for a pattern that
    can never match; LoaderError if a directory cannot be listed. A bucket that does not answer can delay it by 60 s.
    """
    patterns = [pattern] if isinstance(pattern, (str, Path)) else list(pattern)
    if timeout < 0 or at_least < 1 or not patterns:
        raise ArgumentError(
            f"{len(patterns)} patterns, timeout {timeout}, at_least {at_least}: wait_for takes at least one pattern, a "
            f"timeout of 0 s or more, and at_least of 1 or more"
        )
    wanted: dict[str, dict[str, list[str]]] = {}  # directory -> name's pattern -> the paths that match it
    parts = [_split(one) for one in patterns]
    for folder, name in parts:
        wanted.setdefault(folder, {})[name] = []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        watched = {
            folder: stack.enter_context(contextlib.closing(_WatchedFolder(folder))) for folder in wanted
        }
        while True:
            waited = time.monotonic() - began
            for folder, found in wanted.items():
                if any(len(paths) < at_least for paths in found.values()):
                    found |= watched[folder].matches(list(found), newer_than)
            several = {os.path.join(folder, name): wanted[folder][name] for folder, name in parts}
            there = list(dict.fromkeys(chain.from_iterable(several.values())))
            missing = [one for one, paths in several.items() if len(paths) < at_least]
            if not missing:
                return there
            if waited >= timeout:
                raise _error(timeout, missing, there, [one.cause for one in watched.values() if one.cause])
            time.sleep(min(timeout - waited, _pause(waited)))


def _pause(waited: float) -> float:
    """Return the seconds until the next listing: the clock is then a multiple of the pause."""
    pause = next(pause for after, pause in _PAUSES if waited >= after)
    return pause - time.time() % pause


def _split(pattern: str | Path) -> tuple[str, str]:
    """Return the directory and the name of a pattern. Raises ArgumentError for one that can never match."""
    check_is_local(pattern)
    folder, name = os.path.split(pattern)
    if not name:
        raise ArgumentError(f"{pattern} is a directory: wait for a file in it, such as {pattern}*")
    if any(sign in folder for sign in "*?["):
        raise ArgumentError(
            f"{pattern}: only the last part may be a pattern. Pass a pattern for each directory"
        )
    if _is_unfinished(name):
        raise ArgumentError(
            f"{pattern}: a name with a leading dot, or that ends in .tmp or .part, counts as unfinished. Wait for "
            f"another name"
        )
    return folder, name


def _error(timeout: float, missing: list[str], there: list[str], causes: list[str]) -> FilesMissingError:
    error = FilesMissingError(
        f"after {timeout:g} s missing: {_some(missing)}; there: {_some(there) or 'none'}. "
        f"{''.join(f'{cause}. ' for cause in causes)}Wait longer, or go on with the error's `found`."
    )
    error.found, error.missing = tuple(there), tuple(missing)
    return error


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMES_IN_ERROR
    return ", ".join(names[:_NAMES_IN_ERROR]) + (f" and {rest} more" if rest > 0 else "")


class _WatchedFolder:
    """A directory that may not exist yet. cause: why the last listing failed, or "".

    It holds the directory, or the nearest existing one above it. So a listing looks up no name on the way: that would
    cost a LIST for each level below the mountpoint.
    """

    def __init__(self, path: str) -> None:
        self.cause = ""
        self._path = path
        self._held = -1
        self._below: list[str] = []  # the names from the held directory to this one

    def close(self) -> None:
        """Let go of the directory."""
        if self._held >= 0:
            os.close(self._held)
        self._held = -1

    def matches(self, patterns: list[str], newer_than: float | None) -> dict[str, list[str]]:
        """Return pattern -> paths of the files that match it. Raises LoaderError if it cannot be listed."""
        self.cause, found = "", {pattern: list[str]() for pattern in patterns}
        try:
            listed = self._opened()
            if listed < 0:
                self.cause = f"{self._path} does not exist"
                return found
            try:
                with os.scandir(listed) as entries:
                    files = {entry.name: entry for entry in entries if not _is_unfinished(entry.name)}
                for pattern, paths in found.items():
                    names = sorted(fnmatch.filter(files, pattern), key=natural_key)
                    counted = [name for name in names if _counts(files[name], newer_than)]
                    paths += [os.path.join(self._path, name) for name in counted]
            finally:
                os.close(listed)
        except OSError as problem:
            self.close()
            advice = mount_advice(problem, self._path) or "Check the path and its permissions."
            self.cause = f"{self._path} cannot be listed: {problem.strerror}"
            if problem.errno not in (*_GONE, *_MAY_PASS):
                raise LoaderError(f"{self.cause}. {advice}") from problem
        return found

    def _opened(self) -> int:
        """Return the directory, opened for listing; -1 if it does not exist."""
        if self._held < 0:
            path, self._below = os.path.abspath(self._path), []
            while self._held < 0:
                try:
                    self._held = os.open(path, HOLD_FLAGS)
                except FileNotFoundError:
                    path, name = os.path.split(path)
                    self._below.insert(0, name)
        while True:
            listed = os.open(".", _LIST, dir_fd=self._held)
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, listed)
                if not os.fstat(listed).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "it was removed")
                if not self._below:
                    stack.pop_all()
                    return listed
                if self._below[0] not in os.listdir(listed):
                    return -1
            above, self._held = self._held, os.open(self._below[0], HOLD_FLAGS, dir_fd=self._held)
            os.close(above)
            del self._below[0]


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") or name.endswith(_UNFINISHED)


def _counts(entry: "os.DirEntry[str]", newer_than: float | None) -> bool:
    try:
        return entry.is_file() and (newer_than is None or entry.stat().st_mtime > newer_than)
    except OSError:  # it is gone again, or a link that is not followed
        return False
