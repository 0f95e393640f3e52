"""What /proc tells of the processes that write: whether one is being killed, and what its environment says."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

# Set by the kernel on a task that a fatal signal ends (include/linux/sched.h).
_PF_SIGNALED = 0x400
# So often who waits is looked at: nobody tells that a process is being killed.
KILL_LOOK_SECONDS = 0.5
_PROCESSES_REMEMBERED = 1024
# The process of a thread is believed for so long: numbers go round, 32 768 of them at least, before one comes again.
_GROUP_SECONDS = 0.5
_groups: dict[int, tuple[float, int]] = {}


def thread_group(pid: int) -> int:
    """Return the process of a thread, or 0 if it cannot be seen."""
    now = time.monotonic()
    seen, group = _groups.get(pid, (float("-inf"), 0))
    if now - seen < _GROUP_SECONDS:
        return group
    status = _read(f"/proc/{pid}/status")
    at = status.find(b"\nTgid:")
    if at < 0:
        return 0
    group = int(status[at + 6 : status.index(b"\n", at + 1)])
    if len(_groups) >= _PROCESSES_REMEMBERED:
        _groups.clear()
    _groups[pid] = now, group
    return group


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was seen once. started: as the kernel counts (proc(5)), as numbers of processes come again."""

    number: int
    started: int

    def has_ended(self) -> bool:
        """Return whether it is there no more; what waits to be reaped has ended."""
        fields = _fields(self.number)
        return not fields or int(fields[19]) != self.started or fields[0] in (b"Z", b"X")


def process_of(pid: int) -> Process | None:
    """Return the process of a thread, None if it cannot be seen from here."""
    number = thread_group(pid) if pid else 0
    fields = _fields(number) if number else []
    return Process(number, int(fields[19])) if fields else None


def is_being_killed(process: int) -> bool:
    """Return whether a process is being ended by a signal. Unseen counts as alive.

    All its threads must say so: at a normal exit(2) the kernel ends the other threads by a signal, too.
    """
    if not _is_signaled(process):  # the first of them
        return False
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
    except OSError:
        return False
    return bool(threads) and all(_is_signaled(thread) for thread in threads)


def _is_signaled(pid: int) -> bool:
    fields = _fields(pid)
    return bool(fields) and bool(int(fields[6]) & _PF_SIGNALED)


def _fields(pid: int) -> list[bytes]:
    """Return what /proc/PID/stat says behind the command's name (proc(5)): its state comes first, flags seventh."""
    stat = _read(f"/proc/{pid}/stat")
    # The name, in parentheses, may hold anything.
    return stat[stat.rindex(b")") + 2 :].split() if stat else []


def _read(path: str) -> bytes:
    """Return the start of a file in /proc, which is all of the small ones; empty if it cannot be seen."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    except OSError:  # ESRCH: it ended just now
        return b""
    finally:
        os.close(file)


class KillDetector:
    """Looks whether processes are being killed; of one process not more often than its many waiting threads need."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, bool]] = {}

    def is_dying(self, process: int, now: float) -> bool:
        """Return `kill_pending` of a process as it was at most KILL_LOOK_SECONDS ago. now: of any one clock."""
        looked, dying = self._seen.get(process, (float("-inf"), False))
        if now - looked < KILL_LOOK_SECONDS:
            return dying
        if len(self._seen) >= _PROCESSES_REMEMBERED:
            self._seen.clear()
        dying = kill_pending(process)
        self._seen[process] = now, dying
        return dying


def kill_pending(process: int) -> bool:
    """Return whether a fatal signal waits for a process, or has reached it. Unseen counts as alive.

    Who waits in the kernel for our answer dies only with it: SIGKILL stays pending meanwhile (proc(5), SigPnd, ShdPnd).
    The kernel adds it to each thread for other fatal signals too.
    """
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
    except OSError:
        return False
    return any(_has_kill_pending(thread) or _is_signaled(thread) for thread in threads)


def _has_kill_pending(thread: int) -> bool:
    try:
        lines = Path(f"/proc/{thread}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (signal.SIGKILL - 1) & 1 for mask in masks)


def environment(process: int) -> dict[str, str]:
    """Return the environment with which a process was started, empty if it cannot be seen."""
    try:
        raw = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
