"""Paths that a caller gives, and what a path's mount has to do with a read that fails."""

import errno
import os
import re
from pathlib import Path

from loader.errors import ArgumentError

# One slash: it is what Path makes of two.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_MOUNTS = "/proc/self/mountinfo"
# What FUSE says when its daemon is gone, at once or in the middle of a read.
_GONE = {errno.ENOTCONN, errno.ECONNABORTED}
_NO_ANSWER = {errno.EIO, errno.ETIMEDOUT}


def check_is_local(path: object) -> None:
    """Raise ArgumentError for what would be another machine's, and here a folder with an odd name: `s3://…`.

    So it does for MosaicML's pair of a local directory and a remote one, and for what is no path at all.
    """
    if isinstance(path, tuple):
        raise ArgumentError(
            f"{path!r}: one directory is asked for, nothing is uploaded here. Mount the bucket, and give its directory"
        )
    if isinstance(path, (str, Path)) and _SCHEME.match(str(path)):
        raise ArgumentError(
            f"{path}: nothing is downloaded or uploaded here. Mount the bucket, and give its directory"
        )
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"a directory's path is asked for, not {path!r} ({type(path).__name__})")


def mount_advice(problem: OSError, path: str | Path) -> str:
    """Say what to do where a mount, not the file, is the cause of an error; "" where it is not, or not known."""
    if problem.errno not in _GONE | _NO_ANSWER:
        return ""
    root = _fuse_mount(os.path.abspath(path))
    if root is None:
        return ""
    if problem.errno in _GONE:
        return f"The daemon of the mount {root} is gone: ask `fusecache status {root}`, and mount it anew."
    return f"The mount {root} or its bucket did not give it: ask `fusecache status {root}`."


def _fuse_mount(path: str) -> str | None:
    """The FUSE mount that a path lies on, by the kernel's list: where the daemon is gone, nothing else tells."""
    best, is_fuse = "", False
    try:
        lines = Path(_MOUNTS).read_text().splitlines()
    except OSError:
        return None
    path = os.path.realpath(path)
    for line in lines:
        # proc(5): the fifth word is the mount point, with blanks as \040; the type stands behind " - ".
        head, _, kind = line.partition(" - ")
        root = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), head.split(" ")[4])
        if len(root) >= len(best) and f"{path}/".startswith(f"{root.rstrip('/')}/"):
            best, is_fuse = root, kind.startswith("fuse")
    return best if is_fuse else None
