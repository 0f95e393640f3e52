"""The share of time in which a process holds its interpreter's lock, seen from outside."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lock_watch import NoWatch, watched_lock
from tests.support.mounts import wait_until

KNOWN = sys.version_info[:2] == (3, 11)


COMPUTING = """
def compute():
    while True: pass
threading.Thread(target=compute, daemon=True).start()
"""
HASHING = """
import hashlib
data, begun = bytes(1 << 28), threading.Event()
def compute():
    while True:
        hashlib.sha256(data)
        begun.set()
threading.Thread(target=compute, daemon=True).start()
begun.wait()
"""


def sleeps(pid: int) -> bool:
    """Return whether the main thread of a process sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def held(program: str) -> dict[str, float]:
    """Return the figures for half a second of a Python program whose main thread sleeps after it.

    On a busy machine the way from its line to its sleep may take long, and has the lock.
    """
    words = f"import threading, time\n{program}\nprint('begun', flush=True)\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE)
    with child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            wait_until(lambda: sleeps(child.pid), "its sleep")
            with watched_lock(child.pid) as lock:
                time.sleep(0.5)
            return lock.figures("", 1)
        finally:
            child.kill()


@pytest.mark.skipif(not KNOWN, reason="the watch knows Python 3.11 only")
def test_a_program_that_computes_holds_the_lock_and_one_that_sleeps_does_not() -> None:
    computing = held(COMPUTING)
    sleeping = held("")
    assert computing["lock"] > 0.4
    assert sleeping["lock"] == sleeping["lock_error"] == 0


@pytest.mark.skipif(not KNOWN, reason="the watch knows Python 3.11 only")
def test_a_call_that_releases_the_lock_does_not_count() -> None:
    assert held(HASHING)["lock"] < 0.1


def test_a_process_that_is_no_python_has_no_figures() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            with watched_lock(child.pid) as lock:
                assert isinstance(lock, NoWatch)
                assert lock.figures("_per_gib", 1) == {}
        finally:
            child.kill()
