"""The settings that a saved position belongs to, and how they differ from the current ones.

A position `(epoch, samples)` means nothing without the order, the batch size and the dataset. So a state contains all
three, short enough to stay below 1 KB. A difference raises an error that names it.
"""

import hashlib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from loader.errors import StateError
from loader.order.spec import OrderSpec, Weight
from loader.world import World

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
