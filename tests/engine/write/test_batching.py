"""Small files cost a share of a commit, and of a crossing to a thread, and not one each."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from fusecache.disk.staging import StagingFile
from fusecache.engine.runtime.batcher import Batcher
from fusecache.engine.runtime.journal_writer import GATHER_SECONDS, JournalWriter
from fusecache.engine.runtime.supervisor import Supervisor, TaskNursery
from fusecache.index.journal import Change, DropFile, Journal
from fusecache.model.errors import LocalDiskError
from fusecache.model.records import FileState
from tests.engine.write.test_writing import SlowUploads
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, running_node

FILES = 200


class CountingJournal(Journal):
    """Notes the generations of each commit, and when it was."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.commits: list[tuple[float, list[int]]] = []

    def apply(self, changes: Sequence[Change], commit: int = 0) -> None:
        """Note, and write."""
        rows = [change.generation for change in changes if isinstance(change, DropFile)]
        self.commits.append((trio.current_time(), rows))
        super().apply(changes, commit)


async def test_rows_that_no_process_waits_for_share_commits_and_keep_their_order(tmp_path: Path) -> None:
    with CountingJournal(tmp_path) as journal:
        writer = JournalWriter(journal, InlineOffload(), Supervisor())
        async with trio.open_nursery() as nursery:
            await nursery.start(writer.run)
            began = trio.current_time()
            with trio.fail_after(1):
                await writer.submit_batched(DropFile(1)).wait()
            assert trio.current_time() == began  # nothing was committed lately: at once
            tickets = []
            for number in range(2, 10):
                tickets.append(writer.submit_batched(DropFile(number)))
                await trio.sleep(GATHER_SECONDS / 10)
            for ticket in tickets:
                await ticket.wait()
            assert trio.current_time() == pytest.approx(began + GATHER_SECONDS)
            writer.submit_batched(DropFile(10))
            await writer.commit(DropFile(11))  # a process waits: both go now
            assert trio.current_time() == pytest.approx(began + GATHER_SECONDS)
            writer.submit_batched(DropFile(12))
            await writer.wait_committed()
            assert trio.current_time() == pytest.approx(began + GATHER_SECONDS)
            nursery.cancel_scope.cancel()
    assert [rows for _, rows in journal.commits] == [[1], [*range(2, 10)], [10, 11], [12]]


async def test_a_batch_begins_at_once_after_a_pause_and_then_gathers() -> None:
    seen: list[tuple[float, list[int]]] = []
    began = trio.current_time()

    async def work(items: list[int]) -> None:
        seen.append((round(trio.current_time() - began, 3), items))
        await trio.sleep(100)  # and the next ones do not wait for it

    tasks = TaskNursery(Supervisor())
    batches = Batcher(work, tasks, seconds=0.1, most=3, name="work")
    async with trio.open_nursery() as nursery:
        await nursery.start(tasks.run)
        tasks.keep({"batches": batches.run})
        batches.add(1)
        await trio.sleep(0.01)
        for item in (2, 3, 4, 5):
            batches.add(item)
        await trio.sleep(0.15)
        batches.add(6)
        batches.flush_now()
        await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    assert seen == [(0.0, [1]), (0.1, [2, 3, 4]), (0.16, [5, 6])]


async def test_many_small_files_share_commits_on_their_way_to_the_bucket(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        commits: list[int] = []
        apply = user.fs.journal.journal.apply

        def counted(changes: Sequence[Change], commit: int) -> None:
            commits.append(len(changes))
            apply(changes, commit)

        user.fs.journal.journal.apply = counted  # type: ignore[method-assign]
        for number in range(FILES):
            await user.write(f"file-{number}", b"%d" % number)
        closes = len(commits)
        assert await user.drained() == "durable"
        assert closes == FILES  # each close is a commit of its own: one writer, one file after the other
        assert len(commits) - closes < FILES // 4
        used = user.fs.cache.statistics()
        assert (used.staging_bytes, used.used_bytes) == (0, FILES * 4096)
        for number in range(FILES):
            assert await user.read(f"file-{number}") == b"%d" % number
        assert used.bytes_read == 0
    assert bucket.shows() == {f"file-{number}": b"%d" % number for number in range(FILES)}


async def test_a_removed_file_whose_last_handle_is_closed_as_it_becomes_cache_ends_nothing(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=SlowUploads(5.0)) as user:
        await user.write("file", b"content")
        reader = user.fs.file_io.open(await user.fs.resolve("file"), writable=False, pid=0)
        await trio.sleep(3)
        version = reader.node.version
        assert version is not None
        assert version.in_flight
        await user.unlink("file")
        with trio.fail_after(60):
            while version.state is not FileState.STORED:  # noqa: ASYNC110 (in the very moment)
                await trio.sleep(0.001)
        await user.fs.file_io.release(reader)
        assert await user.drained() == "durable"
        await user.write("later", b"-")
        assert await user.drained() == "durable"
        assert user.fs.cache.statistics().staging_bytes == 0


async def test_a_file_that_the_disk_does_not_remove_ends_nothing(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_file: StagingFile) -> None:
        raise LocalDiskError("the file system is read-only")

    async with running_node(bucket, cache) as user:
        await user.write("file", b"-")
        with monkeypatch.context() as patch:
            patch.setattr(StagingFile, "delete", fail)
            await user.unlink("file")
            await trio.sleep(5)
        await user.write("other", b"-")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"other": b"-"}
