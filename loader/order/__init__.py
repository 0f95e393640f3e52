"""The sample order of an epoch: a pure function of shard sizes, seed, epoch and a few settings.

Two families (docs/order.md explains both): the shuffles of StreamingDataset 0.13, bit by bit, so that a run can
migrate in the middle of an epoch; and `native`, for datasets of any size. This package reads no dataset, keeps no
state and does not know torch. The steps:

1. `spec`: the settings. `streams`: how many samples, and which, an epoch takes of each stream and shard (*units*).
2. `shuffles`: StreamingDataset's, over stored ids. `native`: the native order, computed.
3. `rank_partition`: the positions that global batches are cut from, and each rank's part. `epoch_order`: the ids at
   these positions, computed, or in memory.
4. `batching`: the positions of global batch b, for each way to mix streams.

Invariants: 1. The set of samples of a complete global batch does not depend on the world (except with
`device_per_stream`, which documents it). 2. The same call gives the same array on every machine.
"""

from loader.order.batching import BatchPlan, batch_plan
from loader.order.epoch_order import EpochOrders, ordered_ids
from loader.order.native import NativePartition, NativeRun, native_units
from loader.order.rank_partition import RankPartition, rank_positions, samples_per_rank
from loader.order.shuffles import shuffle_units
from loader.order.spec import (
    BATCHINGS,
    DEFAULT_SEED,
    NATIVE,
    ORDERS,
    SAMPLINGS,
    SEQUENTIAL,
    STREAMING_ORDERS,
    OrderSpec,
    Weight,
)
from loader.order.streams import StreamTable

__all__ = [
    "BATCHINGS",
    "DEFAULT_SEED",
    "NATIVE",
    "ORDERS",
    "SAMPLINGS",
    "SEQUENTIAL",
    "STREAMING_ORDERS",
    "BatchPlan",
    "EpochOrders",
    "NativePartition",
    "NativeRun",
    "OrderSpec",
    "RankPartition",
    "StreamTable",
    "Weight",
    "batch_plan",
    "native_units",
    "ordered_ids",
    "rank_positions",
    "samples_per_rank",
    "shuffle_units",
]
