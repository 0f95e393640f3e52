"""The parts of the real StreamingDataset that make an order, without files, processes and shared memory."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from loader.order import OrderSpec
from tests.support.real_streaming import import_streaming


@dataclass(frozen=True)
class Layout:
    """Who reads: counts of nodes, ranks a node, workers a rank; samples a rank and step; samples read already."""

    nodes: int
    ranks_per_node: int
    workers: int
    batch_size: int
    drop_first: int = 0

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """Samples a step of all ranks."""
        return self.ranks * self.batch_size


def load_library() -> SimpleNamespace:
    """Import what makes an order."""
    import_streaming()
    logging.getLogger("streaming").setLevel(logging.ERROR)
    from streaming.base.batching import generate_work
    from streaming.base.dataset import StreamingDataset
    from streaming.base.shuffle import algos
    from streaming.base.stream import Stream
    from streaming.base.world import World

    return SimpleNamespace(
        work=generate_work, dataset=StreamingDataset, stream=Stream, world=World, shuffles=tuple(algos)
    )


def library_work(
    library: SimpleNamespace,
    sizes: np.ndarray[Any, Any],
    shards_per_stream: Sequence[int],
    spec: OrderSpec,
    epoch: int,
    layout: Layout,
    initial_nodes: int | None = None,
) -> np.ndarray[Any, Any]:
    """What the library would read: (nodes, ranks a node, workers, batches a worker, batch), -1 for nothing.

    initial_nodes: of the run that this one resumes.
    """
    streams = [library.stream.__new__(library.stream) for _ in shards_per_stream]
    for stream, weight in zip(streams, spec.weights, strict=False):  # no weights: nothing to set
        for name in ("proportion", "repeat", "choose"):
            if (value := getattr(weight, name)) is not None:
                setattr(stream, name, value)
    borders = np.cumsum([0, *shards_per_stream])
    counts = np.array([sizes[a:b].sum() for a, b in pairwise(borders)])
    dataset = library.dataset.__new__(library.dataset)
    dataset.__dict__.update(
        streams=streams,
        num_streams=len(streams),
        shard_offset_per_stream=borders[:-1],
        shards_per_stream=np.array(shards_per_stream),
        samples_per_shard=sizes,
        sample_offset_per_shard=sizes.cumsum() - sizes,
        sampling_method=spec.sampling,
        sampling_granularity=spec.granularity,
        epoch_seed_change=spec.is_shuffled and spec.sampling == "balanced",
        num_canonical_nodes=spec.canonical_nodes,
        batch_size=layout.batch_size,
        partition_algo="relaxed",
        initial_physical_nodes=initial_nodes,
        shuffle=spec.is_shuffled,
        shuffle_algo=spec.order,
        shuffle_seed=spec.seed,
        shuffle_block_size=spec.block_size,
    )
    world = library.world(layout.nodes, layout.ranks_per_node, layout.workers, 0)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # it warns of shards larger than a block, of repeats, of zero divisions
        dataset.epoch_size = library.stream.apply_weights(streams, counts, spec.epoch_size, spec.seed)
        work: np.ndarray[Any, Any] = library.work(spec.batching, dataset, world, epoch, layout.drop_first)
    return work
