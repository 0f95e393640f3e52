"""Starts a daemon in the background, and unmounts one: processes, mount table, fusermount3.

A background daemon reports to its parent over a pipe, with one line: `ready`, optionally followed by a warning, or
`error: <text>`.

How the program starts itself again.
"""

import enum
import errno
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusecache import keeper
from fusecache.model.errors import MountError
from fusecache.mount.control_client import (
    SUCCESSOR_SECONDS,
    Mount,
    ServerProgress,
    ask,
    find_mount,
    request_stream,
)
from fusecache.mount.mount_table import (
    TABLE,
    DaemonAway,
    check_answers,
    mounted_types,
    our_entries,
    our_mountpoints,
    root_of,
    users_text,
)
from fusecache.mount.progress import missing_texts, pending_text
from fusecache.mount.runtime_folder import peer_of


def own_program() -> list[str]:
    """Return the words that start this program, whatever the working directory holds: a mount may cover that.

    If it is not installed (`python -m fusecache` in a checkout), PYTHONPATH names its place to all children.
    """
    root, python = str(Path(__file__).parents[2]), [sys.executable, "-P"]
    if sys.path[0] == root and not _imports_us(python):
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return [*python, "-m", "fusecache"]


def keeper_program() -> list[str]:
    """Return the words that start a keeper; those of its command follow. Without site-packages, so that it is small."""
    return [sys.executable, "-I", "-S", keeper.__file__]


def _imports_us(python: list[str]) -> bool:
    """Return whether a new interpreter finds the package by itself."""
    return (
        subprocess.run([*python, "-c", "import fusecache"], check=False, capture_output=True).returncode == 0
    )


READY = "ready"
LOG_NAME = "fusecache.log"  # in the cache directory
MAX_REPORT_CHARACTERS = 1000  # even at 4 bytes each, one write fits into the pipe
LOG_TAIL_LINES = 15  # enough for the end of a traceback
# After the unmount nothing is left to upload. The daemon only closes files and writes the clean-shutdown mark.
EXIT_SECONDS = 60.0
# With --force, uploads may be in flight: long enough for an idle daemon, short for a user at a terminal.
FORCED_EXIT_SECONDS = 10.0
_POLL_SECONDS = 0.05
# The kernel ends a daemon's session with the last copy of its mount. A mount namespace that began after the mount, as
# of unshare or a container, can hold a copy: then a signal ends the daemon.
_COPIED_SECONDS = 5.0


class MountState(enum.Enum):
    """What kind of mountpoint a path is."""

    MISSING = "missing"
    NONE = "not a mount"
    LIVE = "a fusecache mount with its daemon"
    DEAD = "a FUSE mount whose daemon has exited"
    FOREIGN = "a mount of another file system, not of fusecache"


# ---- starting


def start_daemon(cache_dir: Path, words: Sequence[str], *, has_keeper: bool) -> "StartingDaemon":
    """Start `fusecache mount` in the background.

    words: the arguments of `mount`. The log goes into the cache directory. Raises MountError.
    """

    def command(ready_fd: int) -> list[str]:
        hidden = ["--foreground", "--ready-fd", str(ready_fd)]
        # It would become the keeper, after a start of its own.
        return [*(keeper_program() if has_keeper else []), *own_program(), "mount", *hidden, *words]

    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_path = cache_dir / LOG_NAME
        log_path.touch(mode=0o600)
    except OSError as exc:
        raise MountError(
            f"cannot use the cache directory {cache_dir}: {exc.strerror}; choose another with --cache-dir"
        ) from exc
    try:
        return StartingDaemon(command, log_path)
    except OSError as exc:
        raise MountError(f"cannot start the daemon: {exc}") from exc


class StartingDaemon:
    """A daemon that starts in its own session. Output goes to the log. `wait` must be called once."""

    def __init__(self, command: Callable[[int], list[str]], log_path: Path) -> None:
        """Start it. command: returns the command line, given the file descriptor for the child's report."""
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        reader, writer = os.pipe()
        self._words = open(reader, "rb")  # noqa: SIM115  # `wait` closes it
        try:
            os.set_inheritable(writer, True)  # noqa: FBT003  # takes no keyword
            command_line = command(writer)
            self._pid = os.posix_spawn(
                command_line[0],
                command_line,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
            )
        except BaseException:
            self._words.close()
            raise
        finally:
            os.close(writer)

    def wait(self) -> str:
        """Return when it reports that it is ready, with its message for the user. Ctrl-C ends it.

        Raises MountError with the child's error, or with the end of its log if the child exited without a report.
        """
        with self._words:
            try:
                line = self._words.readline().decode(errors="replace").strip()
            except KeyboardInterrupt:
                self.end()
                raise
        if line.split(" ")[0] == READY:
            return line.removeprefix(READY).strip()
        # The child reported an error or closed the pipe: it is exiting, and only this process can reap it.
        pid, self._pid = self._pid, 0
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if line.startswith("error:"):
            raise MountError(line.removeprefix("error:").strip())
        lines = _log_end(self._log_path, self._log_start)
        found = "ends with:" if lines else "is empty"
        error = MountError(
            f"the daemon exited with status {status} before it was ready; its log {self._log_path} {found}"
        )
        for line in lines:
            error.add_note(line)
        raise error

    def end(self) -> None:
        """End it, and return when it has ended."""
        pid, self._pid = self._pid, 0
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended
            if pid:
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)


class Parent:
    """The child's end of the pipe to its parent in `StartingDaemon`. descriptor: None if there is no parent."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            # fusermount3 must not hold the pipe open.
            os.set_inheritable(descriptor, False)  # noqa: FBT003  # takes no keyword

    def report(self, message: str) -> None:
        """Write the one line that the parent waits for. Calls after the first do nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        # The daemon continues even if its parent was interrupted.
        with os.fdopen(descriptor, "wb", buffering=0) as pipe, suppress(BrokenPipeError):
            pipe.write((" ".join(message.split())[:MAX_REPORT_CHARACTERS] + "\n").encode())


# ---- ending


def mount_state(mountpoint: Path, *, mount_table: Path = TABLE) -> MountState:
    """Return what is mounted at a path. A mount is dead if statfs fails with ENOTCONN or ECONNABORTED.

    Raises MountError for a mount that does not answer, as `check_answers`.
    """
    check_answers(mountpoint)
    try:
        os.statvfs(mountpoint)  # not stat: the kernel caches its answer for a while, even for a dead mount
    except OSError as exc:
        if exc.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            return MountState.DEAD
        if exc.errno == errno.ENOENT:
            return MountState.MISSING
        raise MountError(f"{mountpoint}: {exc.strerror}") from exc
    point = os.path.realpath(mountpoint)
    kind = mounted_types(mount_table.read_bytes()).get(point)
    if kind is None:
        return MountState.NONE
    if not kind.startswith("fuse"):
        return MountState.FOREIGN
    try:
        mount, inner = find_mount(mountpoint, os.environ)
    except MountError as exc:
        entry = next((each for each in reversed(our_entries(mount_table)) if each.point == point), None)
        if entry is not None:
            check_owner(mountpoint, entry.owner, cause=exc)
        return MountState.FOREIGN
    return MountState.LIVE if inner == "" and mount.root.samefile(mountpoint) else MountState.FOREIGN


def check_owner(mountpoint: Path, owner: int | None, *, cause: Exception | None = None) -> None:
    """Raise MountError unless this user may unmount a mount. owner: its user; None if unknown."""
    if owner is None or os.geteuid() in (0, owner):
        return
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = str(owner)
    raise MountError(
        f"{mountpoint} is a fusecache mount of user {name}, not yours: only {f'{name} and ' * bool(owner)}root may "
        f"unmount it, with `sudo fusecache unmount {mountpoint}`"
    ) from cause


def resolve_in_mount(path: str | os.PathLike[str], *, follows: bool = True) -> tuple[Mount, str]:
    """Return the mount of a path and the path inside it, like `find_mount`, but never wait for a hung daemon.

    Raises MountError.
    """
    check_answers(path)
    return find_mount(path, os.environ, follows=follows)


def mount_of_this_node(directory: Path) -> Path:
    """Return the default path of a command: the working directory if it is in a mount, else the only mount.

    Raises MountError if there is no mount, or more than one.
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
        raise MountError(
            "no fusecache mount on this node; mount with `fusecache mount s3://BUCKET[/PREFIX] MOUNTPOINT`"
        )
    raise MountError("there are several mounts; name one: " + ", ".join(points))


def check_mountpoint(mountpoint: Path, *, allow_other: bool) -> None:
    """Raise MountError, with the remedy, unless this user can mount on the directory."""
    match mount_state(mountpoint):
        case MountState.MISSING:
            raise MountError(f"{mountpoint} does not exist; create it with `mkdir -p {mountpoint}`")
        case MountState.DEAD:
            raise MountError(
                f"{mountpoint}: the daemon of an earlier mount has exited without unmounting; clean up with "
                f"`fusecache unmount {mountpoint}` and mount again. Files not uploaded are in its cache directory"
            )
        case MountState.LIVE:
            raise MountError(
                f"{mountpoint}: fusecache is already mounted here; unmount with `fusecache unmount {mountpoint}`"
            )
        case MountState.FOREIGN:
            raise MountError(f"{mountpoint}: another file system is mounted here; choose another directory")
        case MountState.NONE:
            pass
    if not mountpoint.is_dir():
        raise MountError(f"{mountpoint} is not a directory")
    if any(mountpoint.iterdir()):
        raise MountError(
            f"{mountpoint} is not empty: a mount would hide its contents; choose an empty directory"
        )
    check_fuse(allow_other=allow_other)
    if os.geteuid() != 0 and not os.access(mountpoint, os.W_OK):
        raise MountError(
            f"{mountpoint}: no write permission, which a mount needs; choose a directory that you own"
        )


def check_fuse(*, allow_other: bool) -> None:
    """Raise MountError, with the remedy, unless this user can use FUSE."""
    if not os.path.exists("/dev/fuse"):
        raise MountError(
            "/dev/fuse is missing: run `modprobe fuse`, or start the container with --device /dev/fuse --cap-add "
            "SYS_ADMIN. Where neither is allowed, use a folder: `fusecache pull`, `push` and `watch`"
        )
    if os.geteuid() == 0:
        return
    # The checks of fusermount3 for users other than root.
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise MountError("/dev/fuse: permission denied; get read and write permission, or mount as root")
    if allow_other and "user_allow_other" not in _config_lines(Path("/etc/fuse.conf")):
        raise MountError(
            "--allow-other: /etc/fuse.conf lacks the line user_allow_other; root must add it, or mount as root"
        )


def _config_lines(path: Path) -> set[str]:
    """Return the stripped lines of a file; none if it cannot be read."""
    try:
        return {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    except OSError:
        return set()


def clear_unserved(mountpoint: Path) -> bool:
    """Take away a mount that no daemon serves, and end its keeper. Its cache directory stays untouched.

    Return False if a daemon serves the mount. Raises MountError.
    """
    try:
        if mount_state(mountpoint) is not MountState.DEAD:
            return False
        clear_dead(mountpoint)
    except DaemonAway as away:
        _end_keeper(away, mountpoint)
    return True


def _end_keeper(away: DaemonAway, mountpoint: Path) -> None:
    if away.keeper <= 0:
        raise MountError(f"{mountpoint}: its keeper runs in another container: unmount it there. {away}")
    handle = _open_process(away.keeper)
    if handle is None:  # it has just ended
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        waiter = select.poll()
        waiter.register(handle, select.POLLIN)
        if not waiter.poll(EXIT_SECONDS * 1000):
            raise MountError(
                f"{mountpoint}: its keeper (pid {away.keeper}) did not exit within {EXIT_SECONDS:g} s: a process of "
                "it hangs; end both with `kill -9`, and repeat the unmount"
            )
    except PermissionError as exc:
        raise MountError(f"{mountpoint}: only root and the user who mounted may unmount it: {away}") from exc
    finally:
        os.close(handle)


def clear_dead(mountpoint: Path) -> None:
    """Detach a mount whose daemon has exited. Its cache directory stays untouched."""
    _detach(mountpoint, lazy=True)


def drain(
    mount: Mount, *, timeout_seconds: float | None, on_progress: Callable[[ServerProgress], None]
) -> None:
    """Wait until every pending change is in the bucket. Raises MountError on a timeout or an error."""
    answer = ask(mount, "drain", timeout_seconds=timeout_seconds, on_progress=on_progress)
    if answer.result not in ("ok", "durable"):
        error = MountError(
            f"{mount.root} stays mounted: {pending_text(answer.progress)} not in the bucket yet: "
            f"{answer.message or answer.result}; "
            "wait longer, or use --force to leave the uploads to the next mount"
        )
        for line in missing_texts(answer):
            error.add_note(line)
        raise error


def replace_daemon(mountpoint: Path, version: str) -> None:
    """Have this program take over a mount; return once it answers. version: its own. Raises MountError."""
    mount, _ = find_mount(mountpoint, os.environ)
    before = 0

    def on_connect(connection: socket.socket) -> None:
        nonlocal before
        pid, _, _ = peer_of(connection)
        if before and pid != before:  # the request would be sent a second time
            raise _OtherUpgrade
        before = pid

    try:
        request = {"command": "upgrade", "program": sys.executable}
        answer = request_stream(mount, request, on_connect=on_connect)
        if answer.get("result") != "ok":
            raise MountError(str(answer.get("message")))
    except _OtherUpgrade:
        status = _status_of_next(mount, before)
        if status is None or status["version"] != version:
            return replace_daemon(mountpoint, version)
        return None
    status = _status_of_next(mount, before)
    if status is None:
        raise MountError(
            f"{mountpoint}: no daemon answers {SUCCESSOR_SECONDS:g} s after the old one ended; see fusecache.log in "
            "the cache directory"
        )
    if status["version"] != version:
        raise MountError(
            f"{mountpoint}: version {version} could not take over, version {status['version']} goes on; see "
            "fusecache.log in the cache directory"
        )


class _OtherUpgrade(Exception):  # no error
    """While a daemon prepared an upgrade, another one took over: of an upgrade at the same time, say."""


def _ask_with_pid(mount: Mount, request: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the answer to a request, and the process that gave it; 0 if it is in another pid namespace."""
    pid = 0

    def on_connect(connection: socket.socket) -> None:
        nonlocal pid
        pid, _, _ = peer_of(connection)

    return request_stream(mount, request, on_connect=on_connect), pid


def _status_of_next(mount: Mount, before: int) -> dict[str, Any] | None:
    """Wait for a daemon with another pid; return its status, None if there is none in time."""
    end = time.monotonic() + SUCCESSOR_SECONDS
    while (left := end - time.monotonic()) > 0:
        with suppress(MountError):
            row, pid = _ask_with_pid(mount, {"command": "status", "timeout_seconds": left})
            if pid != before:
                status: dict[str, Any] = row["status"]
                return status
        time.sleep(_POLL_SECONDS)
    return None


def detach_and_wait(mount: Mount, *, forced: bool) -> bool:
    """Unmount and wait until the daemon exits. Return False if a forced daemon still runs after a short wait.

    Raises MountError if the mount is in use, or if a drained daemon does not exit.
    """
    # Opened before the unmount, so that the pid cannot be reused by another process.
    pid, handle = _open_last_process(mount)
    if forced:
        ask(mount, "abandon")
    try:
        try:
            _detach(mount.root, lazy=False)
        except MountError:
            if forced:
                ask(mount, "carry-on")  # it stays mounted, so its exit must upload pending files again
            raise
        if handle is None:
            return True
        waiter = select.poll()
        waiter.register(handle, select.POLLIN)
        if waiter.poll(_COPIED_SECONDS * 1000):
            return True
        with suppress(OSError):  # it has just exited, or is another user's
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        seconds = FORCED_EXIT_SECONDS if forced else EXIT_SECONDS
        if waiter.poll(seconds * 1000):
            return True
    finally:
        if handle is not None:
            os.close(handle)
    if forced:
        return False
    raise MountError(
        f"{mount.root} is unmounted, but its daemon (pid {pid}) did not exit within {seconds:g} s"
    )


def _open_last_process(mount: Mount) -> tuple[int, int | None]:
    """Return the process that ends last with a mount, and a descriptor of it; None if it cannot be waited for.

    That is the keeper, which starts another daemon if this one dies, also after the unmount. Else it is the daemon.
    """
    while True:
        row, pid = _ask_with_pid(mount, {"command": "status"})
        if pid <= 0:
            return pid, None
        status = row["status"]
        # A daemon of a version before says so by itself: its options are what was asked for.
        if not status.get("outlives_daemon", status.get("options", {}).get("keep_mounted")):
            return pid, _open_process(pid)
        with suppress(FileNotFoundError, ProcessLookupError):  # the daemon has just died: ask the next one
            # proc_pid_stat(5): the name, in brackets, may hold blanks; behind it are the state and the parent.
            keeper = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            return keeper, _open_process(keeper)


# ---- private


def _log_end(log_path: Path, start: int) -> list[str]:
    """Return the last lines of a log, from a position on."""
    with open(log_path, encoding="utf-8", errors="replace") as log:
        log.seek(start)
        return list(deque((line.rstrip() for line in log if line.strip()), maxlen=LOG_TAIL_LINES))


def _open_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # already exited, or an old kernel without pidfd: no way to wait
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
        words = " ".join(done.stderr.split()) or f"{command[0]} exited with status {done.returncode}"
        if "busy" in words:
            users = users_text(os.path.realpath(mountpoint))
            # Other users' processes are seen by root alone.
            who = (
                f"it is busy: in use by {users}"
                if users
                else f"{words}; `sudo fuser -vm {mountpoint}` names the processes"
            )
            raise MountError(
                f"cannot unmount {mountpoint}: {who}. Close the files, leave the directory, or end the processes; then "
                "repeat it"
            )
        raise MountError(f"cannot unmount {mountpoint}: {words}")
