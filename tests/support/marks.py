"""Marks for the tests of a whole folder."""

from collections.abc import Collection, Iterable
from pathlib import Path

import pytest


def is_below(item: pytest.Item, folder: Path) -> bool:
    """Return whether a test is in a folder.

    `Path.parents` takes forty times as long: two seconds of CPU time for all tests and folders.
    """
    return str(item.path).startswith(f"{folder}/")


def mark_all(
    items: Iterable[pytest.Item], conftest: str, *marks: pytest.MarkDecorator, using: Collection[str] = ()
) -> None:
    """Add marks to the tests in the folder of a conftest and below. using: only to users of one of these fixtures."""
    here = Path(conftest).parent
    for item in items:
        if is_below(item, here) and (not using or {*using} & {*getattr(item, "fixturenames", ())}):
            for mark in marks:
                item.add_marker(mark)
