"""The batches of a run as a data source of Grain: record k is this rank's batch of step k.

    batches = GrainBatches(dataset, ElasticBatchSampler(dataset, global_batch_size=512), epochs=3)
    loader = grain.DataLoader(
        data_source=batches,
        sampler=grain.samplers.SequentialSampler(len(batches)),
        shard_options=grain.sharding.NoSharding(),                # the sampler has dealt to the ranks
        read_options=grain.ReadOptions(num_threads=4, prefetch_buffer_size=8),   # in batches
    )

`grain.MapDataset.source(batches)` works as well. Grain's own state counts records, which are steps: it continues the
run on any number of ranks that divides the global batch size. With `worker_count=0`, `Hints(dataset, batches)` tells a
mount what comes next.
"""

import json
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from loader.base.argument_checks import whole_number
from loader.errors import OrderError
from loader.mds.record_table import RecordTable
from loader.sampling.sampler import ElasticBatchSampler, StepPlan, SupportsBatches


def as_arrays(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch as a dict of columns: arrays where all values have one shape, else lists."""
    if isinstance(samples, RecordTable):
        return dict(samples.columns)
    return {name: _column([sample[name] for sample in samples]) for name in (samples[0] if samples else ())}


def _column(values: list[Any]) -> Any:
    is_number = all(isinstance(value, (int, float, np.generic, np.ndarray)) for value in values)
    return np.stack(values) if is_number and len({np.shape(value) for value in values}) == 1 else values


class GrainBatches:
    """The batches of `epochs` epochs, in the order of a sampler. Pickles, for Grain's worker processes.

    collate_fn: makes a batch of samples. Raises OrderError for the sampler of another dataset, or no epoch.
    """

    def __init__(
        self,
        dataset: SupportsBatches,
        sampler: ElasticBatchSampler,
        *,
        epochs: int,
        collate_fn: Callable[[Sequence[Any]], Any] = as_arrays,
    ) -> None:
        sampler.check_dataset(dataset)
        self._dataset, self._sampler, self._collate = dataset, sampler, collate_fn
        self._epochs = whole_number(epochs, "epochs")
        if self._epochs < 1:
            raise OrderError(f"{epochs} epochs have no batch: epochs is at least 1")
        self._read = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._epochs * len(self._sampler)

    def __getitem__(self, step: SupportsIndex) -> Any:
        """Return the batch of a step, counted over all epochs. Raises IndexError past the end."""
        number = operator.index(step)
        if not 0 <= number < len(self):
            raise IndexError(f"step {number} is not among the {len(self)} of {self._epochs} epochs")
        with self._lock:  # Grain reads in several threads, and an order is made once
            ids = self._sampler.batch_at(*divmod(number, len(self._sampler)))
            self._read = max(self._read, number + 1)
        return self._collate(self._dataset.__getitems__(ids))

    def __repr__(self) -> str:
        """Return what decides the order. Grain compares it with that of a saved state, so no rank is in it."""
        settings = self._sampler.state_dict(batches_consumed=0)["settings"]
        return f"GrainBatches({json.dumps(settings, sort_keys=True)})"

    @property
    def step_plan(self) -> StepPlan:
        """The steps of the whole machine, for Hints."""
        return self._sampler.step_plan

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, number of its batches that this process has read), for Hints."""
        return divmod(self._read, len(self._sampler))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
