"""A journal in another data format of LMDB stays as it is, and the error says how to read it."""

from pathlib import Path

import lmdb
import pytest

from fusecache.index.journal import Journal
from fusecache.index.lmdb_format import open_environment
from fusecache.model.errors import StateError

MAGIC = 0xBEEFC0DE.to_bytes(4, "little")


@pytest.mark.parametrize("header_bytes", [16, 24])
def test_unknown_format_is_left_alone(tmp_path: Path, header_bytes: int) -> None:
    data = tmp_path / "data.mdb"
    content = bytes(header_bytes) + MAGIC + (9).to_bytes(4, "little") + bytes(8192)
    data.write_bytes(content)
    with pytest.raises(
        StateError, match=r"data format 9.*Nothing is damaged.*pip install.*mount again.*Keep"
    ):
        Journal(tmp_path)
    assert data.read_bytes() == content


def test_damaged_journal_is_not_another_format(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(8192))
    with pytest.raises(StateError, match="the journal cannot be opened"):
        Journal(tmp_path)


@pytest.mark.skipif(not hasattr(lmdb.Environment, "lib_version"), reason="this lmdb has one format alone")
def test_new_file_has_the_format_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDB_DEFAULT_LIB_VERSION", "1")
    with open_environment(tmp_path) as environment:
        assert environment.lib_version()[0] == 0


@pytest.mark.skipif(not hasattr(lmdb.Environment, "lib_version"), reason="this lmdb has one format alone")
def test_journal_of_the_newer_format_is_read(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path), max_dbs=8, lib_version=1).close()
    with Journal(tmp_path) as journal:
        journal.apply([])
        assert journal.is_open
    with open_environment(tmp_path) as environment:
        assert environment.lib_version()[0] == 1
