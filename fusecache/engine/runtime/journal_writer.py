"""One task writes the journal: changes submitted meanwhile share its next synced commit.

A commit costs some milliseconds however much is in it: what nobody waits for goes with the next one that somebody does,
and what only requests to the bucket wait for gathers for a moment.

Invariants:
1. Changes reach the disk in the order in which they were submitted.
2. After a failed commit nothing is journaled any more and every change is refused: memory and disk would
disagree.
"""

from typing import TYPE_CHECKING

import trio

from fusecache.engine.runtime.offload import Offload
from fusecache.index.journal import Change, Journal
from fusecache.model.errors import FusecacheError, ReadOnly

if TYPE_CHECKING:
    from collections.abc import Sequence


# What nobody waits for is on the disk so soon at the latest.
LAZY_SECONDS = 0.5
# What only the bucket waits for goes at once if the last commit began so long ago, and with the next one otherwise: a
# tenth of what a distant bucket takes to answer, in which 200 small files a second leave four.
GATHER_SECONDS = 0.02


class JournalWriter:
    """Gives out numbers, and makes changes durable."""

    def __init__(self, journal: Journal, offload: Offload, *, highest_in_use: int = 0) -> None:
        """highest_in_use: number of a file whose row may not have reached the disk; none is given out twice."""
        self.journal = journal
        self._offload = offload
        self._highest = max(journal.highest_number(), highest_in_use)
        self._committing = False
        self._is_awaited = False  # whether anybody waits for what is in `_waiting`
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
        """Return a number above all given out before: for a generation or a sequence."""
        self._highest += 1
        return self._highest

    def check_writable(self) -> None:
        """Raise ReadOnly if the journal failed: then nothing can be promised any more."""
        if self._failure is not None:
            raise ReadOnly(
                f"writing stopped, as the journal failed ({self._failure}); mount again when the cache disk is well"
            )

    def submit(self, *changes: Change) -> "CommitTicket":
        """Queue changes for the next commit, as one; the ticket tells when they are durable."""
        self.check_writable()
        ticket = CommitTicket()
        self._waiting.append((changes, ticket))
        self._is_awaited = True
        self._wake.set()
        return ticket

    def submit_batched(self, *changes: Change) -> "CommitTicket":
        """Queue changes that no process waits for: they go within GATHER_SECONDS, with others if there are others."""
        self.check_writable()
        ticket = CommitTicket()
        self._waiting.append((changes, ticket))
        self._is_awaited = True
        self._nap_until(self._began + GATHER_SECONDS)
        return ticket

    def submit_lazily(self, *changes: Change) -> None:
        """Queue changes that nobody waits for: they go with the next commit, within LAZY_SECONDS."""
        self.check_writable()
        self._waiting.append((changes, CommitTicket()))
        self._nap_until(trio.current_time() + LAZY_SECONDS)

    def _nap_until(self, deadline: float) -> None:
        if deadline < self._nap.deadline:
            self._nap.deadline = deadline

    async def wait_committed(self) -> None:
        """Return when everything that was submitted, lazily apart, is on disk. Raises ReadOnly if it cannot be."""
        self.check_writable()
        if self._is_awaited or self._committing:
            await self.commit()

    async def commit(self, *changes: Change) -> None:
        """Return when the changes are on disk. Raises what the commit raised."""
        await self.submit(*changes).wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Commit batches until cancelled, then what is left."""
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
            if self._failure is not None:  # these came before anyone knew of it
                raise self._failure
            self._committing = True
            with trio.CancelScope(shield=True):  # a batch that was taken must not be lost
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
    """Tells when submitted changes are on disk."""

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
