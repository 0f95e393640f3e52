"""The file of listing rows on a disk that fails."""

import os
from pathlib import Path

import pytest

from fusecache.index import row_file
from fusecache.index.row_file import RowFile
from fusecache.model.errors import LocalDiskError


def test_a_write_that_began_before_a_failure_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's read fails while a pack is written: the next pack goes to memory, without a try."""
    file = RowFile(tmp_path / "rows")
    damaged = file.store(b"pack")
    (tmp_path / "rows").write_bytes(b"")
    write = os.pwrite

    def read_meanwhile(*arguments: int) -> int:
        with pytest.raises(LocalDiskError):
            file.read(damaged)
        return write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(row_file.os, "pwrite", read_meanwhile)
        written = file.store(b"other")
    assert file.read(written) == b"other"
    assert file.is_refused
    assert file.store(b"third").data == b"third"
    file.close()


def test_a_write_after_a_failure_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "RETRY_SECONDS", 0.0)
    file = RowFile(tmp_path / "rows")
    damaged = file.store(b"pack")
    (tmp_path / "rows").write_bytes(b"")
    with pytest.raises(LocalDiskError):
        file.read(damaged)
    assert file.is_refused
    assert file.store(b"other").data is None
    assert not file.is_refused
    file.close()
