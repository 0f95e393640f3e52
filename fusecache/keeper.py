"""Holds a mount's descriptors while the process that serves it dies, and starts the next one.

    python -I -S keeper.py COMMAND [ARGUMENT …]

It imports nothing but a few modules of the standard library, so that it stays small and has no reason to die. The
command tells it over a socket what to hold (`kept_mount.py`). It ends with the command's exit status, unless the
command was killed while a mount was held. Then the command is started again. Signals that ask to stop are passed on.

The command leaves a copy of itself to the keeper, the standby, which has imported all it needs and waits until it is
needed. So the pause has no start of Python in it. A second after it serves, the keeper starts one if there is none. For
an upgrade the command names the next program, and ends when that one's process waits.

If the command cannot start, or dies as soon as it serves, the pauses before its starts get longer, up to ten seconds.
The mount waits, as the cause may go away: a full disk, an error in a configuration file. The keeper tells on a socket
why nothing serves.

The keeper gives up when the mount is gone, or when the command says that no start can ever succeed. Then it closes the
descriptors, so that system calls fail and do not wait. The mountpoint stays mounted until it is unmounted by hand. Else
programs would write into the directory below it, and not notice.
"""

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

# For the command: its end of a socket to the keeper, the descriptors that were kept, and whether it is a standby.
KEEPER_VARIABLE = "FUSE_KEEPER"
KEPT_VARIABLE = "FUSE_KEPT"
STANDBY_VARIABLE = "FUSE_STANDBY"
# Exit statuses of the command: start me again, as I was asked to; and never start me again.
STATUS_HAND_OVER = 75
STATUS_CANNOT_RESUME = 78
_NOT_STARTED = 127
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# What ends after less service has failed.
_SERVICE_SECONDS = 1.0
# A command that does not serve by then counts as dead; one of another program earlier, as the old one can go on.
_START_SECONDS = 600.0
_NEXT_START_SECONDS = 120.0
# prctl(2): no core dump, and only root may look at the descriptors and the environment, which has the keys.
_PR_SET_DUMPABLE = 4
# prctl(2): a process below this one whose parent ends comes to this one, as a copy of a daemon does.
_PR_SET_CHILD_SUBREAPER = 36
# A successor gets the processor to itself for so long before a standby is started, if it has left none.
_STANDBY_SECONDS = 1.0
# The longest message of a command.
_MESSAGE_BYTES = 8192
# How long an upgrade waits for the standby of the new program: the command waits 30 s for an answer.
_UPGRADE_SECONDS = 25.0
# What the first failure in a row costs, the second one, and so on.
_PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0)
# Where questions are answered; the minor device number of the mount follows. An abstract address (unix(7)) needs no
# directory, and goes away with the keeper.
ADDRESS = "\0fusecache-keeper-"


class Keeper:
    """One mount's keeper. command: its words; the option --ready-fd is for the first start alone."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._held: list[int] = []
        self._mountpoint = ""
        # Of the process that runs. The first word of the command is the program that served last.
        self._program = ""
        self._child = 0
        # A signal that was ignored from the start, as by nohup(1), stays so.
        self._stopping = [each for each in _STOPPING if signal.getsignal(each) != signal.SIG_IGN]
        # The next process: its program, its number and our end of a socket to it.
        self._standby: tuple[str, int, socket.socket] | None = None
        # Whether what the daemon before has left was collected.
        self._is_tidy = True
        self._is_stopping = False
        # How many starts in a row have failed.
        self._failures = 0
        self._served_since = float("inf")
        # Why the command ended, in its own words.
        self._why = ""
        # Why no start succeeds, "" if nothing speaks against the next one; and the socket that tells it.
        self._trouble = ""
        self._listener: socket.socket | None = None
        self._wakeup = -1

    def run(self) -> int:
        """Start the command until it ends by itself; return its exit status."""
        import ctypes  # others need but the names above

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # If it is ignored, children leave no status to wait for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._wakeup, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(written)
        for number in self._stopping:
            signal.signal(number, self._pass_on)
        try:
            return self._run()
        finally:
            self._dismiss_standby()

    def _run(self) -> int:
        while True:
            status = self._run_once()
            if not self._held:
                return status
            if status != STATUS_HAND_OVER and not self._is_stopping:
                if self._program != self._command[0]:
                    _say(
                        f"{self._program} cannot serve the mount (status {status}"
                        f"{self._why and ': '}{self._why}); {self._command[0]} goes on"
                    )
                    self._dismiss_standby()
                elif status == STATUS_CANNOT_RESUME:
                    return self._give_up(status)
                elif self._pause(status):
                    _say(f"the mount {self._mountpoint} is gone")
                    return 0
            if self._is_stopping:
                self._let_go()
                self._unmount()
                return status if status > 0 else 1

    def _pause(self, status: int) -> bool:
        """Say what happens after a death, and wait before the next start; return whether the mount is gone.

        A signal that asks to stop ends the wait.
        """
        has_served = time.monotonic() - self._served_since >= _SERVICE_SECONDS
        self._failures = 0 if has_served else self._failures + 1
        seconds = 0.0
        again = "it is started again, the mount waits for it"
        if self._failures > 1:
            # A copy would fail as well, also when what is installed has been repaired.
            self._dismiss_standby()
            seconds = _PAUSES[min(self._failures, len(_PAUSES)) - 1]
            cause = self._why or f"it ended with status {status}; its log has the cause"
            self._trouble = f"the daemon cannot start: {cause}"
            again = (
                f"it is started again in {seconds:g} s, the mount waits for it. It has failed {self._failures} times "
                f"in a row. The cause is in the lines above; `kill {os.getpid()}` ends the mount {self._mountpoint} "
                "instead"
            )
        _say(f"the daemon died (status {status}); {again}")
        self._listen()
        # An error of the mount is always reported: it was unmounted or aborted.
        return self._held[0] in self._wait(seconds, {self._wakeup: select.POLLIN, self._held[0]: 0})

    def _wait(self, seconds: float | None, events: dict[int, int]) -> set[int]:
        """Return the descriptors that have one of their events; none after `seconds`. Answer questions in between."""
        until = float("inf") if seconds is None else time.monotonic() + seconds
        while True:
            poll = select.poll()
            for fd, mask in events.items():
                poll.register(fd, mask)
            if self._listener is not None:
                poll.register(self._listener, select.POLLIN)
            left = until - time.monotonic()
            found = {fd for fd, _ in poll.poll(None if left == float("inf") else max(left, 0.0) * 1000)}
            ready = found & events.keys()
            if ready or not found:
                return ready
            self._answer()

    @property
    def _start_seconds(self) -> float:
        return _START_SECONDS if self._program == self._command[0] else _NEXT_START_SECONDS

    def _listen(self) -> None:
        """Answer questions from now on. Also while the command serves: so no other process can take the address.

        The keeper of an unmounted mount may still have it, as the kernel uses the number again at once.
        """
        minor = _minor_of(self._mountpoint)
        if self._listener is None and minor:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                listener.bind(ADDRESS + minor)
                listener.listen()
            except OSError:
                listener.close()
            else:
                self._listener = listener

    def _answer(self) -> None:
        """Tell root or this user why no start succeeds."""
        assert self._listener is not None
        with suppress(OSError), self._listener.accept()[0] as asker:
            credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # process, user, group
            user = int.from_bytes(credentials[4:8], sys.byteorder)
            if self._trouble and user in {0, os.geteuid()}:
                text = (
                    f"{self._trouble}. Programs wait, and no closed file is lost. Remove the cause: the keeper "
                    f"(process {os.getpid()}) tries again every {_PAUSES[-1]:g} s. To end the mount instead: fusecache "
                    f"unmount {self._mountpoint}"
                )
                asker.send(text.encode(errors="replace"))

    def _run_once(self) -> int:
        self._served_since = float("inf")
        self._why = ""
        self._reap()
        try:
            self._program, self._child, ours = self._take_standby() or self._start(self._command[0])
        except (OSError, ValueError) as exc:
            self._program = self._command[0]
            self._why = f"cannot start {self._program}: {exc}"
            _say(self._why)
            return _NOT_STARTED
        with ours:
            if self._is_stopping:
                os.kill(self._child, signal.SIGTERM)
            self._close_report()
            while self._hear(ours):
                pass
        _, result = os.waitpid(self._child, 0)
        self._child = 0
        return os.waitstatus_to_exitcode(result)

    def _start(self, program: str, *, is_standby: bool = False) -> tuple[str, int, socket.socket]:
        """Start the command with a program; return that, the process, and our end of a socket to it.

        Raises OSError, ValueError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, KEEPER_VARIABLE: str(theirs.fileno())}
        held = self._held
        if is_standby:
            # It gets them when it is needed.
            environment[STANDBY_VARIABLE], held = "1", []
        elif held:
            environment[KEPT_VARIABLE] = ",".join(map(str, held))
        with theirs:
            try:
                for fd in (theirs.fileno(), *held):
                    os.set_inheritable(fd, True)  # noqa: FBT003  # takes no keyword
                command = [program, *self._command[1:]]
                child = os.posix_spawnp(program, command, environment, setsigdef=self._stopping)
            except BaseException:
                ours.close()
                raise
            finally:
                for fd in held:
                    os.set_inheritable(fd, False)  # noqa: FBT003
        return program, child, ours

    def _take_standby(self) -> tuple[str, int, socket.socket] | None:
        """Give the descriptors to the standby, and return it; None if there is none."""
        if self._standby is None or not self._held:
            return None
        try:
            socket.send_fds(self._standby[2], [b"go"], self._held)
        except OSError:  # it died
            self._dismiss_standby()
            return None
        standby, self._standby = self._standby, None
        return standby

    def _dismiss_standby(self) -> None:
        if self._standby is None:
            return
        (_, child, ours), self._standby = self._standby, None
        ours.close()
        os.kill(child, signal.SIGKILL)

    def _reap(self) -> None:
        """Collect what has ended: dismissed processes, and helpers of a dead daemon, which come to process 1.

        One that was dismissed may never end: it may wait for a disk, or for this mount.
        """
        others = {self._child, self._standby[1] if self._standby else 0}
        with suppress(ChildProcessError):
            while (
                ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) and ended.si_pid not in others:
                os.waitpid(ended.si_pid, 0)

    def _hear(self, ours: socket.socket) -> bool:
        """Carry out one message of the command; return False when it has ended."""
        if not self._wait(self._patience(), {ours.fileno(): select.POLLIN}):
            self._act()
            return True
        try:
            message, fds, _, _ = socket.recv_fds(ours, _MESSAGE_BYTES, 8, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # it died with our message unread
            return False
        if message == b"end":
            self._let_go()
        elif message.startswith(b"keep "):
            self._let_go()
            self._held, self._mountpoint = fds, os.fsdecode(message[5:])
            self._served_since, self._is_tidy = time.monotonic(), False
            self._command[0], self._trouble = self._program, ""
            self._listen()
        elif message.startswith(b"standby ") and fds:
            self._dismiss_standby()
            self._standby = self._program, int(message[8:]), socket.socket(fileno=fds[0])
        elif message.startswith(b"why "):
            self._why = message[4:].decode(errors="replace")
        elif message.startswith(b"program "):
            why = self._prepare(os.fsdecode(message[8:]), ours)
            with suppress(OSError):  # it died
                ours.send(b"no " + why.encode(errors="replace") if why else b"ready")
        else:
            for fd in fds:
                os.close(fd)
        return bool(message)

    def _act(self) -> None:
        """Do what there is to do as the command was silent for so long."""
        if self._served_since == float("inf"):
            self._why = f"it did not serve within {self._start_seconds:g} s"
            os.kill(self._child, signal.SIGKILL)
            return
        self._reap()
        self._is_tidy = True
        if self._standby is None:
            with suppress(OSError, ValueError):
                self._standby = self._start(self._program, is_standby=True)

    def _patience(self) -> float | None:
        """Return how long the command may be silent before there is something to do."""
        if self._served_since < float("inf"):
            return _STANDBY_SECONDS if self._standby is None or not self._is_tidy else None
        return self._start_seconds if self._held else None

    def _prepare(self, program: str, ours: socket.socket) -> str:
        """Start another program's standby for an upgrade; return "" once it waits, else why it does not."""
        self._dismiss_standby()
        try:
            self._standby = self._start(program, is_standby=True)
            told = self._standby[2]
            # Also until the command has died.
            if not select.select([told, ours], [], [], _UPGRADE_SECONDS)[0]:
                why = f"it was not ready within {_UPGRADE_SECONDS:g} s"
            elif (said := told.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)) == b"waiting":
                return ""
            else:
                why = said.removeprefix(b"why ").decode(errors="replace")
        except (OSError, ValueError) as exc:
            why = str(exc)
        why = why or "it ended at its start; the log has the cause"
        _say(f"{program} is not ready to serve the mount: {why}; {self._program} goes on")
        self._dismiss_standby()
        return why

    def _close_report(self) -> None:
        """The pipe on which the first process reports that it is ready is its own."""
        if "--ready-fd" in self._command:
            at = self._command.index("--ready-fd")
            with suppress(OSError):
                os.close(int(self._command[at + 1]))
            del self._command[at : at + 2]

    def _let_go(self) -> None:
        for fd in self._held:
            os.close(fd)
        self._held = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _give_up(self, status: int) -> int:
        self._let_go()
        self._abort()
        _say(
            f"{self._why or 'no daemon can go on'}: every call on the mount {self._mountpoint} fails from now on. "
            f"`fusecache unmount {self._mountpoint}` takes it away; files not uploaded are in its cache "
            "directory, for the next mount"
        )
        return status

    def _unmount(self) -> None:
        # By force where that is permitted: a thread of a dead daemon may wait for its own mount.
        for words in (["umount", "-f", "-l"], ["fusermount3", "-u", "-z"]):
            command = [*words, "--", self._mountpoint]
            with suppress(OSError):
                if not subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
                    break

    def _abort(self) -> None:
        """Have the kernel answer all requests with an error, where that is permitted.

        Else a thread of a dead daemon that waits for its own mount keeps a descriptor of it, and so the mount alive.
        """
        minor = _minor_of(self._mountpoint)
        with suppress(OSError), open(f"/sys/fs/fuse/connections/{minor}/abort", "wb") as file:
            file.write(b"1")

    def _pass_on(self, number: int, _frame: object) -> None:
        self._is_stopping = True
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)


def _minor_of(mountpoint: str) -> str:
    """Return the minor device number of a mount, which names it for the kernel; "" if it is not in the mount table."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            rows = [line.split(b" ") for line in file]
    except OSError:
        return ""
    # proc_pid_mountinfo(5): field 3 is major:minor, field 5 the mountpoint, a blank in it is \\040.
    point = os.fsencode(mountpoint)
    for sign in (b"\\", b" ", b"\t", b"\n"):
        point = point.replace(sign, b"\\%03o" % sign[0])
    minors = [row[2].partition(b":")[2].decode() for row in rows if row[4] == point]
    return minors[-1] if minors else ""


def _say(text: str) -> None:
    if sys.stderr is None:
        return
    # The log may lie on a full disk. Not through sys.stderr: it would keep the line, and fail again at the exit.
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"keeper: {text}\n".encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(Keeper(sys.argv[1:]).run())
