"""Draws items from an order before the job asks for them. The job gets each item, and each error, as without it."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# How long an item that the job could have may wait for later ones.
DRAW_SECONDS = 0.1


class DrawnItems:
    """The items of an iterator that were drawn, and that the job does not have yet.

    samples: how many they stand for. has_ended: the iterator has no more for this pass.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.items: deque[Any] = deque()
        self.samples = 0
        self.has_ended = False
        self._source = source
        self._problem: Exception | None = None

    def draw(self, samples: int) -> list[Any]:
        """Draw until there are this many samples, or for DRAW_SECONDS; return what is new."""
        new: list[Any] = []
        until = time.monotonic() + DRAW_SECONDS
        while self.samples < samples and not self.has_ended:
            try:
                item = next(self._source)
            except StopIteration:
                self.has_ended = True
                break
            except Exception as problem:  # noqa: BLE001  # the job gets it in its turn
                self.has_ended, self._problem = True, problem
                break
            new.append(item)
            self.items.append(item)
            self.samples += samples_of(item)
            if time.monotonic() >= until:
                break
        return new

    def take(self) -> Any:
        """Return the next item. Raises StopIteration if there is none, or the error that came in its place."""
        with suppress(IndexError):
            item = self.items.popleft()
            self.samples -= samples_of(item)
            return item
        self.samples = 0
        problem, self._problem = self._problem, None
        raise problem or StopIteration


def samples_of(item: Any) -> int:
    """Return how many samples an item stands for; an empty list counts too, as an order may have nothing else."""
    return max(1, len(item)) if isinstance(item, list) else 1


def is_same(left: list[Any], right: list[Any]) -> bool:
    """Return whether lists are surely equal: arrays as items may not tell."""
    try:
        return left == right
    except Exception:  # noqa: BLE001  # what comparing items raises is up to them
        return False
