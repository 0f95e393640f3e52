"""A folder's files and the engine: what changes while it is copied, and what a lease tells."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.config.options import load_options
from fusecache.daemon.connect import StartConnection
from fusecache.folder.local_folder import LocalFolder, is_closed, scan
from fusecache.folder.publishing import FolderPublisher, running_engine
from fusecache.remote.read_write_split import ReadWriteSplit
from tests.support.memory_store import MemoryStore


@asynccontextmanager
async def publishing(
    path: Path, store: MemoryStore
) -> AsyncIterator[tuple[LocalFolder, FolderPublisher, Any]]:
    """Run an engine over a bucket in memory for a folder."""
    own = path / ".fusecache"
    options = load_options(
        {"source": "s3://bucket", "mountpoint": str(own / "none"), "cache_dir": str(own / "engine")}, {}
    )
    connection = StartConnection(ReadWriteSplit(store, store))
    with LocalFolder(path, "memory", "push", create=True) as folder:
        async with running_engine(options, connection, "memory") as filesystem:
            yield folder, FolderPublisher(folder, filesystem, connection.remote, options), filesystem


async def test_a_file_that_changes_while_it_is_copied_is_not_published_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    store.put_bytes("old", b"before")
    (tmp_path / "new").write_bytes(b"first half")
    (tmp_path / "latest").write_bytes(b"new")
    read = os.pread

    def read_and_change(descriptor: int, size: int, offset: int) -> bytes:
        data = read(descriptor, size, offset)
        if data == b"first half":
            (tmp_path / "new").write_bytes(b"other")
        return data

    async with publishing(tmp_path, store) as (folder, publisher, filesystem):
        monkeypatch.setattr(os, "pread", read_and_change)
        await publisher.take(publisher.changed(scan(folder, "")))
        monkeypatch.undo()
        await publisher.drop_unfinished()
        assert "it changes while it is read" in publisher.report.failed["new"]
        assert "held back: it may stand for new" in publisher.report.failed["latest"]
        assert list((folder.own / "engine" / "orphans").iterdir()) == []
        assert store.contents() == {"old": b"before"}
        await publisher.take(publisher.changed(scan(folder, "")))
        await filesystem.drain(until_empty=True)
        publisher.record()
        assert store.contents() == {"old": b"before", "new": b"other", "latest": b"new"}
        assert publisher.report.status == 0


async def test_two_that_drop_unfinished_copies_at_once_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the start of a push: one task looks what a killed push has left, another what this one leaves."""
    names = [f"new-{number}" for number in range(8)]
    for name in names:
        (tmp_path / name).write_bytes(b"first half")
    read = os.pread

    def read_and_change(descriptor: int, size: int, offset: int) -> bytes:
        data = read(descriptor, size, offset)
        if data == b"first half":
            os.utime(descriptor, (1, 1))
        return data

    async with publishing(tmp_path, MemoryStore()) as (folder, publisher, filesystem):
        monkeypatch.setattr(os, "pread", read_and_change)
        await publisher.take(publisher.changed(scan(folder, "")))
        monkeypatch.undo()
        assert filesystem.quarantine.statistics()["orphans"] == len(names)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.drop_unfinished)
            nursery.start_soon(publisher.restore)
        assert filesystem.quarantine.statistics()["orphans"] == 0


async def test_the_kernel_says_which_files_are_open_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"data")
    reader = os.open(path, os.O_RDONLY)
    try:
        assert is_closed(reader)
        with path.open("ab"):
            assert not is_closed(reader)
        with path.open("rb"):
            assert is_closed(reader)
    finally:
        os.close(reader)
    await trio.lowlevel.checkpoint()
