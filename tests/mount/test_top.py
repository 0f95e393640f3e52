"""`fusecache top` in a terminal (a pty) and as a log, on several real mounts at once."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20
COLUMNS, ROWS = 100, 30
pytestmark = pytest.mark.s3server_only


class Terminal:
    """A terminal in which a program runs; `frame` is what the last redraw showed."""

    def __init__(self, *command: str | Path) -> None:
        self.controller, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
        self.inside = inside
        self.attributes = termios.tcgetattr(inside)
        self.process = subprocess.Popen([str(word) for word in command], stdin=inside, stdout=inside)
        self.output = ""

    def read(self) -> str:
        while select.select([self.controller], [], [], 0)[0]:
            self.output += os.read(self.controller, 1 << 16).decode(errors="replace")
        return self.output

    def frame(self) -> list[str]:
        """Return the lines of the last whole redraw."""
        whole = [each for each in self.read().split("\x1b[H")[1:] if "\x1b[J" in each]
        if not whole:
            return []
        return [line.removesuffix("\x1b[K") for line in whole[-1].partition("\x1b[J")[0].split("\r\n")]

    def wait_for(self, condition: Callable[[str], object], what: str) -> list[str]:
        """Return the first frame that meets a condition."""
        found: list[str] = []

        def is_met() -> object:
            found[:] = self.frame()
            return condition("\n".join(found))

        wait_until(is_met, f"{what}; shown: {self.output[-3000:]!r}", seconds=60)
        return found


@contextmanager
def terminal(*command: str | Path) -> Iterator[Terminal]:
    made = Terminal(*command)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        os.close(made.controller)
        os.close(made.inside)


@contextmanager
def read_again_and_again(path: Path) -> Iterator[None]:
    """Read a file from the daemon all the time: what is read is shown for some seconds only."""
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(0.2):
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.read()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_terminal_shows_every_mount_with_its_files_until_q(mount, bucket: Bucket):
    bucket.put("data", bytes(MIB))
    first: Mount = mount()
    second: Mount = mount()
    assert (second.path / "data").read_bytes() == bytes(MIB)
    bucket.control.set(upload_bandwidth=MIB // 32)  # minutes: longer than the command takes to start
    try:
        (first.path / "model").write_bytes(bytes(6 * MIB))
        with (
            read_again_and_again(second.path / "data"),
            terminal(FUSECACHE, "top", first.path, second.path, "-d", "0.2") as shown,
        ):
            frame = shown.wait_for(lambda text: "data" in text and "of 6.0 MiB" in text, "both files")
            assert len(frame) <= ROWS
            assert all(len(line) <= COLUMNS for line in frame)
            text = "\n".join(frame)
            heads = [line.split()[0] for line in frame if line.startswith("/")]
            assert heads == [str(first.path), str(second.path)]
            assert re.search(r"^  model +uploads +\S+ \S+ of 6\.0 MiB$", text, re.MULTILINE)
            assert re.search(r"^  data +is read +\S+ [KM]iB/s$", text, re.MULTILINE)
            shown.wait_for(
                lambda text: not re.search(r"uploads 0 B/s.*uploads 0 B/s", text, re.DOTALL), "its pace"
            )
            os.write(shown.controller, b"q")
            assert shown.process.wait(timeout=30) == 0
            assert shown.read().endswith("\x1b[?25h\x1b[?1049l")
            assert termios.tcgetattr(shown.inside) == shown.attributes
    finally:
        bucket.control.set(upload_bandwidth=None)


def test_a_terminated_top_leaves_the_terminal_as_it_was(mount):
    made: Mount = mount()
    with terminal(FUSECACHE, "top", made.path, "-d", "3600") as shown:
        shown.wait_for(lambda text: str(made.path) in text, "the mount")
        shown.process.send_signal(signal.SIGTERM)
        assert shown.process.wait(timeout=30) == 128 + signal.SIGTERM
        assert shown.read().endswith("\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(shown.inside) == shown.attributes


def test_a_daemon_that_hangs_hides_only_itself(mount):
    well: Mount = mount()
    hung: Mount = mount()
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        done = run(FUSECACHE, "top", well.path, hung.path, "-n", "1", check=False)
        assert time.monotonic() - began < 30
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    assert f"{well.path}  {well.bucket.source}  OK" in done.stdout.splitlines()
    assert re.search(rf"^{hung.path}  no answer for \d+ s$", done.stdout, re.MULTILINE)


def test_a_log_has_all_mounts_and_no_escapes(mount):
    made: Mount = mount()
    done = run(FUSECACHE, "top", "-n", "2", "-d", "0.2", check=False)
    assert done.stdout.count("fusecache top, ") == 2
    assert done.stdout.count(f"{made.path}  {made.bucket.source}  OK\n") == 2
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "top shows a live view, and this is no terminal: for a log, add -n 1"),
        (
            ("/", "-n", "1"),
            "/ is not in a fusecache mount: `findmnt --types fuse.fusecache` lists those of this node",
        ),
    ],
)
def test_what_cannot_be_shown_is_one_line(mount, flags, message):
    mount()
    done = run(FUSECACHE, "top", *flags, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"fusecache: error: {message}\n"
