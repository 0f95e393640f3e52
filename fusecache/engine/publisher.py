"""Publishes what the bucket is owed: bytes in advance and in parallel, publishing requests strictly in sequence.

Invariants:
1. The journal says PUBLISHING before the request that publishes, STORED after it, and only then do local bytes go.
2. Nothing is given up: a failing request is sent again without end. What the bucket refuses for good is kept,
   reported, and no longer holds the others up.
3. A request whose answer was lost is settled by what the bucket shows: is the uuid in its metadata ours?
"""

import logging
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

from fusecache.engine.content import Contents, attributes_of
from fusecache.engine.groups import one_failure
from fusecache.engine.journaling import JournalWriter
from fusecache.engine.names import Names
from fusecache.engine.nodes import Generation, Item, Node, Operation
from fusecache.engine.offload import Offload
from fusecache.engine.operations import Outcome, Publishing
from fusecache.engine.owed import Owed
from fusecache.engine.preparing import Preparer
from fusecache.engine.tree import Tree
from fusecache.index.journal import Change, DropFile, DropOperation, PutAttributes, PutFile, PutOperation
from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    FusecacheError,
    NoSpace,
    ObjectChanged,
    ObjectMissing,
    ReadOnly,
    Refused,
    StateError,
    Unavailable,
    UploadLost,
)
from fusecache.model.nouns import ObjectInfo
from fusecache.model.records import OperationKind
from fusecache.model.states import FileState
from fusecache.policy.backoff import backoff_seconds
from fusecache.policy.names import matches_any

log = logging.getLogger(__name__)
T = TypeVar("T")

# Cloudflare R2 answers 429 above one write a second to a key.
KEY_INTERVAL_SECONDS = 1.1
# A file under a temporary name that stays closed so long is meant to stay.
TEMPORARY_SECONDS = 60.0
# So many items are looked at in advance.
_AHEAD = 256
# Causes that pass, or that a person can mend while we wait. What is missing was removed just now: looking again tells.
_WORTH_WAITING = (Unavailable, AccessDenied, CredentialsMissing, BucketMissing, ObjectMissing)
# The journal cannot be written: nothing can be published, as nobody could tell afterwards what was.
_STOPPED = (NoSpace, StateError, ReadOnly)


class Publisher:
    """Takes items from the queue one by one, in order, and makes the bucket show them."""

    def __init__(
        self,
        tree: Tree,
        names: Names,
        contents: Contents,
        owed: Owed,
        journal: JournalWriter,
        preparer: Preparer,
        publishing: Publishing,
        offload: Offload,
        *,
        settle_seconds: float,
        temp_names: tuple[str, ...] = (),
    ) -> None:
        self._tree = tree
        self._names = names
        self._contents = contents
        self._owed = owed
        self._journal = journal
        self._preparer = preparer
        self._publishing = publishing
        self._offload = offload
        self._settle_seconds = settle_seconds
        self._temp_names = temp_names
        self._draining = 0
        self._wake = trio.Event()
        self._wake_ahead = trio.Event()
        self._progress = trio.Event()
        self._last_write: dict[str, float] = {}
        self._rejected: list[Item] = []
        self._stopped: FusecacheError | None = None
        self.conflicts: list[str] = []
        # Where our version of a key in conflict is kept.
        self.kept_as: dict[str, str] = {}
        self.failure: FusecacheError | None = None
        contents.on_sealed = self.wake
        owed.on_change = self._note_change
        owed.on_rebased = self._journal_rebased
        self.on_name_lost: Callable[[Node, str], None] = lambda _parent, _name: None

    @property
    def rejected(self) -> list[Item]:
        """What the bucket refused for good, or could not be read back, unless it was removed or replaced since."""
        self._rejected = [
            item for item in self._rejected if isinstance(item, Operation) or item.state is FileState.REJECTED
        ]
        return self._rejected

    @rejected.setter
    def rejected(self, items: list[Item]) -> None:
        self._rejected = items

    def wake(self) -> None:
        """Look at the queue again."""
        self._wake.set()
        self._wake_ahead.set()

    def _note_change(self) -> None:
        self.wake()
        self._announce()

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Publish without waiting for files to settle: the mount is about to end."""
        self._draining += 1
        self.wake()
        try:
            yield
        finally:
            self._draining -= 1

    async def wait_progress(self) -> None:
        """Return when an item was published, given up, or taken back. Raises what stopped publishing for good."""
        if self._stopped is not None:
            raise self._stopped
        await self._progress.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled."""
        task_status.started()
        try:
            with one_failure():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._look_ahead, name="look-ahead")
                    nursery.start_soon(self._publish_all, name="publish-all")
        except _STOPPED as exc:
            log.exception("publishing stopped; what is not in the bucket waits for the next mount")
            self._stopped = self.failure = exc
            self._announce()
            await trio.sleep_forever()

    async def _look_ahead(self) -> None:
        """Prepare what settles, also while the first item waits for the bucket."""
        while True:
            self._wake_ahead = trio.Event()
            now = trio.current_time()
            self._contents.settle(now, self._settle_seconds)
            self._preparer.begin(self._next_items(now, _AHEAD), self._is_settled)
            # At least once a second while anything is owed: files settle without telling.
            with trio.move_on_after(1.0 if len(self._owed) else float("inf")):
                await self._wake_ahead.wait()

    async def _publish_all(self) -> None:
        while True:
            self._wake = trio.Event()
            self._journal.check_writable()
            now = trio.current_time()
            items = self._next_items(now, 1)
            delay = self._delay(items[0], now) if items else float("inf")
            if delay > 0:
                with trio.move_on_after(min(delay, 1.0) if len(self._owed) else float("inf")):
                    await self._wake.wait()
                continue
            await self._publish(items[0])

    # ---- when

    def _next_items(self, now: float, limit: int) -> list[Item]:
        """Return the first items that are not temporary, in order."""
        found: list[Item] = []
        for item in self._owed.items():
            if not self._is_temporary(item, now):
                found.append(item)
                if len(found) == limit:
                    break
        return found

    def _is_settled(self, generation: Generation) -> bool:
        if generation.state not in {FileState.SEALED, FileState.PUBLISHING}:
            return False
        return self._draining > 0 or trio.current_time() >= generation.sealed_at + self._settle_seconds

    def is_temporary(self, item: Item) -> bool:
        """Whether the item waits because of its temporary name."""
        return self._is_temporary(item, trio.current_time())

    def _is_temporary(self, item: Item, now: float) -> bool:
        """Whether the item is about to be renamed, by its name: nothing waits for it meanwhile."""
        if self._draining or not isinstance(item, Generation):
            return False
        if now > min(item.sealed_at, item.flushed_at) + TEMPORARY_SECONDS:
            return False
        return matches_any(item.record.key.rpartition("/")[2], self._temp_names)

    def _delay(self, item: Item, now: float) -> float:
        """Seconds until the item may be published; 0: now."""
        settle = 0.0 if self._draining else self._settle_seconds
        if isinstance(item, Generation):
            if item.state is FileState.FLUSHED:
                # Its writer's release comes at once, or the close was another process's and the promise is taken back.
                return max(0.05, item.flushed_at + self._settle_seconds - now)
            ready = item.sealed_at + settle
        else:
            # Removed names settle too: the file that takes the place may come a moment later.
            ready = item.queued_at + settle
            if item.record.kind is OperationKind.DELETE and self._has_successor(item, now):
                ready = now + 1.0
        for key in item.changed_keys():
            ready = max(ready, self._last_write.get(key, float("-inf")) + KEY_INTERVAL_SECONDS)
        return max(0.0, ready - now)

    def _has_successor(self, item: Operation, now: float) -> bool:
        """Whether a temporary file beside it, older than its removal, may be about to take its name."""
        folder = item.record.key.rpartition("/")[0]
        for other in self._owed.items():
            if other.sequence > item.sequence:
                return False
            if other.changed_keys()[0].rpartition("/")[0] == folder and self._is_temporary(other, now):
                return True
        return False

    # ---- one item

    async def _publish(self, item: Item) -> None:
        attempt = 0
        while item in self._owed:
            try:
                await self._publish_once(item)
                self.failure = None
                return
            except _WORTH_WAITING as exc:
                attempt += 1
                pause = backoff_seconds(attempt, random.random())
                self.failure = item.error = exc
                log.warning(
                    "publishing waits key=%s attempt=%d seconds=%.1f error=%s",
                    item.changed_keys()[-1],
                    attempt,
                    pause,
                    exc,
                )
                await trio.sleep(pause)
            except _STOPPED:
                raise
            except Exception as exc:
                if not isinstance(exc, FusecacheError):
                    # A mistake of ours: it must not keep everything else from the bucket.
                    log.exception("unexpected failure key=%s", item.changed_keys()[-1])
                if item in self._owed:
                    await self._resolve(item, exc)

    async def _resolve(self, item: Item, error: Exception) -> None:
        """Do what an error asks for that waiting does not mend."""
        if isinstance(error, UploadLost):
            if isinstance(item, Generation):
                log.warning("upload expired, sending it again key=%s", item.record.key)
                self._preparer.restart(item)
        elif isinstance(error, ObjectChanged):
            await self._conflict(item, error)
        elif isinstance(error, FusecacheError):
            await self._reject(item, error)
        else:
            await self._reject(item, Refused(f"{item.changed_keys()[-1]}: {error!r}"))

    async def _publish_once(self, item: Item) -> None:
        if isinstance(item, Generation):
            await self._preparer.wait(item)
            now = trio.current_time()
            if self._next_items(now, 1) != [item] or self._delay(item, now) > 0:
                return  # dropped, or under another key and so in another place, while its bytes were sent
            await self._journal.commit(PutFile(item.go(FileState.PUBLISHING)))
            self._last_write[item.record.key] = trio.current_time()
            version = await self._offload.upload(self._publishing.publish_file, item.record, item.file.path)
            await self._stored(item, version)
            return
        item.in_flight = True
        await self._journal.settled()  # its row must be on the disk before its effect
        self._last_write[item.changed_keys()[-1]] = trio.current_time()
        outcome = await self._offload.upload(self._publishing.publish_operation, item.record)
        await self._done(item, outcome)

    async def _stored(self, generation: Generation, version: ObjectInfo) -> None:
        """The bucket has it: let the name show the bucket's version, say so in the journal, then let the bytes go.

        The tree changes at once, with the queue: whoever writes or removes the file next must know its base.
        """
        record = generation.go(FileState.STORED)
        self._owed.remove(generation, published=True)
        changes = [
            PutFile(record),
            PutAttributes(version.key, version.etag, record.attributes),
            *self._rebase(version.key, version.etag),
        ]
        node = generation.node
        if node is not None:
            if self._tree.is_linked(node):
                node.object = version
                if self._tree.key(node) == version.key:  # else a rename is queued behind it
                    self._names.note_published(node)
            if node.generation is generation and (self._tree.is_linked(node) or node.handles == 0):
                node.generation = None
            self._tree.unpin(node)
        await self._journal.commit(*changes)
        if node is None or node.generation is not generation:
            await self._preparer.retire(generation, version)

    async def _done(self, item: Operation, outcome: Outcome) -> None:
        self._owed.remove(item, published=True)
        changes: list[Change] = [DropOperation(item.sequence)]
        for key, etag in outcome.shows.items():
            changes += self._rebase(key, etag)
        record, node = item.record, item.node
        version = outcome.version
        if node is not None and version is not None and record.kind is OperationKind.RENAME:
            changes.append(PutAttributes(version.key, version.etag, attributes_of(node)))
        if record.kind in {OperationKind.DELETE, OperationKind.RMDIR, OperationKind.RENAME}:
            self._tree.unhide(record.key, gone=True)
        if node is not None:
            if outcome.version is not None:
                node.object = outcome.version
            if self._tree.is_linked(node):
                self._names.note_published(node)
            self._tree.unpin(node)
        await self._journal.commit(*changes)

    def _rebase(self, key: str, etag: str | None) -> list[Change]:
        follower = self._owed.rebase(key, etag)
        if follower is not None:
            return [_row(follower)]
        node = self._tree.find(key)
        if node is not None and node.generation is not None:
            # What is being written under this name was begun before the bucket showed this.
            node.object = None if etag is None else ObjectInfo(key, etag, 0, 0.0)
        return []

    def _journal_rebased(self, item: Item) -> None:
        self._journal.submit(_row(item))

    # ---- what went wrong

    async def _conflict(self, item: Item, error: FusecacheError) -> None:
        """Another client changed the key meanwhile: both versions are kept."""
        self.conflicts.append(item.changed_keys()[-1])
        node = item.node
        parent, name = (node.parent, node.name) if node is not None else (None, "")
        if isinstance(item, Generation):
            key = item.record.key
            copy_key = _conflict_key(key, item.sequence)
            self.kept_as[key] = copy_key
            log.error("conflict key=%s kept_as=%s error=%s", key, copy_key, error)
            self._owed.remove(item, published=True)
            self._preparer.restart(item)
            record = item.go(FileState.SEALED, key=copy_key, base_etag=None)
            self._owed.add(item)
            if node is not None and parent is not None and self._tree.key(node) == key:
                # The name shows the other client's version from now on; ours, and what writers still add to it, has
                # a name of its own.
                self._tree.move(node, parent, copy_key.rpartition("/")[2])
                self.on_name_lost(parent, name)
            await self._journal.commit(PutFile(record), *self._rebase(key, None))
            return
        log.error("conflict, change given up key=%s error=%s", item.record.key, error)
        await self._give_up(item)
        if node is not None and parent is not None and node.parent is parent and node.generation is None:
            self._tree.detach(node)
            self.on_name_lost(parent, name)

    async def _reject(self, item: Item, error: FusecacheError) -> None:
        """The bucket refuses this for good, or its bytes cannot be read: keep it, and go on with the others."""
        log.error("refused for good key=%s error=%s", item.changed_keys()[-1], error)
        item.error = error
        if isinstance(item, Operation):
            self._rejected.append(item)
            await self._give_up(item)
            return
        self._owed.remove(item)
        record = item.go(FileState.REJECTED, error=str(error))
        node = item.node
        if node is not None and self._tree.is_linked(node):
            self._rejected.append(item)
            await self._journal.commit(PutFile(record))
        elif node is not None and node.handles:
            await self._journal.commit(DropFile(record.generation))  # unlinked; ends with its last handle
        else:
            await self._journal.commit(*self._contents.drop(item))

    async def _give_up(self, item: Operation) -> None:
        self._owed.remove(item)
        changes: list[Change] = [DropOperation(item.sequence)]
        if item.record.kind in {OperationKind.DELETE, OperationKind.RMDIR, OperationKind.RENAME}:
            self._tree.unhide(item.record.key, gone=False)
        if item.node is not None:
            self._tree.unpin(item.node)
            item.node.verified = float("-inf")
        await self._journal.commit(*changes)

    def _announce(self) -> None:
        self._progress.set()
        self._progress = trio.Event()


def _row(item: Item) -> PutFile | PutOperation:
    return PutFile(item.record) if isinstance(item, Generation) else PutOperation(item.record)


def _conflict_key(key: str, sequence: int) -> str:
    """Return where our version of a key goes that another client wrote too; its name has at most 255 bytes."""
    folder, slash, name = key.rpartition("/")
    mark = f".conflict-{socket.gethostname()[:60]}-{sequence}"
    return folder + slash + name.encode()[: 255 - len(mark)].decode(errors="ignore") + mark
