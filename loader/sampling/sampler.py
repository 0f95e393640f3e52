"""The batch sampler: gives each rank its ids, and saves and restores the position of the run.

Invariants: 1. With the same dataset and settings, the union over ranks of global batch b is the same set of samples.
This holds for every number of ranks that divides the global batch size, and for any number of resumes. 2. The position
is two numbers, `(epoch, samples)`, the same on all ranks. 3. Ranks exchange nothing.

Only the training loop knows how far a run has come: a DataLoader with workers requests batches long before it
delivers them. So the loop calls `record_step()` after each step, or passes `state_dict(batches_consumed=k)`. The
sampler detects the end of an epoch by itself: see `BatchIterator`.

Detects which DataLoader asks a sampler for an iterator, by the calling stack frame: torch offers no other way.

A `StepPlan` lists what the ranks of one machine read, step by step, ahead of the sampler. Steps
are counted over all epochs, which all have the same number of steps.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from loader.base.argument_checks import sample_count, whole_number
from loader.errors import OrderError, StateError
from loader.order import (
    DEFAULT_SEED,
    BatchPlan,
    EpochOrders,
    OrderSpec,
    StreamTable,
    Weight,
    batch_plan,
)
from loader.order.spec import check_is_state, check_settings, count_of, settings_of, streaming_position
from loader.world import World

# Ids computed at a time: 8 MiB.
BLOCK_SAMPLES = 1 << 20


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps of a run, as the machine of `world` sees them.

    epoch_orders: a copy, because the plan runs ahead of the sampler. steps: of an epoch.
    """

    epoch_orders: EpochOrders
    world: World
    global_batch_size: int
    drop_last: bool
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        plan = self._plan(self.world, 1)
        object.__setattr__(self, "steps", plan.batches(0, drop_last=self.drop_last))

    @property
    def samples(self) -> int:
        """Samples that this machine reads a step; the last step of an epoch may have fewer."""
        return self.global_batch_size // self.world.ranks * len(self._ranks)

    def ids(self, first: int, count: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield (step, ids of this machine) for steps first … first + count - 1 of one epoch, in order, in blocks.

        ids: (steps, samples) int64; the order within a step is not that of the batches. An incomplete last step
        comes alone.
        """
        epoch, step = divmod(first, self.steps)
        stop = min(step + count, self.steps)
        # Streams that alternate are cut batch by batch. Otherwise many batches are cut as one.
        together = max(1, BLOCK_SAMPLES // self.samples) if self.epoch_orders.spec.batching == "random" else 1
        while step < stop:
            whole = min(together - step % together, stop - step)
            if step + whole == self.steps and whole > 1:
                whole -= 1  # the last step alone: its padding depends on where the plan begins
            block = self._block(epoch, step, whole)
            if block is None:  # the block contains the epoch's end, which is not a whole step
                together, whole = 1, 1
                block = np.concatenate([self._batch(epoch, step, 1, rank) for rank in self._ranks])[None]
            yield epoch * self.steps + step, block
            step += whole

    def _block(self, epoch: int, step: int, count: int) -> NDArray[np.int64] | None:
        """Return (steps, samples) of whole steps; None if the last of them is incomplete."""
        size = self.global_batch_size // self.world.ranks
        parts = [self._batch(epoch, step, count, rank) for rank in self._ranks]
        if any(part.size != count * size for part in parts):
            return None
        block: NDArray[np.int64] = np.concatenate([part.reshape(count, size) for part in parts], axis=1)
        return block

    def _batch(self, epoch: int, step: int, count: int, rank: int) -> NDArray[np.int64]:
        """Return a rank's ids of `count` steps."""
        plan = self._plan(replace(self.world, rank=rank), count)
        start = step * self.global_batch_size if count > 1 else 0
        return plan.batch(epoch, start, 0 if count > 1 else step)

    @property
    def _ranks(self) -> Sequence[int]:
        return self.world.machine.dp_ranks

    def _plan(self, world: World, together: int) -> BatchPlan:
        # An incomplete last batch needs the sampler's padding only when batches are cut one at a time.
        drop_last = self.drop_last or together > 1
        return batch_plan(self.epoch_orders, world, self.global_batch_size * together, drop_last=drop_last)


def refuse_resharding(caller: FrameType) -> None:
    """Raise OrderError if the caller is accelerate's BatchSamplerShard, which would shard the batches a second time."""
    # accelerate gives each rank every n-th batch without asking the sampler. The batches that it drops are this rank's.
    # Match by code name: reading the frame's variables would keep all of them alive.
    if caller.f_code.co_qualname.startswith("BatchSamplerShard."):
        raise OrderError(
            "accelerate's prepare would deal out to the ranks, once more, batches that are one rank's already: most "
            "samples would never be read; leave the DataLoader out of prepare, or give it loader.fast.Loader"
        )


def read_ahead(caller: FrameType) -> int:
    """Return how many batches a DataLoader requests before it delivers the first; 0 for other callers."""
    # torch has no API for it. Its iterator (torch 2.13, and that of torchdata 0.11) requests this many batches for its
    # workers first, then one more with each batch that it delivers. Reading a frame's variables keeps them alive, so
    # read those of torch's own short-lived frames only.
    if not caller.f_globals.get("__name__", "").startswith(("torch.utils.data.", "torchdata.")):
        return 0
    loader = caller.f_locals.get("self")
    workers, each = (getattr(loader, name, None) for name in ("_num_workers", "_prefetch_factor"))
    return workers * each if isinstance(workers, int) and isinstance(each, int) else 0


STATE_VERSION = 1


@runtime_checkable
class SupportsShards(Protocol):
    """The part of a dataset that an order needs."""

    @property
    def shard_sizes(self) -> NDArray[np.int64]: ...

    @property
    def fingerprint(self) -> str: ...


@runtime_checkable
class SupportsStreams(SupportsShards, Protocol):
    """A dataset of several streams, with the weight of each; the shards of a stream are consecutive."""

    @property
    def shards_per_stream(self) -> Sequence[int]: ...

    @property
    def weights(self) -> Sequence[Weight]: ...


class SupportsBatches(Protocol):
    """The part of a dataset that reads batches, for example of an MDSDataset."""

    def __getitems__(self, which: list[int]) -> Sequence[Any]: ...


class ElasticBatchSampler:
    """Yields one list of ids a step for this rank; pass it to a DataLoader as `batch_sampler`.

    dataset: an MDSDataset, or the number of samples of each shard. global_batch_size: samples a step over all ranks, a
    multiple of the number of ranks. order: the name of an order, with seed, canonical_nodes, block_size in samples (0:
    the default) and epoch_size in samples (or as "100k"); or an OrderSpec (loader.order), which replaces these five
    and has all other settings. All of them, and the dataset, are part of the state and are checked on load.
    drop_last: drop the incomplete last global batch. False: its samples come as a smaller last batch, padded with
    repeats to the same number on each rank (the native order repeats none, so some ranks get one more).
    consumed_when_yielded: count a batch as consumed once it is handed out, for loaders that ask for the state at the
    moment they take a batch (torchdata's StatefulDataLoader).

    An iteration that ends normally moves on to the next epoch; `set_epoch` chooses one. An iteration that is aborted
    starts again at its beginning, even if a DataLoader's workers had already read to the end.
    Raises OrderError for settings that cannot work, and if accelerate would shard the batches again. An iteration
    raises OrderError if a process group initialised since contradicts the ranks from the environment. It raises
    StateError if the previous one was delivered in full but recorded in part.
    """

    def __init__(  # noqa: PLR0913 -- the options that StreamingDataset users know, each with a default
        self,
        dataset: SupportsShards | Sequence[int] | NDArray[np.integer[Any]],
        *,
        global_batch_size: int,
        seed: int = DEFAULT_SEED,
        order: str | OrderSpec = "py1e",
        canonical_nodes: int | None = None,
        world: World | None = None,
        epoch_size: int | str | None = None,
        block_size: int = 0,
        drop_last: bool = True,
        consumed_when_yielded: bool = False,
    ) -> None:
        sizes, fingerprint = _shards(dataset)
        self._dataset = repr(dataset) if isinstance(dataset, SupportsShards) else ""
        spec = OrderSpec(
            order if isinstance(order, str) else "py1e",
            seed,
            canonical_nodes,
            block_size,
            sample_count(epoch_size, "epoch_size"),
        )
        if isinstance(order, OrderSpec):
            if spec != OrderSpec():
                raise OrderError(
                    "an OrderSpec holds seed, canonical_nodes, block_size and epoch_size: set them there"
                )
            spec = order
        spec, shards_per_stream = _with_streams(spec, dataset, sizes.size)
        self._fingerprint, self._spec = fingerprint, spec
        self._world = World.detect() if world is None else world
        global_batch_size = whole_number(global_batch_size, "global_batch_size", "samples")
        if global_batch_size < 1:
            raise OrderError(f"global_batch_size is {global_batch_size}: a step takes at least 1 sample")
        if global_batch_size % self._world.ranks:
            raise OrderError(
                f"global_batch_size {global_batch_size} does not divide by {self._world.ranks} ranks: "
                f"each rank takes the same number of samples a step"
            )
        self._global_batch_size = global_batch_size
        self._drop_last = drop_last
        self._consumed_when_yielded = consumed_when_yielded
        table = StreamTable.of(sizes, shards_per_stream, spec)
        self._epoch_orders = EpochOrders(table, spec)
        self._plan = self._make_plan()
        self._epoch = 0
        self._start = 0  # samples of the epoch consumed before the current iteration
        self._recorded = 0  # steps that the training loop has recorded in the current iteration
        self._yielded = 0  # batches handed out in the current iteration
        self._requested = 0  # requests for a batch in the current iteration, including those past its end
        self._prefetched = 0  # of these, how many a loader makes before it delivers its first batch
        # Whether end_iteration reported that all batches were delivered; None: it was not called.
        self._ended: bool | None = None
        self._loaded_epoch = 0  # of the state that was loaded, until an iteration begins
        self._refuse_empty(table.samples)

    def _refuse_empty(self, samples: int) -> None:
        """Raise OrderError if an epoch of so many samples fills no global batch, and no smaller one is delivered."""
        if len(self) and not (self._drop_last and samples < self._global_batch_size):
            return
        ways = "lower it, or set a larger epoch_size"
        if self._spec.batching == "random":
            ways += ", or drop_last=False, which delivers an incomplete batch"
        is_more = f"is more than the epoch's {samples} samples"
        if samples >= self._global_batch_size:
            is_more = "takes more samples of a stream than an epoch has"
        raise OrderError(
            f"global_batch_size {self._global_batch_size} {is_more}, so no batch is whole: {ways}"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one before it begins."""
        return self._epoch

    def check_dataset(self, dataset: object) -> None:
        """Raise OrderError if a dataset is not the one that this sampler was made for; the message names both.

        A dataset without a fingerprint is not checked.
        """
        if not isinstance(dataset, SupportsShards):
            return
        if self._dataset:
            is_mine = dataset.fingerprint == self._fingerprint
        else:  # made for sizes
            is_mine = int(dataset.shard_sizes.sum()) == int(self._epoch_orders.table.sizes.sum())
        if not is_mine:
            mine = self._dataset or f"{int(self._epoch_orders.table.sizes.sum())} samples"
            raise OrderError(
                f"the sampler was made for another dataset: for {mine}, not for {dataset!r}; make it of this one"
            )

    @property
    def batch_size(self) -> int:
        """Samples a step on this rank."""
        return self._global_batch_size // self._world.ranks

    @property
    def step_plan(self) -> StepPlan:
        """The steps of the whole machine, for planning ahead; the sampler and the plan share an epoch's order."""
        return StepPlan(copy(self._epoch_orders), self._world, self._global_batch_size, self._drop_last)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, number of its batches handed out, by this run and the runs before it)."""
        return self._epoch, self._start // self._global_batch_size + self._yielded

    @property
    def remaining_batches(self) -> int:
        """The number of batches that an iteration from the current position of the epoch yields."""
        return self._batches(self._start)

    def batch_at(self, epoch: int, number: int) -> list[int]:
        """Return the ids of this rank in one global batch of an epoch. The position of the run stays as it is."""
        return self._batch(epoch, 0, number)

    def __len__(self) -> int:
        """The number of batches of a whole epoch (see remaining_batches for a resumed one)."""
        return self._batches(0)

    def __iter__(self) -> "BatchIterator":
        caller = sys._getframe(1)
        refuse_resharding(caller)
        self._world.confirm()
        if self._is_over:
            self._check_all_recorded()
            self._epoch, self._start = self._epoch + 1, 0
        self._loaded_epoch = 0
        self._begin()
        self._prefetched = read_ahead(caller)
        return BatchIterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. An epoch just loaded or in progress keeps its position.

        Raises StateError for an epoch before the loaded one: a trainer that counts epochs by itself would silently
        start from the beginning. Raises OrderError for a negative epoch.
        """
        epoch = whole_number(epoch, "epoch")
        if epoch < 0:
            raise OrderError(f"epoch {epoch} is negative")
        if epoch < self._loaded_epoch:
            raise StateError(
                f"epoch {epoch} comes before the loaded position, in epoch {self._loaded_epoch}: let the trainer count "
                f"from there (for accelerate: prepared.set_epoch(sampler.epoch) before the first iteration)"
            )
        if epoch != self._epoch or self._is_over:
            self._move(epoch, 0)

    def record_step(self, batches: int = 1) -> None:
        """Record that the training loop has finished with `batches` more batches. Raises StateError for too many."""
        batches = whole_number(batches, "batches")
        if not 0 <= batches <= self._yielded - self._recorded:
            raise StateError(
                f"{self._recorded + batches} batches cannot be consumed: {self._yielded} were handed out"
            )
        self._recorded += batches

    def end_iteration(self, delivered: int) -> None:
        """Report that the iteration is over, and how many batches were delivered: for loaders that read ahead.

        The next iteration moves on to the next epoch if all were delivered, however many were handed out.
        """
        self._ended = min(delivered, self._yielded) == self.remaining_batches

    def state_dict(self, batches_consumed: int | None = None) -> dict[str, Any]:
        """Return the position of the run: JSON-able, below 1 KB, the same on all ranks.

        batches_consumed: batches that the loop has finished with since its iteration of the loader began; None: the
        count of record_step. Raises StateError if batches were handed out and neither is given.
        """
        if batches_consumed is None:
            if self._consumed_when_yielded:
                batches_consumed = self._yielded
            elif self._recorded or not self._yielded:
                batches_consumed = self._recorded
            else:
                raise StateError(
                    f"{self._yielded} batches were handed out, but how many of them the training loop has consumed is "
                    f"not known (loaders read ahead): call record_step() after each step, or pass batches_consumed"
                )
        batches_consumed = whole_number(batches_consumed, "batches_consumed")
        if not 0 <= batches_consumed <= self._yielded:
            raise StateError(
                f"{batches_consumed} batches cannot be consumed: {self._yielded} were handed out"
            )
        return self._state(batches_consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where state_dict() was taken, on this number of ranks.

        Also takes a StreamingDataset's state dict. Its seed and canonical nodes must agree; the caller must match what
        it does not contain (order, block size, dataset, batch size). Raises StateError that names each difference,
        or what is wrong with the state; the sampler then keeps its position.
        """
        check_is_state(state, "sampler")
        if "sample_in_epoch" in state:
            epoch, samples = streaming_position(state, self._spec)
            self._check_padded_end(samples)
            self._move(epoch, min(samples, self._plan.length))
            self._loaded_epoch = self._epoch
            return
        if state.get("version") != STATE_VERSION or not isinstance(state.get("settings"), Mapping):
            raise StateError(
                f"this is not a state of a sampler (version {STATE_VERSION}, with settings); it holds "
                f"{', '.join(sorted(map(str, state))) or 'nothing'}"
            )
        check_settings(state["settings"], self._settings(), self._dataset)
        self._move(count_of(state, "epoch"), count_of(state, "samples"))
        self._loaded_epoch = self._epoch

    def _check_padded_end(self, samples: int) -> None:
        # On several ranks, StreamingDataset pads an epoch with repeats and counts them: less than one global batch. If
        # streams are batched separately, it pads each of them.
        table = self._epoch_orders.table
        sequences = 1 if self._spec.batching == "random" else table.streams
        if samples >= max(self._plan.length, table.samples) + sequences * self._global_batch_size:
            raise StateError(
                f"sample {samples} is beyond the epoch's {self._plan.length}: the saved run had another dataset or "
                f"epoch_size, or a larger global batch than {self._global_batch_size}: continue with those, or start "
                f"a new epoch without the state"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plan = self._make_plan()

    def _make_plan(self) -> BatchPlan:
        return batch_plan(self._epoch_orders, self._world, self._global_batch_size, drop_last=self._drop_last)

    def _move(self, epoch: int, samples: int) -> None:
        length = self._plan.length
        batch = self._global_batch_size
        if samples > -(-length // batch) * batch:
            raise StateError(f"sample {samples} is beyond the epoch's {length}")
        if samples % batch and samples != length:
            # Batches cut from there would differ from those of the uninterrupted run.
            raise StateError(
                f"sample {samples} of the epoch lies within a global batch of {batch}, not between two: set "
                f"global_batch_size to that of the saved run (its samples a rank and step, times its ranks), or to "
                f"another number that divides {samples}"
            )
        self._epoch, self._start = epoch, min(samples, length)
        self._begin()
        if self.remaining_batches == 0:
            self._epoch, self._start = epoch + 1, 0

    def _begin(self) -> None:
        self._recorded = self._yielded = self._requested = self._prefetched = 0
        self._ended = None

    @property
    def _is_over(self) -> bool:
        """Whether all batches of the current iteration were delivered to the loop."""
        return (
            self._requested - self._prefetched >= self.remaining_batches
            if self._ended is None
            else self._ended
        )

    def _check_all_recorded(self) -> None:
        # Moving on to the next epoch would skip samples that a state taken now still reads.
        if self._ended is None and 0 < self._recorded < self.remaining_batches:
            raise StateError(
                f"{self._recorded} of {self.remaining_batches} batches were recorded as consumed, though all were "
                f"delivered: call record_step() for each, or choose where to continue: load_state_dict(state_dict()) "
                f"after those recorded, set_epoch({self._epoch + 1}) for the next epoch, set_epoch({self._epoch}) to "
                f"repeat this one"
            )

    def _settings(self) -> dict[str, Any]:
        return settings_of(
            self._spec,
            samples=self._epoch_orders.samples(),
            global_batch_size=self._global_batch_size,
            drop_last=self._drop_last,
            fingerprint=self._fingerprint,
            world=self._world,
        )

    def _state(self, batches: int) -> dict[str, Any]:
        epoch, samples = self._epoch, self._start + batches * self._global_batch_size
        if batches == self.remaining_batches:
            epoch, samples = epoch + 1, 0
        return {"version": STATE_VERSION, "epoch": epoch, "samples": samples, "settings": self._settings()}

    def _batches(self, start: int) -> int:
        return self._plan.batches(start, drop_last=self._drop_last)

    def _batch(self, epoch: int, start: int, number: int) -> list[int]:
        """Return the ids of this rank in a global batch, counted from `start`."""
        found: list[int] = self._plan.batch(epoch, start, number).tolist()
        return found


class BatchIterator(Iterator[list[int]]):
    """One pass over an epoch, or over the rest of it.

    A DataLoader keeps a fixed number of undelivered batches at its workers. It requests one more for each batch that it
    delivers, at the end of the epoch without getting any. So the number of requests tells how many were delivered.
    """

    def __init__(self, sampler: ElasticBatchSampler) -> None:
        self._sampler = sampler
        self._epoch, self._start = sampler._epoch, sampler._start
        self._batches = sampler.remaining_batches
        self._next = self._requested = 0

    def __next__(self) -> list[int]:
        sampler = self._sampler
        self._requested += 1
        if self._next == self._batches:
            sampler._requested = self._requested
            raise StopIteration
        batch = sampler._batch(self._epoch, self._start, self._next)
        self._next += 1
        sampler._yielded, sampler._requested = self._next, self._requested
        return batch


def _shards(
    dataset: SupportsShards | Sequence[int] | NDArray[np.integer[Any]],
) -> tuple[NDArray[np.int64], str]:
    """Return (shards,) samples of each shard, and the dataset's fingerprint."""
    given = dataset.shard_sizes if isinstance(dataset, SupportsShards) else dataset
    sizes = np.asarray(given, np.int64)
    if sizes.ndim != 1 or sizes.size == 0 or int(sizes.min()) < 0 or not sizes.any():
        raise OrderError("there are no samples to order: the dataset is empty")
    if isinstance(dataset, SupportsShards):
        return sizes, dataset.fingerprint
    return sizes, hashlib.blake2b(sizes.astype("<i8").tobytes(), digest_size=16).hexdigest()


def _with_streams(spec: OrderSpec, dataset: object, shards: int) -> tuple[OrderSpec, Sequence[int]]:
    """Return the spec with the dataset's weights, and the number of shards of each stream."""
    if not isinstance(dataset, SupportsStreams):
        return spec, [shards]
    weights = tuple(dataset.weights)
    if spec.weights and spec.weights != weights and any(weight != Weight() for weight in weights):
        raise OrderError(
            "the dataset's streams and the OrderSpec have different weights: set them in one place"
        )
    return replace(spec, weights=spec.weights or weights), dataset.shards_per_stream
