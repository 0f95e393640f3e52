"""FilePlaces remembers directories, but never more than a bounded number."""

import os
import tracemalloc
from pathlib import Path

import pytest

from loader.hints import file_hints as module
from loader.hints.file_hints import FilePlaces


def test_memory_does_not_grow_with_the_number_of_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_DIRECTORIES", 50)
    places, sizes = FilePlaces(), []
    tracemalloc.start()
    try:
        for number in range(500):
            assert places.find(f"{tmp_path}/{number}/x") is None
            if number in (49, 499):
                snapshot = tracemalloc.take_snapshot()
                snapshot = snapshot.filter_traces([tracemalloc.Filter(True, "*/loader/hints/*")])  # noqa: FBT003
                sizes.append(sum(each.size for each in snapshot.statistics("filename")))
    finally:
        tracemalloc.stop()
    assert sizes[1] < 2 * sizes[0]
    assert places.has_missing


def test_links_in_a_circle_lead_nowhere(tmp_path: Path) -> None:
    os.symlink(tmp_path / "b", tmp_path / "a")
    os.symlink(tmp_path / "a", tmp_path / "b")
    assert FilePlaces().find(str(tmp_path / "a")) is None
