"""Marks for the tests of a whole folder."""

from collections.abc import Collection, Iterable
from pathlib import Path

import pytest


def mark_all(
    items: Iterable[pytest.Item], conftest: str, *marks: pytest.MarkDecorator, using: Collection[str] = ()
) -> None:
    """Add marks to the tests in the folder of a conftest and below. using: only to users of one of these fixtures."""
    here = Path(conftest).parent
    for item in items:
        uses = not using or {*using} & {*getattr(item, "fixturenames", ())}
        if here in item.path.parents and uses:
            for mark in marks:
                item.add_marker(mark)
