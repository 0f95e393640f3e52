"""The sample order of an epoch: a pure function of shard sizes, seed, epoch and a few settings.

Two families (docs/order.md explains both): StreamingDataset 0.13's shuffles, bit by bit, so that a run can change
over in the middle of an epoch; and `native`, for any size. Nothing here reads a dataset, keeps state or knows
of torch. How an epoch comes about, and where:

1. `spec`: the settings. `streams`: how many samples of each stream, each shard, and which (*units*).
2. `shuffles`: StreamingDataset's, over stored ids; `bijection` and `native`: the other, computed.
3. `lines`: the line that global batches are cut from, and a rank's part of each. `epochs`: the line's ids, in
   memory or in a file that the processes of a machine share (`cache`).
4. `batching`: which positions make global batch b, where streams take turns or shares.

Invariants: 1. The set of samples of a complete global batch does not depend on the world (`device_per_stream`
alone excepted, which says so). 2. The same call gives the same array on every machine.
"""

from loader.order.batching import BatchPlan, batch_plan
from loader.order.epoch_order import EpochOrders, epoch_ids, ordered_ids
from loader.order.native import NativePartition, NativeRun, native_units
from loader.order.order_files import OrderFiles
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
    "OrderFiles",
    "OrderSpec",
    "RankPartition",
    "StreamTable",
    "Weight",
    "batch_plan",
    "epoch_ids",
    "native_units",
    "ordered_ids",
    "rank_positions",
    "samples_per_rank",
    "shuffle_units",
]
