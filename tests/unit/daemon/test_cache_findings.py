"""What `doctor` says of the cache's size, on a disk whose free space the test chooses."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusecache.config.option_groups import MonitoringOptions, RequestOptions, SessionOptions, WritebackOptions
from fusecache.config.options import MountOptions
from fusecache.daemon.checkup import OK, WARNING, cache_findings
from fusecache.engine.cache.block_cache import FREE_SPACE_FLOOR_BYTES

MIB = 1 << 20
FREE_BYTES = FREE_SPACE_FLOOR_BYTES + 100 * MIB


@pytest.mark.parametrize(
    ("cached_bytes", "cache_size", "level"),
    [
        (0, 100 * MIB, OK),
        (0, 101 * MIB, WARNING),
        (2 * MIB, 102 * MIB, OK),
        (2 * MIB, 104 * MIB, WARNING),
    ],
)
def test_a_cache_may_use_what_is_free_and_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_bytes: int, cache_size: int, level: str
) -> None:
    (folder := tmp_path / "cache" / "blocks").mkdir(parents=True)
    (folder / "block").write_bytes(b"x" * cached_bytes)
    usage = SimpleNamespace(total=1 << 40, used=0, free=FREE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    options = MountOptions(
        source="s3://b",
        mountpoint=tmp_path / "mnt",
        cache_dir=tmp_path / "cache",
        cache_size=cache_size,
        memory=1,
        session=SessionOptions(),
        writeback=WritebackOptions(),
        requests=RequestOptions(),
        monitoring=MonitoringOptions(),
    )
    found = {each.subject: each for each in cache_findings(options)}["cache size"]
    assert (found.level, "the cache will use" in found.text) == (level, level == WARNING)
