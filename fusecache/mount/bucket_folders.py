"""The folder in which several buckets are mounted: which mounts are in it, and who makes it.

The mount table says what belongs together: a command about a folder is for all mounts right in it.
"""

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fusecache.model.errors import MountError
from fusecache.mount.launch import MountState, check_mountpoint, mount_of_this_node, mount_state
from fusecache.mount.mount_table import mountpoints_in, our_mountpoints, root_of

# Of a folder that a mount has made, and by which it is known: no program writes beside the mounts, to this disk.
_TOP_MODE = 0o1555


def mounts_meant(place: Path | str | None) -> Sequence[Path | str]:
    """Return the mounts, or a path in one, that a command is for: of a folder of several buckets all of them.

    place: as given; None means the working directory, or the only mount, or the only such folder.
    Raises MountError if that is not clear, FileNotFoundError if the working directory was removed.
    """
    if place is not None:
        return mounts_in(place) or [place]
    directory = Path.cwd()
    if found := mounts_in(directory):
        return found
    try:
        return [mount_of_this_node(directory)]
    except MountError:
        points = our_mountpoints()
        if len({os.path.dirname(point) for point in points}) != 1:
            raise
        return [Path(point) for point in points]


def mounts_in(folder: Path | str) -> list[Path]:
    """Return the mounts right in a folder that is in no mount itself.

    In one that a mount has made, also the folders of buckets that are not mounted: a command fails for these.
    """
    if root_of(folder) is not None:
        return []
    found = [Path(point) for point in mountpoints_in(folder)]
    if found and stat.S_IMODE(os.stat(folder).st_mode) == _TOP_MODE:
        top = found[0].parent
        found += [top / name for name in sorted(os.listdir(top)) if top / name not in found]
    return found


def make_bucket_folder(folder: Path, *, allow_other: bool) -> None:
    """Make the folder of one of several buckets, and the folder that they share. Raises MountError."""
    top = folder.parent
    if mount_state(top) in (MountState.LIVE, MountState.DEAD):
        check_mountpoint(top, allow_other=allow_other)  # which says what to do
    try:
        if not top.exists():
            top.mkdir(parents=True)
            top.chmod(_TOP_MODE)
        if not os.path.lexists(folder):
            with _changeable(top):
                folder.mkdir(mode=0o755)
            if os.geteuid() == 0:
                os.chown(folder, top.stat().st_uid, top.stat().st_gid)
    except OSError as exc:
        raise MountError(
            f"{folder}: cannot be made: {exc.strerror}; make it yourself, as the mountpoint of the bucket"
        ) from exc


def remove_bucket_folder(folder: Path) -> None:
    """After an unmount, remove the folder of one of several buckets, if the mount made the one they share."""
    top = folder.parent
    with suppress(OSError):
        with _changeable(top) as is_made:
            if is_made:
                folder.rmdir()
        if is_made:
            top.rmdir()  # if it was the last


def _is_made(top: Path) -> bool:
    facts = top.stat()
    return stat.S_IMODE(facts.st_mode) == _TOP_MODE and facts.st_uid == os.geteuid()


@contextmanager
def _changeable(top: Path) -> Iterator[bool]:
    """Allow changes of a folder that a mount has made, for a moment; tell whether it is one. Raises OSError."""
    lock = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the commands for its other buckets do the same
        is_made = _is_made(top)
        if is_made:
            os.fchmod(lock, 0o755)
        try:
            yield is_made
        finally:
            if is_made:
                os.fchmod(lock, _TOP_MODE)
    finally:
        os.close(lock)
