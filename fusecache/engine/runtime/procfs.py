"""Reads /proc: the process of a thread, whether it is being killed, and its environment.

Ends waits for the bucket whose process is being killed.

While a handler changes names, the kernel holds a lock of their directories. Until the handler answers, the process
cannot die, and no process that waits for the lock can. FUSE_INTERRUPT does not help: it would end a handler anywhere.

Invariant: only waits before the first change end early. They are marked with `ends_with_caller`. A write is none of
them: its bytes may be of a program that went on long ago, and one with threads that exits looks like a killed one.
"""

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePath

import trio

from fusecache.engine.runtime.supervisor import unwrap_single_error
from fusecache.model.errors import Interrupted

# Set by the kernel on a task that a fatal signal ends (include/linux/sched.h).
_PF_SIGNALED = 0x400
# Interval at which a waiting process is checked: no event says that it is being killed.
KILL_LOOK_SECONDS = 0.5
_PROCESSES_REMEMBERED = 1024
# TTL of a thread's cached process. The kernel uses up at least 32 768 pids before it reuses one.
_GROUP_TTL_SECONDS = 0.5
_groups: dict[int, tuple[float, int]] = {}


def thread_group(pid: int) -> int:
    """Return the process of a thread, or 0 if it is not visible here (another pid namespace, or ended)."""
    now = time.monotonic()
    seen, group = _groups.get(pid, (float("-inf"), 0))
    if now - seen < _GROUP_TTL_SECONDS:
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
    """One process. started: its start time in the kernel's ticks (proc(5)), as the kernel reuses pids."""

    number: int
    started: int

    def has_ended(self) -> bool:
        """Return whether it is gone; a zombie counts as ended."""
        fields = _fields(self.number)
        return not fields or int(fields[19]) != self.started or fields[0] in (b"Z", b"X")


def process_of(pid: int) -> Process | None:
    """Return the process of a thread, None if it is not visible here."""
    number = thread_group(pid) if pid else 0
    fields = _fields(number) if number else []
    return Process(number, int(fields[19])) if fields else None


def is_being_killed(process: int) -> bool:
    """Return whether a signal is ending a process. A process that is not visible counts as alive.

    The flag must be set on all its threads: at a normal exit(2) the kernel ends the other threads by a signal, too.
    """
    if not _is_signaled(process):  # the main thread
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
    """Return the fields of /proc/PID/stat behind the command's name (proc(5)): state is the first, flags the 7th."""
    stat = _read(f"/proc/{pid}/stat")
    # The name, in parentheses, may hold anything.
    return stat[stat.rindex(b")") + 2 :].split() if stat else []


def _read(path: str) -> bytes:
    """Return the first 4 KiB of a file in /proc, which is all of a small one; empty if it is not visible."""
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
    """Checks whether processes are being killed, at most once per KILL_LOOK_SECONDS for all threads of a process."""

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
    """Return whether a fatal signal is pending for a process, or has reached it. Not visible counts as alive.

    A thread that waits in the kernel for the daemon's answer dies only after it: until then SIGKILL stays pending
    (proc(5), SigPnd, ShdPnd). The kernel adds SIGKILL to each thread for other fatal signals, too.
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


def available_memory(root: Path = Path("/")) -> int:
    """Return how many bytes programs, or the page cache, may take, by this machine and by control groups (version 2).

    root: of the file system; tests pass their own.
    """
    available = 0
    with suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        (free,) = (line for line in lines if line.startswith("MemAvailable:"))
        available = 1024 * int(free.split()[1])
        (own,) = (
            line for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
        )
        inner = PurePath(own[3:].lstrip("/"))
        for group in (inner, *inner.parents):
            available = min(available, _group_memory(root / "sys/fs/cgroup" / group, available))
    return available


def _group_memory(group: Path, otherwise: int) -> int:
    """Return what a control group may still take.

    Pages of files count as free, as in MemAvailable: the group gives them back. A group that has read files for a while
    is full of them, and calls most of them active.
    """
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        pages = (line.split() for line in lines if line.startswith(("active_file ", "inactive_file ")))
        return limit - used + sum(int(nbytes) for _, nbytes in pages)
    except (OSError, ValueError):  # "max": no limit
        return otherwise


def environment(process: int) -> dict[str, str]:
    """Return the environment with which a process was started, empty if it is not visible."""
    try:
        raw = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


# Killed processes that wait for one lock get it one after the other, and each dies only after its first check.
_FIRST_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Caller:
    """Whose request a task works for. task: tasks that it starts inherit this, and may serve others, too."""

    task: trio.lowlevel.Task
    thread: int


_caller: ContextVar[_Caller | None] = ContextVar("caller", default=None)
_detector = KillDetector()


@contextmanager
def called_by(thread: int) -> Iterator[None]:
    """Say for which thread the body works, so that its waits in `ends_with_caller` end with that thread's process."""
    token = _caller.set(_Caller(trio.lowlevel.current_task(), thread))
    try:
        yield
    finally:
        _caller.reset(token)


@asynccontextmanager
async def ends_with_caller() -> AsyncIterator[None]:
    """End the body with Interrupted once the process of `called_by` is being killed.

    The body changes nothing, or the caller of this undoes that.
    """
    caller = _caller.get()
    if caller is None or not caller.thread or caller.task is not trio.lowlevel.current_task():
        yield
        return
    with unwrap_single_error():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_raise_when_killed, caller.thread, name=f"caller {caller.thread}")
            yield
            nursery.cancel_scope.cancel()


async def _raise_when_killed(thread: int) -> None:
    await trio.sleep(_FIRST_LOOK_SECONDS)
    process = thread_group(thread)
    while process:
        if _detector.is_dying(process, trio.current_time()):
            raise Interrupted(f"process {process} is being killed")
        await trio.sleep(KILL_LOOK_SECONDS)
