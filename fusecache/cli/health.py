"""`fusecache health`: one line and an exit status for probes, within seconds even if the daemon hangs."""

import argparse
import os
import select
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from fusecache.cli.say import print_line
from fusecache.cli.status import status_of
from fusecache.model.errors import FusecacheError
from fusecache.model.verdict import ACTION, DEGRADED, OK, verdict_line
from fusecache.mount.bucket_folders import mounts_meant
from fusecache.mount.mount_table import root_of

# With the start of the interpreter, less than the 5 s that a probe may take.
_ANSWER_SECONDS = 4.0
_EXIT = {OK: 0, DEGRADED: 1, ACTION: 2}
_LINE_BYTES = 1 << 16


def health(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the verdict on a mount, or on each in a folder; return the worst exit status.

    0 OK, 1 DEGRADED, 2 ACTION or no answer.
    """
    try:
        places = mounts_meant(arguments.mount)[0]
    except (FusecacheError, OSError) as exc:
        print_line(f"{ACTION}: {exc}")
        return _EXIT[ACTION]
    end = time.monotonic() + _ANSWER_SECONDS
    worst = 0
    for place, child, reader in [(place, *_begin(place)) for place in places]:
        line = _answer(place, child, reader, end)
        print_line(line if len(places) == 1 else f"{place}: {line}")
        worst = max(worst, _EXIT.get(line.partition(":")[0].partition(",")[0], _EXIT[ACTION]))
    return worst


def _begin(place: Path | str) -> tuple[int, int]:
    """Start a child process that asks: a call into a mount that hangs can neither be cancelled nor waited for.

    Return it, and the end of a pipe that its line comes from.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_child(place, writer)
    os.close(writer)
    return child, reader


def _answer(place: Path | str, child: int, reader: int, end: float) -> str:
    """Return the line of a child process. end: when it is too late."""
    with open(reader, "rb", buffering=0) as answer:
        if select.select([answer], [], [], max(0.0, end - time.monotonic()))[0]:
            line = answer.read(_LINE_BYTES).decode(errors="replace")
            os.waitpid(child, 0)
            return line or f"{ACTION}: the status of the mount could not be read"
    os.kill(child, signal.SIGKILL)
    return (
        f"{ACTION}: {place}: no answer from the daemon within {_ANSWER_SECONDS:g} s: it hangs or is stopped; see "
        f"`fusecache status {shlex.quote(str(place))}`"
    )


def _run_child(place: Path | str, writer: int) -> None:
    """Write the line to a pipe, and exit. Holds nothing else of the caller's open: it may hang for long."""
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        try:
            # The mount, not the path: a name in it may take a request to the bucket.
            line = verdict_line(status_of(root_of(place) or place))
        except (FusecacheError, OSError, KeyError) as exc:
            line = f"{ACTION}: {exc}"
        # Less than a pipe holds, so this never waits.
        os.write(writer, line.encode(errors="replace")[:_LINE_BYTES])
        status = 0
    finally:
        os._exit(status)
