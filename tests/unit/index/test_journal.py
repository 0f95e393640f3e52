"""The journal keeps what it was given, all or nothing, and refuses what it cannot read without touching it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from fusecache.index import journal as journal_module
from fusecache.index.journal import (
    DropAbort,
    DropAttributes,
    DropConflict,
    DropFile,
    DropOperation,
    Journal,
    PutAbort,
    PutAttributes,
    PutConflict,
    PutFile,
    PutOperation,
)
from fusecache.model.errors import JournalMapFull, StateError
from fusecache.model.records import (
    ConflictRecord,
    FileRecord,
    FileState,
    OperationKind,
    OperationRecord,
    PosixAttributes,
    Reason,
)

ATTRIBUTES = PosixAttributes(0o644, 1, 2, 3)


def file(generation: int, key: str = "key", sequence: int = 0) -> FileRecord:
    return FileRecord(generation, FileState.FLUSHED, key, 10, sequence, "uuid", "boot", ATTRIBUTES)


def operation(sequence: int) -> OperationRecord:
    return OperationRecord(sequence, OperationKind.RENAME, "a", "b", attributes=ATTRIBUTES)


def test_rows_are_there_after_reopening_oldest_first(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.apply(
            [PutFile(file(300)), PutFile(file(2)), PutOperation(operation(70)), PutOperation(operation(5))]
        )
    with Journal(tmp_path) as journal:
        assert journal.files() == [file(2), file(300)]
        assert journal.operations() == [operation(5), operation(70)]


def test_a_dropped_row_is_gone_and_dropping_it_again_is_fine(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.apply([PutFile(file(1)), PutOperation(operation(2))])
        for _ in range(2):
            journal.apply([DropFile(1), DropOperation(2)])
        assert (journal.files(), journal.operations()) == ([], [])


def test_conflicts_are_kept_until_they_are_dropped(tmp_path: Path) -> None:
    conflict = ConflictRecord(4, "key", "key.conflict", 10, 1.5, "changed")
    settled = replace(conflict, settled=True)
    with Journal(tmp_path) as journal:
        journal.apply([PutConflict(conflict), PutConflict(replace(conflict, number=9)), PutConflict(settled)])
    with Journal(tmp_path) as journal:
        assert journal.conflicts() == [settled, replace(conflict, number=9)]
        journal.apply([DropConflict(4), DropConflict(9)])
        assert journal.conflicts() == []
        assert journal.highest_number() == 9


def test_uploads_to_be_aborted_are_kept_until_the_bucket_has_answered(tmp_path: Path) -> None:
    long_key, long_id = "k" * 1000, "u" * 600
    with Journal(tmp_path) as journal:
        journal.apply([PutAbort(long_key, long_id), PutAbort("key", "1"), PutAbort("key", "2")])
        journal.apply([DropAbort("key", "1"), DropAbort("key", "unknown")])
    with Journal(tmp_path) as journal:
        assert sorted(journal.aborts()) == [("key", "2"), (long_key, long_id)]


def test_why_a_file_is_kept_aside_is_kept_and_older_rows_do_without(tmp_path: Path) -> None:
    kept = replace(file(1), state=FileState.ORPHAN, reason=Reason.POWER_CUT, moment=1.5, error="words")
    with Journal(tmp_path) as journal:
        journal.apply([PutFile(kept), PutFile(file(2))])
        assert journal.files() == [kept, file(2)]
    with lmdb.open(str(tmp_path), max_dbs=4) as env, env.begin(write=True) as txn:
        rows = env.open_db(b"files", txn=txn)
        row = json.loads(txn.get((2).to_bytes(8, "big"), db=rows))
        older = {name: value for name, value in row.items() if name not in ("reason", "moment")}
        txn.put((2).to_bytes(8, "big"), json.dumps(older).encode(), db=rows)
    with Journal(tmp_path) as journal:
        assert journal.files() == [kept, file(2)]


def test_numbers_never_go_back_even_if_their_rows_are_gone(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        assert journal.highest_number() == 0
        journal.apply([PutFile(file(7, sequence=9)), PutOperation(operation(8))])
        journal.apply([DropFile(7), DropOperation(8)])
        journal.apply([PutFile(file(3))])
    with Journal(tmp_path) as journal:
        assert journal.highest_number() == 9


def test_attributes_belong_to_a_version_and_keys_may_be_long(tmp_path: Path) -> None:
    key = "k" * 1024
    with Journal(tmp_path) as journal:
        journal.apply([PutAttributes(key, "etag", ATTRIBUTES)])
        assert journal.attributes(key, "etag") == ATTRIBUTES
        assert journal.attributes(key, "other") is None
        assert journal.attributes(key[:-1], "etag") is None


def test_a_batch_that_does_not_fit_is_not_there_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAP_BYTES", 1 << 20)
    with Journal(tmp_path) as journal:
        journal.apply([PutFile(file(1))])
        with pytest.raises(JournalMapFull, match="address space"):
            journal.apply([PutFile(file(number, "x" * 1000)) for number in range(2, 2000)])
        assert journal.files() == [file(1)]
        assert journal.highest_number() == 1
        journal.apply([PutFile(file(2))])


def test_what_was_applied_survives_a_killed_process(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fusecache.index.journal import Journal, PutFile\n"
        "from tests.unit.index.test_journal import file\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for number in range(1, 50): journal.apply([PutFile(file(number))])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], check=False, env={**os.environ, "PYTHONPATH": "."}
    )
    assert done.returncode == -signal.SIGKILL
    with Journal(tmp_path) as journal:
        assert [record.generation for record in journal.files()] == list(range(1, 50))


@pytest.mark.parametrize("database", ["files", "operations"])
def test_an_unreadable_row_is_reported_and_stays(tmp_path: Path, database: str) -> None:
    Journal(tmp_path).close()
    with lmdb.open(str(tmp_path), max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"12345678", b"not a row", db=env.open_db(database.encode(), txn=txn))
    for _ in range(2):
        with Journal(tmp_path) as journal, pytest.raises(StateError, match="nothing was changed"):
            getattr(journal, database)()


def test_a_newer_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with lmdb.open(str(tmp_path), max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"2", db=env.open_db(b"meta", txn=txn))
    with pytest.raises(StateError, match=r"format 2.*another --cache-dir"):
        Journal(tmp_path)


def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    data = tmp_path / "data.mdb"
    data.write_bytes(b"\0" * 4096 + b"rubbish" * 1000)
    before = data.read_bytes()
    with pytest.raises(StateError, match="Move the cache directory aside"):
        Journal(tmp_path)
    assert data.read_bytes() == before


def test_attributes_are_bounded_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the bound the rows of the oldest files go, and the newest stay."""
    monkeypatch.setattr(journal_module, "ATTRIBUTES_MAX", 100)
    with Journal(tmp_path) as journal:
        for number in range(2000):
            attributes = PosixAttributes(0o644, 0, 0, number)
            journal.apply([PutAttributes(f"key-{number}", "etag", attributes)])
        kept = [number for number in range(2000) if journal.attributes(f"key-{number}", "etag")]
    assert len(kept) <= 100
    assert len([number for number in kept if number >= 1900]) > 50


def test_attributes_of_a_replaced_version_go(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.apply([PutAttributes("key", "old", ATTRIBUTES)])
        journal.apply([DropAttributes("key", "old"), PutAttributes("key", "new", ATTRIBUTES)])
        assert journal.attributes("key", "old") is None
        journal.apply([DropAttributes("key", "new"), PutAttributes("key", "new", ATTRIBUTES)])
        assert journal.attributes("key", "new") == ATTRIBUTES
