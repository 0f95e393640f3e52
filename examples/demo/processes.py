"""The processes that the demo starts, and a promise that none of them outlives it.

The demo makes itself the reaper of its orphans (prctl(2), PR_SET_CHILD_SUBREAPER): daemons that detach, and
workers whose launcher was killed, stay its descendants, so that the last step finds whatever is left.
Linux only, as is the mount.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class StepError(Exception):
    """A step of the demo did not do what it should."""


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int | None = None) -> set[int]:
    """Return the pids below `root` (this process by default); zombies are not counted."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended while we looked
            # after the name, which may hold blanks and brackets: state, parent (proc(5))
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    queue = [os.getpid() if root is None else root]
    while queue:
        below = [pid for pid in children.get(queue.pop(), []) if pid not in found]
        found.update(below)
        queue.extend(below)
    return found


def kill_all(pids: Iterable[int], sign: signal.Signals = signal.SIGKILL) -> None:
    """Send `sign` to every process of `pids` that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def wait_gone(pids: Iterable[int], timeout_seconds: float) -> set[int]:
    """Wait until none of `pids` runs; return those that still do after `timeout_seconds`."""
    left = set(pids)
    deadline = time.monotonic() + timeout_seconds
    while left and time.monotonic() < deadline:
        for pid in list(left):
            with contextlib.suppress(ChildProcessError):  # not ours to reap, or reaped already
                os.waitpid(pid, os.WNOHANG)
        left &= descendants()
        if left:
            time.sleep(0.05)
    return left


def reap_when_gone(pids: Iterable[int]) -> None:
    """Collect each of `pids` as it ends: a zombie would look alive to whoever waits for it."""

    def reap(pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    for pid in pids:
        threading.Thread(target=reap, args=(pid,), name=f"reap-{pid}", daemon=True).start()


def end_everything() -> set[int]:
    """End every descendant, politely for five seconds; return the pids that even SIGKILL did not end."""
    left = descendants()
    kill_all(left, signal.SIGTERM)
    kill_all(wait_gone(left, 5.0))
    return wait_gone(descendants(), 10.0)


def start(command: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own (Ctrl-C is the demo's), its output appended to `log_path`."""
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            start_new_session=True,
        )


def run(command: Sequence[str], environment: Mapping[str, str], timeout_seconds: float) -> str:
    """Run `command` to its end and return what it printed. Raises StepError with its output if it fails.

    In a session of its own: Ctrl-C is the demo's, and the clean-up runs commands after it.
    """
    line = " ".join(command)
    # a file, not a pipe: a daemon that the command leaves behind would hold the pipe open
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        printed = output.read()
    if status is None:
        raise StepError(f"no end within {timeout_seconds:.0f} s: {line}\n{tail(printed)}")
    if status != 0:
        raise StepError(f"exit status {status}: {line}\n{tail(printed)}")
    return printed.decode(errors="replace")


def tail(output: bytes, lines: int = 60) -> str:
    """Return the last lines of a program's output, or those from its first traceback on: what follows is its echo."""
    text = output.decode(errors="replace").splitlines()
    first = next((number for number, line in enumerate(text) if "Traceback (most" in line), None)
    return "\n".join(text[-lines:] if first is None else text[first : first + lines])
