"""`fusecache record` writes what is read from a mount to a file; `fusecache replay` has a daemon fetch by it."""

import argparse
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from fusecache.cli.say import print_line, say, say_error
from fusecache.model.errors import MountError
from fusecache.model.format_text import count_text, size_text
from fusecache.model.hints import PLAN, HintError, decode_plan
from fusecache.model.recording import MOST_EXTENTS, Recorder, Recording
from fusecache.mount.control_client import Mount, request_stream
from fusecache.mount.launch import mount_of_this_node, resolve_in_mount

_STOPS = (signal.SIGINT, signal.SIGTERM)
# So many files are looked for before a replay.
_CHECKED_FILES = 5


def add_arguments(record: argparse.ArgumentParser, replay: argparse.ArgumentParser) -> None:
    """Add the arguments of both commands."""
    record.add_argument("file", type=Path, metavar="FILE", help="the recording; it is replaced as a whole")
    record.add_argument("path", nargs="?", help="record the reads at or below this path [the whole mount]")
    record.set_defaults(run=_record, parser=record)
    replay.add_argument("file", type=Path, metavar="FILE", help="a recording of the same bucket and prefix")
    replay.add_argument(
        "path", nargs="?", help="a path in a mount [the working directory, or the only mount]"
    )
    replay.set_defaults(run=_replay, parser=replay)


def _record(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Record until a signal, or until the mount is gone; return the exit status."""
    file: Path = arguments.file
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise MountError(
            f"{file}: cannot write a recording into {file.parent}: name a directory that you can write"
        )
    mount, inner = resolve_in_mount(arguments.path or mount_of_this_node(Path.cwd()))
    recorder, lost, is_begun = Recorder(), 0, False

    def take(row: dict[str, Any]) -> None:
        nonlocal lost, is_begun
        lost += row.get("lost", 0)
        for path, start, nbytes in row.get("reads", ()):
            if not inner or f"{path}/".startswith(f"{inner}/"):
                recorder.add(path, start, nbytes)
        if not is_begun:
            is_begun = True
            say(f"recording the reads of {mount.root} to {file}; Ctrl-C or SIGTERM ends it")
            sys.stderr.flush()

    try:
        take(request_stream(mount, {"command": "record"}, on_report=take, on_connect=_end_at_signals))
    except MountError as problem:
        if not is_begun:
            raise
        say(f"the recording ends: {problem}")
    if not len(recorder):
        raise MountError(f"{file} is not written: nothing was read at {arguments.path or mount.root}")
    _write(file, recorder.encode())
    print_line(_summary(recorder.files, len(recorder), recorder.nbytes) + f" in {file}")
    if lost or recorder.left_out:
        say(
            f"{count_text(lost + recorder.left_out, 'read')} left out: a recording has at most {MOST_EXTENTS} extents, "
            "and the daemon reports 131072 reads a second; a replay does without them"
        )
    return 0


def _end_at_signals(connection: socket.socket) -> None:
    """Have the first signal end the recording: the daemon then sends the last reads."""

    def end(*_: object) -> None:
        with suppress(OSError):  # the daemon is gone
            connection.shutdown(socket.SHUT_WR)

    for number in _STOPS:
        signal.signal(number, end)


def _write(file: Path, content: bytes) -> None:
    """Replace a file by a rename: it is whole at any moment."""
    with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as new:
        try:
            new.write(content)
            new.flush()
            os.fchmod(new.fileno(), 0o644)
            os.replace(new.name, file)
        except BaseException:
            os.unlink(new.name)
            raise


def _replay(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Send a recording to a daemon as the hints of a job; return the exit status."""
    file: Path = arguments.file
    mount, _inner = resolve_in_mount(arguments.path or mount_of_this_node(Path.cwd()))
    try:
        recording = Recording(file.read_bytes())
        paths = [path for message in recording.plans for path in decode_plan(message).paths]
    except HintError as problem:
        raise MountError(f"{file}: {problem}") from problem
    _check_files(file, mount, paths)
    job = "replay-" + (re.sub(r"[^A-Za-z0-9._-]", "-", file.name)[:80])
    for message in recording.plans:
        request = {"command": "hint", "file": job + PLAN, "bytes": len(message)}
        answer = request_stream(mount, request, body=message)
        if answer.get("result") != "ok":
            raise MountError(f"{file}: the daemon of {mount.root} refused it: {answer.get('message')}")
    print_line(
        f"{mount.root} fetches {_summary(recording.files, recording.extents, recording.nbytes)}, as job {job}: "
        "see `fusecache status`"
    )
    return 0


def _check_files(file: Path, mount: Mount, paths: Sequence[str]) -> None:
    """Name files that the mount does not have. Raises MountError if it seems to have none of them."""
    some = paths[:: max(1, len(paths) // _CHECKED_FILES)][:_CHECKED_FILES]
    gone = [path for path in some if not os.path.lexists(mount.root / path)]
    if gone and len(gone) == len(some):
        raise MountError(
            f"{file}: {mount.root} has none of its files, such as {gone[0]}: replay it on a mount of the same bucket "
            "and prefix"
        )
    if gone:
        say_error(f"{file} names files that {mount.root} lacks, such as {gone[0]}; the others are fetched")


def _summary(files: int, extents: int, nbytes: int) -> str:
    return f"{size_text(nbytes)} of {count_text(files, 'file')} in {count_text(extents, 'extent')}"
