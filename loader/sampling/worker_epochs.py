"""Keeps the epoch count of a `StreamingDataset` consistent across the worker processes of one rank.

The processes share anonymous memory. Ranks need not agree, because each counts its own iterations.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.errors import LoaderError
from loader.sampling.sampler import StepPlan


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """The position of a loaded state. samples: of the epoch, over all ranks."""

    epoch: int
    samples: int
    canonical_nodes: int
    seed: int
    initial_nodes: int | None


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """The progress of a rank's workers, in the form in which Hints reads a sampler."""

    step_plan: StepPlan
    epochs: "WorkerEpochs"

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, number of its batches that a worker has begun)."""
        begun, loaded = self.epochs.farthest(), self.epochs.position()
        if begun is not None:
            return begun
        return (loaded.epoch, loaded.samples // self.step_plan.global_batch_size) if loaded else (0, 0)


class WorkerEpochs:
    """The epoch of each iteration, the same in all worker processes of a rank.

    The memory is shared by fork, or by passing its descriptor. It contains int64 numbers: the next epoch; the count of
    loaded states; the loaded state (epoch -1: none). Then for each worker: its generation (the seed that a DataLoader
    gives all its workers); the count of loaded states when that generation began; the first epoch for these two; the
    iterations since; and 1 + epoch * 2^32 + batch for the batch that it is at (0: not begun).
    """

    _HEAD, _SLOT, _WORKERS = 8, 5, 1024

    def __init__(self) -> None:
        self._open(os.memfd_create("loader-epochs"))
        self._numbers[0], self._numbers[2] = 0, -1

    def _open(self, descriptor: int) -> None:
        size = 8 * (self._HEAD + self._SLOT * self._WORKERS)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._descriptor = descriptor
        self._numbers = np.frombuffer(mmap.mmap(descriptor, size), np.int64)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return {"shared": DupFd(self._descriptor)}
        return {"copied": self._numbers.tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "shared" in state:
            self._open(state["shared"].detach())
        else:
            self._open(os.memfd_create("loader-epochs"))
            self._numbers[:] = np.frombuffer(state["copied"], np.int64)

    @property
    def next(self) -> int:
        """The epoch of the next iteration."""
        return int(self._numbers[0])

    def position(self) -> WorkerPosition | None:
        """Return the state that was loaded last, None if none was."""
        epoch, samples, nodes, seed, initial = self._numbers[2:7].tolist()
        return None if epoch < 0 else WorkerPosition(epoch, samples, nodes, seed, initial or None)

    def move(self, position: WorkerPosition) -> None:
        """Continue at a position."""
        with self._locked():
            self._numbers[0] = position.epoch
            self._numbers[1] += 1
            self._store(position)
            self._slots[:, 4] = 0

    def join(self, position: WorkerPosition) -> None:
        """Continue all workers at a position that each of them loaded by itself; none of them has begun."""
        with self._locked():
            self._numbers[0] = position.epoch + 1  # for workers that start after these have ended
            self._store(position)

    def _store(self, position: WorkerPosition) -> None:
        self._numbers[2:7] = (
            position.epoch, position.samples, position.canonical_nodes, position.seed, position.initial_nodes or 0,
        )  # fmt: skip

    def record(self, worker: int, epoch: int, batch: int) -> None:
        """Record that a worker begins a batch."""
        self._slots[worker, 4] = (epoch << 32) + batch + 1

    def farthest(self) -> tuple[int, int] | None:
        """Return (epoch, batch) of the most advanced worker; None if none has begun since a state was loaded."""
        farthest = int(self._slots[:, 4].max())
        return divmod(farthest - 1, 1 << 32) if farthest else None

    def begin(
        self, worker: int, generation: int | None, *, again: int | None = None
    ) -> tuple[int, WorkerPosition | None]:
        """Begin an iteration; return its epoch, and the state loaded last.

        generation: None without workers. again: the epoch, for a worker that resumes in the middle of it.
        """
        with self._locked():
            epoch = self._upcoming(worker, generation) if again is None else again
            if generation is not None:
                mine = self._slots[worker]
                first, iterations = self._progress_of(worker, generation) if again is None else (again, 0)
                mine[:4] = (*self._generation_key(generation), first, iterations + 1)
            self._numbers[0] = max(self.next, epoch + 1)
            return epoch, self.position()

    def upcoming(self, worker: int, generation: int | None) -> int:
        """Return the epoch that an iteration begun now would have."""
        with self._locked():
            return self._upcoming(worker, generation)

    def _upcoming(self, worker: int, generation: int | None) -> int:
        return self.next if generation is None else sum(self._progress_of(worker, generation))

    def _progress_of(self, worker: int, generation: int) -> tuple[int, int]:
        """Return (first epoch of a worker's generation, iterations that the worker has begun)."""
        if worker >= self._WORKERS:
            raise LoaderError(f"the DataLoader has more than {self._WORKERS} workers: lower num_workers")
        slots, now = self._slots, self._generation_key(generation)
        peers = slots[(slots[:, 0] == now[0]) & (slots[:, 1] == now[1])]
        mine = slots[worker]
        return int(peers[0, 2]) if len(peers) else self.next, int(mine[3]) if (mine[:2] == now).all() else 0

    def _generation_key(self, generation: int) -> tuple[int, int]:
        # The seed with bit 61 set: never 0, which marks an unused slot.
        return generation & (1 << 62) - 1 | 1 << 61, int(self._numbers[1])

    @property
    def _slots(self) -> NDArray[np.int64]:
        """(workers, numbers) of each worker."""
        return self._numbers[self._HEAD :].reshape(self._WORKERS, self._SLOT)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
