"""The fast path: threads of the training process read batches ahead, in the sampler's order.

    loader = Loader(dataset, sampler)
    loader.load_state_dict(state)                # if there is one
    for batch in loader:                         # one epoch, or what is left of it
        ...                                      # one training step
        state = loader.state_dict()              # counts exactly the batches that this loop received

If the dataset lies on a mount of the daemon, the loader sends hints (`loader.hints`) from its construction on. So
make the loader, and load its state, before you build the model.

A sample of tokens costs so little CPU that worker processes are not needed, and reads release the interpreter's lock.
Images that Python code decodes gain nothing from threads: use the workers of a DataLoader for them.

Invariants: 1. Batches come in the sampler's order, whichever thread finishes first. 2. At most `ahead` batches exist
that the loop has not received. 3. An error is raised at its own batch, after all batches before it. 4. When an
iteration ends, for whatever reason, no new read starts for it; only reads in flight complete.
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
from typing import Any

import torch

from loader.errors import ArgumentError, LoaderError
from loader.hints.client import Hints, Plannable
from loader.mds.dataset import MDSDataset
from loader.mds.record_table import RecordTable
from loader.sampling.sampler import ElasticBatchSampler, SupportsBatches
from loader.torch.collate import Ragged, collate

# Cold samples of a remote bucket cost one round trip each per thread, if no hints were sent before.
THREADS = 16
# Two batches would hide a steady reader; four also hide a slow shard, at about 4 MiB each.
AHEAD = 4
# If a batch is slower than this because of reading (waiting, not computing), its samples are split among all threads.
# If it is slower because of making the batch, several batches are made concurrently.
SLOW_SECONDS_A_SAMPLE = 2e-4

_ENDED = "this iteration of the loader was ended by another one, by set_epoch or by load_state_dict"
_CLOSED = "the loader was closed: this iteration of it has ended"


class Loader:
    """Iterates over the batches of a sampler, one iteration at a time. A new iteration continues as the sampler does.

    dataset: an MDSDataset. collate_fn: makes a batch of samples. threads: number of reading threads. ahead: batches in
    memory besides the one that the loop has. pin_memory: put batches into pinned memory, which a GPU copies from
    directly; None: if CUDA is available. hints: send hints to the daemon of a mount until the loader is closed or
    garbage-collected; a pickled copy sends none.
    Raises LoaderError for numbers that cannot work, and OrderError for the sampler of another dataset.
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
        self._workers: _WorkerThreads | None = None
        self._hints: Hints | None = None
        if hints and isinstance(dataset, Plannable):
            self._hints = Hints(dataset, sampler)
            weakref.finalize(self, self._hints.close)

    def close(self) -> None:
        """End the iteration in progress, and stop the hints."""
        if self._workers is not None:
            self._workers.ending = _CLOSED
        self._stop()
        if self._hints is not None:
            self._hints.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workers": None, "_hints": None}

    def __len__(self) -> int:
        """The number of batches of a whole epoch."""
        return len(self.batch_sampler)

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one before it begins."""
        return self.batch_sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; an epoch just loaded or in progress keeps its position."""
        self._stop()
        was = self.batch_sampler.position
        self.batch_sampler.set_epoch(epoch)
        if self.batch_sampler.position != was:
            self._delivered = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run: after the batches that the loop received, whatever was read ahead.

        This is the sampler's state: JSON-able, below 1 KB, the same on all ranks.
        """
        return self.batch_sampler.state_dict(batches_consumed=self._delivered)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, by this class, the sampler or StreamingDataset.

        Raises StateError that names each difference; the loader then keeps its position.
        """
        self.batch_sampler.load_state_dict(state)
        self._stop()
        self._delivered = 0

    def __iter__(self) -> Iterator[Any]:
        """Begin an iteration; one in progress ends."""
        self._stop()
        if isinstance(self.dataset, MDSDataset):
            self.dataset.reopen_files()
        ids = iter(self.batch_sampler)
        self._workers = workers = _WorkerThreads(self._threads)
        self._delivered, self._is_under_way = 0, True
        return self._batches(ids, workers)

    def _batches(self, ids: Iterator[list[int]], workers: "_WorkerThreads") -> Iterator[Any]:
        waiting: deque[_PendingBatch] = deque()
        try:
            while True:
                if workers.process != os.getpid():
                    raise LoaderError(
                        f"this iteration belongs to process {workers.process}, whose threads read for it; process "
                        f"{os.getpid()} was forked from it and has none of them: begin one there, or fork first"
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
                del found  # so that the next batch can reuse its memory
        finally:
            workers.stop()
            if self._workers is workers:
                self._stop()

    def finished(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples."""
        batch = self._collate(samples)
        return _pinned(batch) if self._pins else batch

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.stop()
            self._workers = None
        if self._is_under_way:
            # The sampler counts the batches that it handed out; the loop may have received fewer.
            self._is_under_way = False
            self.batch_sampler.end_iteration(self._delivered)


class _WorkerThreads:
    """Threads that execute the parts put into their queue. Daemon threads: a hanging read does not block the exit.

    If one thread is fast enough to make all batches, the parts are serialized. Several threads would compete for the
    interpreter's lock, and for each other's caches and heaps (100 KB samples: 23 µs of CPU by 16 threads, 14 by one).
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.process = os.getpid()
        self.is_slow = True  # until measured: the first reads may go to a remote bucket
        self.is_heavy = True  # until measured: the time to make a batch is unknown
        self.stopped = False
        self.ending = _ENDED  # the error text if it is stopped before the iteration's end
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_BatchPart | None]] = []
        self._all: list[SimpleQueue[_BatchPart | None]] = []
        self._waiting: deque[_BatchPart] = deque()
        # Serialized parts wait here while one of them is being executed.
        self._serialized: deque[_BatchPart] = deque()
        self._is_serial_busy = False

    def do(self, task: "_BatchPart") -> None:
        """Have a thread execute a part, which raises nothing. Threads are started on demand."""
        with self._lock:
            if task.is_serialized and not self.stopped:
                if self._is_serial_busy:
                    self._serialized.append(task)
                    return
                self._is_serial_busy = True
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
        """End the threads after their current parts; waiting parts are dropped."""
        if self.process != os.getpid():  # the threads are the parent's, and one of them may hold the lock
            return
        with self._lock:
            if self.stopped:
                return
            self.stopped = True
            waiting = [*self._waiting, *self._serialized]
            self._waiting.clear()
            self._serialized.clear()
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
            was_serialized = task.is_serialized
            del task  # or its samples would stay in memory until the next part comes
            task = self._next(tasks, was_serialized=was_serialized)

    def _next(self, tasks: "SimpleQueue[_BatchPart | None]", *, was_serialized: bool) -> "_BatchPart | None":
        with self._lock:
            if was_serialized:
                if self._serialized:
                    return self._serialized.popleft()
                self._is_serial_busy = False
            if self._waiting:
                return self._waiting.popleft()
            self._idle.append(tasks)
        return tasks.get()


class _PendingBatch:
    """One batch in progress: read as one part, or as one part a thread if reads are slow."""

    def __init__(self, loader: Loader, ids: list[int], workers: _WorkerThreads) -> None:
        self._loader, self._workers, self._samples = loader, workers, len(ids)
        part_count = min(workers.threads, len(ids)) if workers.is_slow else 1
        size = -(-len(ids) // part_count)
        self._parts: list[Sequence[Any]] = [()] * -(-len(ids) // size)
        self._missing = len(self._parts)
        self._lock = threading.Lock()
        self._began = perf_counter()
        self._future: Future[Any] = Future()
        is_serialized = not workers.is_slow and not workers.is_heavy
        for number in range(len(self._parts)):
            workers.do(
                _BatchPart(
                    self, number, ids[number * size : (number + 1) * size], is_serialized=is_serialized
                )
            )

    def result(self) -> Any:
        """Wait for the batch. Raises the error of reading or collating it."""
        try:
            return self._future.result()
        finally:
            del self  # it has the error, whose traceback has this frame: a cycle that keeps shards open

    def read(self, number: int, ids: list[int]) -> None:
        """Read one part; the thread that completes the last part makes the batch."""
        try:
            if len(self._parts) == 1:
                self._began = perf_counter()  # it may have waited in the queue
            self._parts[number] = self._loader.dataset.__getitems__(ids)
            with self._lock:
                self._missing -= 1
                if self._missing:
                    return
            slow = self._began + SLOW_SECONDS_A_SAMPLE * self._samples
            self._workers.is_slow = perf_counter() > slow
            batch = self._loader.finished(_joined(self._parts))
            self._workers.is_heavy = perf_counter() > slow
            self._future.set_result(batch)
        except BaseException as problem:  # noqa: BLE001 -- the consumer raises a thread's errors
            self.fail(problem)
            del self  # see `result`

    def drop(self) -> None:
        """Have `result` raise that the iteration has ended."""
        self.fail(LoaderError(self._workers.ending))

    def fail(self, problem: BaseException) -> None:
        """Have `result` raise an error, unless the batch is done already."""
        with self._lock:
            if not self._future.done():
                self._future.set_exception(problem)


class _BatchPart:
    """Reads one part of a batch; is_serialized: one at a time. Not a closure: dropping it must free what it holds."""

    def __init__(self, batch: _PendingBatch, number: int, ids: list[int], *, is_serialized: bool) -> None:
        self._batch = batch
        # Not a method: an error of the batch keeps its frames, and thus this part, as long as its traceback.
        self.read: Callable[[], None] = partial(batch.read, number, ids)
        self.is_serialized = is_serialized

    def drop(self) -> None:
        """Drop the part: the iteration has ended; a late caller of `result` gets the reason."""
        self._batch.drop()


def _joined(parts: list[Sequence[Any]]) -> Sequence[Any]:
    """Join the parts of a batch."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, RecordTable) for part in parts):
        return RecordTable.joined(parts)  # type: ignore[arg-type]  # all of them are
    return [sample for part in parts for sample in part]


def _pinned(batch: Any) -> Any:
    """Return the same batch with its tensors in pinned memory."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, Ragged):
        return Ragged(batch.values.pin_memory(), batch.offsets.pin_memory())
    if isinstance(batch, dict):
        return {name: _pinned(column) for name, column in batch.items()}
    return batch
