"""`fusecache top`: what the mounts of this node do, shown again and again. Not here: the text (`top_text`).

Each mount is asked in a thread of its own, so that a daemon that hangs hides only itself.
"""

import argparse
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from fusecache.cli.say import print_line
from fusecache.cli.views.status import status_of
from fusecache.cli.views.top_text import mount_lines, screen_text
from fusecache.model.errors import ConfigError, FusecacheError, MountError
from fusecache.mount.control_client import not_in_a_mount
from fusecache.mount.mount_table import our_entries, root_of

# A daemon that has not answered for this long is said to hang.
_LATE_SECONDS = 5.0
_CLEAR, _OTHER_SCREEN, _FIRST_SCREEN = "\x1b[2J", "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class MountWatch:
    """Asks one mount for its status at an interval, in a thread that ends with the process or after `stop`."""

    def __init__(self, point: str, interval_seconds: float) -> None:
        self._point = point
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()
        # The newest status and the one before; replaced as a whole by the thread.
        self._seen: tuple[dict[str, Any] | None, dict[str, Any] | None] = None, None
        self._error = ""
        self._heard = time.monotonic()
        self.answered = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End the thread after its current question."""
        self._stopped.set()

    @property
    def is_well(self) -> bool:
        """Whether the daemon answers."""
        return self._seen[0] is not None and not self._problem()

    def lines(self) -> list[str]:
        """Return what to show."""
        newest, before = self._seen
        return list(mount_lines(self._point, newest, before, self._problem()))

    def _problem(self) -> str:
        silent = time.monotonic() - self._heard - self._interval_seconds
        return self._error or (f"no answer for {silent:.0f} s" if silent > _LATE_SECONDS else "")

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                status = status_of(self._point)
                if "rates" not in status:
                    raise MountError(
                        f"its daemon is fusecache {status['version']}, too old for top: mount it again"
                    )
                self._seen, self._error = (status, self._seen[0]), ""
            except (FusecacheError, OSError) as exc:
                self._error = str(exc)
            self._heard = time.monotonic()
            self.answered.set()
            self._stopped.wait(self._interval_seconds)


class MountWatches:
    """The watches of the mounts that exist now."""

    def __init__(self, named: Sequence[str], interval_seconds: float) -> None:
        """named: paths in the mounts to watch; empty for all mounts of this node. Raises MountError."""
        self._named = [_root(path) for path in named]
        self._interval_seconds = interval_seconds
        self._watches: dict[str, MountWatch] = {}
        if not self.update():
            raise MountError("no fusecache mount on this node")

    def update(self) -> list[MountWatch]:
        """Return the watches, after a look at which mounts there are."""
        points = self._named or sorted({entry.point for entry in our_entries() if not entry.root})
        for gone in self._watches.keys() - set(points):
            self._watches.pop(gone).stop()
        for point in points:
            if point not in self._watches:
                self._watches[point] = MountWatch(point, self._interval_seconds)
        return [self._watches[point] for point in points]

    def lines(self) -> list[str]:
        """Return the text of now: a line with the time, then each mount."""
        watches = self.update()
        lines = [f"fusecache top, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"]
        for watch in watches:
            lines += ["", *watch.lines()]
        return lines


def top(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Show the mounts until `q`, or print them `-n` times; return the exit status."""
    if arguments.times is not None:
        watches = MountWatches(arguments.paths, arguments.interval)
        return _print(watches, arguments.times, arguments.interval)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("top shows a live view, and this is no terminal: for a log, add -n 1")
    watches = MountWatches(arguments.paths, arguments.interval)
    with _terminal() as keyboard:
        while True:
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
            sys.stdout.write(screen_text([*watches.lines(), "", "q quits"], columns, rows))
            sys.stdout.flush()
            if select.select([keyboard], [], [], arguments.interval)[0] and os.read(keyboard, 64) in (
                b"q", b"Q", b"\x03", b"",
            ):  # fmt: skip
                return 0


def _root(path: str) -> str:
    root = root_of(path)
    if root is None:
        raise not_in_a_mount(path)
    return root


def _print(watches: MountWatches, times: int, interval_seconds: float) -> int:
    for index in range(times):
        if index:
            time.sleep(interval_seconds)
            print_line("")
        deadline = time.monotonic() + _LATE_SECONDS + interval_seconds
        for watch in watches.update():
            watch.answered.wait(max(0.0, deadline - time.monotonic()))
        for line in watches.lines():
            print_line(line)
        sys.stdout.flush()
    return int(not all(watch.is_well for watch in watches.update()))


@contextmanager
def _terminal() -> Iterator[int]:
    """Show another screen, and read keys one by one; at the end, and after a signal, all is as before."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    old = signal.signal(signal.SIGTERM, _exit)
    try:
        tty.setraw(keyboard, termios.TCSANOW)
        sys.stdout.write(_OTHER_SCREEN + _CLEAR)
        yield keyboard
    finally:
        sys.stdout.write(_FIRST_SCREEN)
        sys.stdout.flush()
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
        signal.signal(signal.SIGTERM, old)


def _exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
