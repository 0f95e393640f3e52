"""The settings of an order. Together with the dataset, the epoch and the batch size, they alone decide it.

Plain values. Each is checked once, here; the rest of the package relies on it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.base.argument_checks import optional_whole, plain_number, whole_number
from loader.errors import OrderError

Ids = NDArray[np.int64]
# Stored orders use 4 bytes an id where that suffices.
Stored = NDArray[Any]

# Both from StreamingDataset 0.13: the seed and the minimum block size of a run that sets neither.
DEFAULT_SEED = 9176
SMALLEST_DEFAULT_BLOCK = 1 << 18
SAMPLES_OF_DEFAULT_BLOCKS = 4_000_000

SEQUENTIAL = "sequential"
NATIVE = "native"
# StreamingDataset's shuffles, and its unshuffled order.
STREAMING_ORDERS = ("py1e", "py1br", "py1b", "py1s", "py2s", "naive", SEQUENTIAL)
ORDERS = (*STREAMING_ORDERS, NATIVE)
DEFAULT_CANONICAL_NODES = 8
# A multiple of most node counts; each node then reads only its own shards.
DEFAULT_LANES = 64
# With 64 lanes it mixes 4 million samples, as StreamingDataset's default blocks do.
DEFAULT_NATIVE_BLOCK = 1 << 16

BATCHINGS = ("random", "stratified", "per_stream", "device_per_stream")
SAMPLINGS = ("balanced", "fixed")


@dataclass(frozen=True, slots=True)
class Weight:
    """The share of an epoch that comes from one stream; at most one of the three. None set: each sample once.

    proportion: of the epoch; set it for all streams or for none. Only the ratios count. repeat: times the stream's
    samples. choose: number of samples. Raises OrderError for two of them, or negative ones.
    """

    proportion: float | None = None
    repeat: float | None = None
    choose: int | None = None

    def __post_init__(self) -> None:
        given = []
        for name in ("proportion", "repeat", "choose"):
            if (value := getattr(self, name)) is not None:
                given.append(plain_number(value, name))
                object.__setattr__(self, name, given[-1])
        if len(given) > 1:
            raise OrderError("a stream has at most one of proportion, repeat and choose")
        if given and not 0 <= given[0] < float("inf"):
            raise OrderError(f"the weight {given[0]} of a stream is not a number from 0 up")

    def __str__(self) -> str:
        for name, value in (
            ("proportion", self.proportion),
            ("repeat", self.repeat),
            ("choose", self.choose),
        ):
            if value is not None:
                return f"{name}={value!r}"
        return "all"


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """All settings that decide an order, apart from the dataset, the epoch and the batch size.

    order: one of ORDERS. canonical_nodes: the rows of the order (`native`: its lanes). It never derives from the world,
    so the order survives a change of world. None: 8 (`native`: 64). block_size: in samples (`native`: of one lane); 0:
    the default. epoch_size: samples an epoch; None: as many as the weights say.

    weights: one a stream. Empty: each sample once, or epoch_size samples, of each stream in proportion to its size.
    sampling: partial passes are redrawn each epoch ("balanced") or drawn once for the run ("fixed"). granularity:
    samples drawn together from a shard; 1 for `native`. batching: how streams share a global batch: "random";
    "stratified" (each batch has the same share of each stream); "per_stream" (each batch is of one stream);
    "device_per_stream" (each rank's batch is of one stream; it depends on the number of ranks: not elastic).

    tail_layout: (nodes, ranks a node) of the StreamingDataset run that "stratified" or "per_stream" continues.
    StreamingDataset pads each stream with repeats to the same number on each rank, which may complete one more batch;
    (1, 1): no repeats. Raises OrderError for values out of range.
    """

    order: str = "py1e"
    seed: int = DEFAULT_SEED
    canonical_nodes: int | None = None
    block_size: int = 0
    epoch_size: int | None = None
    batching: str = "random"
    sampling: str = "balanced"
    granularity: int = 1
    weights: tuple[Weight, ...] = ()
    tail_layout: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("order", self.order, ORDERS),
            ("batching", self.batching, BATCHINGS),
            ("sampling", self.sampling, SAMPLINGS),
        ):
            if value not in known:
                raise OrderError(f"{name} {value!r} is unknown: choose one of {', '.join(known)}")
        for name in ("seed", "block_size", "granularity"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name))
        for name in ("canonical_nodes", "epoch_size"):
            object.__setattr__(self, name, optional_whole(getattr(self, name), name))
        if self.seed < 0:
            raise OrderError(f"seed {self.seed} is negative")
        if self.epoch_size is not None and self.epoch_size < 1:
            raise OrderError(f"epoch_size {self.epoch_size} is not positive; None means each sample once")
        if self.granularity < 1:
            raise OrderError(f"granularity {self.granularity} is not positive")
        if self.granularity > 1 and self.order == NATIVE:
            raise OrderError("granularity is StreamingDataset's; the native order draws evenly of each shard")
        if len(self.tail_layout) != 2 or min(self.tail_layout) < 1:
            raise OrderError(f"tail_layout {self.tail_layout} is not (nodes, ranks a node)")
        object.__setattr__(self, "weights", tuple(self.weights))
        self._fill_defaults()

    def _fill_defaults(self) -> None:
        nodes = self.canonical_nodes
        if nodes is None:
            nodes = DEFAULT_LANES if self.order == NATIVE else DEFAULT_CANONICAL_NODES
            object.__setattr__(self, "canonical_nodes", nodes)
        if nodes < 1:
            raise OrderError(f"canonical_nodes {nodes} is not positive")
        if self.block_size == 0:
            default = max(SAMPLES_OF_DEFAULT_BLOCKS // nodes, SMALLEST_DEFAULT_BLOCK)
            object.__setattr__(self, "block_size", DEFAULT_NATIVE_BLOCK if self.order == NATIVE else default)
        if self.block_size < 2:
            raise OrderError(
                f"block_size {self.block_size} shuffles nothing: at least 2, or 0 for the default"
            )

    @property
    def rows(self) -> int:
        """canonical_nodes, with its default filled in."""
        assert self.canonical_nodes is not None
        return self.canonical_nodes

    @property
    def is_shuffled(self) -> bool:
        """Whether the order differs from that of the index."""
        return self.order != SEQUENTIAL

    def epoch_seed(self, epoch: int) -> int:
        """Return the seed for what changes with the epoch only if samples are redrawn (StreamingDataset's rule)."""
        return self.seed + epoch if self.is_shuffled and self.sampling == "balanced" else self.seed
