"""What /proc tells of the processes that write: whether one that closes a file is being killed."""

import os
from pathlib import Path

# Set by the kernel on a task that a fatal signal ends (include/linux/sched.h).
_PF_SIGNALED = 0x400


def thread_group(pid: int) -> int:
    """Return the process of a thread, or 0 if it cannot be seen."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def was_killed(process: int) -> bool:
    """Return whether a process is being ended by a signal. Unseen counts as alive.

    All its threads must say so: at a normal exit(2) the kernel ends the other threads by a signal, too.
    """
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
    except OSError:
        return False
    return bool(threads) and all(_is_signaled(thread) for thread in threads)


def _is_signaled(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The command's name, in parentheses, may hold anything; flags are the seventh field behind it (proc(5)).
    fields = stat[stat.rindex(b")") + 2 :].split()
    return bool(int(fields[6]) & _PF_SIGNALED)
