"""The fixture `nothing_left_behind`, used on tests that leave things and on tests that do not."""

import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT

# Each leaves one thing, or none; what is left ends with the process, but for the mount.
TESTS = r"""
import os, socket, subprocess, sys, threading, time
import pytest

KEPT = []

def test_descriptor(tmp_path):
    KEPT.append(open(tmp_path / "left open", "w"))

def test_descriptor_of_a_removed_file(tmp_path):
    KEPT.append(open(tmp_path / "removed", "w"))
    os.unlink(tmp_path / "removed")

def test_socket():
    KEPT.append(socket.create_server(("127.0.0.1", 0)))

def test_thread():
    threading.Thread(target=time.sleep, args=(60,), name="sleeper", daemon=True).start()

def test_child():
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()", "a child"], stdin=subprocess.PIPE))

def test_zombie():
    if not (pid := os.fork()):
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

def test_mount(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path]).returncode:
        pytest.skip("may not mount")

@pytest.fixture
def late():
    yield
    KEPT.append(os.pipe())

def test_fixture(late):
    pass

async def test_async(tmp_path):
    KEPT.append(open(tmp_path / "left by a task", "w"))

def test_nothing(tmp_path):
    with open(tmp_path / "closed", "w"):
        thread = threading.Thread(target=time.sleep, args=(0,))
        thread.start()
        thread.join()
    subprocess.run([sys.executable, "-c", ""])

class Cycle:
    def __init__(self):
        self.me, self.pipe = self, os.pipe()
    def __del__(self):
        for number in self.pipe:
            os.close(number)

def test_cycle():
    Cycle()

def test_cycle_of_a_thread():
    threading.Thread(target=lambda kept: time.sleep(0.3), args=(Cycle(),)).start()

class Pause:
    def __init__(self):
        self.me, self.thread = self, threading.Thread(target=time.sleep, args=(0.3,))
    def __del__(self):
        time.sleep(5)
        self.thread.start()

def test_pause():
    threading.Timer(0.1, print).start()
    Pause()

def test_timer():
    threading.Timer(0.3, print).start()

def test_failure(tmp_path):
    file = open(tmp_path / "held by the traceback alone", "w")
    assert not file

@pytest.fixture(scope="session")
def opened():
    yield os.pipe()

def test_session_fixture(opened):
    pass
"""
LEFT = {
    "descriptor": r"descriptor \d+ of /\S+/left open",
    "descriptor_of_a_removed_file": r"descriptor \d+ of /\S+/removed \(deleted\)",
    "socket": r"descriptor \d+ of socket:\[\d+\] at \('127\.0\.0\.1', \d+\)",
    "thread": r"thread sleeper",
    "child": r"child \d+ \S+ -c input\(\) a child; descriptor \d+ of pipe:\[\d+\]",
    "zombie": r"child \d+ \(ended, and nobody waited for it\)",
    "mount": r"mount /\S+/test_mount0",
    "fixture": r"descriptor \d+ of pipe:\[\d+\]; descriptor \d+ of pipe:\[\d+\]",
    "async": r"descriptor \d+ of /\S+/left by a task",
}
NOTHING = ["nothing", "cycle", "cycle_of_a_thread", "pause", "timer", "session_fixture"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of TESTS."""
    folder = tmp_path_factory.mktemp("left")
    (folder / "test_all.py").write_text(TESTS)
    temporary = folder / "temporary"
    words = ["-v", "--color=no", "--rootdir", folder, "-c", os.devnull, "-o", "trio_mode=true"]
    words += ["-p", "tests.conftest", "-p", "no:cacheprovider", "--basetemp", temporary]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, folder / "test_all.py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=250,
        )
    finally:
        subprocess.run(["umount", "--quiet", temporary / "test_mount0"], check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", LEFT)
def test_what_a_test_leaves_fails_it_and_is_named(told: str, name: str) -> None:
    if name == "mount" and "test_mount SKIPPED" in told:
        pytest.skip("this user may not mount")
    assert f"::test_{name} ERROR" in told, told
    part = told.partition(f" ERROR at teardown of test_{name} ")[2]
    assert re.match(rf"_*\nleft behind: {LEFT[name]}\n", part), told


def test_a_failed_test_is_not_accused_of_what_its_traceback_holds(told: str) -> None:
    assert "::test_failure FAILED" in told, told
    assert "::test_failure ERROR" not in told, told


@pytest.mark.parametrize("name", NOTHING)
def test_a_test_that_leaves_nothing_passes(told: str, name: str) -> None:
    assert f"::test_{name} PASSED" in told, told
    assert f"::test_{name} ERROR" not in told, told
