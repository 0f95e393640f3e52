"""The folder in which several buckets are mounted: which mounts are in it, and who makes it.

The mount table says what belongs together: a command about a folder is for all mounts right in it.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fusecache.model.errors import MountError
from fusecache.mount.launch import MountState, check_mountpoint, mount_of_this_node, mount_state
from fusecache.mount.mount_table import our_mountpoints, root_of

# Of a folder that a mount has made, and by which it is known: no program writes beside the mounts, to this disk.
_TOP_MODE = 0o1555


def mounts_meant(place: Path | str | None, directory: Path) -> Sequence[Path | str]:
    """Return the mounts, or a path in one, that a command is for: of a folder of several buckets all of them.

    place: as given; None means the working directory `directory`, or the only mount, or the only such folder.
    Raises MountError if that is not clear.
    """
    if place is not None or mounts_in(directory):
        named = directory if place is None else place
        return mounts_in(named) or [named]
    try:
        return [mount_of_this_node(directory)]
    except MountError:
        points = our_mountpoints()
        if len({os.path.dirname(point) for point in points}) != 1:
            raise
        return [Path(point) for point in points]


def mounts_in(folder: Path | str) -> list[Path]:
    """Return the mounts right in a folder that is in no mount itself."""
    if root_of(folder) is not None:
        return []
    top = os.path.realpath(folder)
    return [Path(point) for point in our_mountpoints() if os.path.dirname(point) == top]


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
        if _is_made(top):
            with _changeable(top):
                folder.rmdir()
            top.rmdir()  # if it was the last


def _is_made(top: Path) -> bool:
    facts = top.stat()
    return stat.S_IMODE(facts.st_mode) == _TOP_MODE and facts.st_uid == os.geteuid()


@contextmanager
def _changeable(top: Path) -> Iterator[None]:
    """Allow changes of a folder that a mount has made, for a moment. Raises OSError."""
    is_made = _is_made(top)
    if is_made:
        top.chmod(0o755)
    try:
        yield
    finally:
        if is_made:
            top.chmod(_TOP_MODE)
