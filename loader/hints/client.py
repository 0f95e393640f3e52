"""Tells the daemon of a mounted bucket what this machine's ranks will read, and how far they are.

    hints = Hints(dataset, sampler)      # before the model is loaded: the daemon fetches the first batches
    ...                                  # the training loop, with that sampler in a DataLoader

`loader.fast.Loader` and `loader.streaming.StreamingDataset` do this by themselves.

On each machine a thread of local rank 0 sends the plans and, several times a second, the current step, for all ranks
of the machine. The order is a pure function, so this rank knows what all of them read. Other ranks, and runs on a
plain directory, send nothing. Hints are advice: the first failure is logged, and the training loop never waits.

Content (`docs/hints.md`): for the first batches the exact byte ranges of their samples; after them plan windows of
whole shards, with the first and last step of each, until one epoch ahead is known. Steps are counted over all epochs.
"""

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Generator
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fusecache.model.hints import FOLDER, PLAN, HintError
from loader.base.mount_endpoint import find_endpoint
from loader.errors import ArgumentError, LoaderError
from loader.hints.job import HintJob, check_job, hold_name
from loader.hints.page_warmer import PageWarmer
from loader.hints.plan_messages import (
    Ids,
    MountMap,
    PlanMessage,
    PlannedReads,
    choose,
    reads_from,
    sample_reads,
    shard_reads,
    table_bytes,
)
from loader.mds.index import Index
from loader.sampling.sampler import ElasticBatchSampler, StepPlan

log = logging.getLogger(__name__)

# How often the step is sent: cheap, and early enough for the daemon's read-ahead.
CURSOR_SECONDS = 0.25
# Batches whose exact bytes are sent: half a minute of training or more, enough to fetch the first whole shards.
COLD_STEPS = 64
COLD_SAMPLES = 1 << 15
# Reads of offset tables in flight: each is a small request, so latency dominates.
TABLES_AT_ONCE = 32
# Largest plan window of whole shards; it is halved until one message can contain it.
WINDOW_SAMPLES = 1 << 22
# Plan ahead by at most this many samples, if an epoch has more.
AHEAD_SAMPLES = 1 << 24
# Batches handed out but not read yet: the workers of a DataLoader fetch ahead of the loop.
READING_STEPS = 16


@runtime_checkable
class Plannable(Protocol):
    """The part of a dataset that hints need."""

    @property
    def index(self) -> Index: ...

    @property
    def fingerprint(self) -> str: ...


class HintedSampler(Protocol):
    """The part of a sampler that hints need."""

    @property
    def step_plan(self) -> StepPlan: ...

    @property
    def position(self) -> tuple[int, int]: ...


class Hints:
    """Sends what a sampler's machine will read next, until it is closed or the process ends.

    dataset: an MDSDataset. sampler: its ElasticBatchSampler. job: a name that a run keeps across restarts, so that its
    new plans replace its old ones; the default derives from the run's id in the environment, else from the process.
    A forked child sends and withdraws nothing. Raises ArgumentError for arguments of the wrong kind, and OrderError
    for the sampler of another dataset.
    """

    def __init__(self, dataset: Plannable, sampler: HintedSampler, *, job: str | None = None) -> None:
        if not hasattr(dataset, "index") or not hasattr(type(sampler), "step_plan"):
            raise ArgumentError(
                f"Hints takes a dataset and its sampler, in this order, not {type(dataset).__name__} and "
                f"{type(sampler).__name__}"
            )
        check_job(job)
        if isinstance(sampler, ElasticBatchSampler):
            sampler.check_dataset(dataset)
        self._sampler = sampler
        self._index = dataset.index
        self._mount_map = MountMap(
            self._index, [find_endpoint(directory) for directory in self._index.directories]
        )
        self._endpoints = self._mount_map.endpoints
        step_plan = sampler.step_plan
        machine = step_plan.world.machine
        self.is_sending = bool(self._endpoints) and machine.local_rank == 0
        self._step_plan = step_plan
        if self.is_sending and not job:
            about = f"{self._mount_map} {step_plan.epoch_orders.spec}"
            job = hold_name(dataset.fingerprint, machine.number, about)
        self._job = HintJob(job or "", log)
        self._planned_to = -1  # plans were sent up to this step
        self._at = -1
        self._limit_retry_at = -math.inf  # time of the next attempt to plan ahead, by the monotonic clock
        self._window_steps = max(1, WINDOW_SAMPLES // step_plan.samples)
        # (shards, step): the exact bytes of these shards were sent for all steps before this step.
        self._cold: tuple[Ids, int] = (np.zeros(0, np.int64), 0)
        self._warmers = {
            endpoint: PageWarmer(
                endpoint.root / ".fusecache" / FOLDER / (self._job.name + PLAN), self._mount_map.raw_file
            )
            for endpoint in (self._endpoints if self.is_sending else ())
            if not endpoint.is_folder  # what a pull wrote just now is in the page cache
        }
        if self.is_sending:
            self._ends: Ids = np.cumsum(self._index.samples)
            self._job.start(self._turns(), "fusecache-hints")

    def close(self) -> None:
        """Stop sending, and withdraw the plan: now, or when the mount answers again."""
        self._job.close()

    def __enter__(self) -> "Hints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the thread

    def _turns(self) -> Generator[float]:
        """Send what is new, again and again; end if the daemon rejects it and would reject it again."""
        try:
            while True:
                pause = CURSOR_SECONDS
                try:
                    self._tick()
                except (OSError, LoaderError, HintError) as problem:
                    pause = self._job.refused(problem)
                    if isinstance(problem, HintError) or getattr(problem, "errno", None) == errno.EINVAL:
                        return
                    self._planned_to = -1  # the daemon may have been restarted and have lost the plan
                yield pause
        finally:
            for warmer in self._warmers.values():
                warmer.close()

    def _tick(self) -> None:
        """Send plans that are due; else the current step, if it is new or the daemon has not heard of it for long."""
        epoch, batch = self._sampler.position
        at = epoch * self._step_plan.steps + batch
        if self._planned_to < 0 or not self._at <= at <= self._planned_to:
            self._begin(at)  # the first plan, or a state was loaded, or an iteration was started again
        has_moved = at != self._at
        self._at = at
        if self._plan_ahead(at):
            return
        for endpoint in self._endpoints:
            if has_moved or self._job.is_quiet(endpoint):
                self._job.move(endpoint, max(0, at - READING_STEPS))
                if endpoint in self._warmers:
                    self._warmers[endpoint].move(max(0, at - READING_STEPS))

    def _begin(self, at: int) -> None:
        """Send the exact bytes of the first batches from a step on."""
        steps = max(1, min(COLD_STEPS, COLD_SAMPLES // self._step_plan.samples))
        steps = min(steps, self._step_plan.steps - at % self._step_plan.steps)
        tables = self._tables(at, steps)
        reads = sample_reads(self._step_plan, self._index, self._ends, at, steps, table_of=tables.get)
        parts = self._mount_map.parts(reads)
        self._send(2 * at, at, parts, is_exact=True)
        # Shards whose exact bytes are unknown are sent as whole shards, from the first step on.
        named = [part.reads.shard for part in parts]
        self._cold = np.unique(np.concatenate(named)), at + steps
        self._planned_to = at

    def _plan_ahead(self, at: int) -> bool:
        """Send plan windows until enough is known, the daemon refuses more, or it is time to send the step.

        Return whether any was sent. Each window carries the current step too.
        """
        step_plan = self._step_plan
        enough = at + min(step_plan.steps, max(1, AHEAD_SAMPLES // step_plan.samples))
        was = self._planned_to
        began = time.monotonic()
        if began < self._limit_retry_at:
            return False
        while self._planned_to <= enough and not self._job.stopped.is_set():
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
                # Keep the plans already sent; the cursor still follows them.
                self._limit_retry_at = time.monotonic() + self._job.refused(problem)
                break
            self._planned_to = first + count
        return self._planned_to > was

    def _without_cold(self, reads: PlannedReads) -> PlannedReads:
        """Leave out the reads of steps whose exact bytes were sent, for the shards that they were sent of."""
        shards, step = self._cold
        if reads.first.size == 0 or int(reads.first[0]) >= step:
            return reads
        named = np.isin(reads.shard, shards)
        late = reads_from(choose(reads, named), step)
        rest = choose(reads, ~named)
        joined = PlannedReads(
            *(
                np.concatenate([getattr(rest, name), getattr(late, name)])
                for name in ("shard", "start", "stop", "first", "last")
            )
        )
        return choose(joined, np.argsort(joined.first, kind="stable"))

    def _tables(self, at: int, steps: int) -> dict[int, NDArray[np.uint32]]:
        """Read the offset tables that the first batches need, concurrently; skip failed reads."""
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
                while not self._job.stopped.is_set():
                    shard, size = waiting.popleft()
                    table = _table(index, shard, size)
                    if table is not None:
                        found[shard] = table

        # Daemon threads, unlike a pool's: a read that hangs does not block the exit of the process.
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
            self._job.plan(part.endpoint, message)
            if not is_exact and part.endpoint in self._warmers:
                self._warmers[part.endpoint].plan(window, part.reads.shard, part.reads.last)


def _table(index: Index, shard: int, size: int) -> NDArray[np.uint32] | None:
    """Return a shard's offset table; None if it cannot be read or is not valid."""
    path = os.path.join(index.directory(shard), index.raw_names[shard])
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead past the table
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
        return None  # the reader reports what is wrong with it
    return words[1:].astype(np.uint32)
