"""The kernel's mount table (proc_pid_mountinfo(5)), whether a fusecache mount answers, and which processes use it.

Invariant: no function waits for a mount, except `check_answers`, `wait_statfs` and `real_path`. These wait in a child
process, for some time: a process that waits for a hung daemon, or through it for the bucket, cannot be interrupted.
"""

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fusecache.keeper import ADDRESS
from fusecache.model.errors import MountError
from fusecache.model.mount_rows import MountRow, mount_rows
from fusecache.mount.runtime_folder import peer_of

TABLE = Path("/proc/self/mountinfo")
OUR_TYPE = "fuse.fusecache"
# A live daemon answers statfs at once, whatever the bucket does. On a loaded node the answer may be late.
ANSWER_SECONDS = 10.0
# After a daemon's death, the next one answers by then. A probe gets its answer within 5 s in any case.
_SUCCESSOR_SECONDS = 2.0
# For a name that it knows, the daemon answers within 10 s even if the bucket does not.
NAME_SECONDS = 11.0
_KEEPER_SECONDS = 2.0
_KEEPER_BYTES = 16384
_MOST_LINKS = 40  # the kernel's limit, path_resolution(7)


class DaemonAway(MountError):
    """No daemon serves the mount, and a keeper tries to start one. keeper: its process."""

    def __init__(self, message: str, keeper: int) -> None:
        super().__init__(message)
        self.keeper = keeper


def mounted_types(table: bytes) -> dict[str, str]:
    """Return the file system type at each mountpoint of a mountinfo table. If mounts are stacked, the top one wins."""
    return {row.point: row.kind for row in mount_rows(table)}


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A fusecache mount as the kernel has it. point: where it is mounted; device: the same for all its bind mounts.

    root: the directory of the mount that shows at `point`, "" for all of it. owner: the user id of its daemon; None if
    the kernel does not say. source: what is mounted, as `fusecache mount` was given it. mount_id, parent_id: the
    kernel's numbers of this mount, and of the one that it is mounted on.
    """

    point: str
    device: str
    root: str
    owner: int | None
    source: str = ""
    mount_id: str = ""
    parent_id: str = ""


def our_entries(mount_table: Path = TABLE) -> list[TableEntry]:
    """Return all fusecache mounts, bind mounts included, the top one last."""
    return [_entry(row) for row in mount_rows(mount_table.read_bytes()) if row.kind == OUR_TYPE]


def _entry(row: MountRow) -> TableEntry:
    owner = re.search(r"(?:^|,)user_id=(\d+)", row.options)
    return TableEntry(
        row.point,
        row.device,
        row.root.strip("/"),
        None if owner is None else int(owner[1]),
        row.source,
        row.mount_id,
        row.parent_id,
    )


def our_mountpoints(mount_table: Path = TABLE) -> list[str]:
    """Return the mountpoints of all fusecache mounts."""
    types = mounted_types(mount_table.read_bytes())
    return sorted(point for point, kind in types.items() if kind == OUR_TYPE)


def mountpoints_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the mountpoints of the fusecache mounts right in a folder."""
    top = os.path.realpath(folder)
    return [point for point in our_mountpoints() if os.path.dirname(point) == top]


def root_of(path: str | os.PathLike[str], mount_table: Path = TABLE) -> str | None:
    """Return the mountpoint of the fusecache mount that a path leads into, None if it leads into none.

    Resolves the path like realpath(3), but stops at a fusecache mount: a lookup inside it may wait forever.
    """
    return _split_at_mount(path, mount_table)[0]


def real_path(path: str | os.PathLike[str]) -> str:
    """Resolve a path like realpath(3). If the bucket does not answer in time, return the path as written."""
    root, inner = _split_at_mount(path, TABLE)
    if root is None or not inner:
        return root or os.path.realpath(path)
    written = os.path.join(root, inner)
    try:
        child = subprocess.Popen(
            ["realpath", "--canonicalize-missing", "--zero", "--", written],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except FileNotFoundError:  # a system without coreutils
        return os.path.realpath(path)
    try:
        answer, _ = child.communicate(timeout=NAME_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # not waited for: the process ends only when the daemon gives up
        return written
    return os.fsdecode(answer.removesuffix(b"\0")) if child.returncode == 0 else os.path.realpath(path)


def real_name(path: str | os.PathLike[str]) -> str:
    """Resolve a path like `real_path`, but keep a symlink at its end if it is in a fusecache mount."""
    folder, name = os.path.split(os.path.abspath(path))
    if os.fspath(path).endswith("/") or root_of(folder) is None:
        return real_path(path)
    found = os.path.join(real_path(folder), name)
    return found if root_of(found) == root_of(folder) else real_path(path)


def _split_at_mount(path: str | os.PathLike[str], mount_table: Path) -> tuple[str | None, str]:
    """Return the fusecache mountpoint that a path leads into (None: no mount) and the rest of the path inside it.

    If one mount lies below another, the inner one counts. Names are taken as written: a link inside the outer mount is
    not followed.
    """
    points = our_mountpoints(mount_table)
    links = 0
    left = os.path.abspath(path).split("/")[:0:-1]  # the first part last
    current = "/"
    while left:
        step = os.path.join(current, left.pop())
        if step in points:
            whole = "/".join((step, *reversed(left)))
            inner = _mounts_on_the_way(step, whole, mount_table)[-1]
            return inner, whole[len(inner) + 1 :]
        target = _target_of(step) if links < _MOST_LINKS else None
        if target is None:
            current = step
            continue
        links += 1
        left += os.path.normpath(os.path.join(current, target)).split("/")[:0:-1]
        current = "/"
    return None, ""


def _mounts_on_the_way(outer: str, path: str, mount_table: Path) -> list[str]:
    """Return the mountpoint `outer`, and those below it that a path leads through, each mounted on the one before."""
    on_the_way = [entry for entry in our_entries(mount_table) if f"{path}/".startswith(f"{entry.point}/")]
    found = [outer]
    while True:
        top = [entry.mount_id for entry in on_the_way if entry.point == found[-1]][-1:]
        below = [entry.point for entry in on_the_way if entry.parent_id in top and entry.point != found[-1]]
        if not below:
            return found
        found.append(below[-1])


def check_answers(path: str | os.PathLike[str]) -> None:
    """Raise MountError if a path leads into or through a fusecache mount whose daemon does not answer.

    It is a DaemonAway if a keeper holds the mount and no daemon serves it.
    """
    root = root_of(path)
    if root is not None:
        # The outer one first: a call to the inner one waits for both.
        outer = next((point for point in our_mountpoints() if f"{root}/".startswith(f"{point}/")), root)
        for each in dict.fromkeys((*_mounts_on_the_way(outer, root, TABLE), root)):
            _check_mount(each)


def _check_mount(root: str) -> None:
    if wait_statfs(root, _SUCCESSOR_SECONDS) is not None:
        return
    for entry in our_entries():
        if entry.point == root:
            _ask_keeper(entry)
    if wait_statfs(root, ANSWER_SECONDS) is None:
        raise MountError(
            f"{root}: the daemon has not answered for {ANSWER_SECONDS:g} s: it hangs or is stopped. Find its pid with "
            f"`pgrep -af 'fusecache mount'`; resume it with `kill -CONT PID`, or end it with `kill -9 PID` and clean "
            f"up with `fusecache unmount {root}`. Closed files are in its cache directory"
        )


def _ask_keeper(entry: TableEntry) -> None:
    """Raise DaemonAway if a mount has a keeper, which says why no daemon serves the mount."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_KEEPER_SECONDS)
        try:
            connection.connect(ADDRESS + entry.device.partition(":")[2])
            process, user, _ = peer_of(connection)
            answer = connection.recv(_KEEPER_BYTES)
        except OSError:  # the mount has no keeper, or it is in another network namespace
            return
    if answer and user in {0, os.geteuid() if entry.owner is None else entry.owner}:
        raise DaemonAway(f"{entry.point}: {answer.decode(errors='replace')}", process)


def wait_statfs(root: str, seconds: float) -> bool | None:
    """Return whether statfs(2) of a mount succeeds, None if it gets no answer in time.

    While a keeper starts the next daemon, the call waits for that one. On a dead mount it fails at once.
    """
    try:
        child = subprocess.Popen(
            ["stat", "--file-system", "--", root],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except FileNotFoundError:  # a system without coreutils: no way to tell
        return True
    try:
        return not child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.returncode is None:  # also if a signal ends the wait
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(1)


def _target_of(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


# Processes that a message names.
_NAMED = 5


def users_text(mountpoint: str) -> str:
    """Return which processes use a mount, and how, as far as this user may see them; "" if none is seen."""
    found = []
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name)):
        with suppress(OSError):  # it has ended, or is another user's
            use = next(_uses(process, mountpoint), "")
            if use:
                name = (process / "comm").read_text().strip()
                found.append(f"{name} (pid {process.name}, {use})")
    more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return ", ".join([*found[:_NAMED], *more])


def _uses(process: Path, mountpoint: str) -> Iterator[str]:
    """Yield how a process uses a mount. Raises OSError."""
    links = [(process / "cwd", "works in"), (process / "root", "has as its root")]
    links += [(each, "has open") for each in (process / "fd").iterdir()]
    for link, verb in links:
        with suppress(FileNotFoundError):  # it has just been closed
            path = os.readlink(link)
            if f"{path}/".startswith(f"{mountpoint}/"):
                yield f"{verb} {path}"
    for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
        path = line.partition("/")[2]
        if path and f"/{path}/".startswith(f"{mountpoint}/"):
            yield f"maps /{path}"
