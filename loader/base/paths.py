"""Checks the paths that a caller passes, and explains read errors that the mount causes rather than the file."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from loader.errors import ArgumentError

# One slash, because Path turns two into one.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_MOUNTS = "/proc/self/mountinfo"
_OUR_TYPE = "fuse.fusecache"
# For a directory that is only held. O_PATH: the daemon keeps no handle for it.
HOLD_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# The errno values of FUSE when its daemon is gone, before or during a read.
_GONE = {errno.ENOTCONN, errno.ECONNABORTED}
_NO_ANSWER = {errno.EIO, errno.ETIMEDOUT}


def check_is_local(path: object) -> None:
    """Raise ArgumentError for a URL such as `s3://…`, which would otherwise name an odd local folder.

    Also for MosaicML's pair of a local and a remote directory, and for values that are no path at all.
    """
    if isinstance(path, tuple):
        raise ArgumentError(
            f"{path!r}: give one directory, the loader uploads nothing. Mount the bucket, and give its directory"
        )
    if is_url(path):
        raise ArgumentError(
            f"{path}: the loader downloads and uploads nothing. Mount the bucket, and give its directory"
        )
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"the path of a directory is needed, not {path!r} ({type(path).__name__})")


def is_url(path: object) -> bool:
    """Return whether a path is a URL such as `s3://bucket/folder`."""
    return isinstance(path, (str, Path)) and _SCHEME.match(str(path)) is not None


def mount_advice(problem: OSError, path: str | Path) -> str:
    """Return advice if the mount, rather than the file, caused an error; "" if it did not, or that is unknown."""
    if problem.errno not in _GONE | _NO_ANSWER:
        return ""
    root = _fuse_mount(os.path.abspath(path))
    if root is None:
        return ""
    if problem.errno in _GONE:
        return f"The daemon of the mount {root} is gone: run `fusecache status {root}`, and mount it again."
    return f"The mount {root} or its bucket failed to deliver it: run `fusecache status {root}`."


def mounted_path(url: str) -> str | None:
    """Return where a mount of this node shows a bucket's URL, such as `s3://bucket/folder`; None if none does.

    If several mounts show it, the first one with the longest prefix counts.
    """
    best, found = "", None
    for root, kind, source in _mounts():
        shown = source.rstrip("/")
        if kind == _OUR_TYPE and len(shown) > len(best) and f"{url.rstrip('/')}/".startswith(f"{shown}/"):
            best, found = shown, os.path.join(root, url.rstrip("/")[len(shown) :].strip("/")).rstrip("/")
    return found


def _fuse_mount(path: str) -> str | None:
    """Return the FUSE mount that a path lies on. Asks the kernel's mount list, as stat fails if the daemon is gone."""
    best, is_fuse = "", False
    path = os.path.realpath(path)
    for root, kind, _ in _mounts():
        if len(root) >= len(best) and f"{path}/".startswith(f"{root.rstrip('/')}/"):
            best, is_fuse = root, kind.startswith("fuse")
    return best if is_fuse else None


def _mounts() -> Iterator[tuple[str, str, str]]:
    """Yield mount point, type and source of all mounts of this node; none if the kernel's list cannot be read."""
    try:
        lines = Path(_MOUNTS).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # proc(5): the fifth word is the mount point, with blanks as \040; type and source follow " - ".
        head, _, rest = line.partition(" - ")
        kind, source, *_ = rest.split(" ")
        yield _unescaped(head.split(" ")[4]), kind, _unescaped(source)


def _unescaped(word: str) -> str:
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), word)


def natural_key(path: str) -> tuple[list[list[tuple[int, int, str]]], str]:
    """Return the sort key of a relative path: digits compare as numbers, and a folder comes before its content."""
    parts = [
        [
            (0, int(piece), "") if piece.isdecimal() else (1, 0, piece)
            for piece in re.split(r"(\d+)", name)
            if piece
        ]
        for name in path.split("/")
    ]
    return parts, path
