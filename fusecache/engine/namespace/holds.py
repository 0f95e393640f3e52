"""Holds on content while threads work on it, so that it is neither sealed nor given away under them."""

from collections.abc import Iterator
from contextlib import contextmanager

from fusecache.engine.namespace.nodes import Generation


@contextmanager
def bytes_in_use(generation: Generation) -> Iterator[None]:
    """Keep a generation's file while a thread works on it, even if its bytes become cache meanwhile."""
    generation.readers += 1
    try:
        yield
    finally:
        generation.readers -= 1
        if generation.readers == 0 and generation.unread is not None:
            generation.unread.set()


@contextmanager
def being_written(generation: Generation) -> Iterator[None]:
    """Keep a generation from being sealed while a thread writes into it."""
    generation.writes += 1
    try:
        yield
    finally:
        generation.writes -= 1
        if generation.writes == 0 and generation.idle is not None:
            generation.idle.set()
