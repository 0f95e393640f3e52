"""Tells the daemon of a mounted bucket what this machine's ranks will read, and how far they are.

    hints = Hints(dataset, sampler)      # before the model is loaded: the first batches are on their way
    ...                                  # the training loop, with that sampler in a DataLoader

`loader.fast.Loader` and `loader.streaming.StreamingDataset` do this by themselves.

A thread of the first rank of each machine sends the plans and, several times a second, the step, for all ranks there:
the order is a pure function, so that one knows what all of them read. The others, and all on a plain directory, do
nothing. Advice only: whatever fails is logged once, and the training loop never waits for it.

What is sent (`docs/hints.md`): for the first batches the exact bytes of their samples; behind them windows of whole
shards with their first and last step, until an epoch ahead is known. The steps are counted over epochs.
"""

import atexit
import contextlib
import errno
import itertools
import json
import logging
import math
import os
import re
import socket
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fusecache.model.hint import CURSOR, FOLDER, PLAN, TO_THE_END, HintError, encode_cursor, encode_plan
from loader.course import Course
from loader.errors import LoaderError
from loader.foresight import Ids, Uses, behind, sample_uses, shard_uses, table_bytes
from loader.index import Index
from loader.warming import Warmer

log = logging.getLogger(__name__)

CURSOR_SECONDS = 0.25
# The daemon forgets jobs of which it hears nothing for ten minutes: an evaluation may last longer.
ALIVE_SECONDS = 60.0
# After a failure that may pass, such as a mount that is made anew.
AGAIN_SECONDS = 10.0
# After EPERM: other jobs have named all that may be named, and end in hours rather than seconds.
FULL_SECONDS = 60.0
# Of the first batches the exact bytes are named: half a minute of training or more, in which the first shards come.
COLD_STEPS = 64
COLD_SAMPLES = 1 << 15
TABLES_AT_ONCE = 32
# A window of whole shards is at most so long …
WINDOW_SAMPLES = 1 << 22
# … and so much is known in advance, if an epoch has more.
AHEAD_SAMPLES = 1 << 24
# Batches that are handed out and not read yet: the workers of a DataLoader fetch ahead of the loop.
READING_STEPS = 16

_SOCKET_VARIABLE = "FUSECACHE_SOCKET"
_ANSWER_SECONDS = 30.0
# What the socket's answer says where a file's close has an errno of its own.
_REFUSALS = {"no plan": errno.ENOENT, "all jobs together": errno.EPERM}
# To take back what was said; a mount that does not answer keeps no process from ending.
_CLOSE_SECONDS = 2.0
# Jobs of this process: a second loader of the same dataset is not the first.
_names: set[str] = set()


@runtime_checkable
class Plannable(Protocol):
    """A dataset, as far as hints need it."""

    @property
    def index(self) -> Index: ...

    @property
    def fingerprint(self) -> str: ...


class Sampler(Protocol):
    """A sampler, as far as hints need it."""

    @property
    def course(self) -> Course: ...

    @property
    def place(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class Door:
    """Where a mount takes hints: its directory, or its daemon's socket where the mount can only be read."""

    root: Path

    def send(self, file: str, message: bytes) -> None:
        """Hand a message over; b"" takes back what the job has said.

        Raises OSError: EINVAL if it is refused, EPERM if it is until other jobs end.
        """
        path = self.root / ".fusecache" / FOLDER / file
        try:
            if message:
                path.write_bytes(message)
            else:
                path.unlink()
        except OSError as problem:
            if problem.errno not in (errno.EROFS, errno.EACCES):
                raise
            self._send_by_socket(file, message)

    def _send_by_socket(self, file: str, message: bytes) -> None:
        address = os.environ.get(_SOCKET_VARIABLE) or (self.root / ".fusecache/socket").read_text().strip()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(address)
            request = {"command": "hint", "file": file, "bytes": len(message)}
            connection.sendall(json.dumps(request).encode() + b"\n" + message)
            with connection.makefile("rb") as lines:
                try:
                    answer = json.loads(lines.readline())
                except ValueError as problem:
                    raise OSError(errno.EPROTO, f"the daemon's answer is no JSON: {problem}") from problem
        if answer.get("result") != "ok":
            reason = str(answer.get("message"))
            known = (number for words, number in _REFUSALS.items() if words in reason)
            raise OSError(next(known, errno.EINVAL), reason)


def find_door(directory: str | Path) -> tuple[Door, str] | None:
    """Return the way to the daemon of the mount that a directory lies in, and its path there; None if it lies in none.

    A directory that only looks like a mount's is no mount: nothing is ever written into a plain directory.
    """
    path = Path(os.path.realpath(directory))
    for root in (path, *path.parents):
        if os.path.ismount(root):
            try:
                if not (root / ".fusecache" / FOLDER).is_dir() or not (root / ".fusecache/socket").is_file():
                    return None
            except OSError:  # of another kind, or its daemon is gone
                return None
            inner = path.relative_to(root).as_posix()
            return Door(root), "" if inner == "." else inner + "/"
    return None


class Hints:
    """Sends what a sampler's machine reads next, until it is closed or the process ends.

    dataset: an MDSDataset; sampler: its ElasticBatchSampler. job: a name that a run keeps when it is started again, so
    that its new plans take the place of the old; by default of the run's id in the environment, or the process.
    A forked process sends nothing, and takes nothing back.
    """

    def __init__(self, dataset: Plannable, sampler: Sampler, *, job: str | None = None) -> None:
        self._sampler = sampler
        self._index = dataset.index
        doors = [find_door(directory) for directory in self._index.directories]
        self._doors = {door for door, _ in filter(None, doors)}
        self._places = doors
        course = sampler.course
        world = course.world
        self.is_sending = bool(self._doors) and world.rank_of_node == 0 and world.replica == 0
        self._job = job or _job_name(dataset.fingerprint, world.node) if self.is_sending else ""
        self._course = course
        self._process = os.getpid()
        self._stopped = threading.Event()
        self._planned_to = -1  # the step up to which plans were sent
        self._at = -1
        self._full_until = -math.inf  # when to plan ahead again, by the monotonic clock
        # Shards whose bytes were named exactly up to a step.
        self._cold: tuple[Ids, int] = (np.zeros(0, np.int64), 0)
        self._told = False
        self._thread: threading.Thread | None = None
        self._warmers = {
            door: Warmer(door.root / ".fusecache" / FOLDER / (self._job + PLAN), self._raw_file)
            for door in (self._doors if self.is_sending else ())
        }
        if self.is_sending:
            self._ends: Ids = np.cumsum(self._index.samples)
            self._thread = threading.Thread(target=self._run, name="fusecache-hints", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Stop sending, and take back what was said: now, or when the mount answers again."""
        thread = self._thread
        if thread is None or self._process != os.getpid():  # whose thread it is not, its plan it is not
            return
        self._thread = None
        self._stopped.set()
        atexit.unregister(self.close)
        if thread is not threading.current_thread():  # which collects garbage, too
            thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> "Hints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the thread

    def _run(self) -> None:
        try:
            self._follow()
        finally:
            for warmer in self._warmers.values():
                warmer.close()
            for door in self._doors:
                self._take_back(door)
            _names.discard(self._job)

    def _follow(self) -> None:
        pause, quiet = 0.0, 0.0
        while not self._stopped.wait(pause):
            quiet += pause
            pause = CURSOR_SECONDS
            try:
                said = self._tick(is_due=quiet >= ALIVE_SECONDS)
            except (OSError, LoaderError, HintError) as problem:
                self._tell(problem)
                if isinstance(problem, HintError) or _errno(problem) == errno.EINVAL:
                    return  # it will not be understood the next time either
                self._planned_to = -1  # the mount, or the daemon's memory, may have been made anew
                pause = FULL_SECONDS if _errno(problem) == errno.EPERM else AGAIN_SECONDS
                said = False
            quiet = 0.0 if said else quiet

    def _tick(self, *, is_due: bool) -> bool:
        """Say what is new; return whether anything was said."""
        epoch, batch = self._sampler.place
        at = epoch * self._course.steps + batch
        if self._planned_to < 0 or not self._at <= at <= self._planned_to:
            self._begin(at)  # for the first time, or as a state was loaded, or an iteration begun anew
        has_moved = at != self._at
        self._at = at
        if self._plan_ahead(at) or not (has_moved or is_due):
            return False
        for door in self._doors:
            door.send(self._job + CURSOR, encode_cursor(max(0, at - READING_STEPS)))
            self._warmers[door].move(max(0, at - READING_STEPS))
        return True

    def _begin(self, at: int) -> None:
        """Name the exact bytes of the first batches from a step on."""
        steps = max(1, min(COLD_STEPS, COLD_SAMPLES // self._course.samples))
        steps = min(steps, self._course.steps - at % self._course.steps)
        tables = self._tables(at, steps)
        uses = sample_uses(self._course, self._index, self._ends, at, steps, table_of=tables.get)
        self._send(2 * at, at, uses, is_exact=True)
        # Shards whose bytes nobody can name yet come as a whole from the first step on.
        self._cold = np.unique(uses.shard), at + steps
        self._planned_to = at

    def _plan_ahead(self, at: int) -> bool:
        """Send windows of whole shards until enough is known, or refused for now; return whether any was sent."""
        course = self._course
        enough = at + min(course.steps, max(1, AHEAD_SAMPLES // course.samples))
        was = self._planned_to
        if time.monotonic() < self._full_until:
            return False
        while self._planned_to <= enough and not self._stopped.is_set():
            first = self._planned_to
            count = min(max(1, WINDOW_SAMPLES // course.samples), course.steps - first % course.steps)
            uses = self._without_cold(shard_uses(course, self._ends, first, count))
            try:
                self._send(2 * first + 1, at, uses, is_exact=False)
            except PermissionError as problem:
                if problem.errno != errno.EPERM:
                    raise
                # What is planned stays, and is followed by the cursor meanwhile.
                self._tell(problem)
                self._full_until = time.monotonic() + FULL_SECONDS
                break
            self._planned_to = first + count
        return self._planned_to > was

    def _without_cold(self, uses: Uses) -> Uses:
        """Leave out the steps whose bytes are named exactly, of the shards of which they are."""
        shards, step = self._cold
        if uses.first.size == 0 or int(uses.first[0]) >= step:
            return uses
        named = np.isin(uses.shard, shards)
        late = behind(_choose(uses, named), step)
        rest = _choose(uses, ~named)
        joined = Uses(
            *(
                np.concatenate([getattr(rest, name), getattr(late, name)])
                for name in ("shard", "start", "stop", "first", "last")
            )
        )
        return _choose(joined, np.argsort(joined.first, kind="stable"))

    def _tables(self, at: int, steps: int) -> dict[int, NDArray[np.uint32]]:
        """Read the tables of offsets that the first batches need, many at once; what fails is left out."""
        index = self._index
        first = shard_uses(self._course, self._ends, at, steps)
        needed = {
            shard: size
            for shard in first.shard.tolist()
            if not index.compression(shard) and (size := table_bytes(index, shard))
        }
        if not needed:
            return {}
        shards = np.array(list(needed), np.int64)
        nothing = np.zeros(shards.size, np.int64)
        sizes = np.array(list(needed.values()), np.int64)
        self._send(2 * at, at, Uses(shards, nothing, sizes, nothing + at, nothing + at), is_exact=True)
        found: dict[int, NDArray[np.uint32]] = {}
        waiting = deque(needed.items())

        def read() -> None:
            with contextlib.suppress(IndexError):
                while not self._stopped.is_set():
                    shard, size = waiting.popleft()
                    table = _table(index, shard, size)
                    if table is not None:
                        found[shard] = table

        # Daemons, unlike a pool's: a read that hangs does not keep the process from ending.
        count = min(TABLES_AT_ONCE, len(needed))
        readers = [threading.Thread(target=read, name="fusecache-tables", daemon=True) for _ in range(count)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return found

    # ---- sending

    def _send(self, window: int, step: int, uses: Uses, *, is_exact: bool) -> None:
        """Send the part of a plan that each mount has."""
        for door in self._doors:
            here = np.array([place is not None and place[0] == door for place in self._places])
            streams = np.searchsorted(self._index.borders, uses.shard, side="right") - 1
            mine = _choose(uses, here[streams])
            names = [self._path(shard) for shard in mine.shard.tolist()]
            paths = sorted(set(names))
            number = {path: place for place, path in enumerate(paths)}
            length = np.where(mine.stop > 0, mine.stop - mine.start, TO_THE_END)
            message = encode_plan(
                window=window,
                step=max(0, step - READING_STEPS),
                is_exact=is_exact,
                paths=paths,
                path=array("q", [number[name] for name in names]),
                start=_column(mine.start),
                length=_column(length),
                first=_column(mine.first),
                span=_column(mine.last - mine.first),
            )
            door.send(self._job + PLAN, message)
            if not is_exact:
                self._warmers[door].plan(window, mine.shard, mine.last)

    def _path(self, shard: int) -> str:
        """The path of a shard's file, below its mount's root."""
        index = self._index
        place = self._places[int(np.searchsorted(index.borders, shard, side="right")) - 1]
        assert place is not None
        return place[1] + (index.zip_names[shard] or index.raw_names[shard])

    def _raw_file(self, shard: int) -> str | None:
        """The file that samples are read from one by one; None for a compressed shard, which is read whole."""
        index = self._index
        if index.zip_names[shard]:
            return None
        return os.path.join(index.directory(shard), index.raw_names[shard])

    def _take_back(self, door: Door) -> None:
        try:
            door.send(self._job + PLAN, b"")
        except FileNotFoundError:
            pass  # nothing was said, or it is forgotten
        except OSError as problem:
            self._tell(problem)

    def _tell(self, problem: Exception) -> None:
        """Log the first of all failures."""
        level = logging.DEBUG if self._told else logging.INFO
        self._told = True
        log.log(level, "the daemon takes no hints, reading goes on without: %s", problem)


def _choose(uses: Uses, which: NDArray[np.bool_] | NDArray[np.intp]) -> Uses:
    return Uses(uses.shard[which], uses.start[which], uses.stop[which], uses.first[which], uses.last[which])


def _column(numbers: Ids) -> "array[int]":
    return array("q", numbers.astype("=i8").tobytes())


def _table(index: Index, shard: int, size: int) -> NDArray[np.uint32] | None:
    """Return a shard's table of offsets, None if it cannot be read, or is none."""
    path = os.path.join(index.directory(shard), index.raw_names[shard])
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # its table, and not a page behind it
            head = os.pread(descriptor, size, 0)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    words = np.frombuffer(head[: len(head) // 4 * 4], "<u4")
    if (
        words.size != size // 4
        or int(words[0]) != int(index.samples[shard])
        or (words[2:] < words[1:-1]).any()
    ):
        return None  # the reader will say what is wrong with it
    return words[1:].astype(np.uint32)


def _job_name(fingerprint: str, node: int) -> str:
    """Return a name that the same job has when it is started again, and no other loader has at the same time."""
    run = _from_environment("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID") or f"{socket.gethostname()}-{os.getpid()}"
    # Ranks that each read on their own, as an evaluation does, are jobs of their own.
    rank = _from_environment("LOCAL_RANK", "SLURM_LOCALID") or "0"
    stem = re.sub("[^A-Za-z0-9._-]", "_", f"{fingerprint[:12]}-{run[:60]}-{node}-{rank[:6]}")
    name = next(name for number in itertools.count(1) if (name := f"{stem}.{number}") not in _names)
    _names.add(name)
    return name


def _from_environment(*names: str) -> str:
    """Return the first variable that says something; torchrun's run id is "none" where nobody chose one."""
    return next((value for name in names if (value := os.environ.get(name, "")) not in ("", "none")), "")


def _errno(problem: BaseException) -> int | None:
    return problem.errno if isinstance(problem, OSError) else None
