"""Each test must leave the process as it was: no more descriptors, threads, child processes or mounts than before.

Pytest opens session and module fixtures before the first look, so what they hold does not count. ALLOWED lists what
libraries open once per process and keep.
"""

import gc
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests.support import starter

# What one look found: what identifies a thing, and how the message names it.
Found = dict[tuple[str, object], str]

# Patterns of names, as the message shows them, and why the thing may stay.
ALLOWED = {
    r"thread Trio thread \d+": "trio's idle worker threads: a cache, each ends by itself after ten seconds",
    r"thread tqdm_monitor": "tqdm's own: one thread a process, begun by the first bar",
    r"descriptor .*/matplotlib/mpl-data/fonts/.*": "matplotlib keeps each font open that it has drawn with",
    r"descriptor .*/libuuid/clock\.txt": "libuuid keeps its clock open: one a process (azure-identity calls uuid1)",
    r"child .* tests\.support\.starter \d+": "the tests' own: one child a test process",
    r"child .* from multiprocessing\.resource_tracker import main.*": "multiprocessing's: one child a process",
}
_ALLOWED = re.compile("|".join(f"(?:{pattern})" for pattern in ALLOWED))
# What ends by itself takes milliseconds, and longer on a machine under load. Looks and not seconds: while the whole
# machine stands still, nothing ends.
_LOOKS = 30
_PAUSE_SECONDS = 0.1


@pytest.fixture
def kept_by_the_session() -> None:
    """Override it in a folder whose session fixtures open things late: what it opens does not count."""


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    kept_by_the_session: None,
) -> Iterator[None]:
    """Fail a test that leaves descriptors, threads, child processes, or mounts below the temporary folder."""
    folder = tmp_path_factory.getbasetemp()
    before = _look(folder)
    yield
    if not _left(before, folder):
        return
    # Pytest keeps these a little longer: the values of fixtures, and with the frames of exceptions their variables.
    (request.node.funcargs or {}).clear()  # None: the run was interrupted
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)  # of a test that failed
    for phase in ("setup", "call"):
        caplog.get_records(phase).clear()
    left = _left_after_a_while(before, folder)
    if left:
        pytest.fail("left behind: " + "; ".join(sorted(left)), pytrace=False)


def _left_after_a_while(before: Found, folder: Path) -> list[str]:
    """Return what stays: timers, queues' threads and connections that just closed end by themselves.

    Datasets, torch's DataLoaders and botocore's connections have no close, and end with their last reference: garbage
    is collected at each look, as a thread that is about to end still holds its own.
    """
    left: list[str] = []
    for _ in range(_LOOKS):
        gc.collect()
        left = _left(before, folder)
        if not left:
            break
        time.sleep(_PAUSE_SECONDS)
    return left


def _left(before: Found, folder: Path) -> list[str]:
    """Return the names of what was not there before and may not stay."""
    return [
        f"{name}{_ends(name)}"
        for key, name in _look(folder).items()
        if key not in before and not _ALLOWED.fullmatch(name)
    ]


def _ends(name: str) -> str:
    """Return where a socket leads; "" for everything else."""
    found = re.match(r"descriptor (\d+) of socket:", name)
    if not found:
        return ""
    with suppress(OSError), socket.socket(fileno=os.dup(int(found[1]))) as end:
        with suppress(OSError):
            return f" from {end.getsockname()} to {end.getpeername()}"
        return f" at {end.getsockname()}"
    return ""


def _look(folder: Path) -> Found:
    return {**_descriptors(), **_threads(), **_children(), **_mounts(folder)}


def _descriptors() -> Found:
    found: Found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{number}")
            found[target, number] = f"descriptor {number} of {target}"
    # The pipe to multiprocessing's resource tracker, and the socket to the daemon starter: a process has one of each.
    kept = {str(resource_tracker._resource_tracker._fd), str(starter.descriptor())}
    return {key: name for key, name in found.items() if key[1] not in kept}


def _threads() -> Found:
    # The object, not its number: the kernel uses a number again.
    return {("thread", thread): f"thread {thread.name}" for thread in threading.enumerate()}


def _children() -> Found:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}  # as nearly always
    found: Found = {}
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that just ended
            for number in Path(f"/proc/self/task/{task}/children").read_text().split():
                found["child", number] = f"child {number} {_command(number)}"
    return found


def _command(number: str) -> str:
    words = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return words.strip() or "(ended, and nobody waited for it)"


def _mounts(folder: Path) -> Found:
    found: Found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ", 5)[4]
        if point.startswith(f"{folder}/"):
            found["mount", point] = f"mount {point}"
    return found
