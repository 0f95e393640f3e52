"""The journal's writer on a disk that fails: changes keep their order, callers get an answer, nothing is lost."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from fusecache.engine.runtime.journal_writer import ANSWER_SECONDS, JournalWriter
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.index import journal as module
from fusecache.index.journal import Change, DropConflict, Journal, PutAbort, PutConflict
from fusecache.model.errors import FusecacheError, InternalError, NoSpace, ReadOnly, StateError
from fusecache.model.records import ConflictRecord
from tests.support.inline_offload import InlineOffload
from tests.support.mistakes import Mistake


class FailingJournal(Journal):
    """A journal whose commits fail while `error` is set."""

    error: Exception | None = None
    writes_before_error = False

    def apply(self, changes: "list[Change]", commit: int = 0) -> None:  # type: ignore[override]
        if self.error is None or self.writes_before_error:
            super().apply(changes, commit)
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[tuple[FailingJournal, JournalWriter]]:
    with FailingJournal(path) as journal:
        writer = JournalWriter(journal, InlineOffload(), Supervisor())
        async with trio.open_nursery() as nursery:
            await nursery.start(writer.run)
            yield journal, writer
            nursery.cancel_scope.cancel()


def conflict(number: int, key: str = "k") -> PutConflict:
    return PutConflict(ConflictRecord(number, key, "", 1, 0.0, "changed"))


@pytest.mark.parametrize("writes_before_error", [False, True])
@pytest.mark.parametrize(
    ("error", "refusal"),
    [(NoSpace("full"), NoSpace), (StateError("broken"), ReadOnly), (Mistake("a bug"), ReadOnly)],
)
async def test_failed_changes_are_written_later_in_order(
    tmp_path: Path,
    error: Exception,
    refusal: type[FusecacheError],
    writes_before_error: bool,  # noqa: FBT001
) -> None:
    """A failed commit is kept and retried: memory and disk agree once the disk works again."""
    async with running(tmp_path) as (journal, writer):
        await writer.commit(conflict(1))
        journal.error, journal.writes_before_error = error, writes_before_error
        late = writer.submit(DropConflict(1), conflict(2, "old"))
        began = trio.current_time()
        with pytest.raises(refusal, match=f"refused until the journal can be written: .*{error.args[0]}"):
            await late.wait()
        assert trio.current_time() - began < ANSWER_SECONDS + 3
        with pytest.raises(refusal):
            writer.check_writable()
        writer.submit_lazily(conflict(2, "new"))
        journal.error = None
        await late.committed()
        await late.wait()
        await writer.wait_healthy()
        writer.check_writable()
        await writer.wait_committed()
        assert [(each.number, each.key) for each in journal.conflicts()] == [(2, "new")]


async def test_a_short_failure_reaches_no_caller(tmp_path: Path) -> None:
    """A disk that is full for three seconds makes a commit slow, and nothing else."""
    async with running(tmp_path) as (journal, writer):
        journal.error = NoSpace("full")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.commit, conflict(1))
            await trio.sleep(3)
            writer.check_writable()
            journal.error = None
        assert len(journal.conflicts()) == 1


@pytest.mark.parametrize("disk_error", [None, NoSpace("full")])
async def test_unwritable_row_fails_only_its_ticket(tmp_path: Path, disk_error: Exception | None) -> None:
    """Retries would keep all later changes waiting for ever."""
    async with running(tmp_path) as (journal, writer):
        journal.error = disk_error
        before = writer.submit(conflict(1))
        hostile = writer.submit(conflict(2), PutConflict(ConflictRecord(3, "k", "", b"?", 0.0, "")))  # type: ignore[arg-type]
        after = writer.submit(conflict(4))
        await trio.sleep(1)
        journal.error = None
        with pytest.raises(
            InternalError, match=r"journal k: unexpected error .*bytes is not JSON serializable"
        ):
            await hostile.wait()
        with pytest.raises(InternalError):
            await hostile.committed()
        with trio.fail_after(5):
            await before.wait()
            await after.committed()
            await writer.wait_healthy()
            await writer.wait_committed()
        assert [each.number for each in journal.conflicts()] == [1, 4]


@pytest.mark.real_time
async def test_a_full_map_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the address space holds make it larger, and no caller sees it."""
    monkeypatch.setattr(module, "MAP_BYTES", 1 << 20)
    async with running(tmp_path) as (journal, writer):
        for number in range(30):
            await writer.commit(*(PutAbort(f"key-{number}-{index}", "u" * 400) for index in range(100)))
        assert len(journal.aborts()) == 3000
    with Journal(tmp_path) as again:
        assert len(again.aborts()) == 3000
