"""What a close promises: the life of a generation from the flush until it is sealed, dropped, or kept aside.

Promises are made here and carried out by the publisher.

Invariants:
1. `flush` returns only when the journal's row is synced; what it promised is found again after any crash.
2. A generation whose write failed, or whose writer was killed, is never published.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

import trio

from fusecache.disk.staging import StagingDirectory, checksum_of_checksums
from fusecache.engine.cache import BlockCache
from fusecache.engine.groups import one_failure
from fusecache.engine.journaling import JournalWriter
from fusecache.engine.nodes import FileHandle, Generation, Item, Node, Operation, attributes_of
from fusecache.engine.offload import Offload
from fusecache.engine.owed import Owed
from fusecache.engine.processes import was_killed
from fusecache.engine.tree import Tree
from fusecache.index.journal import Change, DropFile, DropOperation, PutFile
from fusecache.model.errors import AcrossDevices, FusecacheError, NoSpace
from fusecache.model.nouns import MIB
from fusecache.model.records import FileRecord, OperationKind, Reason
from fusecache.model.states import FileState
from fusecache.policy.names import covers, matches_any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

# Files up to this size are taken for ones that speak of others.
_SMALL_BYTES = MIB
# So many versions of a file that speaks of others are queued at most, during an outage say.
_POINTER_VERSIONS = 1000
# A queued file whose rewriting has put its upload off for so long is published as it is.
_REWRITE_SECONDS = 10.0


class Promises:
    """Makes what was written durable here, and queues it for the bucket."""

    def __init__(
        self,
        tree: Tree,
        cache: BlockCache,
        staging: StagingDirectory,
        journal: JournalWriter,
        owed: Owed,
        offload: Offload,
        boot_id: str,
    ) -> None:
        self._tree = tree
        self._cache = cache
        self._staging = staging
        self._journal = journal
        self._owed = owed
        self._offload = offload
        self._boot_id = boot_id
        # Closed, and perhaps not by the last that holds them.
        self._flushed: set[Generation] = set()
        # Being written; those that ended are taken out by `unsettled`.
        self._dirty: set[Generation] = set()
        # Content that is never published: of names that match `local_only`.
        self.local: set[Generation] = set()
        self.local_only: tuple[str, ...] = ()
        self.temp_names: tuple[str, ...] = ()
        self.before_close: Callable[[FileHandle], Awaitable[None]] | None = None
        self.on_dirty: Callable[[], None] = lambda: None
        self.on_sealed: Callable[[], None] = lambda: None
        self.on_name_lost: Callable[[Node, str], None] = lambda _parent, _name: None
        self.on_dropped: Callable[[Generation], None] = lambda _generation: None
        self.on_key_changed: Callable[[Generation], None] = lambda _generation: None
        self.on_aside: Callable[[FileRecord], None] = lambda _record: None

    async def flush(self, handle: FileHandle) -> None:
        """One close(2) of the file: make what was written durable here. Raises the file's first stored error."""
        node = handle.node
        generation = node.generation
        if not handle.writable:
            return
        if node.write_error is not None:
            raise node.write_error
        if generation is None:
            return
        _raise_failure(generation)
        if not generation.is_mutable or not generation.changed_since_flush:
            await self._journal.settled()  # another's close may be on its way to the disk
            return
        if not self.is_local(node):
            if self.before_close is not None:
                if not generation.writes:
                    self._trim(generation)
                await self.before_close(handle)
            if node.generation is not generation or not generation.is_mutable:
                return  # published as it is meanwhile, or removed
            if _is_unfinished(generation, handle):
                return
        await self._promise(node, generation)

    async def fsync(self, handle: FileHandle) -> None:
        """Return when data and journal row are on the disk. Raises the file's first stored error."""
        generation = handle.node.generation
        if generation is None:
            return
        _raise_failure(generation)
        if generation.is_mutable:
            generation.record = replace(
                generation.record, size=generation.size, attributes=attributes_of(handle.node)
            )
        ticket = self._journal.submit(*self._row(generation))
        try:
            with bytes_in_use(generation):
                await self._sync(generation)
        except FusecacheError as exc:
            # The kernel tells it once: what is read back later need not be what was written.
            if generation.is_mutable:
                self._fail(generation, exc)
            raise
        await ticket.wait()

    async def _sync(self, generation: Generation) -> None:
        """Bring the bytes to the disk; take their checksums beside that, so that a close finds them verified.

        Not again before as much was written as was summed: a database that syncs each change does not wait for that.
        """
        file, changes = generation.file, generation.changes
        if generation.writes or not generation.is_mutable or generation.summed_bytes > generation.written:
            await self._offload.disk(file.sync)
            return
        generation.summed_bytes += generation.size
        checksums = b""

        async def sum_up() -> None:
            nonlocal checksums
            checksums = await self._offload.disk(file.checksums)

        with one_failure():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sum_up, name=f"checksums {generation.record.key}")
                await self._offload.disk(file.sync)
        generation.synced_checksums = (changes, checksums)

    def settle(self, now: float, settle_seconds: float) -> None:
        """Take back promises of files that a writer still holds: the close was a forked child's."""
        for item in list(self._flushed):
            if item.state is not FileState.FLUSHED:
                self._flushed.discard(item)
            elif now - item.flushed_at >= settle_seconds and item.node is not None and item.node.writers:
                self._owed.discard(item)
                item.go(FileState.OPEN)
                item.changed_since_flush = True  # its writer's own close is still to come
                # Its sequence stays: a RELEASE without another FLUSH (late pages of a mapping) seals it
                # under that.
                self._journal.submit(PutFile(item.record))

    # ---- content that is never closed

    def unsettled(self) -> list[Generation]:
        """Return what is being written, and was changed since the last promise that still holds."""
        self._dirty = {each for each in self._dirty if each.state in {FileState.OPEN, FileState.FLUSHED}}
        return list(self._dirty)

    async def snapshot(self, node: Node, *, rested_seconds: float) -> Generation | None:
        """Have what an open file holds now published, and return it; None if there is nothing to be published.

        Nothing is copied here: the content is sealed, and who writes next gets a copy of it.
        rested_seconds: so much of its settle time counts as over.
        """
        generation = node.generation
        while generation is not None and generation.writes:
            if generation.idle is None or generation.idle.is_set():
                generation.idle = trio.Event()
            await generation.idle.wait()
            generation = node.generation
        if generation is None or generation.state not in {FileState.OPEN, FileState.FLUSHED}:
            return None
        if generation.killed_writer is not None or not self._tree.is_linked(node) or self.is_local(node):
            return None
        ticket = self._journal.submit(*self._promised(node, generation), *self._sealed(generation))
        generation.sealed_at -= rested_seconds
        self.on_sealed()
        await ticket.wait()
        return generation

    def has_temporary_name(self, node: Node) -> bool:
        """Return whether the node's name is one under which programs write before they rename."""
        return matches_any(node.name, self.temp_names)

    # ---- content that is never published

    def is_local(self, node: Node) -> bool:
        """Return whether files under the node's name are never published."""
        return bool(self.local_only) and covers(self.local_only, self._tree.path(node))

    def check_stays_published(self, key_before: str, key_now: str) -> None:
        """Raise AcrossDevices for a rename that would take a file out of the bucket: `mv` then copies and removes."""
        if self.local_only:
            before, now = self._tree.relative(key_before), self._tree.relative(key_now)
            if covers(self.local_only, now) and not covers(self.local_only, before):
                raise AcrossDevices(f"{now}: files there are never published; copy {before} and remove it")

    def take_local(self, generations: list[Generation]) -> None:
        """Take over what the daemon before never published; what is under another name by now's options is queued."""
        for generation in generations:
            node = generation.node
            if node is None:
                continue
            if self.is_local(node):
                self.local.add(generation)
            else:
                self._journal.submit(*self._promised(node, generation), *self._sealed(generation))

    def leave_local(self, node: Node, generation: Generation) -> list[Change]:
        """Content that was never published got another name; return what is to be journaled with that."""
        key = self._tree.key(node)
        if self.is_local(node):
            generation.record = replace(generation.record, key=key)
            return [PutFile(generation.record)]
        self.local.discard(generation)
        if node.writers:
            self._dirty.add(generation)
            self.on_dirty()
            # Under its new name it is as new as the rename: a release without another flush seals it under that.
            generation.changed_since_flush = True
            return [PutFile(generation.go(FileState.OPEN, key=key, sequence=self._journal.next_number()))]
        changes = [*self._promised(node, generation), *self._sealed(generation)]
        self.on_sealed()
        return changes

    # ---- ending

    def drop(self, generation: Generation) -> list[DropFile]:
        """End a generation that nobody needs any more; return the change to be journaled with its reason.

        One in flight cannot be dropped.
        """
        self._owed.discard(generation)
        self.local.discard(generation)
        generation.go(FileState.DROPPED)
        node = generation.node
        generation.node = None
        if node is not None:
            if node.generation is generation:
                node.generation = None
            self._tree.unpin(node)
        self.on_dropped(generation)
        return [DropFile(generation.record.generation), *self._drop_replaced(generation)]

    def _drop_replaced(self, generation: Generation) -> list[DropFile]:
        """The version that the bucket refused is not wanted any more."""
        refused, generation.replaces = generation.replaces, None
        return self.drop(refused) if refused is not None else []

    def collapse_delete(self, key: str, changes: list[Change]) -> str | None:
        """New content takes the place of a queued DELETE of its key; return what the bucket shows there, or None."""
        queued = self._owed.for_key(key)
        last = queued[-1] if queued else None
        if isinstance(last, Operation) and last.record.kind is OperationKind.DELETE and not last.in_flight:
            self._owed.remove(last)
            self._tree.unhide(key, gone=False)
            changes.append(DropOperation(last.sequence))
            return last.record.base_etag
        return None

    def _let_go(self, generation: Generation) -> None:
        """The last handle of an unlinked file is closed."""
        if generation.state is FileState.STORED:
            generation.node = None
            self.on_dropped(generation)
        else:
            self._journal.submit(*self.drop(generation))

    async def _end_writing(self, node: Node, generation: Generation) -> None:
        """The last writer is gone: seal, or keep aside."""
        failed = generation.state is FileState.FAILED
        if not failed and self.is_local(node):
            if generation.state is not FileState.LOCAL or generation.changed_since_flush:
                await self._promise(node, generation)
            self._trim(generation)
        elif failed or generation.killed_writer is not None or generation.record.sequence == 0:
            self._put_aside(node, generation)
        else:
            if generation.state is FileState.OPEN:
                await self._promise_late(node, generation)
            if node.writers == 0 and generation.state is FileState.FLUSHED:
                self._seal(generation)  # else another writer came meanwhile: its end seals

    def _put_aside(self, node: Node, generation: Generation) -> None:
        """Keep content that must not be published; the published version shows again under the name."""
        parent, name = node.parent, node.name
        if isinstance(generation.error, NoSpace):
            # Its writer was told; keeping it would hold the very room that is missing.
            log.warning("removed a file that the disk had no room for path=%s", self._tree.path(node))
            self._journal.submit(*self.drop(generation))
        else:
            self._owed.discard(generation)
            self.local.discard(generation)
            self.on_key_changed(generation)  # parts that were sent are for nobody
            failed = generation.error is not None
            record = generation.go(
                FileState.ORPHAN,
                size=generation.size,
                moment=time.time(),
                reason=Reason.FAILED if failed else Reason.KILLED,
                error=str(generation.error) if failed else "its writer was killed before it closed the file",
            )
            self._journal.submit(PutFile(record))
            generation.file.close()
            place = self._staging.move_aside(record.generation, "orphans")
            log.warning(
                "kept aside an unfinished file path=%s bytes=%d at=%s reason=%s",
                self._tree.path(node), record.size, place, record.error,
            )  # fmt: skip
            self.on_aside(record)
            self._cache.release_staging(generation.reserved - generation.size)
            generation.reserved = generation.size
            node.generation = None
            generation.node = None
            self._tree.unpin(node)
        if parent is not None and node.parent is not None:
            # The kernel holds the unfinished bytes under this inode: the name needs another one.
            self._tree.detach(node)
            self._hand_over(node, parent, name)
            self.on_name_lost(parent, name)

    def _hand_over(self, node: Node, parent: Node, name: str) -> None:
        """Give what is queued for a node to a new one of that name: its last closed version shows again."""
        queued = [
            item for item in self._owed.for_key(self._tree.child_key(parent, name)) if item.node is node
        ]
        if not queued:
            return
        heir = self._tree.make(parent, name, node.kind, attributes=attributes_of(node), version=node.object)
        for item in queued:
            item.node = heir
            self._tree.pin(heir)
            self._tree.unpin(node)
            if isinstance(item, Generation):
                heir.generation = item

    # ---- inside

    def _row(self, generation: Generation) -> list[PutFile]:
        """Return the row to be journaled: none for a file that was unlinked, which must not come back after a crash."""
        is_named = generation.node is not None and self._tree.is_linked(generation.node)
        return [PutFile(generation.record)] if is_named else []

    async def _note_change(self, generation: Generation) -> None:
        """Bytes change after a close was promised: take the promise back until the next close, or the release.

        Durably, before the first byte changes: a crash must not publish a mixture as if it had been closed.
        """
        generation.changed_since_flush = True
        if generation.dirty_since == float("inf"):
            generation.dirty_since = trio.current_time()
            self._dirty.add(generation)
            self.on_dirty()
        while generation.state is FileState.FLUSHED:
            self._owed.discard(generation)
            await self._journal.commit(PutFile(generation.go(FileState.OPEN)))

    def _fail(self, generation: Generation, error: FusecacheError) -> None:
        if generation.error is None:
            log.error("write failed path=%s error=%s", generation.record.key, error)
            generation.error = error
        self._owed.discard(generation)
        if generation.state is not FileState.FAILED:
            self._journal.submit(PutFile(generation.go(FileState.FAILED, error=str(error))))

    async def _promise(self, node: Node, generation: Generation) -> None:
        """Journal what a close promises."""
        generation.changed_since_flush = False
        if not self._tree.is_linked(node):
            return  # unlinked while open: its content goes with the last handle
        await self._journal.commit(*self._promised(node, generation))
        self.on_sealed()

    def _promised(self, node: Node, generation: Generation) -> list[Change]:
        """Make content FLUSHED under a new sequence, or under the place of an older generation of the same key.

        Content that is never published becomes LOCAL instead. Return what is to be journaled.
        """
        generation.changed_since_flush = False
        self._owed.discard(generation)
        key = self._tree.key(node)
        changes: list[Change] = [*self._drop_replaced(generation)]
        if self.is_local(node):
            self.local.add(generation)
            attributes = attributes_of(node)
            record = generation.go(
                FileState.LOCAL, key=key, size=generation.size, sequence=0, attributes=attributes
            )
            return [*changes, PutFile(record)]
        sequence, base_etag = self._place(node, generation, key)
        record = generation.go(
            FileState.FLUSHED,
            key=key,
            size=generation.size,
            sequence=sequence,
            base_etag=base_etag,
            attributes=attributes_of(node),
            boot_id=self._boot_id,
            moment=time.time(),
            **self._verified(generation),
        )
        generation.flushed_at = trio.current_time()
        generation.waiting_since = min(generation.waiting_since, generation.flushed_at)
        self._flushed.add(generation)
        self._owed.add(generation)
        return [*changes, PutFile(record)]

    def _verified(self, generation: Generation) -> dict[str, bool | str]:
        """Return what a row says of bytes on the disk: verified, if they are those of the last fsync."""
        changes, checksums = generation.synced_checksums
        if generation.writes or changes != generation.changes:
            return {"synced": False, "checksum": ""}
        generation.granule_checksums = checksums
        return {"synced": True, "checksum": checksum_of_checksums(checksums)}

    async def _promise_late(self, node: Node, generation: Generation) -> None:
        """Pages came after the close (a mapping): same promise, same place, the newer bytes."""
        self._owed.discard(generation)
        key = self._tree.key(node)
        base = self._owed.base_for(key, node.published_etag(key))
        verified = self._verified(generation)
        record = generation.go(FileState.FLUSHED, key=key, size=generation.size, base_etag=base, **verified)
        generation.changed_since_flush = False
        self._flushed.add(generation)
        self._owed.add(generation)
        await self._journal.commit(PutFile(record))

    def _place(self, node: Node, generation: Generation, key: str) -> tuple[int, str | None]:
        """Return sequence and base for new content of `key`, behind what is queued of it."""
        sequence = self._journal.next_number()
        queued = self._owed.for_key(key)
        last = queued[-1] if queued else None
        generation.follows = last is not None and self._owed.ends_with(last)
        return sequence, self._owed.base_for(key, node.published_etag(key))

    def _take_place(self, generation: Generation) -> list[Change]:
        """Give sealed content the place of the queued version that it makes needless; return what is to be journaled.

        Or have it take the place of a removed object. Not before: a promise that is taken back must leave the closed
        version before it, or its removal, in the queue.
        """
        key = generation.record.key
        queued = [item for item in self._owed.for_key(key) if item.sequence < generation.sequence]
        last = queued[-1] if queued else None
        if _is_delete(last) and not last.in_flight:
            self._owed.remove(last)  # what it knew of the bucket passes on
            self._tree.unhide(key, gone=False)
            return [DropOperation(last.sequence)]
        if not isinstance(last, Generation) or last.node is not generation.node or last.in_flight:
            return []
        # A small file may speak of what was written since: the newer content comes after that, and the oldest stays
        # where it is, for those that rely on it. Of one that is known to speak of others (`latest`) each version
        # stays: what came between, a removed checkpoint say, relies on the one before it.
        versions = sum(isinstance(item, Generation) and item.node is last.node for item in queued)
        most = _POINTER_VERSIONS if self._owed.tells(key) else 2
        if generation.size <= _SMALL_BYTES and not generation.follows and versions < most:
            return []
        # A file rewritten again and again must not keep everything behind it waiting for ever: its oldest version goes.
        is_overdue = (
            trio.current_time() - last.waiting_since > _REWRITE_SECONDS or last.record.upload_id != ""
        )
        if is_overdue and versions == 1:
            return []
        # Who waits for this very content in the bucket must not be told of later content that may never come.
        if last.awaited:
            return []
        # The newer content takes the oldest unpublished place of its key: whatever was written after the old one may
        # rely on it.
        sequence, generation.waiting_since = last.sequence, last.waiting_since
        self._owed.remove(generation)
        changes: list[Change] = [*self.drop(last)]
        base = self._owed.base_for(key, last.record.base_etag)
        generation.record = replace(generation.record, sequence=sequence, base_etag=base)
        self._owed.add(generation)
        return changes

    def _seal(self, generation: Generation) -> None:
        rows = self._sealed(generation)
        # What was replaced goes with its row: that is not put off.
        submit = self._journal.submit_lazily if len(rows) == 1 else self._journal.submit
        submit(*rows)
        self.on_sealed()

    def _sealed(self, generation: Generation) -> list[Change]:
        """Make content immutable, and queue it; return what says so."""
        generation.go(FileState.SEALED, size=generation.size)
        generation.sealed_at = trio.current_time()
        self._trim(generation)
        if generation not in self._owed:
            self._owed.add(generation)
        changes = self._take_place(generation)
        return [*changes, PutFile(generation.record)]

    def _trim(self, generation: Generation) -> None:
        """Nothing more is written into it for now: give back what was reserved for that."""
        if generation.reserved > generation.size:
            self._cache.release_staging(generation.reserved - generation.size)
            generation.reserved = generation.size


def _is_delete(item: Item | None) -> TypeGuard[Operation]:
    return isinstance(item, Operation) and item.record.kind is OperationKind.DELETE


def _raise_failure(generation: Generation) -> None:
    """Raise why content is not published; an upload that is only tried again is no failure of its writer."""
    if generation.error is not None and generation.state in {FileState.FAILED, FileState.REJECTED}:
        raise generation.error


def _is_unfinished(generation: Generation, handle: FileHandle) -> bool:
    """Return whether the process that wrote through a handle is being killed, and note it."""
    if was_killed(handle.process or handle.pid):
        generation.killed_writer = handle
    elif generation.killed_writer is not handle:
        generation.killed_writer = None
    # Else a child that outlived it closes the same open file.
    return generation.killed_writer is not None


@contextmanager
def bytes_in_use(generation: Generation) -> Iterator[None]:
    """Keep a generation's file while a thread works on it, even if its bytes become cache meanwhile."""
    generation.readers += 1
    try:
        yield
    finally:
        generation.readers -= 1
        if generation.readers == 0 and generation.unread is not None:
            generation.unread.set()


@contextmanager
def being_written(generation: Generation) -> Iterator[None]:
    """Keep a generation from being sealed while a thread writes into it."""
    generation.writes += 1
    try:
        yield
    finally:
        generation.writes -= 1
        if generation.writes == 0 and generation.idle is not None:
            generation.idle.set()
