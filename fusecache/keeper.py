"""Holds a mount's descriptors while the process that serves it dies, and starts the next one.

    python -I -S keeper.py COMMAND [ARGUMENT …]

It imports nothing but a few modules of the standard library, so that it stays small and has no reason to die. The
command tells it over a socket what to hold (`kept_mount.py`). It ends with the command's exit status, unless the
command was killed while a mount was held. Then the command is started again. Signals that ask to stop are passed on.

A command that can stand by is started once more in advance: that process imports all it needs, and waits until it is
needed. So the pause has no start of Python in it. For an upgrade the command names the next program, and ends when that
one's process waits.

If the command dies again and again as soon as it serves, or before, the descriptors are closed, so that system calls
fail and do not wait. The mountpoint stays mounted until it is unmounted by hand. Else programs would write into the
directory below it, and not notice. If it serves for a while and crashes often, the pauses before its starts get longer.
"""

import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

KEEPER_VARIABLE = "FUSE_KEEPER"
KEPT_VARIABLE = "FUSE_KEPT"
STANDBY_VARIABLE = "FUSE_STANDBY"
_HAND_OVER = 75
_CANNOT_RESUME = 78
_NOT_STARTED = 127
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# So many deaths in a row, each within so many seconds of service, are a loop.
_DEATHS = 5
_SECONDS = 1.0
# A command that does not serve by then counts as dead.
_START_SECONDS = 600.0
# prctl(2): no core dump, and only root may look at the descriptors and the environment, which has the keys.
_PR_SET_DUMPABLE = 4
# A successor gets the processor to itself for so long before the next standby is started.
_STANDBY_SECONDS = 1.0
# How long an upgrade waits for the standby of the new program.
_UPGRADE_SECONDS = 60.0
# The wait before each further start.
_PAUSES = (0.0, 0.2, 0.5, 1.0, 2.0)
# So many crashes within the window cost no pause. The next one costs a second, and each further one twice as much.
_CRASHES = 5
_WINDOW_SECONDS = 600.0
_LONGEST_PAUSE_SECONDS = 60.0


class Keeper:
    """One mount's keeper. command: its words; the option --ready-fd is for the first start alone."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._held: list[int] = []
        self._mountpoint = ""
        # What served last, while another program has not served yet.
        self._fallback = ""
        # Whether the process that runs is that other program's.
        self._is_next = False
        self._child = 0
        # A signal that was ignored from the start, as by nohup(1), stays so.
        self._stopping = [each for each in _STOPPING if signal.getsignal(each) != signal.SIG_IGN]
        # The next process and our end of a socket to it.
        self._standby: tuple[int, socket.socket] | None = None
        self._dismissed: list[int] = []
        self._can_stand_by = False
        self._is_stopping = False
        self._deaths = 0
        # When the latest crashes happened.
        self._crashes: list[float] = []
        self._served_since = float("inf")

    def run(self) -> int:
        """Start the command until it ends by itself; return its exit status."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        # If it is ignored, children leave no status to wait for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
            if self._is_stopping:
                return self._give_up("", status)
            if self._fallback and status != _HAND_OVER and self._fall_back(status):
                continue
            if status == _CANNOT_RESUME:
                return self._give_up("the daemon cannot go on with the mount of its predecessor", status)
            if status != _HAND_OVER:
                self._count_death(status)
                if self._deaths >= _DEATHS:
                    return self._give_up(f"the daemon died {_DEATHS} times in a row", status)
                self._pause(status)

    def _count_death(self, status: int) -> None:
        now = time.monotonic()
        if now - self._served_since >= _SECONDS:
            self._deaths = 0
        self._deaths += 1
        self._crashes = [each for each in self._crashes if now - each < _WINDOW_SECONDS]
        if _is_crash(status):
            self._crashes.append(now)

    def _pause(self, status: int) -> None:
        """Say what happens after a death, and wait before the next start. A signal that asks to stop ends the wait."""
        seconds, count = _PAUSES[self._deaths - 1], len(self._crashes)
        if _is_crash(status) and count > _CRASHES:
            seconds = max(seconds, min(2.0 ** (count - _CRASHES - 1), _LONGEST_PAUSE_SECONDS))
            _say(
                f"the daemon died (status {status}) and has crashed {count} times in {_WINDOW_SECONDS / 60:g} minutes; "
                f"it is started again in {seconds:g} s, the mount waits for it. The cause is in the lines above; "
                f"`kill {os.getpid()}` ends the mount {self._mountpoint} instead"
            )
        else:
            _say(f"the daemon died (status {status}); it is started again, the mount waits for it")
        # Not time.sleep: it goes on after a signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._stopping)
        if not self._is_stopping and signal.sigtimedwait(self._stopping, seconds):
            self._is_stopping = True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._stopping)

    def _fall_back(self, status: int) -> bool:
        """Go on with the program that served last; return whether the other one was tried."""
        if self._is_next:
            _say(f"{self._command[0]} cannot serve the mount (status {status}); {self._fallback} goes on")
        self._dismiss_standby()
        self._command[0], self._fallback = self._fallback, ""
        return self._is_next

    def _run_once(self) -> int:
        self._served_since = float("inf")
        self._can_stand_by = False
        self._is_next = bool(self._fallback)
        self._reap()
        try:
            self._child, ours = self._take_standby() or self._start()
        except (OSError, ValueError) as exc:
            _say(f"cannot start {self._command[0]}: {exc}")
            return _NOT_STARTED
        with ours:
            if self._is_stopping:
                os.kill(self._child, signal.SIGTERM)
            self._close_report()
            ours.settimeout(_START_SECONDS if self._held else None)
            while self._hear(ours):
                pass
        _, result = os.waitpid(self._child, 0)
        self._child = 0
        return os.waitstatus_to_exitcode(result)

    def _start(self, *, is_standby: bool = False) -> tuple[int, socket.socket]:
        """Start the command; return its process, and our end of a socket to it. Raises OSError, ValueError."""
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
                child = os.posix_spawnp(
                    self._command[0], self._command, environment, setsigdef=self._stopping
                )
            except BaseException:
                ours.close()
                raise
            finally:
                for fd in held:
                    os.set_inheritable(fd, False)  # noqa: FBT003
        return child, ours

    def _take_standby(self) -> tuple[int, socket.socket] | None:
        """Give the descriptors to the standby, and return it; None if there is none."""
        if self._standby is None or not self._held:
            return None
        try:
            socket.send_fds(self._standby[1], [b"go"], self._held)
        except OSError:  # it died
            self._dismiss_standby()
            return None
        standby, self._standby = self._standby, None
        return standby

    def _await_standby(self, ours: socket.socket) -> None:
        """Start a standby; return when it waits, or the command has died. Without one the next process starts later."""
        with suppress(OSError, ValueError):
            self._standby = self._start(is_standby=True)
            told = self._standby[1]
            select.select([told, ours], [], [], _UPGRADE_SECONDS)
            if told.recv(64, socket.MSG_DONTWAIT) == b"waiting":
                return
        self._dismiss_standby()  # it died, or does not know how to wait

    def _dismiss_standby(self) -> None:
        if self._standby is None:
            return
        (child, ours), self._standby = self._standby, None
        ours.close()
        os.kill(child, signal.SIGKILL)
        self._dismissed.append(child)

    def _reap(self) -> None:
        """Collect dismissed processes that have ended. One may never: it may wait for a disk, or for this mount."""
        self._dismissed = [child for child in self._dismissed if not os.waitpid(child, os.WNOHANG)[0]]

    def _hear(self, ours: socket.socket) -> bool:
        """Carry out one message of the command; return False when it has ended."""
        try:
            message, fds, _, _ = socket.recv_fds(ours, 8192, 8, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # it died with our message unread
            return False
        except TimeoutError:
            ours.settimeout(None)
            if self._served_since < float("inf"):
                with suppress(OSError, ValueError):
                    self._standby = self._start(is_standby=True)
                return True
            _say(f"the daemon did not serve within {_START_SECONDS:g} s")
            os.kill(self._child, signal.SIGKILL)
            return True
        if message == b"end":
            self._let_go()
        elif message.startswith(b"keep "):
            self._let_go()
            self._held, self._mountpoint = fds, os.fsdecode(message[5:])
            ours.settimeout(_STANDBY_SECONDS if self._can_stand_by and self._standby is None else None)
            self._served_since = time.monotonic()
            self._fallback = ""
        elif message == b"standby":
            self._can_stand_by = True
        elif message.startswith(b"program "):
            ours.settimeout(None)
            self._dismiss_standby()
            self._fallback = self._fallback or self._command[0]
            self._command[0] = os.fsdecode(message[8:])
            self._await_standby(ours)
            with suppress(OSError):  # it died
                ours.send(b"ready")
        else:
            for fd in fds:
                os.close(fd)
        return bool(message)

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

    def _give_up(self, reason: str, status: int) -> int:
        self._let_go()
        if reason:
            self._abort()
            _say(
                f"{reason}: every call on the mount {self._mountpoint} fails from now on. `fusecache unmount "
                f"{self._mountpoint}` takes it away; files not uploaded are in its cache directory, for the next mount"
            )
        else:
            self._unmount()
        return status if status > 0 else 1

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
        with suppress(OSError):
            with open("/proc/self/mountinfo", "rb") as file:
                rows = [line.split(b" ") for line in file]
            # proc_pid_mountinfo(5): field 3 is major:minor, field 5 the mountpoint, a blank in it is \\040.
            point = os.fsencode(self._mountpoint)
            for sign in (b"\\", b" ", b"\t", b"\n"):
                point = point.replace(sign, b"\\%03o" % sign[0])
            minors = [row[2].partition(b":")[2].decode() for row in rows if row[4] == point]
            for minor in minors[-1:]:
                with open(f"/sys/fs/fuse/connections/{minor}/abort", "wb") as file:
                    file.write(b"1")

    def _pass_on(self, number: int, _frame: object) -> None:
        self._is_stopping = True
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)


def _is_crash(status: int) -> bool:
    # SIGKILL comes from a person, or from a kernel without memory, which is free now: a pause would not help.
    return status != -signal.SIGKILL


def _say(text: str) -> None:
    if sys.stderr is None:
        return
    # The log may lie on a full disk. Not through sys.stderr: it would keep the line, and fail again at the exit.
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"keeper: {text}\n".encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(Keeper(sys.argv[1:]).run())
