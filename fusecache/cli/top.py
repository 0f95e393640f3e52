"""`fusecache top`: what the mounts of this node do, shown again and again.

Each mount is asked in a thread of its own, so that a daemon that hangs hides only itself.

For each mount: its verdict, rates, jobs and busiest files.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from fusecache.cli.say import print_line
from fusecache.cli.status import rate_lines, status_of
from fusecache.model.errors import ConfigError, FusecacheError, MountError
from fusecache.model.format_text import count_text, printable, seconds_text, size_text
from fusecache.model.status_text import only_here_lines, rates_between, shown_jobs
from fusecache.model.verdict import verdict_line
from fusecache.mount.bucket_folders import mounts_in
from fusecache.mount.control_client import not_in_a_mount
from fusecache.mount.mount_table import our_entries, root_of

# Jobs and files shown for each mount.
_ROWS = 10


def mount_lines(
    point: str, status: Mapping[str, Any] | None, before: Mapping[str, Any] | None, error: str
) -> Iterator[str]:
    """Yield the lines of one mount.

    status: its newest status; None if it has none yet. before: an earlier one, from which the rates are counted; None
    shows those of the last minute. error: why there is no newer status; "" if there is one.
    """
    if status is None:
        yield f"{point}  {error or 'waiting for the daemon'}"
        return
    yield f"{point}  {status['source']}  {error or verdict_line(status)}"
    for line in (*rate_lines(rates_between(status, before)), _cache_text(status)):
        yield f"  {line}"
    jobs = shown_jobs(status["hints"])
    yield from _table(("JOB", "STEP", "PER STEP", "AHEAD", "CACHED"), [_job_row(job) for job in jobs[:_ROWS]])
    yield from _table(("FILE", "DOES", "PACE"), list(_file_rows(status))[:_ROWS])


def screen_text(lines: Sequence[str], columns: int, rows: int) -> str:
    """Return lines as what a terminal of this size is sent to show them instead of what it shows."""
    shown = [printable(line)[:columns] for line in lines]
    if len(shown) > rows:
        shown = [*shown[: rows - 1], f"… {count_text(len(shown) - rows + 1, 'more line')}"[:columns]]
    # Home; each line clears what is right of it, the last one what is below. No newline at the end: it would scroll.
    return "\x1b[H" + "\x1b[K\r\n".join(shown) + "\x1b[K\x1b[J"


def _cache_text(status: Mapping[str, Any]) -> str:
    cache = status["cache"]
    words = [f"cache {size_text(cache['used_bytes'])} of {size_text(cache['limit_bytes'])}"]
    words.append(f"only here: {next(only_here_lines(status)).partition(':')[0]}")
    if reads := status["reads_waiting"]["reads"]:
        longest = seconds_text(status["reads_waiting"]["seconds"])
        words.append(f"{count_text(reads, 'read')} waiting for the bucket, the longest for {longest}")
    return "; ".join(words)


def _job_row(job: Mapping[str, Any]) -> tuple[str, ...]:
    read = job["hit_bytes"] + job["missed_bytes"]
    return (
        job["job"],
        "ended" if job["ended_seconds"] else str(job["step"]),
        seconds_text(job["seconds_a_step"]) if job["seconds_a_step"] else "-",
        f"{count_text(job['horizon_steps'], 'step')}, {size_text(job['horizon_bytes'])}",
        f"{job['hit_bytes'] / read:.0%}" if read else "-",
    )


def _file_rows(status: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield files that programs write, uploads, failed changes, and files that programs read, the fastest first."""
    for each in status.get("writing", ()):
        yield each["path"], "is written", f"{size_text(each['bytes'])} so far"
    for each in status["uploading"]:
        yield each["path"], "uploads", f"{size_text(each['sent'])} of {size_text(each['bytes'])}"
    for each in status["waiting"]:
        yield each["path"], "waits", each["cause"]
    for each in status["busy_files"]:
        yield each["path"], "is read", f"{size_text(each['read_bytes_per_second'])}/s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows under their heads, as columns; nothing without rows."""
    if rows:
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        for row in (head, *rows):
            yield (
                "  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
            )


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
                if "reads_waiting" not in status:
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
    paths = [str(each) for path in arguments.paths for each in mounts_in(path) or [path]]
    if arguments.times is not None:
        watches = MountWatches(paths, arguments.interval)
        return _print(watches, arguments.times, arguments.interval)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("top shows a live view, and this is no terminal: for a log, add -n 1")
    watches = MountWatches(paths, arguments.interval)
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
