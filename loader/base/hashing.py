"""Computes the hashes that an index may contain: those of hashlib and of xxhash."""

import hashlib
from collections.abc import Iterable
from typing import Any

from loader.base.optional_imports import optional_module
from loader.errors import LoaderError

XXHASHES = frozenset(["xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"])


def digest(name: str, *pieces: bytes | bytearray) -> str:
    """Return the hex digest of data that comes in pieces. Raises LoaderError for an unknown hash."""
    if name in XXHASHES:
        xxhash = optional_module("xxhash", why=f"the hash {name}")
        return str(_over(getattr(xxhash, name)(), pieces))
    try:
        if name in hashlib.algorithms_available:
            return str(_over(hashlib.new(name), pieces))
    except (ValueError, TypeError):  # this OpenSSL lacks it, or it needs a digest length
        pass
    some = ", ".join(["md5", "sha1", "sha256", *sorted(XXHASHES)])
    raise LoaderError(f"the hash {name!r} is unknown: choose one of {some}, or another of hashlib's")


def _over(state: Any, pieces: Iterable[bytes | bytearray]) -> Any:
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def mismatch(hashes: dict[str, str], data: bytes) -> str:
    """Return the name of the first hash that does not match data, "" if all match."""
    return next((name for name, value in hashes.items() if digest(name, data) != value), "")
