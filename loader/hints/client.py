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
import logging
import math
import os
import threading
import time
from collections import deque
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fusecache.model.hints import CURSOR, FOLDER, PLAN, HintError, encode_cursor
from loader.errors import ArgumentError, LoaderError
from loader.hints.job_name import hold_name, release_name
from loader.hints.mount_endpoint import MountEndpoint, find_endpoint
from loader.hints.page_warmer import PageWarmer
from loader.hints.plan_messages import MountMap, PlanMessage, choose
from loader.hints.planned_reads import Ids, PlannedReads, behind, sample_reads, shard_reads, table_bytes
from loader.mds.index import Index
from loader.sampling.sampler import ElasticBatchSampler
from loader.sampling.step_plan import StepPlan

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
# A window of whole shards is at most so long, and no longer than one message can be …
WINDOW_SAMPLES = 1 << 22
# … and so much is known in advance, if an epoch has more.
AHEAD_SAMPLES = 1 << 24
# Batches that are handed out and not read yet: the workers of a DataLoader fetch ahead of the loop.
READING_STEPS = 16

# To take back what was said; a mount that does not answer keeps no process from ending.
_CLOSE_SECONDS = 2.0


@runtime_checkable
class Plannable(Protocol):
    """A dataset, as far as hints need it."""

    @property
    def index(self) -> Index: ...

    @property
    def fingerprint(self) -> str: ...


class HintedSampler(Protocol):
    """A sampler, as far as hints need it."""

    @property
    def step_plan(self) -> StepPlan: ...

    @property
    def position(self) -> tuple[int, int]: ...


class Hints:
    """Sends what a sampler's machine reads next, until it is closed or the process ends.

    dataset: an MDSDataset; sampler: its ElasticBatchSampler. job: a name that a run keeps when it is started again, so
    that its new plans take the place of the old; by default of the run's id in the environment, or the process.
    A forked process sends nothing, and takes nothing back. Raises OrderError for the sampler of another dataset.
    """

    def __init__(self, dataset: Plannable, sampler: HintedSampler, *, job: str | None = None) -> None:
        if not hasattr(dataset, "index") or not hasattr(type(sampler), "step_plan"):
            raise ArgumentError(
                f"Hints takes a dataset and its sampler, in this order, not {type(dataset).__name__} and "
                f"{type(sampler).__name__}"
            )
        if isinstance(sampler, ElasticBatchSampler):
            sampler.check_dataset(dataset)
        self._sampler = sampler
        self._index = dataset.index
        self._mount_map = MountMap(
            self._index, [find_endpoint(directory) for directory in self._index.directories]
        )
        self._doors = self._mount_map.doors
        step_plan = sampler.step_plan
        machine = step_plan.world.machine
        self.is_sending = bool(self._doors) and machine.local_rank == 0
        self._step_plan = step_plan
        self._job = job or ""
        if self.is_sending and not job:
            about = f"{self._mount_map} {step_plan.epoch_orders.spec}"
            self._job = hold_name(dataset.fingerprint, machine.number, about)
        self._process = os.getpid()
        self._stopped = threading.Event()
        self._planned_to = -1  # the step up to which plans were sent
        self._at = -1
        self._full_until = -math.inf  # when to plan ahead again, by the monotonic clock
        self._window_steps = max(1, WINDOW_SAMPLES // step_plan.samples)
        # Shards whose bytes were named exactly up to a step.
        self._cold: tuple[Ids, int] = (np.zeros(0, np.int64), 0)
        self._told = False
        self._thread: threading.Thread | None = None
        self._warmers = {
            endpoint: PageWarmer(
                endpoint.root / ".fusecache" / FOLDER / (self._job + PLAN), self._mount_map.raw_file
            )
            for endpoint in (self._doors if self.is_sending else ())
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
            for endpoint in self._doors:
                self._withdraw(endpoint)
            release_name(self._job)

    def _follow(self) -> None:
        pause, quiet = 0.0, 0.0
        while not self._stopped.wait(pause):
            quiet += pause
            pause = CURSOR_SECONDS
            try:
                said = self._tick(is_due=quiet >= ALIVE_SECONDS)
            except (OSError, LoaderError, HintError) as problem:
                self._warn(problem)
                if isinstance(problem, HintError) or _errno(problem) == errno.EINVAL:
                    return  # it will not be understood the next time either
                self._planned_to = -1  # the mount, or the daemon's memory, may have been made anew
                pause = FULL_SECONDS if _errno(problem) == errno.EPERM else AGAIN_SECONDS
                said = False
            quiet = 0.0 if said else quiet

    def _tick(self, *, is_due: bool) -> bool:
        """Say what is new; return whether anything was said."""
        epoch, batch = self._sampler.position
        at = epoch * self._step_plan.steps + batch
        if self._planned_to < 0 or not self._at <= at <= self._planned_to:
            self._begin(at)  # for the first time, or as a state was loaded, or an iteration begun anew
        has_moved = at != self._at
        self._at = at
        if self._plan_ahead(at) or not (has_moved or is_due):
            return False
        for endpoint in self._doors:
            endpoint.send(self._job + CURSOR, encode_cursor(max(0, at - READING_STEPS)))
            self._warmers[endpoint].move(max(0, at - READING_STEPS))
        return True

    def _begin(self, at: int) -> None:
        """Name the exact bytes of the first batches from a step on."""
        steps = max(1, min(COLD_STEPS, COLD_SAMPLES // self._step_plan.samples))
        steps = min(steps, self._step_plan.steps - at % self._step_plan.steps)
        tables = self._tables(at, steps)
        uses = sample_reads(self._step_plan, self._index, self._ends, at, steps, table_of=tables.get)
        parts = self._mount_map.parts(uses)
        self._send(2 * at, at, parts, is_exact=True)
        # Shards whose bytes nobody can name yet come as a whole from the first step on.
        named = [part.uses.shard for part in parts]
        self._cold = np.unique(np.concatenate(named)), at + steps
        self._planned_to = at

    def _plan_ahead(self, at: int) -> bool:
        """Send windows of whole shards until enough is known, refused for now, or time to say where the run is.

        Return whether any was sent; each says it, too.
        """
        step_plan = self._step_plan
        enough = at + min(step_plan.steps, max(1, AHEAD_SAMPLES // step_plan.samples))
        was = self._planned_to
        began = time.monotonic()
        if began < self._full_until:
            return False
        while self._planned_to <= enough and not self._stopped.is_set():
            if self._planned_to > was and time.monotonic() > began + CURSOR_SECONDS:
                break
            first = self._planned_to
            count = min(self._window_steps, step_plan.steps - first % step_plan.steps)
            parts = self._mount_map.parts(
                self._without_cold(shard_reads(step_plan, self._ends, first, count))
            )
            if count > 1 and any(part.is_cut for part in parts):
                self._window_steps = count // 2
                continue
            try:
                self._send(2 * first + 1, at, parts, is_exact=False)
            except (OSError, HintError) as problem:
                if isinstance(problem, OSError) and problem.errno not in (errno.EPERM, errno.EINVAL):
                    raise
                # What is planned stays, and is followed by the cursor meanwhile.
                self._warn(problem)
                self._full_until = time.monotonic() + FULL_SECONDS
                break
            self._planned_to = first + count
        return self._planned_to > was

    def _without_cold(self, uses: PlannedReads) -> PlannedReads:
        """Leave out the steps whose bytes are named exactly, of the shards of which they are."""
        shards, step = self._cold
        if uses.first.size == 0 or int(uses.first[0]) >= step:
            return uses
        named = np.isin(uses.shard, shards)
        late = behind(choose(uses, named), step)
        rest = choose(uses, ~named)
        joined = PlannedReads(
            *(
                np.concatenate([getattr(rest, name), getattr(late, name)])
                for name in ("shard", "start", "stop", "first", "last")
            )
        )
        return choose(joined, np.argsort(joined.first, kind="stable"))

    def _tables(self, at: int, steps: int) -> dict[int, NDArray[np.uint32]]:
        """Read the tables of offsets that the first batches need, many at once; what fails is left out."""
        index = self._index
        first = shard_reads(self._step_plan, self._ends, at, steps)
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
        tables = PlannedReads(shards, nothing, sizes, nothing + at, nothing + at)
        self._send(2 * at, at, self._mount_map.parts(tables), is_exact=True)
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

    def _send(self, window: int, step: int, parts: list[PlanMessage], *, is_exact: bool) -> None:
        """Send each mount its part of a plan."""
        for part in parts:
            message = part.message(window=window, step=max(0, step - READING_STEPS), is_exact=is_exact)
            part.door.send(self._job + PLAN, message)
            if not is_exact:
                self._warmers[part.door].plan(window, part.uses.shard, part.uses.last)

    def _withdraw(self, endpoint: MountEndpoint) -> None:
        try:
            endpoint.send(self._job + PLAN, b"")
        except FileNotFoundError:
            pass  # nothing was said, or it is forgotten
        except OSError as problem:
            self._warn(problem)

    def _warn(self, problem: Exception) -> None:
        """Log the first of all failures."""
        level = logging.DEBUG if self._told else logging.INFO
        self._told = True
        log.log(level, "the daemon takes no hints, reading goes on without: %s", problem)


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


def _errno(problem: BaseException) -> int | None:
    return problem.errno if isinstance(problem, OSError) else None
