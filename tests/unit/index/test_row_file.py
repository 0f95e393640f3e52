"""The file of listing rows: on a disk that fails, and used by several threads."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from fusecache.index import listings
from fusecache.index.listings import RowFile
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
        patched.setattr(listings.os, "pwrite", read_meanwhile)
        written = file.store(b"other")
    assert file.read(written) == b"other"
    assert file.is_refused
    assert file.store(b"third").data == b"third"
    file.close()


def test_a_write_after_a_failure_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "RETRY_SECONDS", 0.0)
    file = RowFile(tmp_path / "rows")
    damaged = file.store(b"pack")
    (tmp_path / "rows").write_bytes(b"")
    with pytest.raises(LocalDiskError):
        file.read(damaged)
    assert file.is_refused
    assert file.store(b"other").data is None
    assert not file.is_refused
    file.close()


def test_threads_that_store_the_first_packs_at_once_open_the_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening empties the file: a second open would lose the packs that were stored in between."""
    file = RowFile(tmp_path / "rows")
    both, opened, open_file = threading.Barrier(2), [], os.open

    def open_together(*arguments: object) -> int:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for the other thread, if it comes as far as this
        opened.append(open_file(*arguments))  # type: ignore[arg-type]
        return opened[-1]

    contents = [b"one", b"two"]
    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as threads:
        patched.setattr(listings.os, "open", open_together)
        packs = list(threads.map(file.store, contents))
    assert len(opened) == 1
    assert [file.read(each) for each in packs] == contents
    file.close()


def test_packs_that_threads_store_in_a_new_file_are_all_there(tmp_path: Path) -> None:
    """The same, as it comes."""
    with ThreadPoolExecutor(4) as threads:
        for number in range(200):
            file, start = RowFile(tmp_path / str(number)), threading.Barrier(4)

            def store(content: bytes, file: RowFile = file, start: threading.Barrier = start) -> None:
                start.wait()
                pack = file.store(content)
                assert file.read(pack) == content

            list(threads.map(store, [bytes([each]) * 6000 for each in range(4)]))
            file.close()
    assert [each for each in os.listdir("/proc/self/fd") if _target(each).startswith(str(tmp_path))] == []


def _target(descriptor: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""
