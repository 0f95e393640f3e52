"""Services of the kernel that need no disk of their own."""

import os
from pathlib import Path

import pytest

from fusecache.disk.native import replace_synced


def test_a_replaced_file_is_private_and_synced_before_and_after_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "facts.json"
    path.write_text("old")
    path.chmod(0o644)
    synced: list[tuple[str, str]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((os.readlink(f"/proc/self/fd/{fd}"), path.read_text()))
    )
    replace_synced(path, ("new ", "text"))
    assert synced == [(str(tmp_path / "facts.new"), "old"), (str(tmp_path), "new text")]
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["facts.json"]
