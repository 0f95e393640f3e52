"""`fusecache health`: one line and an exit status for probes, within seconds even if the daemon hangs."""

import argparse
import os
import select
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from fusecache.cli.say import print_line
from fusecache.cli.views.status import status_of
from fusecache.model.errors import FusecacheError
from fusecache.model.verdict import ACTION, DEGRADED, OK, verdict_line
from fusecache.mount.launch import mount_of_this_node
from fusecache.mount.mount_table import root_of

# With the start of the interpreter, less than the 5 s that a probe may take.
_ANSWER_SECONDS = 4.0
_EXIT = {OK: 0, DEGRADED: 1, ACTION: 2}
_LINE_BYTES = 1 << 16


def health(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the verdict on a mount; return its exit status: 0 OK, 1 DEGRADED, 2 ACTION or no answer."""
    line = _answer(arguments.mount)
    print_line(line)
    return _EXIT.get(line.partition(":")[0].partition(",")[0], _EXIT[ACTION])


def _answer(place: str | None) -> str:
    """Return the line of a child process: a call into a mount that hangs can neither be cancelled nor waited for."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_child(place, writer)
    os.close(writer)
    with open(reader, "rb", buffering=0) as answer:
        if select.select([answer], [], [], _ANSWER_SECONDS)[0]:
            line = answer.read(_LINE_BYTES).decode(errors="replace")
            os.waitpid(child, 0)
            return line or f"{ACTION}: the status of the mount could not be read"
    os.kill(child, signal.SIGKILL)
    return (
        f"{ACTION}: {place or 'the mount'}: no answer from the daemon within {_ANSWER_SECONDS:g} s: it hangs or is "
        f"stopped; see `fusecache status {shlex.quote(place or '')}".rstrip()
        + "`"
    )


def _run_child(place: str | None, writer: int) -> None:
    """Write the line to a pipe, and exit. Holds nothing else of the caller's open: it may hang for long."""
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        try:
            path = place or mount_of_this_node(Path.cwd())
            # The mount, not the path: a name in it may take a request to the bucket.
            line = verdict_line(status_of(root_of(path) or path))
        except (FusecacheError, OSError, KeyError) as exc:
            line = f"{ACTION}: {exc}"
        # Less than a pipe holds, so this never waits.
        os.write(writer, line.encode(errors="replace")[:_LINE_BYTES])
        status = 0
    finally:
        os._exit(status)
