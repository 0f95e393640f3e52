"""What is mounted where, by the kernel's table (proc_pid_mountinfo(5)), and whether a mount of ours answers.

Invariant: nothing here waits for a mount, but `check_answers` and `real_path`, which do so for some seconds and in
another process: who waits for a daemon that hangs, or by way of it for the bucket, cannot be woken.
"""

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from fusecache.model.errors import MountError

TABLE = Path("/proc/self/mountinfo")
OUR_TYPE = "fuse.fusecache"
# A live daemon answers at once, whatever the bucket does; that of a loaded node may be late.
ANSWER_SECONDS = 10.0
# A daemon answers for a name that it knows after 10 s, however silent the bucket is.
NAME_SECONDS = 11.0
_MOST_LINKS = 40  # as the kernel's, path_resolution(7)


def mounted_types(table: bytes) -> dict[str, str]:
    """Return the file system type at each mountpoint of a mountinfo table; the last one lies on top."""
    lines = (line.partition(b" - ") for line in table.splitlines())
    return {_mount_point(fields): rest.split(b" ")[0].decode() for fields, _, rest in lines}


def our_mountpoints(mount_table: Path = TABLE) -> list[str]:
    """Return where fusecache is mounted."""
    types = mounted_types(mount_table.read_bytes())
    return sorted(point for point, kind in types.items() if kind == OUR_TYPE)


def root_of(path: str | os.PathLike[str], mount_table: Path = TABLE) -> str | None:
    """Return the mountpoint of the fusecache mount that a path leads into, None if it leads into none.

    As realpath(3) does it, but no step is taken into a mount of ours, where it might wait for ever.
    """
    return _way_into(path, mount_table)[0]


def real_path(path: str | os.PathLike[str]) -> str:
    """Return a path as realpath(3) does; where the bucket does not say in time what stands there, as it is written."""
    root, inner = _way_into(path, TABLE)
    if root is None or not inner:
        return root or os.path.realpath(path)
    written = os.path.join(root, inner)
    try:
        asker = subprocess.Popen(
            ["realpath", "--canonicalize-missing", "--zero", "--", written],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except FileNotFoundError:  # a system without coreutils
        return os.path.realpath(path)
    try:
        answer, _ = asker.communicate(timeout=NAME_SECONDS)
    except subprocess.TimeoutExpired:
        asker.kill()  # nobody waits for its end: it comes when the daemon gives up
        return written
    return os.fsdecode(answer.removesuffix(b"\0")) if asker.returncode == 0 else os.path.realpath(path)


def real_name(path: str | os.PathLike[str]) -> str:
    """Return a path as `real_path` does, but for a symlink in a mount of ours at its end: that stays what it is."""
    folder, name = os.path.split(os.path.abspath(path))
    if os.fspath(path).endswith("/") or root_of(folder) is None:
        return real_path(path)
    found = os.path.join(real_path(folder), name)
    return found if root_of(found) == root_of(folder) else real_path(path)


def _way_into(path: str | os.PathLike[str], mount_table: Path) -> tuple[str | None, str]:
    """Return the mountpoint that a path leads into, None if it leads into none, and what of the path is left there."""
    points = our_mountpoints(mount_table)
    links = 0
    left = os.path.abspath(path).split("/")[:0:-1]  # the first part last
    current = "/"
    while left:
        step = os.path.join(current, left.pop())
        if step in points:
            return step, "/".join(reversed(left))
        target = _target_of(step) if links < _MOST_LINKS else None
        if target is None:
            current = step
            continue
        links += 1
        left += os.path.normpath(os.path.join(current, target)).split("/")[:0:-1]
        current = "/"
    return None, ""


def check_answers(path: str | os.PathLike[str]) -> None:
    """Raise MountError if a path leads into a mount of ours whose daemon does not answer."""
    root = root_of(path)
    if root is None:
        return
    try:
        # What it says is of no interest: a mount that is dead, or not for us, answers too.
        asker = subprocess.Popen(
            ["stat", "--file-system", "--", root],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except FileNotFoundError:  # a system without coreutils: then nobody can tell
        return
    try:
        asker.wait(ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        asker.kill()
        with suppress(subprocess.TimeoutExpired):
            asker.wait(1)
        raise MountError(
            f"{root}: the daemon has not answered for {ANSWER_SECONDS:g} s: it hangs, or is stopped; let it go on "
            f"(kill -CONT), or end it (kill -9; its number: pgrep -af 'fusecache mount') and clean up with "
            f"`fusecache unmount {root}`: what was closed is in its cache directory"
        ) from None


def _target_of(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _mount_point(fields: bytes) -> str:
    """Return the fifth field of a line, unescaped."""
    return os.fsdecode(
        re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), fields.split(b" ")[4])
    )
