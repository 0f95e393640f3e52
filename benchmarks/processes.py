"""The processes under measurement: started so that none outlives the run, with their memory and CPU time.

Figures are of a process and all its descendants.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_SECONDS = 0.1
STOP_SECONDS = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")


class BenchmarkError(Exception):
    """A competitor did not do what it was asked; its row says so, and the run goes on."""


def start(
    command: Sequence[str], environment: Mapping[str, str], log_path: Path
) -> "subprocess.Popen[bytes]":
    """Start a process that ends with this one and does not hear its Ctrl-C; its words go to `log_path`."""
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            # util-linux: the signal that the kernel sends when the parent is gone, also by SIGKILL.
            ["setpriv", "--pdeathsig", "TERM", "--", *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process: first asked, then made to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_child(
    module: str, request: Mapping[str, Any], *, environment: Mapping[str, str] | None = None, seconds: float
) -> dict[str, Any]:
    """Run `python -m module` with one JSON argument; return the JSON object that it prints.

    Raises BenchmarkError if it fails, or takes longer than `seconds`.
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
    output = run_command(command, environment=environment, seconds=seconds)
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError as exc:
        raise BenchmarkError(f"{module} printed {output[-200:]!r}") from exc
    return answer


def run_command(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, seconds: float
) -> str:
    """Return what a command prints. Raises BenchmarkError if it fails, or takes longer than `seconds`."""
    child = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *command],
        cwd=ROOT,
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, words = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TooSlow(seconds) from None
    finally:
        if child.poll() is None:
            child.kill()
            # One that waits in the kernel for a mount that hangs cannot be collected before the unmount.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
    if child.returncode:
        last = words.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        raise BenchmarkError(f"{Path(command[0]).name}: {last[0][-300:]}")
    return output


class TooSlow(BenchmarkError):
    """A competitor took longer than it was given."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"> {seconds:g} s")
        self.seconds = seconds


def tree(pid: int) -> list[int]:
    """Return a process and its descendants; those that ended are left out."""
    found, waiting = [], [pid]
    while waiting:
        current = waiting.pop()
        found.append(current)
        waiting += children(current)
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process, of one thread after the other, the oldest first; none if it has ended."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, of its descendants, and of those already collected."""
    ticks = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            # proc(5): the name is in parentheses and may hold spaces; utime is field 14, cstime field 17.
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(value) for value in fields[11:15])
    return ticks / _TICKS


class DescendantsWatch:
    """Counts the CPU time of a process's descendants; a thread looks each 100 ms, so that none is lost when it ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[int, float] = {}
        self._lock = threading.Lock()
        self.seconds()
        threading.Thread(target=self._run, name="descendants", daemon=True).start()

    def seconds(self) -> float:
        """Return the user and system time of all descendants seen so far, in ticks of 10 ms each."""
        with self._lock:
            for pid in tree(self._pid)[1:]:
                with contextlib.suppress(OSError):
                    # Not cutime and cstime: a child that ended was seen by itself.
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    self._seen[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
            return sum(self._seen.values())

    def _run(self) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            self.seconds()


def _words(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def memory_bytes(pid: int) -> int:
    """Return RssAnon + RssShmem of a process and its descendants, without a copy that waits to follow it.

    That one shares its memory, and other versions have one that is no descendant.
    """
    total = 0
    for each in tree(pid):
        if each != pid and _words(each) == _words(pid):
            continue
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total += int(line.split()[1]) * 1024
    return total


class MemoryWatch:
    """Samples a process's memory each 100 ms in a thread; `take` returns the highest since the last call."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._highest = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def take(self) -> int:
        """Return the highest bytes since the last call."""
        highest = max(self._highest, memory_bytes(self._pid))
        self._highest = 0
        return highest

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._highest = max(self._highest, memory_bytes(self._pid))


def drop_pages(*folders: Path) -> None:
    """Write out what is dirty and drop the kernel's pages: of everything as root, else of files in `folders`."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        for folder in folders:
            drop_files(folder)


def drop_files(folder: Path) -> None:
    """Drop the kernel's pages of the files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            _drop_file(path)


def _drop_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def is_mounted(path: Path) -> bool:
    """Return whether something is mounted there; never asks the mount itself."""
    return f" {path} " in Path("/proc/self/mountinfo").read_text()


def unmount(path: Path) -> None:
    """Take a mount away, whatever state it is in."""
    for flags in ([], ["-z"]):
        if not is_mounted(path):
            return
        subprocess.run(["fusermount3", "-u", *flags, str(path)], capture_output=True, check=False)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder in which nothing is mounted any more; never reaches through a mount."""
    if any(f" {path}" in line for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        return
    shutil.rmtree(path, ignore_errors=True)
