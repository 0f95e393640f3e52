"""A bucket and a cache directory; files of a few MiB are large here: cut into parts as those above 64 MiB are."""

from pathlib import Path

import pytest

from fusecache.model.objects import MIB
from fusecache.policy.writeback import multipart
from tests.support.node import Bucket


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 4 MiB are parts of 4 MiB."""
    monkeypatch.setattr(multipart, "SINGLE_PUT_BYTES_MAX", 4 * MIB)
    monkeypatch.setattr(multipart, "_PART_BYTES_MIN", 4 * MIB)
    monkeypatch.setattr(multipart, "_PART_STEP", 4 * MIB)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A node's cache directory."""
    return tmp_path / "cache"


@pytest.fixture
def bucket() -> Bucket:
    """An empty bucket."""
    return Bucket()
