"""The share of time in which a process holds its interpreter's lock, seen from outside."""

import subprocess
import sys
import time

import pytest

from benchmarks.lock_watch import NoWatch, watched_lock

KNOWN = sys.version_info[:2] == (3, 11)


def held(program: str) -> dict[str, float]:
    """Return the figures for half a second of a Python program that says when it begins."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"print('begun', flush=True)\n{program}"], stdout=subprocess.PIPE
    )
    with child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            with watched_lock(child.pid) as lock:
                time.sleep(0.5)
            return lock.figures("", 1)
        finally:
            child.kill()


@pytest.mark.skipif(not KNOWN, reason="the watch knows Python 3.11 only")
def test_a_program_that_computes_holds_the_lock_and_one_that_sleeps_does_not() -> None:
    computing = held("while True: pass")
    sleeping = held("import time; time.sleep(60)")
    assert computing["lock"] > 0.4
    assert sleeping["lock"] == sleeping["lock_error"] == 0


@pytest.mark.skipif(not KNOWN, reason="the watch knows Python 3.11 only")
def test_a_call_that_releases_the_lock_does_not_count() -> None:
    assert held("import hashlib; data = bytes(1 << 28)\nwhile True: hashlib.sha256(data)")["lock"] < 0.1


def test_a_process_that_is_no_python_has_no_figures() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            with watched_lock(child.pid) as lock:
                assert isinstance(lock, NoWatch)
                assert lock.figures("_per_gib", 1) == {}
        finally:
            child.kill()
