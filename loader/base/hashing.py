"""Computes the hashes that an index may contain: those of hashlib and of xxhash."""

import hashlib

from loader.base.optional_imports import optional_module
from loader.errors import LoaderError

XXHASHES = frozenset(["xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"])


def digest(name: str, data: bytes) -> str:
    """Return the hex digest of data. Raises LoaderError for a hash that neither hashlib nor xxhash has."""
    if name in XXHASHES:
        xxhash = optional_module("xxhash", why=f"the hash {name}")
        return str(getattr(xxhash, name)(data).hexdigest())
    try:
        if name in hashlib.algorithms_available:
            return hashlib.new(name, data).hexdigest()
    except (ValueError, TypeError):  # this OpenSSL lacks it, or it needs a digest length
        pass
    some = ", ".join(["md5", "sha1", "sha256", *sorted(XXHASHES)])
    raise LoaderError(f"the hash {name!r} is unknown: choose one of {some}, or another of hashlib's")


def mismatch(hashes: dict[str, str], data: bytes) -> str:
    """Return the name of the first hash that does not match data, "" if all match."""
    return next((name for name, value in hashes.items() if digest(name, data) != value), "")
