"""The settings of an order. Together with the dataset, the epoch and the batch size, they alone decide it.

Plain values. Each is checked once, here; the rest of the package relies on it.

The settings that a saved position belongs to, and how they differ from the current ones.

A position `(epoch, samples)` means nothing without the order, the batch size and the dataset. So a state contains all
three, short enough to stay below 1 KB. A difference raises an error that names it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.base.argument_checks import optional_whole, plain_number, whole_number
from loader.errors import OrderError, StateError
from loader.world import World

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


STREAMING_KEYS = {"epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed"}
# A longer list of weights is stored as a digest, to keep the state below 1 KB.
LONGEST_WEIGHTS = 200
# The values of settings that states of earlier versions lack.
_EARLIER = {"batching": "random", "sampling": "balanced", "granularity": 1, "weights": "all"}


def settings_of(
    spec: OrderSpec, *, samples: int, global_batch_size: int, drop_last: bool, fingerprint: str, world: World
) -> dict[str, Any]:
    """Return everything that a position depends on, JSON-able. samples: of an epoch. fingerprint: of the dataset."""
    settings = {
        "order": spec.order,
        "seed": spec.seed,
        "canonical_nodes": spec.rows,
        "block_size": spec.block_size,
        "epoch_size": samples,
        "global_batch_size": global_batch_size,
        "drop_last": drop_last,
        "dataset": fingerprint,
        "batching": spec.batching,
        "sampling": spec.sampling,
        "granularity": spec.granularity,
        "weights": _weights(spec.weights),
    }
    if spec.tail_layout != (1, 1):
        settings["tail_layout"] = list(spec.tail_layout)
    if spec.batching == "device_per_stream":
        settings["nodes x ranks (device_per_stream is not elastic)"] = (
            f"{world.nodes} x {world.ranks_per_node}"
        )
    return settings


def _weights(weights: tuple[Weight, ...]) -> str:
    text = ", ".join(map(str, weights)) or "all"
    if len(text) <= LONGEST_WEIGHTS:
        return text
    return f"{len(weights)} streams, {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def check_is_state(state: object, whose: str) -> None:
    """Raise StateError unless a state is a mapping. whose: the object that it would be loaded into."""
    if not isinstance(state, Mapping):
        raise StateError(
            f"a {whose}'s state is the dict that state_dict() returned, not {type(state).__name__}; to start from the "
            f"beginning, load none"
        )


def check_settings(saved: Mapping[Any, Any], settings: Mapping[str, Any], dataset: str = "") -> None:
    """Raise StateError that names each setting that has changed. dataset: the name of the current dataset."""
    saved = _EARLIER | dict(saved)
    differences = [
        f"{name} was {saved.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted({*settings, *saved}, key=str)
        if saved.get(name) != settings.get(name)
    ]
    if saved.get("dataset") != settings.get("dataset"):
        raise StateError(
            f"the saved position belongs to another dataset than {dataset or 'these shard sizes'}: names, sample "
            f"counts, sizes or columns of its shards were different ({'; '.join(differences)}). Continue "
            f"with the dataset as it was, or start a new epoch without the state."
        )
    if differences:
        raise StateError(
            f"the saved position belongs to another order: {'; '.join(differences)}. "
            f"Continue with the saved settings, or start a new epoch without the state."
        )


def streaming_position(state: Mapping[str, Any], spec: OrderSpec) -> tuple[int, int]:
    """Return (epoch, samples) of a StreamingDataset's state.

    Seed and canonical nodes must agree. The state does not contain the rest (order, block size, batching, streams,
    dataset, batch size), so the caller must match it. Raises StateError for what differs or is missing.
    """
    missing = STREAMING_KEYS - set(state)
    if missing:
        raise StateError(f"this StreamingDataset state lacks {', '.join(sorted(missing))}")
    pairs = {
        "seed": (state["shuffle_seed"], spec.seed),
        "canonical_nodes": (state["num_canonical_nodes"], spec.rows),
    }
    differences = [f"{name} was {was!r} and is {now!r}" for name, (was, now) in pairs.items() if was != now]
    if differences:
        raise StateError(f"the StreamingDataset run had another order: {'; '.join(differences)}")
    samples = count_of(state, "sample_in_epoch")
    if state["epoch"] == -1 and not samples:
        return 0, 0  # StreamingDataset's code for "no epoch has begun"
    return count_of(state, "epoch"), samples


def count_of(state: Mapping[str, Any], name: str) -> int:
    """Return a count of a saved state. Raises StateError if it is not one."""
    value = state.get(name)
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
        raise StateError(f"{name} of the saved state is {value!r}, not a count")
    return int(value)
