"""Lists what the ranks of one machine read, step by step and many steps at a time, ahead of the sampler.

The batches are those of `order.batching`. Steps are counted over all epochs, which all have the same number of steps.
This module reads no dataset.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from loader.order import BatchPlan, EpochOrders, batch_plan
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
