"""Group commit for the journal: one task writes it, and changes submitted during a commit share the next one.

A synced commit costs some milliseconds, however many changes it has. Changes that no caller waits for join the next
commit that one does. Changes that only requests to the bucket wait for are batched for GATHER_SECONDS.

A failed commit is retried with back-off until it succeeds, with all that was submitted since. Until then the publisher
waits. Calls of programs wait for ANSWER_SECONDS, then get the error; from then on `check_writable` refuses new ones. A
call that got the error may still take effect: its change is kept, as memory already shows it.

The same holds for an unexpected exception, after which the batch may be on disk or not: it is committed again, as each
row is written or removed by its own key. But if a change itself cannot be encoded, no retry helps: its ticket fails,
and the others go on.

Commits are numbered, and the journal has the number of the last one. What changes in memory now is on the disk with the
commit `next_commit`. So a successor of a killed daemon knows which of its changes the journal has.

Invariants:
1. Changes reach the disk in the order in which they were submitted, each once its predecessors are there.
2. No change is dropped while the daemon runs, except those of a ticket that fails: memory and disk agree after the
   next successful commit.
"""

import logging
from typing import TYPE_CHECKING

import trio

from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.index.journal import Change, Journal, encoded
from fusecache.model.errors import FusecacheError, InternalError, JournalMapFull, NoSpace, ReadOnly, StateLost

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

# A change that no caller waits for is on disk after this time at the latest.
LAZY_SECONDS = 0.5
# Shortest interval between the starts of two commits that only requests to the bucket wait for. It is a tenth of a
# distant bucket's response time; at 200 small files a second four of them share a commit.
GATHER_SECONDS = 0.02
# Calls that wait for a failing commit get an answer after this time. A disk that is full for a moment stays unseen.
ANSWER_SECONDS = 5.0
# How soon a journal that was removed is noticed while nothing is written.
WATCH_SECONDS = 5.0
# Pauses between attempts of a failing commit: the first one, doubled up to the longest.
_RETRY_SECONDS_MIN = 0.1
_RETRY_SECONDS_MAX = 2.0


class JournalWriter:
    """Gives out numbers (file versions, sequences), and makes journal changes durable."""

    def __init__(
        self, journal: Journal, offload: Offload, supervisor: Supervisor, *, highest_in_use: int = 0
    ) -> None:
        """highest_in_use: highest number of a staging file, whose row may be missing; no number is given out twice."""
        self.journal = journal
        self._offload = offload
        self._supervisor = supervisor
        self._highest = max(journal.highest_number(), highest_in_use)
        # The last commit on disk; and the one that takes what is submitted now.
        self.last_commit = journal.last_commit()
        self.next_commit = self.last_commit + 1
        self._committing = False
        self._is_awaited = False  # whether a caller waits for a change in `_waiting`
        self._waiting: _Batch = []
        self._wake = trio.Event()
        self._nap = trio.CancelScope()
        self._began = float("-inf")
        self._failing_since = 0.0
        # Why the last commit failed; and the error that calls get, once that lasts for ANSWER_SECONDS.
        self.failure: FusecacheError | None = None
        self.refusal: FusecacheError | None = None
        self._healthy = trio.Event()
        self._healthy.set()

    @property
    def is_awaited(self) -> bool:
        """Whether changes are on their way to the disk that a caller waits for."""
        return self._is_awaited or self._committing

    def next_number(self) -> int:
        """Return a number above all given out before: for a file version or a sequence."""
        self._highest += 1
        return self._highest

    def check_writable(self) -> None:
        """Raise NoSpace or ReadOnly if commits fail for ANSWER_SECONDS: call it before a change in memory."""
        if self.refusal is not None:
            raise self.refusal

    async def wait_healthy(self) -> None:
        """Return when the last commit succeeded."""
        await self._healthy.wait()

    def submit(self, *changes: Change) -> "CommitTicket":
        """Queue changes for the next commit, all or none; the ticket tells when they are durable."""
        ticket = CommitTicket()
        self._waiting.append((changes, ticket))
        self._is_awaited = True
        self._wake.set()
        return ticket

    def submit_batched(self, *changes: Change) -> "CommitTicket":
        """Queue changes that no process waits for: they are batched, and committed within GATHER_SECONDS."""
        ticket = CommitTicket()
        self._waiting.append((changes, ticket))
        self._is_awaited = True
        self._nap_until(self._began + GATHER_SECONDS)
        return ticket

    def submit_lazily(self, *changes: Change) -> None:
        """Queue changes that no caller waits for: they join the next commit, within LAZY_SECONDS."""
        self._waiting.append((changes, CommitTicket()))
        self._nap_until(trio.current_time() + LAZY_SECONDS)

    def _nap_until(self, deadline: float) -> None:
        if deadline < self._nap.deadline:
            self._nap.deadline = deadline

    async def wait_committed(self) -> None:
        """Return when all submitted changes, except lazy ones, are on disk. Raises what `commit` raises.

        Changes that cannot be encoded do not count.
        """
        if self.is_awaited:
            await self.commit()

    async def wait_all_committed(self) -> None:
        """Return when all submitted changes, except lazy ones, are on disk, however long that takes."""
        if self.is_awaited:
            await self.submit().committed()

    async def commit(self, *changes: Change) -> None:
        """Submit changes, and wait for their ticket. Raises NoSpace, ReadOnly or InternalError."""
        await self.submit(*changes).wait()

    async def watch(self) -> None:
        """Until cancelled, find out whether the journal is still there, also while nothing is written."""
        while True:
            await trio.sleep(WATCH_SECONDS)
            try:
                await self._offload.rows(self.journal.check_there)
            except StateLost as exc:
                if self.failure is None:
                    self._on_failed(exc)
                    self._wake.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Commit batches until cancelled, then commit the rest."""
        task_status.started()
        self._wake.set()  # a failed run may have left changes
        try:
            while True:
                with self._nap:
                    await self._wake.wait()
                self._wake = trio.Event()
                self._nap = trio.CancelScope()
                await self._commit_with_retries()
        finally:
            if not await self._commit_batch():
                log.error("changes are not journaled count=%d error=%s", len(self._waiting), self.failure)

    async def _commit_with_retries(self) -> None:
        pause = _RETRY_SECONDS_MIN
        while not await self._commit_batch():
            await trio.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS_MAX)

    async def _commit_batch(self) -> bool:
        """Commit all that was submitted, in one transaction; return whether that succeeded."""
        batch, self._waiting = self._waiting, []
        self._is_awaited = False
        if not batch and self.failure is None:
            return True
        self._began = trio.current_time()
        changes = [change for group, _ in batch for change in group]
        self._committing = True
        commit, self.next_commit = self.next_commit, self.next_commit + 1
        try:
            with trio.CancelScope(shield=True):  # a cancelled commit must not lose its batch
                await self._apply(changes, commit)
        except Exception as exc:  # noqa: BLE001  # recorded
            writable = batch if isinstance(exc, FusecacheError) else self._fail_unwritable(batch)
            self._waiting = writable + self._waiting
            self._is_awaited = True
            if len(writable) < len(batch):
                return await self._commit_batch()
            error = exc if isinstance(exc, FusecacheError) else self._supervisor.record("journal", exc)
            self._on_failed(error)
            return False
        finally:
            self._committing = False
        self.last_commit = commit
        for _, ticket in batch:
            ticket.succeed()
        if self.failure is not None:
            seconds = trio.current_time() - self._failing_since
            log.warning("the journal is written again failed_seconds=%.1f changes=%d", seconds, len(changes))
            self.failure = self.refusal = None
            self._healthy.set()
        return True

    def _fail_unwritable(self, batch: "_Batch") -> "_Batch":
        """Fail the tickets whose changes cannot be encoded; return the others."""
        writable = []
        for changes, ticket in batch:
            try:
                for change in changes:
                    encoded(change)
            except Exception as exc:  # noqa: BLE001  # recorded
                about = getattr(getattr(change, "record", change), "key", "")
                ticket.fail(self._supervisor.record("journal", exc, about))
            else:
                writable.append((changes, ticket))
        return writable

    async def _apply(self, changes: "Sequence[Change]", commit: int) -> None:
        if not self.journal.is_open:
            self.journal.reopen()
        while True:
            try:
                return await self._offload.rows(self.journal.apply, changes, commit)
            except JournalMapFull:
                # Here, on the loop: no other thread may use the map while it moves.
                self.journal.grow()

    def _on_failed(self, error: FusecacheError) -> None:
        now = trio.current_time()
        if self.failure is None:
            self._failing_since = now
            self._healthy = trio.Event()
            log.error("the journal cannot be written, retrying error=%s", error)
        self.failure = error
        if isinstance(error, StateLost):
            self.refusal = ReadOnly(str(error))
        elif now < self._failing_since + ANSWER_SECONDS:
            return
        else:
            kind = NoSpace if isinstance(error, NoSpace) else ReadOnly
            self.refusal = kind(f"writes are refused until the journal can be written: {error}")
        for _, ticket in self._waiting:
            ticket.refuse(self.refusal)


class CommitTicket:
    """Lets callers wait until its submitted changes are on disk."""

    def __init__(self) -> None:
        self._committed = trio.Event()
        self._answered = trio.Event()
        self._refusal: FusecacheError | None = None
        self._failure: InternalError | None = None

    def succeed(self) -> None:
        self._committed.set()
        self._answered.set()

    def refuse(self, refusal: FusecacheError) -> None:
        """Answer callers of `wait` with an error. The changes stay queued."""
        self._refusal = refusal
        self._answered.set()

    def fail(self, failure: InternalError) -> None:
        """Answer all callers with an error: the changes can never be written."""
        self._failure = failure
        self.succeed()

    async def wait(self) -> None:
        """Return when the changes are on disk.

        Raises NoSpace or ReadOnly if that takes more than ANSWER_SECONDS, and what `committed` raises.
        """
        await self._answered.wait()
        if not self._committed.is_set() and self._refusal is not None:
            raise self._refusal
        await self.committed()

    async def committed(self) -> None:
        """Return when the changes are on disk, however long that takes.

        Raises InternalError if they can never be written.
        """
        await self._committed.wait()
        if self._failure is not None:
            raise self._failure


_Batch = list[tuple["Sequence[Change]", CommitTicket]]
