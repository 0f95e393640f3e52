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
from fusecache.mount.mount_table import TABLE, mounted_types, mountpoints_in, our_mountpoints, root_of

# Of a folder that a mount has made, and by which it is known: no program writes beside the mounts, to this disk.
_TOP_MODE = 0o1555
# Of the bare folder of a bucket: it is to be mounted. `systemd/fusecache-mountpoint` sets it too.
_MARK = stat.S_ISVTX


def mounts_meant(place: Path | str | None) -> tuple[Sequence[Path | str], bool]:
    """Return the mounts, or a path in one, that a command is for: of a folder of several buckets all of them.

    Return also whether it is such a folder. place: as given; None means the working directory, or the only mount, or
    the only such folder. Raises MountError if that is not clear, FileNotFoundError if the directory was removed.
    """
    directory = Path.cwd() if place is None else place
    if found := mounts_in(directory):
        return found, True
    if place is not None:
        return [place], False
    try:
        return [mount_of_this_node(Path(directory))], False
    except MountError:
        points = our_mountpoints()
        if len({os.path.dirname(point) for point in points}) != 1:
            raise
        return [Path(point) for point in points], True


def mounts_in(folder: Path | str) -> list[Path]:
    """Return the mounts right in a folder that is in no mount itself.

    Beside these, also the folders of buckets that are not mounted: a command fails for them.
    """
    if root_of(folder) is not None:
        return []
    found = [Path(point) for point in mountpoints_in(folder)]
    if found:
        top, mounted = found[0].parent, mounted_types(TABLE.read_bytes())
        bare = [top / name for name in sorted(os.listdir(top)) if f"{top / name}" not in mounted]
        found += [each for each in bare if each.is_dir() and each.lstat().st_mode & _MARK]
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
        _mark(folder, is_bucket=True)
    except OSError as exc:
        raise MountError(
            f"{folder}: cannot be made: {exc.strerror}; make it yourself, as the mountpoint of the bucket"
        ) from exc


def _mark(folder: Path, *, is_bucket: bool) -> None:
    """Say in the bare folder of a bucket that it is to be mounted, or is not any more, if this user may change it."""
    with suppress(OSError):
        if root_of(folder) is None:
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~_MARK | _MARK * is_bucket)


def remove_bucket_folder(folder: Path) -> None:
    """After an unmount, remove the folder of one of several buckets, if the mount made the one they share."""
    top = folder.parent
    _mark(folder, is_bucket=False)
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
