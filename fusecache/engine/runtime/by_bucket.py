"""The parts of the engine that each bucket has for itself, so that one bucket's outage does not touch the others.

In a mount of several buckets every key begins with its bucket's folder, `dataset/a/b`. A mount of one bucket has one of
each part, under the name "".
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


def bucket_of(key: str) -> str:
    """Return the name of a key's bucket in a mount of several: its first part."""
    return key.partition("/")[0]


class ByBucket(Generic[T]):
    """One part for each bucket, found by key."""

    def __init__(self, names: Iterable[str], make: Callable[[str], T]) -> None:
        """names: of the buckets' folders; "" also serves the keys of no bucket. make: builds the part of one."""
        self._parts = {name: make(name) for name in names}
        self._first = next(iter(self._parts.values()))
        self._is_single = len(self._parts) == 1

    def of(self, key: str) -> T:
        """Return the part of a key's bucket; of the first bucket if the key is in none."""
        return self._first if self._is_single else self._parts.get(bucket_of(key), self._first)

    def __iter__(self) -> Iterator[T]:
        return iter(self._parts.values())

    def items(self) -> Iterable[tuple[str, T]]:
        """Return each bucket's name and part."""
        return self._parts.items()
