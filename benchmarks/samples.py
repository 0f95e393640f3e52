"""The samples of the loader's benchmark, and checks that a library delivered all of them, once each. Pure."""

from collections.abc import Iterable
from typing import Any

import numpy as np

CONTEXT = 2048
# About 100 KB, as JPEGs differ in size.
BLOB_BYTES = (80_000, 120_000)
# Random bytes at a blob's start tell it from the others.
PREFIX_BYTES = 16


class DeliveryError(Exception):
    """A library did not deliver what was written, so its figures would not compare."""


def make_value(kind: str, number: int, rng: np.random.Generator) -> Any:
    """Return sample `number`: tokens that begin with it, or random bytes. From one seed, all libraries get the same."""
    if kind == "tokens":
        tokens = rng.integers(0, 50_000, CONTEXT, np.int32)
        tokens[0] = number
        return tokens
    return rng.bytes(int(rng.integers(*BLOB_BYTES)))


def check_count(count: int, samples: int, batch: int) -> None:
    """Raise DeliveryError unless a pass had every sample; an incomplete last batch may be missing."""
    if not samples // batch * batch <= count <= samples:
        raise DeliveryError(f"{count} samples of {samples} were delivered, in batches of {batch}")


def check_delivery(kind: str, batches: Iterable[Any], samples: int, batch: int, *, with_values: bool) -> None:
    """Go through a pass. Raises DeliveryError if its samples are too few, or repeated, or cut off.

    batches: of tokens, whose first one is the sample's number, or of blobs. with_values: False to check the count only.
    """
    count, seen = 0, set[Any]()
    for values in batches:
        count += len(values)
        if with_values:
            seen.update(_identities(kind, values))
    check_count(count, samples, batch)
    if with_values and len(seen) != count:
        raise DeliveryError(f"{count} samples were delivered, but only {len(seen)} different ones")
    if with_values and kind == "tokens" and not seen <= set(range(samples)):
        raise DeliveryError(f"samples were delivered that have other numbers than 0 to {samples - 1}")


def _identities(kind: str, values: Any) -> list[Any]:
    if kind == "tokens":
        if values.shape[1:] != (CONTEXT,):
            raise DeliveryError(f"a batch has the shape {tuple(values.shape)}, not (samples, {CONTEXT})")
        numbers: list[Any] = values[:, 0].tolist()
        return numbers
    for value in values:
        if not BLOB_BYTES[0] <= len(value) < BLOB_BYTES[1]:
            raise DeliveryError(f"a blob has {len(value)} bytes")
    return [bytes(value[:PREFIX_BYTES]) for value in values]
