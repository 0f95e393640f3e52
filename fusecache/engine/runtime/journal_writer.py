"""Group commit for the journal: one task writes it, and changes submitted during a commit share the next one.

A synced commit costs some milliseconds, however many changes it has. Changes that no caller waits for join the next
commit that one does. Changes that only requests to the bucket wait for are batched for GATHER_SECONDS.

Invariants:
1. Changes reach the disk in the order in which they were submitted.
2. After a failed commit nothing more is journaled, and every submit raises ReadOnly: memory and disk would disagree.
"""

from typing import TYPE_CHECKING

import trio

from fusecache.engine.runtime.offload import Offload
from fusecache.index.journal import Change, Journal
from fusecache.model.errors import FusecacheError, ReadOnly

if TYPE_CHECKING:
    from collections.abc import Sequence


# A change that no caller waits for is on disk after this time at the latest.
LAZY_SECONDS = 0.5
# Shortest interval between the starts of two commits that only requests to the bucket wait for. It is a tenth of a
# distant bucket's response time; at 200 small files a second four of them share a commit.
GATHER_SECONDS = 0.02


class JournalWriter:
    """Gives out numbers (file versions, sequences), and makes journal changes durable."""

    def __init__(self, journal: Journal, offload: Offload, *, highest_in_use: int = 0) -> None:
        """highest_in_use: highest number of a staging file, whose row may be missing; no number is given out twice."""
        self.journal = journal
        self._offload = offload
        self._highest = max(journal.highest_number(), highest_in_use)
        self._committing = False
        self._is_awaited = False  # whether a caller waits for a change in `_waiting`
        self._waiting: list[tuple[Sequence[Change], CommitTicket]] = []
        self._wake = trio.Event()
        self._nap = trio.CancelScope()
        self._began = float("-inf")
        self._failure: FusecacheError | None = None

    @property
    def highest(self) -> int:
        """The last number that was given out."""
        return self._highest

    def next_number(self) -> int:
        """Return a number above all given out before: for a file version or a sequence."""
        self._highest += 1
        return self._highest

    def check_writable(self) -> None:
        """Raise ReadOnly if the journal failed: no write can be acknowledged any more."""
        if self._failure is not None:
            raise ReadOnly(
                f"mount is read-only, the journal could not be written ({self._failure}); fix the cache disk, remount"
            )

    def submit(self, *changes: Change) -> "CommitTicket":
        """Queue changes for the next commit, all or none; the ticket's `wait` returns when they are durable."""
        self.check_writable()
        ticket = CommitTicket()
        self._waiting.append((changes, ticket))
        self._is_awaited = True
        self._wake.set()
        return ticket

    def submit_batched(self, *changes: Change) -> "CommitTicket":
        """Queue changes that no process waits for: they are batched, and committed within GATHER_SECONDS."""
        self.check_writable()
        ticket = CommitTicket()
        self._waiting.append((changes, ticket))
        self._is_awaited = True
        self._nap_until(self._began + GATHER_SECONDS)
        return ticket

    def submit_lazily(self, *changes: Change) -> None:
        """Queue changes that no caller waits for: they join the next commit, within LAZY_SECONDS."""
        self.check_writable()
        self._waiting.append((changes, CommitTicket()))
        self._nap_until(trio.current_time() + LAZY_SECONDS)

    def _nap_until(self, deadline: float) -> None:
        if deadline < self._nap.deadline:
            self._nap.deadline = deadline

    async def wait_committed(self) -> None:
        """Return when all submitted changes, except lazy ones, are on disk. Raises ReadOnly if the journal failed."""
        self.check_writable()
        if self._is_awaited or self._committing:
            await self.commit()

    async def commit(self, *changes: Change) -> None:
        """Return when the changes are on disk. Raises what the commit raised."""
        await self.submit(*changes).wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Commit batches until cancelled, then commit the rest."""
        task_status.started()
        try:
            while True:
                with self._nap:
                    await self._wake.wait()
                self._wake = trio.Event()
                self._nap = trio.CancelScope()
                await self._commit_batch()
        finally:
            await self._commit_batch()

    async def _commit_batch(self) -> None:
        batch, self._waiting = self._waiting, []
        self._is_awaited = False
        if not batch:
            return
        self._began = trio.current_time()
        changes = [change for group, _ in batch for change in group]
        try:
            if self._failure is not None:  # submitted before the failure was known
                raise self._failure
            self._committing = True
            with trio.CancelScope(shield=True):  # a cancelled commit must not lose its batch
                await self._offload.rows(self.journal.apply, changes)
        except FusecacheError as exc:
            self._failure = exc
            for _, ticket in batch:
                ticket.fail(exc)
            return
        finally:
            self._committing = False
        for _, ticket in batch:
            ticket.succeed()


class CommitTicket:
    """Lets a caller wait until its submitted changes are on disk."""

    def __init__(self) -> None:
        self._done = trio.Event()
        self._failure: FusecacheError | None = None

    def succeed(self) -> None:
        self._done.set()

    def fail(self, failure: FusecacheError) -> None:
        self._failure = failure
        self._done.set()

    async def wait(self) -> None:
        """Return when the changes are on disk. Raises what the commit raised."""
        await self._done.wait()
        if self._failure is not None:
            raise self._failure
