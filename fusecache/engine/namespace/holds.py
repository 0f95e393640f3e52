"""Use counts of a file version: while a thread works on its content, it is neither sealed nor handed over."""

from collections.abc import Iterator
from contextlib import contextmanager

from fusecache.engine.namespace.nodes import FileVersion


@contextmanager
def reading(version: FileVersion) -> Iterator[None]:
    """Keep a version's file while a thread reads it, even if its bytes become cache at the same time."""
    version.readers += 1
    try:
        yield
    finally:
        version.readers -= 1
        if version.readers == 0 and version.unread is not None:
            version.unread.set()


@contextmanager
def writing(version: FileVersion) -> Iterator[None]:
    """Keep a version from being sealed while a thread writes into it."""
    version.writes += 1
    try:
        yield
    finally:
        version.writes -= 1
        if version.writes == 0 and version.idle is not None:
            version.idle.set()
