"""Whether a signal is about to end a process that waits for a reply.

The kernel sends FUSE_INTERRUPT for every signal, harmless ones as well. Only a process that is about to end may be told
EINTR: a page fault of a mapping would become SIGBUS, and few programs expect EINTR from stat(2). So the pending signals
are looked at (proc(5): SigPnd and others).
"""

import os
import signal
import time


def _mask(*numbers: int) -> int:
    return sum(1 << (number - 1) for number in numbers)


# Signals that by default do not end a process.
_HARMLESS = _mask(
    signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGCONT,
    signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
)  # fmt: skip
_BY_HAND = _mask(signal.SIGINT)
_FIELDS = ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
# The processes of threads, and when they are forgotten: the kernel uses numbers again.
_processes: dict[int, int] = {}
_PROCESSES_SECONDS = 1.0
_PROCESSES_MAX = 32 * 1024
_forgotten_at = 0.0


def is_ending(thread: int, *, by_hand: bool = False) -> bool:
    """Return whether a pending signal ends a thread's process. One that is not visible here counts as alive.

    by_hand: also if a SIGINT is pending that the program handles, as of Ctrl-C in Python.
    """
    return shows_end(_status(thread), by_hand=by_hand)


def process_of(thread: int) -> int:
    """Return the process of a thread, 0 if it is not visible here."""
    global _forgotten_at  # a cache
    now = time.monotonic()
    if now >= _forgotten_at or len(_processes) >= _PROCESSES_MAX:
        _processes.clear()
        _forgotten_at = now + _PROCESSES_SECONDS
    found = _processes.get(thread)
    if found is None:
        _, _, rest = _status(thread).partition("\nTgid:")
        found = _processes[thread] = int(rest.partition("\n")[0] or 0)
    return found


def _status(thread: int) -> str:
    """Return the text of /proc/PID/status (proc(5)), "" if it is not visible here."""
    try:
        fd = os.open(f"/proc/{thread}/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 8192).decode("ascii", "replace")
    except OSError:  # it ended just now
        return ""
    finally:
        os.close(fd)


def shows_end(status: str, *, by_hand: bool) -> bool:
    """Return the same from the text of a thread's /proc/PID/status."""
    masks = dict.fromkeys(_FIELDS, 0)
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in masks:
            masks[name] = int(value, 16)
    pending = (masks["SigPnd"] | masks["ShdPnd"]) & ~masks["SigBlk"]
    fatal = pending & ~masks["SigIgn"] & ~masks["SigCgt"] & ~_HARMLESS
    return bool(fatal or (by_hand and pending & _BY_HAND))
