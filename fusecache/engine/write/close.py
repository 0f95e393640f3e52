"""What a close promises: the life of a generation from the flush until it is sealed.

Promises are made here and carried out by the publisher; `engine/writeback/placement.py` says in which order,
`disposal.py` how content ends of which nothing is promised.

Invariants:
1. `flush` returns only when the journal's row is synced; what it promised is found again after any crash.
2. A generation whose write failed, or whose writer was killed, is never published.
"""

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from fusecache.disk.staging import StagingDirectory, checksum_of_checksums
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.holds import bytes_in_use
from fusecache.engine.namespace.nodes import FileHandle, Generation, Node, attributes_of
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.exception_groups import one_failure
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.procfs import was_killed
from fusecache.engine.write.disposal import Endings
from fusecache.engine.write.enospc_log import Shortages
from fusecache.engine.writeback.placement import Places
from fusecache.engine.writeback.queue import Owed
from fusecache.index.journal import Change, PutFile
from fusecache.model.errors import AcrossDevices, FusecacheError
from fusecache.model.records import Reason
from fusecache.model.states import FileState
from fusecache.policy.name_patterns import covers, matches_any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class Promises(Endings):
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
        super().__init__(tree, cache, staging, journal, owed)
        self._offload = offload
        self._boot_id = boot_id
        self.places = Places(tree, owed, journal, self.drop, self.take_out)
        # Closed, and perhaps not by the last that holds them.
        self._flushed: set[Generation] = set()
        # Of these, those that the last look of `settle` found held for too long.
        self._overdue: set[Generation] = set()
        # Being written; those that ended are taken out by `unsettled`.
        self._dirty: set[Generation] = set()
        self.shortages = Shortages()
        self.local_only: tuple[str, ...] = ()
        self.temp_names: tuple[str, ...] = ()
        self.before_close: Callable[[FileHandle], Awaitable[None]] | None = None
        self.on_dirty: Callable[[], None] = lambda: None
        self.on_sealed: Callable[[], None] = lambda: None

    async def flush(self, handle: FileHandle) -> None:
        """One close(2) of the file: make what was written durable here. Raises the file's first stored error."""
        if not handle.writable:
            return
        handle.is_flushed = True
        node = handle.node
        _raise_failure(node)
        generation = node.generation
        if generation is None:
            return
        if not generation.is_mutable or not generation.changed_since_flush:
            if generation.state is FileState.FLUSHED and generation.flushed_by is handle:
                _is_unfinished(generation, handle)  # what was promised is a forked child's close
            await self._journal.settled()  # another's close may be on its way to the disk
        elif self.is_local(node) or await self._may_promise(handle, generation):
            generation.flushed_by = handle
            await self._promise(node, generation)

    async def _may_promise(self, handle: FileHandle, generation: Generation) -> bool:
        """Wait for room, and say whether the close is to promise anything after that."""
        if self.before_close is not None:
            if not generation.writes:
                self._trim(generation)
            await self.before_close(handle)
            _raise_failure(handle.node)  # another's write found no room meanwhile
        if handle.node.generation is not generation or not generation.is_mutable:
            return False  # published as it is meanwhile, or removed
        return not _is_unfinished(generation, handle)

    async def fsync(self, handle: FileHandle) -> None:
        """Return when data and journal row are on the disk. Raises the file's first stored error."""
        generation = handle.node.generation
        _raise_failure(handle.node)
        if generation is None:
            return
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
        """Bring the bytes to the disk; take their checksums beside that, so that a close finds them verified."""
        file, sums, size = generation.file, generation.sums, generation.size
        if generation.writes or not generation.is_mutable or not sums.may_take(size, generation.written):
            await self._offload.disk(file.sync)
            return
        with sums.taking(size) as extent:

            async def sum_up() -> None:
                start, stop = extent
                sums.put(extent, size, await self._offload.disk(file.checksums, start, stop - start))

            with one_failure():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sum_up, name=f"checksums {generation.record.key}")
                    await self._offload.disk(file.sync)

    def settle(self, now: float, settle_seconds: float) -> bool:
        """Take back promises of files that a writer still holds: the close was a forked child's.

        Not at the first look that finds one overdue: the loop may have stood still, and the end of the close lie unread
        in the kernel. Return whether another look, a moment later, is to decide.
        """
        overdue = self._overdue
        self._overdue = set()
        for item in list(self._flushed):
            if item.state is not FileState.FLUSHED:
                self._flushed.discard(item)
            elif (
                not item.closing
                and now - item.flushed_at >= settle_seconds
                and item.node is not None
                and item.node.writers
            ):
                if item not in overdue:
                    self._overdue.add(item)
                    continue
                self._owed.discard(item)
                item.go(FileState.OPEN)
                item.changed_since_flush = True  # its writer's own close is still to come
                # Its sequence stays: a RELEASE without another FLUSH (late pages of a mapping) seals it
                # under that.
                self._journal.submit(*self._row(item))
        return bool(self._overdue)

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

    def offer_again(self, node: Node, generation: Generation) -> list[Change]:
        """Queue content that the bucket refused once more, as if it had been closed just now."""
        key = self._tree.key(node)
        generation.error = None
        self.on_key_changed(generation)  # parts of the upload that was refused are no use
        base = self._owed.base_for(key, node.published_etag(key))
        sequence = self._journal.next_number()
        generation.go(
            FileState.SEALED,
            key=key,
            sequence=sequence,
            base_etag=base,
            error="",
            reason=Reason.NONE,
            refused_at=0,
        )
        generation.sealed_at = generation.flushed_at = trio.current_time()
        self._owed.add(generation)
        self.on_sealed()
        return [PutFile(generation.record), *self.places.end_put_off(key), *self.on_settled(generation)]

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

    async def _end_writing(self, handle: FileHandle, generation: Generation) -> None:
        """The last writer is gone: seal, or keep aside."""
        node = handle.node
        error, node.write_error = node.write_error, None
        if error is not None:
            self._fail(generation, error)  # bytes are missing that were to be in it
        if generation.state is FileState.FAILED:
            self._put_aside(node, generation)
        elif self.is_local(node):
            if generation.state is not FileState.LOCAL or generation.changed_since_flush:
                await self._promise(node, generation)
            self._trim(generation)
        elif _is_unfinished_at_end(generation, handle):
            self._put_aside(node, generation)
        else:
            if generation.state is FileState.OPEN:
                await self._promise_late(node, generation)
            self._seal_closed(node, generation)

    def _end_replaced(self, handle: FileHandle, generation: Generation) -> None:
        """A handle of an unlinked file was closed: if it is owed still, then before what was renamed over it."""
        node = handle.node
        if handle.writable and node.writers == 0 and _is_unfinished_at_end(generation, handle):
            self._owed.discard(generation)
        if generation in self._owed:
            self._seal_closed(node, generation)
        elif node.handles == 0:
            self._let_go(generation)

    # ---- inside

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
            generation.go(FileState.OPEN)
            await self._journal.commit(*self._row(generation))

    def _fail(self, generation: Generation, error: FusecacheError) -> None:
        if generation.error is None:
            log.error("write failed path=%s error=%s", generation.record.key, error)
            generation.error = error
        self._owed.discard(generation)
        if generation.state is not FileState.FAILED:
            generation.go(FileState.FAILED, error=str(error))
            self._journal.submit(*self._row(generation))

    async def _promise(self, node: Node, generation: Generation) -> None:
        """Journal what a close promises."""
        generation.changed_since_flush = False
        if not self._tree.is_linked(node):
            return  # unlinked while open: its content goes with the last handle
        changes = self._promised(node, generation)
        generation.closing += 1
        try:
            await self._journal.commit(*changes)
        finally:
            generation.closing -= 1
        generation.flushed_at = max(generation.flushed_at, trio.current_time())
        self.on_sealed()

    def _promised(self, node: Node, generation: Generation) -> list[Change]:
        """Make content FLUSHED under a new sequence, or under the place of an older generation of the same key.

        Content that is never published becomes LOCAL instead. Return what is to be journaled.
        """
        generation.changed_since_flush = False
        generation.flushed_changes = generation.changes
        self._owed.discard(generation)
        key = self._tree.key(node)
        self.shortages.note_closed(self._tree.relative(key), generation.size)
        changes: list[Change] = [*self.drop_replaced(generation)]
        if self.is_local(node):
            self.local.add(generation)
            attributes = attributes_of(node)
            record = generation.go(
                FileState.LOCAL, key=key, size=generation.size, sequence=0, attributes=attributes
            )
            return [*changes, PutFile(record)]
        sequence, base_etag = self.places.new(node, generation, key)
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
        if generation.writes or not generation.sums.are_current:
            return {"synced": False, "checksum": ""}
        generation.granule_checksums = generation.sums.checksums
        return {"synced": True, "checksum": checksum_of_checksums(generation.granule_checksums)}

    async def _promise_late(self, node: Node, generation: Generation) -> None:
        """Pages came after the close (a mapping): same promise, same place, the newer bytes.

        A place of their own if what was closed is published already, or was promised under another name.
        """
        key = self._tree.key(node)
        if not generation.sequence or generation.record.key != key:
            await self._promise(node, generation)
            return
        self._owed.discard(generation)
        base = self._owed.base_for(key, node.published_etag(key), generation.sequence)
        verified = self._verified(generation)
        record = generation.go(FileState.FLUSHED, key=key, size=generation.size, base_etag=base, **verified)
        generation.changed_since_flush = False
        generation.flushed_changes = generation.changes
        self._flushed.add(generation)
        self._owed.add(generation)
        await self._journal.commit(PutFile(record))

    def _seal_closed(self, node: Node, generation: Generation) -> None:
        """Seal what was promised, unless another writer came meanwhile, whose end seals, or it was removed.

        What another file was renamed over is still to be published, before that.
        """
        if node.writers or generation.state is not FileState.FLUSHED or generation not in self._owed:
            return
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
        changes = self.places.take(generation)
        return [*changes, PutFile(generation.record)]


def _raise_failure(node: Node) -> None:
    """Raise why content is not published; an upload that is only tried again is no failure of its writer."""
    if node.write_error is not None:
        raise node.write_error
    generation = node.generation
    if generation is None or generation.error is None:
        return
    if generation.state in {FileState.FAILED, FileState.REJECTED}:
        raise generation.error


def _is_unfinished(generation: Generation, handle: FileHandle) -> bool:
    """Return whether the process that wrote through a handle is being killed, and note it."""
    if is_killed(handle):
        generation.killed_writer = handle
    elif generation.killed_writer is not handle:
        generation.killed_writer = None
    # Else a child that outlived it closes the same open file.
    return generation.killed_writer is not None


def _is_unfinished_at_end(generation: Generation, handle: FileHandle) -> bool:
    """Return whether content must not be published although its last writer is gone."""
    if generation.killed_writer is not None:
        return True
    if generation.changes == generation.flushed_changes:
        return False  # a close promised just this
    # A mapping's late pages, of a process that may have been killed; or nothing was written, and nothing closed.
    return is_killed(handle) or not (generation.changes or generation.sequence)


def is_killed(handle: FileHandle) -> bool:
    """Return whether the process that opened a file for writing is being ended by a signal."""
    return was_killed(handle.process or handle.pid)
