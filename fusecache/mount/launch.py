"""Starts a daemon in the background, and ends one: processes, mount table, fusermount3.

The pipe of a background start carries one line from the child: `ready`, perhaps with a warning, or `error: <text>`.
"""

import enum
import errno
import os
import select
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fusecache.model.errors import MountError
from fusecache.mount.control_client import Answer, Mount, ServerProgress, ask, daemon_pid, find_mount
from fusecache.mount.mount_table import TABLE, check_answers, mounted_types, our_mountpoints, root_of
from fusecache.mount.progress import pending_text

READY = "ready"
LONGEST_WORDS = 1000  # characters: whatever they are, they fit into a pipe at once
LOG_LINES = 15  # enough for the end of a traceback
# After the unmount nothing is left to upload; what remains is closing files and the clean-shutdown mark.
GONE_SECONDS = 60.0
# With --force uploads may be under way: long enough for an idle daemon, short for a person at a terminal.
FORCED_GONE_SECONDS = 10.0


class MountState(enum.Enum):
    """What a path is."""

    MISSING = "not there"
    NONE = "not a mount"
    LIVE = "a fusecache mount with its daemon"
    DEAD = "a FUSE mount whose daemon is gone"
    FOREIGN = "a mount, but not of fusecache"


# ---- starting


def start_in_background(command: Callable[[int], list[str]], log_path: Path) -> str:
    """Run a daemon as a session of its own; return when it says that it is ready, with what it says beside that.

    command: from the descriptor where the child is to tell how it went. The log gets its output.

    Raises MountError with the child's words, or with the end of its log if it died without any.
    """
    log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_start = log_path.stat().st_size if log_path.exists() else 0
    reader, writer = os.pipe()
    with open(reader, "rb") as words:
        try:
            os.set_inheritable(writer, True)  # noqa: FBT003  # takes no keyword
            words_of_child = command(writer)
            pid = os.posix_spawn(
                words_of_child[0],
                words_of_child,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
            )
        finally:
            os.close(writer)
        try:
            line = words.readline().decode(errors="replace").strip()
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            raise
    if line.split(" ")[0] == READY:
        return line.removeprefix(READY).strip()
    # It said an error or hung up: it is ending, and nobody else will collect it.
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if line.startswith("error:"):
        raise MountError(line.removeprefix("error:").strip())
    raise MountError(
        f"the daemon ended with status {status} before it was ready; {_log_end(log_path, log_start)}"
    )


class Parent:
    """The child's end of the pipe to a parent in `start_in_background`; None where nobody waits."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            # fusermount3 must not hold the pipe open.
            os.set_inheritable(descriptor, False)  # noqa: FBT003  # takes no keyword

    def tell(self, words: str) -> None:
        """Write the one line that the parent waits for. Only the first one counts."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        # A parent that was interrupted is no reason to stop.
        with os.fdopen(descriptor, "wb", buffering=0) as pipe, suppress(BrokenPipeError):
            pipe.write((" ".join(words.split())[:LONGEST_WORDS] + "\n").encode())


# ---- ending


def mount_state(mountpoint: Path, *, mount_table: Path = TABLE) -> MountState:
    """Return what is mounted at a path. A dead mount is one whose statfs says ENOTCONN.

    Raises MountError for one that does not answer.
    """
    check_answers(mountpoint)
    try:
        os.statvfs(mountpoint)  # the kernel remembers what stat says for a while, also of a dead one
    except OSError as exc:
        if exc.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            return MountState.DEAD
        if exc.errno == errno.ENOENT:
            return MountState.MISSING
        raise MountError(f"{mountpoint}: {exc.strerror}") from exc
    kind = mounted_types(mount_table.read_bytes()).get(os.path.realpath(mountpoint))
    if kind is None:
        return MountState.NONE
    if not kind.startswith("fuse"):
        return MountState.FOREIGN
    try:
        mount, inner = find_mount(mountpoint, os.environ)
    except MountError:
        return MountState.FOREIGN
    return MountState.LIVE if inner == "" and mount.root.samefile(mountpoint) else MountState.FOREIGN


def resolve_in_mount(path: str | os.PathLike[str], *, follows: bool = True) -> tuple[Mount, str]:
    """Return the mount that a path belongs to, and the path inside it, as `find_mount`; waits for no daemon that hangs.

    Raises MountError.
    """
    check_answers(path)
    return find_mount(path, os.environ, follows=follows)


def mount_of_this_node(directory: Path) -> Path:
    """Return what a command without a path is about: the directory, if it is in a mount, else the only mount.

    Raises MountError if there is none, or more than one.
    """
    if root_of(directory) is not None:
        return directory
    with suppress(MountError):
        find_mount(directory, os.environ)
        return directory
    points = our_mountpoints()
    if len(points) == 1:
        return Path(points[0])
    if not points:
        raise MountError("nothing is mounted here: `fusecache mount s3://BUCKET[/PREFIX] MOUNTPOINT`")
    raise MountError("which mount? give one of " + ", ".join(points))


def check_mountpoint(mountpoint: Path, *, allow_other: bool) -> None:
    """Raise MountError, saying what to do, unless something can be mounted there by this user."""
    match mount_state(mountpoint):
        case MountState.MISSING:
            raise MountError(f"{mountpoint} does not exist: create it first (mkdir -p {mountpoint})")
        case MountState.DEAD:
            raise MountError(
                f"{mountpoint}: the daemon of an earlier mount died here; clear it with "
                f"`fusecache unmount {mountpoint}` and mount again: what it had not uploaded is in its cache directory"
            )
        case MountState.LIVE:
            raise MountError(
                f"{mountpoint}: fusecache is mounted here already (`fusecache unmount {mountpoint}`)"
            )
        case MountState.FOREIGN:
            raise MountError(f"{mountpoint}: another file system is mounted here; choose another directory")
        case MountState.NONE:
            pass
    if not mountpoint.is_dir():
        raise MountError(f"{mountpoint} is not a directory")
    if any(mountpoint.iterdir()):
        raise MountError(
            f"{mountpoint} is not empty: mounting would hide what is in it; choose an empty directory"
        )
    _check_fuse(mountpoint, allow_other=allow_other)


def _check_fuse(mountpoint: Path, *, allow_other: bool) -> None:
    if not os.path.exists("/dev/fuse"):
        raise MountError(
            "/dev/fuse is missing: `modprobe fuse`, or give the container --device /dev/fuse --cap-add SYS_ADMIN"
        )
    if os.geteuid() == 0:
        return
    # What fusermount3 asks of other users than root.
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise MountError("/dev/fuse: you may not use it; ask for read and write permission, or mount as root")
    if not os.access(mountpoint, os.W_OK):
        raise MountError(
            f"{mountpoint}: you may not write to it, so you may not mount on it; choose one of yours"
        )
    if allow_other and "user_allow_other" not in _message(Path("/etc/fuse.conf")):
        raise MountError("--allow-other: /etc/fuse.conf lacks the line user_allow_other; have root add it")


def _message(path: Path) -> set[str]:
    """Return the lines of a file that are no comments; none if it cannot be read."""
    try:
        return {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    except OSError:
        return set()


def clear_dead(mountpoint: Path) -> None:
    """Detach a mount whose daemon is gone; nothing in its cache directory is lost."""
    _detach(mountpoint, lazy=True)


def drain(
    mountpoint: Path, *, timeout_seconds: float | None, on_progress: Callable[[ServerProgress], None]
) -> None:
    """Wait until everything written is in the bucket. Raises MountError if that cannot be said."""
    mount, _ = find_mount(mountpoint, os.environ)
    answer = ask(mount, "drain", timeout_seconds=timeout_seconds, on_progress=on_progress)
    if answer.result not in ("ok", "durable"):
        raise MountError(
            f"{mountpoint} stays mounted: {pending_text(answer.progress)} not in the bucket yet: "
            f"{answer.message or answer.result}; "
            "wait longer, or use --force to keep them for the next mount"
        )


def log_tail(mountpoint: Path) -> Answer:
    """Return what the daemon says of itself before its end: what is not in the bucket yet, and its status."""
    mount, _ = find_mount(mountpoint, os.environ)
    return ask(mount, "status")


def detach_and_wait(mountpoint: Path, *, forced: bool) -> bool:
    """Unmount and wait for the daemon's end; False if a forced daemon is still busy after a short while.

    Raises MountError if the mount is in use, or a daemon that was drained does not end.
    """
    mount, _ = find_mount(mountpoint, os.environ)
    pid = daemon_pid(mount)
    # Opened before the unmount: the number cannot come to mean another process.
    handle = _open_process(pid)
    if forced:
        ask(mount, "abandon")
    try:
        try:
            _detach(mountpoint, lazy=False)
        except MountError:
            if forced:
                ask(mount, "carry-on")  # it stays mounted: its own end is to upload all again
            raise
        if handle is None:
            return True
        waiter = select.poll()
        waiter.register(handle, select.POLLIN)
        seconds = FORCED_GONE_SECONDS if forced else GONE_SECONDS
        if waiter.poll(seconds * 1000):
            return True
    finally:
        if handle is not None:
            os.close(handle)
    if forced:
        return False
    raise MountError(
        f"{mountpoint} is unmounted, but its daemon (pid {pid}) did not end within {seconds:g} s"
    )


# ---- private


def _log_end(log_path: Path, start: int) -> str:
    with open(log_path, encoding="utf-8", errors="replace") as log:
        log.seek(start)
        lines = deque((line.rstrip() for line in log if line.strip()), maxlen=LOG_LINES)
    if not lines:
        return f"its log {log_path} is empty"
    return f"its log {log_path} ends with:\n" + "\n".join(f"  {line}" for line in lines)


def _open_process(pid: int | None) -> int | None:
    if pid is None:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # already gone, or an old kernel: then there is nothing to wait with
        return None


def _detach(mountpoint: Path, *, lazy: bool) -> None:
    if shutil.which("fusermount3"):
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(mountpoint)]
    elif os.geteuid() == 0:
        command = ["umount", *(["-l"] if lazy else []), "--", str(mountpoint)]
    else:
        raise MountError(f"cannot unmount {mountpoint}: fusermount3 is missing; install fuse3")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"{command[0]} ended with status {done.returncode}"
        hint = f"; see who uses it with: fuser -vm {mountpoint}" if "busy" in words else ""
        raise MountError(f"cannot unmount {mountpoint}: {words}{hint}")
