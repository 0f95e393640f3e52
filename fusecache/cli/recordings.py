"""`fusecache record` writes what is read from a mount to a file; `fusecache replay` has a daemon fetch by it."""

import argparse
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from fusecache.cli.say import print_line, say, say_error, write_whole
from fusecache.model.errors import MountError
from fusecache.model.format_text import count_text, size_text
from fusecache.model.hints import PLAN, HintError, decode_plan
from fusecache.model.recording import MOST_EXTENTS, Recorder, Recording
from fusecache.mount.control_client import Mount, request_stream
from fusecache.mount.launch import mount_of_this_node, resolve_in_mount

# SIGHUP: the terminal was closed. Below nohup it is ignored, and stays so.
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
    _check_target(file)
    mount, inner = resolve_in_mount(arguments.path or mount_of_this_node(Path.cwd()))
    if not os.path.lexists(mount.root / inner):
        raise MountError(f"{mount.root / inner} does not exist: name a file or a directory of the mount")
    session = _Session(file, mount, inner)
    session.run()
    recorder = session.recorder
    if not len(recorder):
        raise MountError(f"{file} is not written: nothing was read at {mount.root / inner}")
    write_whole(file, recorder.encode())
    print_line(_summary(recorder.files, len(recorder), recorder.nbytes) + f" in {file}")
    if left_out := session.lost + recorder.left_out:
        say(
            f"{count_text(left_out, 'read')} left out: a recording has at most {MOST_EXTENTS} extents, fewer if paths "
            "are longer than 100 characters, and the daemon reports 131072 reads a second; a replay does without them"
        )
    return 0


def _check_target(file: Path) -> None:
    """Raise MountError unless the recording can be written: an epoch later that would be too late."""
    if file.is_dir():
        raise MountError(f"{file} is a directory: name the file that the recording is written to")
    try:
        with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}."):
            pass
    except OSError as exc:
        raise MountError(
            f"{file}: cannot write a recording into {file.parent} ({exc.strerror}): name a directory that you can write"
        ) from exc


class _EndedBetweenDaemons(Exception):  # no error
    """A signal ended the recording while no daemon served the mount."""


class _Session:
    """Records the reads of a mount, also beyond the end of its daemon, if another one goes on with the mount."""

    def __init__(self, file: Path, mount: Mount, inner: str) -> None:
        self._mount, self._inner = mount, inner
        self._connection: socket.socket | None = None
        # What to say when a daemon has begun to record.
        self._said = f"recording the reads of {mount.root / inner} to {file}; Ctrl-C or SIGTERM ends it"
        self._has_begun = self._is_ended = False
        self.recorder = Recorder()
        self.lost = 0

    def run(self) -> None:
        """Return after a signal, or when the mount has ended. Raises MountError if it cannot begin."""
        problem = "the daemon has ended"
        try:
            request = {"command": "record"}
            self._take(
                request_stream(self._mount, request, on_report=self._take, on_connect=self._on_connect)
            )
        except _EndedBetweenDaemons:
            return
        except MountError as exc:
            if not self._has_begun:
                raise
            problem = str(exc)
        if not self._is_ended:
            say(f"the recording ends: {problem}")

    def _take(self, row: dict[str, Any]) -> None:
        self.lost += row.get("lost", 0)
        for path, start, nbytes in row.get("reads", ()):
            if not self._inner or f"{path}/".startswith(f"{self._inner}/"):
                self.recorder.add(path, start, nbytes)
        if self._said:  # at the first row: from now on the daemon records
            say(self._said)
            sys.stderr.flush()
            self._said, self._has_begun = "", True

    def _on_connect(self, connection: socket.socket) -> None:
        """Have the first signal end the recording: the daemon then sends the last reads."""
        if self._is_ended:
            raise _EndedBetweenDaemons
        self._connection = connection
        if self._has_begun:
            self._said = (
                f"another daemon serves {self._mount.root}: reads of half a second before it may be missing"
            )
        for number in _STOPS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._end)

    def _end(self, *_: object) -> None:
        self._is_ended = True
        if self._connection is not None:
            if self._connection.fileno() < 0:  # closed
                raise _EndedBetweenDaemons
            with suppress(OSError):  # the daemon is gone
                self._connection.shutdown(socket.SHUT_WR)


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
    for window, message in enumerate(recording.plans):
        request = {"command": "hint", "file": job + PLAN, "bytes": len(message)}
        answer = request_stream(mount, request, body=message)
        if answer.get("result") != "ok":
            if window:  # else a job of that name is not of this replay
                request_stream(mount, {**request, "bytes": 0})
            raise MountError(f"{file}: the daemon of {mount.root} refused it: {answer.get('message')}")
    print_line(
        f"{mount.root} fetches {_summary(recording.files, recording.extents, recording.nbytes)}, as job {job}: "
        f"see `fusecache status {shlex.quote(str(mount.root))}`"
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
