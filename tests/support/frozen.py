"""A process that stands still for a while, as one that hangs does."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SECONDS = 20.0


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process; the block begins when its last thread stands still, after it the process goes on.

    The signal alone is not enough: on a busy machine other threads run on until the one that takes it has its turn.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + _SECONDS
        while not all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
            assert time.monotonic() < deadline, f"process {pid} does not stop"
            time.sleep(0.001)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _is_stopped(thread: Path) -> bool:
    try:
        stat = (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended meanwhile
    # The name, in brackets, may hold anything.
    return stat.rpartition(")")[2].split()[0] == "T"
