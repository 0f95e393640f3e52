"""Checks the paths that a caller passes, and explains read errors that the mount causes rather than the file."""

import errno
import json
import os
import re
import subprocess
import time
from pathlib import Path

from fusecache.model.mount_rows import MountRow, mount_rows
from loader.errors import ArgumentError

# One slash, because Path turns two into one.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_MOUNTS = "/proc/self/mountinfo"
_OUR_TYPE = "fuse.fusecache"
# A daemon answers from memory, at once. On a busy node the answer may be late.
_ANSWER_SECONDS = 5.0
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
        url = _SCHEME.sub(r"\g<0>/", str(path), count=1) if isinstance(path, Path) else path
        raise ArgumentError(
            f"{url}: the loader downloads and uploads nothing. Mount the bucket, and give its directory"
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

    If several mounts show it, the first one with the longest prefix counts. One whose daemon is gone counts last.
    Raises ArgumentError if two of them show buckets of one name at different endpoints.
    """
    found: list[tuple[int, str, str]] = []
    devices: dict[str, str] = {}
    for mount in _mounts():
        # Of a folder that is bound elsewhere, as into a container, only what is below it shows there.
        shown = (mount.source.rstrip("/") + mount.root).rstrip("/")
        if mount.kind == _OUR_TYPE and f"{url.rstrip('/')}/".startswith(f"{shown}/"):
            inner = url.rstrip("/")[len(shown) :].strip("/")
            found.append((len(shown), mount.point, os.path.join(mount.point, inner).rstrip("/")))
            if mount.root == "/":
                devices.setdefault(mount.device, mount.point)
    if len(devices) > 1:
        _check_is_one_bucket(url, sorted(devices.values()))
    found.sort(key=lambda each: each[0], reverse=True)
    # The others are not asked: one may hang.
    alive = (path for _, point, path in found if not _is_dead(point))
    return next(alive, found[0][2] if found else None)


def _check_is_one_bucket(url: str, points: list[str]) -> None:
    """Raise ArgumentError if the mounts' daemons name different endpoints. One that does not answer is left out."""
    ends = time.monotonic() + _ANSWER_SECONDS
    places: dict[str, str] = {}
    for point, child in [(point, _asking(point)) for point in points]:
        try:
            answer, _ = child.communicate(timeout=max(0.0, ends - time.monotonic()))
            places.setdefault(json.loads(answer)["endpoint"], point)
        except subprocess.TimeoutExpired:
            child.kill()  # not waited for: the process ends only when the daemon does
        except (ValueError, KeyError):  # its daemon is gone, or an older one
            continue
    if len(places) > 1:
        shown = " and ".join(f"{point} ({endpoint})" for endpoint, point in places.items())
        raise ArgumentError(
            f"{url}: two buckets of this name are mounted, at different endpoints: {shown}. Give the directory in "
            "one of them instead of the URL"
        )


def _asking(point: str) -> "subprocess.Popen[bytes]":
    """Return a process that prints what a mount's daemon says of itself. A process of its own: it may hang."""
    words = ["cat", f"{point}/.fusecache/stats.json"]
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def _is_dead(point: str) -> bool:
    try:
        os.statvfs(point)
    except OSError as problem:
        return problem.errno in _GONE
    return False


def mounts_below(path: str | Path) -> list[str]:
    """Return the mount points at or below a path."""
    real = os.path.realpath(path).rstrip("/")
    return [mount.point for mount in _mounts() if f"{mount.point.rstrip('/')}/".startswith(f"{real}/")]


def _fuse_mount(path: str) -> str | None:
    """Return the FUSE mount that a path lies on. Asks the kernel's mount list, as stat fails if the daemon is gone."""
    best, is_fuse = "", False
    path = os.path.realpath(path)
    for mount in _mounts():
        if len(mount.point) >= len(best) and f"{path}/".startswith(f"{mount.point.rstrip('/')}/"):
            best, is_fuse = mount.point, mount.kind.startswith("fuse")
    return best if is_fuse else None


def _mounts() -> list[MountRow]:
    """Return all mounts of this node; none if the kernel's list cannot be read."""
    try:
        return mount_rows(Path(_MOUNTS).read_bytes())
    except OSError:
        return []


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
