"""The fast path: batches read ahead by threads of the training process, in the sampler's order.

    loader = Loader(dataset, sampler)
    loader.load_state_dict(state)                # if there is one
    for batch in loader:                         # one epoch, or what is left of it
        ...                                      # one training step
        state = loader.state_dict()              # exactly the batches that this loop was given

Where the dataset lies on a mount of the daemon, the daemon is told what comes next (`loader.hints`) from construction
on: make the loader, and load its state, before the model.

A sample costs so little CPU that no worker processes are needed for tokens; reading lets go of the interpreter's lock.
Images that are decoded by Python code do not gain by threads: a DataLoader's workers are the place for these.

Invariants: 1. Batches come in the sampler's order, whichever thread finishes first. 2. At most `ahead` batches exist
that the loop was not given. 3. An error is raised at the batch that it befell, after all before it. 4. When an
iteration ends, however it ends, nothing is read on its behalf any more but what a thread is in the middle of.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

import torch

from loader.errors import ArgumentError, LoaderError
from loader.hints.client import Hints, Plannable
from loader.mds.record_table import RecordTable
from loader.sampling.sampler import ElasticBatchSampler
from loader.torch.collate import Ragged, collate

# Cold samples of a far bucket come one a round trip and thread, where nobody asked for them before.
THREADS = 16
# Two would hide a steady reader; four also hide a slow shard, at some 4 MiB each.
AHEAD = 4
# Slower than this, a batch is shared out to all threads if its reading takes the time (which is waited, not computed),
# and several batches are made at once if making them does.
SLOW_SECONDS_A_SAMPLE = 2e-4

_ENDED = "this iteration of the loader was ended by another one, by set_epoch or by load_state_dict"
_CLOSED = "the loader was closed: this iteration of it has ended"


class SupportsBatches(Protocol):
    """What is read: an MDSDataset."""

    def __getitems__(self, which: list[int]) -> Sequence[Any]: ...


class Loader:
    """Iterates over the batches of a sampler; one iteration at a time. A new one goes on as the sampler's does.

    dataset: an MDSDataset. collate_fn: samples into a batch. threads: that read. ahead: batches in memory besides the
    one that the loop has. pin_memory: batches lie in memory that a GPU copies from by itself; None: if CUDA is there.
    hints: tell a mount's daemon what comes next, until the loader is closed or gone; a copy of it does not.
    Raises LoaderError for numbers that cannot work, OrderError for the sampler of another dataset.
    """

    def __init__(
        self,
        dataset: SupportsBatches,
        sampler: ElasticBatchSampler,
        *,
        collate_fn: Callable[[Sequence[Any]], Any] = collate,
        threads: int = THREADS,
        ahead: int = AHEAD,
        pin_memory: bool | None = None,
        hints: bool = True,
    ) -> None:
        if threads < 1 or ahead < 1:
            raise LoaderError(f"{threads} threads that read {ahead} batches ahead: both are at least 1")
        if not isinstance(sampler, ElasticBatchSampler):
            raise ArgumentError(
                f"the loader takes a sampler, which knows ranks and order: ElasticBatchSampler(dataset, "
                f"global_batch_size=…), not {sampler!r}"
            )
        sampler.check_dataset(dataset)
        self.dataset = dataset
        self.batch_sampler = sampler
        self._collate = collate_fn
        self._threads, self._ahead = threads, ahead
        self._pins = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._delivered = 0
        self._is_under_way = False
        self._crew: _WorkerThreads | None = None
        self._hints: Hints | None = None
        if hints and isinstance(dataset, Plannable):
            self._hints = Hints(dataset, sampler)
            weakref.finalize(self, self._hints.close)

    def close(self) -> None:
        """End the iteration under way, and the hints."""
        if self._crew is not None:
            self._crew.ending = _CLOSED
        self._stop()
        if self._hints is not None:
            self._hints.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_crew": None, "_hints": None}

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.batch_sampler)

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one before it begins."""
        return self.batch_sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the one just loaded or under way keeps its position."""
        self._stop()
        was = self.batch_sampler.position
        self.batch_sampler.set_epoch(epoch)
        if self.batch_sampler.position != was:
            self._delivered = 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: after the batches that the loop was given, whatever was read ahead.

        The sampler's state: JSON-able, below 1 KB, the same on all ranks.
        """
        return self.batch_sampler.state_dict(batches_consumed=self._delivered)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, of this class, of the sampler or of StreamingDataset.

        Raises StateError that names each difference; the loader then stays where it was.
        """
        self.batch_sampler.load_state_dict(state)
        self._stop()
        self._delivered = 0

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration; one under way ends."""
        self._stop()
        ids = iter(self.batch_sampler)
        self._crew = workers = _WorkerThreads(self._threads)
        self._delivered, self._is_under_way = 0, True
        return self._batches(ids, workers)

    def _batches(self, ids: Iterator[list[int]], workers: "_WorkerThreads") -> Iterator[Any]:
        waiting: deque[_PendingBatch] = deque()
        try:
            while True:
                if workers.process != os.getpid():
                    raise LoaderError(
                        f"this iteration belongs to process {workers.process}, whose threads read for it; "
                        f"process {os.getpid()} was forked off it and has none of them: begin one there, or fork first"
                    )
                if workers.stopped:
                    raise LoaderError(workers.ending)
                while len(waiting) < self._ahead and (which := next(ids, None)) is not None:
                    waiting.append(_PendingBatch(self, which, workers))
                if not waiting:
                    return
                found = waiting.popleft().result()
                self._delivered += 1
                yield found
                del found  # or its memory could not be the next one's
        finally:
            workers.stop()
            if self._crew is workers:
                self._stop()

    def finished(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples."""
        batch = self._collate(samples)
        return _pinned(batch) if self._pins else batch

    def _stop(self) -> None:
        if self._crew is not None:
            self._crew.stop()
            self._crew = None
        if self._is_under_way:
            # The sampler counts what it handed out, which the loop may never have been given.
            self._is_under_way = False
            self.batch_sampler.end_iteration(self._delivered)


class _WorkerThreads:
    """Threads that do what is put before them. Daemons: a read that hangs does not keep the process from ending.

    Where batches are made so fast that one thread is enough, one makes all of them, in turn: several take the
    interpreter's lock and each other's caches and heaps away (100 KB samples: 23 µs of CPU by 16 threads, 14 by one).
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.process = os.getpid()
        self.is_slow = True  # what nobody has read yet may be far away
        self.is_heavy = True  # and nobody knows how long a batch takes to be made
        self.stopped = False
        self.ending = _ENDED  # how, if it is stopped before its end
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_BatchPart | None]] = []
        self._all: list[SimpleQueue[_BatchPart | None]] = []
        self._waiting: deque[_BatchPart] = deque()
        # What is done one after the other waits here while one of its kind is being done.
        self._in_turn: deque[_BatchPart] = deque()
        self._turn_is_taken = False

    def do(self, task: "_BatchPart") -> None:
        """Have a thread do it; it raises nothing. Threads are started as they are needed."""
        with self._lock:
            if task.is_in_turn and not self.stopped:
                if self._turn_is_taken:
                    self._in_turn.append(task)
                    return
                self._turn_is_taken = True
            if self.stopped:
                pass
            elif self._idle:
                self._idle.pop().put(task)
                return
            elif len(self._all) < self.threads:
                tasks: SimpleQueue[_BatchPart | None] = SimpleQueue()
                tasks.put(task)
                self._all.append(tasks)
                name = f"loader-{len(self._all)}"
                threading.Thread(target=self._run, args=(tasks,), name=name, daemon=True).start()
                return
            else:
                self._waiting.append(task)
                return
        task.drop()

    def stop(self) -> None:
        """End the threads once they are done with what they do; what waits is not begun."""
        if self.process != os.getpid():  # they are the parent's, and one of them may have had the lock
            return
        with self._lock:
            if self.stopped:
                return
            self.stopped = True
            waiting = [*self._waiting, *self._in_turn]
            self._waiting.clear()
            self._in_turn.clear()
            for tasks in self._all:
                tasks.put(None)
        for task in waiting:
            task.drop()

    def _run(self, tasks: "SimpleQueue[_BatchPart | None]") -> None:
        task = tasks.get()
        while task is not None:
            if self.stopped:
                task.drop()
            else:
                task.read()
            was_in_turn = task.is_in_turn
            del task  # its samples are not to be kept until the next one comes
            task = self._next(tasks, was_in_turn=was_in_turn)

    def _next(self, tasks: "SimpleQueue[_BatchPart | None]", *, was_in_turn: bool) -> "_BatchPart | None":
        with self._lock:
            if was_in_turn:
                if self._in_turn:
                    return self._in_turn.popleft()
                self._turn_is_taken = False
            if self._waiting:
                return self._waiting.popleft()
            self._idle.append(tasks)
        return tasks.get()


class _PendingBatch:
    """One batch on its way: read in one piece, or in as many as there are threads where reading waits."""

    def __init__(self, loader: Loader, ids: list[int], workers: _WorkerThreads) -> None:
        self._loader, self._crew, self._samples = loader, workers, len(ids)
        pieces = min(workers.threads, len(ids)) if workers.is_slow else 1
        size = -(-len(ids) // pieces)
        self._parts: list[Sequence[Any]] = [()] * -(-len(ids) // size)
        self._missing = len(self._parts)
        self._lock = threading.Lock()
        self._began = perf_counter()
        self._future: Future[Any] = Future()
        is_in_turn = not workers.is_slow and not workers.is_heavy
        for number in range(len(self._parts)):
            workers.do(
                _BatchPart(self, number, ids[number * size : (number + 1) * size], is_in_turn=is_in_turn)
            )

    def result(self) -> Any:
        """Wait for the batch. Raises what reading or collating it raised."""
        try:
            return self._future.result()
        finally:
            del self  # which has the error, whose traceback has this frame: a ring that keeps shards open

    def read(self, number: int, ids: list[int]) -> None:
        """Read one part; whoever reads the last one makes the batch."""
        try:
            if len(self._parts) == 1:
                self._began = perf_counter()  # it may have waited for its turn
            self._parts[number] = self._loader.dataset.__getitems__(ids)
            with self._lock:
                self._missing -= 1
                if self._missing:
                    return
            slow = self._began + SLOW_SECONDS_A_SAMPLE * self._samples
            self._crew.is_slow = perf_counter() > slow
            batch = self._loader.finished(_joined(self._parts))
            self._crew.is_heavy = perf_counter() > slow
            self._future.set_result(batch)
        except BaseException as problem:  # noqa: BLE001 -- a thread's errors are the consumer's
            self.fail(problem)
            del self  # as in result

    def drop(self) -> None:
        """Have `result` say that the iteration has ended."""
        self.fail(LoaderError(self._crew.ending))

    def fail(self, problem: BaseException) -> None:
        """Have `result` raise it, unless it raises something already."""
        with self._lock:
            if not self._future.done():
                self._future.set_exception(problem)


class _BatchPart:
    """Reads one part of a batch; is_in_turn: after those before it. Not a closure: what it holds goes with it."""

    def __init__(self, batch: _PendingBatch, number: int, ids: list[int], *, is_in_turn: bool) -> None:
        self._batch = batch
        # No method, whose frame would hold this piece as long as an error of the batch has a traceback.
        self.read: Callable[[], None] = partial(batch.read, number, ids)
        self.is_in_turn = is_in_turn

    def drop(self) -> None:
        """Leave it, as nobody waits for it any more; who does is told."""
        self._batch.drop()


def _joined(parts: list[Sequence[Any]]) -> Sequence[Any]:
    """The parts of a batch as one."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, RecordTable) for part in parts):
        return RecordTable.joined(parts)  # type: ignore[arg-type]  # all of them are
    return [sample for part in parts for sample in part]


def _pinned(batch: Any) -> Any:
    """The same batch with its tensors in pinned memory."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, Ragged):
        return Ragged(batch.values.pin_memory(), batch.offsets.pin_memory())
    if isinstance(batch, dict):
        return {name: _pinned(column) for name, column in batch.items()}
    return batch
