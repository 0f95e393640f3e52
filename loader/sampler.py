"""The batch sampler: hands each rank its ids, and says where the run stands.

Promise: with the same dataset and settings, the union over ranks of global batch b is the same set of samples
for every number of ranks that divides the global batch size, before and after any number of resumes. The
position is two numbers, `(epoch, samples)`, the same on all ranks. Nothing is exchanged between ranks.

How far a run has come only the training loop knows: a DataLoader with workers asks for batches well before it
delivers them. So the loop says so, by `record_step()` after each step, or by
`state_dict(batches_consumed=k)`.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from loader.errors import OrderError, StateError
from loader.order import (
    DEFAULT_SEED,
    Line,
    OrderSpec,
    epoch_ids,
    rank_positions,
    samples_per_rank,
)
from loader.world import World

STATE_VERSION = 1
STREAMING_KEYS = {"epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed"}


@runtime_checkable
class Shards(Protocol):
    """A dataset, as far as an order needs it."""

    @property
    def shard_sizes(self) -> NDArray[np.int64]: ...

    @property
    def fingerprint(self) -> str: ...


class ElasticBatchSampler:
    """Yields, for this rank, one list of ids a step; pass it to a DataLoader as `batch_sampler`.

    dataset: an MDSDataset, or the sizes of its shards. global_batch_size: samples a step over all ranks, a
    multiple of their number. order, seed, canonical_nodes, block_size (0: the default), epoch_size: see
    loader.order; all of them, and the dataset, are part of the state and checked on load. drop_last: leave
    out the incomplete last global batch; else its samples, filled up by repeats to the same number a rank,
    come as a smaller last batch. consumed_when_yielded: for loaders that ask for the state at the moment they
    take a batch (torchdata's StatefulDataLoader): then a batch counts as consumed once it is handed out.

    Iterating to the end moves on to the next epoch for the next iteration; `set_epoch` chooses one. An
    iteration that was broken off begins again where it began.
    Raises OrderError for settings that cannot work.
    """

    def __init__(  # noqa: PLR0913 -- the options that StreamingDataset users know, each with its default
        self,
        dataset: Shards | Sequence[int] | NDArray[np.integer[Any]],
        *,
        global_batch_size: int,
        seed: int = DEFAULT_SEED,
        order: str = "py1e",
        canonical_nodes: int = 8,
        world: World | None = None,
        epoch_size: int | None = None,
        block_size: int = 0,
        drop_last: bool = True,
        consumed_when_yielded: bool = False,
    ) -> None:
        if isinstance(dataset, Shards):
            self._sizes = np.asarray(dataset.shard_sizes, np.int64)
            self._fingerprint = dataset.fingerprint
        else:
            self._sizes = np.asarray(dataset, np.int64)
            self._fingerprint = hashlib.blake2b(
                self._sizes.astype("<i8").tobytes(), digest_size=16
            ).hexdigest()
        if (
            self._sizes.ndim != 1
            or self._sizes.size == 0
            or int(self._sizes.min()) < 0
            or not self._sizes.any()
        ):
            raise OrderError("there is no sample to order: the dataset is empty")
        self._spec = OrderSpec(order, seed, canonical_nodes, block_size, epoch_size)
        self._world = World.detect() if world is None else world
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
        self._samples_per_epoch = epoch_size or int(self._sizes.sum())
        self._epoch = 0
        self._start = 0  # samples of the epoch consumed before the current iteration
        self._recorded = 0  # steps that the training loop has told of, in the current iteration
        self._yielded = 0  # batches handed out in the current iteration
        self._exhausted = False
        self._ids: tuple[int, NDArray[np.int64]] | None = None
        self._line()  # numbers that contradict each other shall fail here, not in the first step
        if len(self) == 0:
            raise OrderError(
                f"global_batch_size {global_batch_size} is more than the epoch's {self._samples_per_epoch} "
                f"samples, and drop_last leaves out incomplete batches: there would be none. Lower it, or set "
                f"drop_last=False or a larger epoch_size."
            )

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, or of the next one before it begins."""
        return self._epoch

    @property
    def batch_size(self) -> int:
        """Samples a step of this rank."""
        return self._global_batch_size // self._world.ranks

    @property
    def remaining_batches(self) -> int:
        """Batches that an iteration from the present start of the epoch yields."""
        return self._batches(self._start)

    def __len__(self) -> int:
        """Batches of a whole epoch (see remaining_batches for a resumed one)."""
        return self._batches(0)

    def __iter__(self) -> "BatchIterator":
        if self._exhausted:
            self._epoch, self._start = self._epoch + 1, 0
        self._exhausted = False
        self._recorded = self._yielded = 0
        return BatchIterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. The epoch just loaded or under way keeps its position."""
        if epoch < 0:
            raise OrderError(f"epoch {epoch} is negative")
        if epoch != self._epoch or self._exhausted:
            self._move(epoch, 0)

    def record_step(self, batches: int = 1) -> None:
        """Tell that the training loop has finished with so many more batches."""
        if not 0 <= batches <= self._yielded - self._recorded:
            raise StateError(
                f"{self._recorded + batches} batches cannot be consumed: {self._yielded} were handed out"
            )
        self._recorded += batches

    def state_dict(self, batches_consumed: int | None = None) -> dict[str, Any]:
        """Return where the run stands: JSON-able, below 1 KB, the same on all ranks.

        batches_consumed: batches that the loop has finished with since its iteration of the loader began;
        without it, what record_step was told. Raises StateError if neither says anything though batches were
        handed out.
        """
        if batches_consumed is None:
            if self._consumed_when_yielded:
                batches_consumed = self._yielded
            elif self._recorded or not self._yielded:
                batches_consumed = self._recorded
            else:
                raise StateError(
                    f"{self._yielded} batches were handed out, but nobody told how many of them the training "
                    f"loop has consumed (loaders read ahead): call record_step() after each step, or pass "
                    f"batches_consumed"
                )
        if not 0 <= batches_consumed <= self._yielded:
            raise StateError(
                f"{batches_consumed} batches cannot be consumed: {self._yielded} were handed out"
            )
        return self._state(batches_consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where state_dict() was taken, on this number of ranks.

        Takes StreamingDataset's state dict, too: seed and canonical nodes must agree; what it does not hold
        (order, block size, dataset, batch size) is for the caller to match. Raises StateError naming each
        difference, or what is wrong with the state; the sampler then stays where it was.
        """
        if not isinstance(state, Mapping):
            raise StateError(
                f"a sampler's state is the dict that state_dict() returned, not {type(state).__name__}; "
                f"to begin anew, load none"
            )
        if "sample_in_epoch" in state:
            self._move(*self._streaming_position(state))
            return
        if state.get("version") != STATE_VERSION or not isinstance(state.get("settings"), Mapping):
            raise StateError(
                f"this is no state of a sampler (version {STATE_VERSION}, with settings); it holds "
                f"{', '.join(sorted(map(str, state))) or 'nothing'}"
            )
        settings = self._settings()
        saved = state["settings"]
        differences = [
            f"{name} was {saved.get(name)!r} and is {settings.get(name)!r}"
            for name in sorted({*settings, *saved}, key=str)
            if saved.get(name) != settings.get(name)
        ]
        if differences:
            raise StateError(
                f"the saved position belongs to another order: {'; '.join(differences)}. "
                f"Continue with the saved settings, or start a new epoch without the state."
            )
        self._move(_count(state, "epoch"), _count(state, "samples"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None}

    def _move(self, epoch: int, samples: int) -> None:
        length = Line(self._samples_per_epoch, self._spec.canonical_nodes).length_of_any_world
        batch = self._global_batch_size
        if samples > -(-length // batch) * batch:
            raise StateError(f"sample {samples} is beyond the epoch's {length}")
        if samples % batch and samples != length:
            # Batches cut from there on would be no batches of the uninterrupted run.
            raise StateError(
                f"sample {samples} of the epoch lies within a global batch of {batch}, not between two: set "
                f"global_batch_size to that of the saved run (its samples a rank and step, times its ranks), or to "
                f"another number that divides {samples}"
            )
        self._epoch, self._start = epoch, min(samples, length)
        self._recorded = self._yielded = 0
        self._exhausted = False
        if self.remaining_batches == 0:
            self._epoch, self._start = epoch + 1, 0

    def _streaming_position(self, state: Mapping[str, Any]) -> tuple[int, int]:
        missing = STREAMING_KEYS - set(state)
        if missing:
            raise StateError(f"this StreamingDataset state lacks {', '.join(sorted(missing))}")
        saved = {"seed": state["shuffle_seed"], "canonical_nodes": state["num_canonical_nodes"]}
        differences = [
            f"{name} was {value!r} and is {getattr(self._spec, name)!r}"
            for name, value in saved.items()
            if value != getattr(self._spec, name)
        ]
        if differences:
            raise StateError(f"the StreamingDataset run had another order: {'; '.join(differences)}")
        return _count(state, "epoch"), _count(state, "sample_in_epoch")

    def _settings(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "order": spec.order,
            "seed": spec.seed,
            "canonical_nodes": spec.canonical_nodes,
            "block_size": spec.block_size,
            "epoch_size": self._samples_per_epoch,
            "global_batch_size": self._global_batch_size,
            "drop_last": self._drop_last,
            "dataset": self._fingerprint,
        }

    def _state(self, batches: int) -> dict[str, Any]:
        epoch, samples = self._epoch, self._start + batches * self._global_batch_size
        if batches == self.remaining_batches:
            epoch, samples = epoch + 1, 0
        return {"version": STATE_VERSION, "epoch": epoch, "samples": samples, "settings": self._settings()}

    def _line(self) -> tuple[Line, World]:
        """The epoch's line, and the world as it divides it."""
        world = self._world
        spread = (
            max(world.nodes, self._spec.canonical_nodes) % min(world.nodes, self._spec.canonical_nodes) == 0
        )
        if not spread:
            # These nodes do not divide the rows between them, so count all ranks as one node: same global
            # batches.
            world = World(world.rank, world.ranks)
        return Line(self._samples_per_epoch, self._spec.canonical_nodes, world.nodes), world

    def _batches(self, start: int) -> int:
        remaining = Line(self._samples_per_epoch, self._spec.canonical_nodes).length_of_any_world - start
        complete, rest = divmod(remaining, self._global_batch_size)
        return complete + (rest > 0 and not self._drop_last)

    def _batch(self, epoch: int, start: int, number: int) -> list[int]:
        """The ids of this rank in the given global batch past `start`."""
        if self._ids is None or self._ids[0] != epoch:
            self._ids = epoch, epoch_ids(self._sizes, self._spec, epoch)
        line, world = self._line()
        first = number * self.batch_size
        stop = min(first + self.batch_size, samples_per_rank(line.length, world, start))
        positions = rank_positions(line.length, world, first, stop, start)
        found: list[int] = self._ids[1][line.indices(positions)].tolist()
        return found


class BatchIterator(Iterator[list[int]]):
    """One pass over an epoch, or over what is left of it."""

    def __init__(self, sampler: ElasticBatchSampler) -> None:
        self._sampler = sampler
        self._epoch, self._start = sampler._epoch, sampler._start
        self._batches = sampler.remaining_batches
        self._next = 0

    def __next__(self) -> list[int]:
        sampler = self._sampler
        if self._next == self._batches:
            sampler._exhausted = True
            raise StopIteration
        batch = sampler._batch(self._epoch, self._start, self._next)
        self._next += 1
        sampler._yielded = self._next
        return batch


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StateError(f"{name} of the saved state is {value!r}, not a count")
    return value
