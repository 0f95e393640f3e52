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
from fusecache.engine.namespace.nodes import FileHandle, FileVersion, Node, attributes_of, reading
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.procfs import is_being_killed
from fusecache.engine.write.disposal import VersionDisposal
from fusecache.engine.write.enospc_log import EnospcLog
from fusecache.engine.writeback.placement import QueuePlacement
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, PutFile
from fusecache.model.errors import AcrossDevices, FusecacheError
from fusecache.model.records import Reason
from fusecache.model.states import FileState
from fusecache.policy.name_patterns import is_at_or_below_any, matches_any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class CloseProtocol(VersionDisposal):
    """Makes what was written durable here, and queues it for the bucket."""

    def __init__(
        self,
        tree: Tree,
        cache: BlockCache,
        staging: StagingDirectory,
        journal: JournalWriter,
        queue: WritebackQueue,
        offload: Offload,
        boot_id: str,
    ) -> None:
        super().__init__(tree, cache, staging, journal, queue)
        self._offload = offload
        self._boot_id = boot_id
        self.placement = QueuePlacement(tree, queue, journal, self.drop, self.dequeue)
        # Closed, and perhaps not by the last that holds them.
        self._flushed: set[FileVersion] = set()
        # Of these, those that the last look of `settle` found held for too long.
        self._overdue: set[FileVersion] = set()
        # Being written; those that ended are taken out by `unsettled`.
        self._dirty: set[FileVersion] = set()
        self.enospc_log = EnospcLog()
        self.local_only: tuple[str, ...] = ()
        self.temp_names: tuple[str, ...] = ()
        self.wait_for_space: Callable[[FileHandle], Awaitable[None]] | None = None
        self.on_dirty: Callable[[], None] = lambda: None
        self.on_sealed: Callable[[], None] = lambda: None

    async def flush(self, handle: FileHandle) -> None:
        """One close(2) of the file: make what was written durable here. Raises the file's first stored error."""
        if not handle.writable:
            return
        handle.is_flushed = True
        node = handle.node
        _raise_failure(node)
        version = node.version
        if version is None:
            return
        if not version.is_mutable or not version.changed_since_flush:
            if version.state is FileState.FLUSHED and version.flushed_by is handle:
                _is_unfinished(version, handle)  # what was promised is a forked child's close
            await self._journal.wait_committed()  # another's close may be on its way to the disk
        elif self.is_local(node) or await self._may_journal_close(handle, version):
            version.flushed_by = handle
            await self._journal_close(node, version)

    async def _may_journal_close(self, handle: FileHandle, version: FileVersion) -> bool:
        """Wait for room, and say whether the close is to promise anything after that."""
        if self.wait_for_space is not None:
            if not version.writes:
                self._trim(version)
            await self.wait_for_space(handle)
            _raise_failure(handle.node)  # another's write found no room meanwhile
        if handle.node.version is not version or not version.is_mutable:
            return False  # published as it is meanwhile, or removed
        return not _is_unfinished(version, handle)

    async def fsync(self, handle: FileHandle) -> None:
        """Return when data and journal row are on the disk. Raises the file's first stored error."""
        version = handle.node.version
        _raise_failure(handle.node)
        if version is None:
            return
        if version.is_mutable:
            version.record = replace(version.record, size=version.size, attributes=attributes_of(handle.node))
        ticket = self._journal.submit(*self._row(version))
        try:
            with reading(version):
                await self._sync(version)
        except FusecacheError as exc:
            # The kernel tells it once: what is read back later need not be what was written.
            if version.is_mutable:
                self._fail(version, exc)
            raise
        await ticket.wait()

    async def _sync(self, version: FileVersion) -> None:
        """Bring the bytes to the disk; take their checksums beside that, so that a close finds them verified."""
        file, sums, size = version.file, version.checksums, version.size
        if version.writes or not version.is_mutable or not sums.may_take(size, version.written):
            await self._offload.disk(file.sync)
            return
        with sums.taking(size) as extent:

            async def sum_up() -> None:
                start, stop = extent
                sums.put(extent, size, await self._offload.disk(file.checksums, start, stop - start))

            with unwrap_single_error():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sum_up, name=f"checksums {version.record.key}")
                    await self._offload.disk(file.sync)

    def revoke_unfinished_closes(self, now: float, settle_seconds: float) -> bool:
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
                self._queue.discard(item)
                item.transition_to(FileState.OPEN)
                item.changed_since_flush = True  # its writer's own close is still to come
                # Its sequence stays: a RELEASE without another FLUSH (late pages of a mapping) seals it
                # under that.
                self._journal.submit(*self._row(item))
        return bool(self._overdue)

    # ---- content that is never closed

    def dirty_versions(self) -> list[FileVersion]:
        """Return what is being written, and was changed since the last promise that still holds."""
        self._dirty = {each for each in self._dirty if each.state in {FileState.OPEN, FileState.FLUSHED}}
        return list(self._dirty)

    async def snapshot(self, node: Node, *, rested_seconds: float) -> FileVersion | None:
        """Have what an open file holds now published, and return it; None if there is nothing to be published.

        Nothing is copied here: the content is sealed, and who writes next gets a copy of it.
        rested_seconds: so much of its settle time counts as over.
        """
        version = node.version
        while version is not None and version.writes:
            if version.idle is None or version.idle.is_set():
                version.idle = trio.Event()
            await version.idle.wait()
            version = node.version
        if version is None or version.state not in {FileState.OPEN, FileState.FLUSHED}:
            return None
        if version.killed_writer is not None or not self._tree.is_linked(node) or self.is_local(node):
            return None
        ticket = self._journal.submit(*self._mark_flushed(node, version), *self._sealed(version))
        version.sealed_at -= rested_seconds
        self.on_sealed()
        await ticket.wait()
        return version

    def requeue(self, node: Node, version: FileVersion) -> list[Change]:
        """Queue content that the bucket refused once more, as if it had been closed just now."""
        key = self._tree.key(node)
        version.error = None
        self.on_key_changed(version)  # parts of the upload that was refused are no use
        base = self._queue.base_for(key, node.published_etag(key))
        sequence = self._journal.next_number()
        version.transition_to(
            FileState.SEALED,
            key=key,
            sequence=sequence,
            base_etag=base,
            error="",
            reason=Reason.NONE,
            refused_at=0,
        )
        version.sealed_at = version.flushed_at = trio.current_time()
        self._queue.add(version)
        self.on_sealed()
        return [
            PutFile(version.record),
            *self.placement.cancel_deferred_delete(key),
            *self.on_settled(version),
        ]

    def has_temporary_name(self, node: Node) -> bool:
        """Return whether the node's name is one under which programs write before they rename."""
        return matches_any(node.name, self.temp_names)

    # ---- content that is never published

    def is_local(self, node: Node) -> bool:
        """Return whether files under the node's name are never published."""
        return bool(self.local_only) and is_at_or_below_any(self.local_only, self._tree.path(node))

    def check_stays_published(self, key_before: str, key_now: str) -> None:
        """Raise AcrossDevices for a rename that would take a file out of the bucket: `mv` then copies and removes."""
        if self.local_only:
            before, now = self._tree.relative(key_before), self._tree.relative(key_now)
            if is_at_or_below_any(self.local_only, now) and not is_at_or_below_any(self.local_only, before):
                raise AcrossDevices(f"{now}: files there are never published; copy {before} and remove it")

    def adopt_local_only(self, generations: list[FileVersion]) -> None:
        """Take over what the daemon before never published; what is under another name by now's options is queued."""
        for version in generations:
            node = version.node
            if node is None:
                continue
            if self.is_local(node):
                self.local.add(version)
            else:
                self._journal.submit(*self._mark_flushed(node, version), *self._sealed(version))

    def end_local_only(self, node: Node, version: FileVersion) -> list[Change]:
        """Content that was never published got another name; return what is to be journaled with that."""
        key = self._tree.key(node)
        if self.is_local(node):
            version.record = replace(version.record, key=key)
            return [PutFile(version.record)]
        self.local.discard(version)
        if node.writers:
            self._dirty.add(version)
            self.on_dirty()
            # Under its new name it is as new as the rename: a release without another flush seals it under that.
            version.changed_since_flush = True
            return [
                PutFile(version.transition_to(FileState.OPEN, key=key, sequence=self._journal.next_number()))
            ]
        changes = [*self._mark_flushed(node, version), *self._sealed(version)]
        self.on_sealed()
        return changes

    async def _end_writing(self, handle: FileHandle, version: FileVersion) -> None:
        """The last writer is gone: seal, or keep aside."""
        node = handle.node
        error, node.write_error = node.write_error, None
        if error is not None:
            self._fail(version, error)  # bytes are missing that were to be in it
        if version.state is FileState.FAILED:
            self._quarantine(node, version)
        elif self.is_local(node):
            if version.state is not FileState.LOCAL or version.changed_since_flush:
                await self._journal_close(node, version)
            self._trim(version)
        elif _is_unfinished_at_end(version, handle):
            self._quarantine(node, version)
        else:
            if version.state is FileState.OPEN:
                await self._journal_late_pages(node, version)
            self._seal_closed(node, version)

    def _end_replaced(self, handle: FileHandle, version: FileVersion) -> None:
        """A handle of an unlinked file was closed: if it is owed still, then before what was renamed over it."""
        node = handle.node
        if handle.writable and node.writers == 0 and _is_unfinished_at_end(version, handle):
            self._queue.discard(version)
        if version in self._queue:
            self._seal_closed(node, version)
        elif node.handles == 0:
            self._dispose_unlinked(version)

    # ---- inside

    async def _on_change(self, version: FileVersion) -> None:
        """Bytes change after a close was promised: take the promise back until the next close, or the release.

        Durably, before the first byte changes: a crash must not publish a mixture as if it had been closed.
        """
        version.changed_since_flush = True
        if version.dirty_since == float("inf"):
            version.dirty_since = trio.current_time()
            self._dirty.add(version)
            self.on_dirty()
        while version.state is FileState.FLUSHED:
            self._queue.discard(version)
            version.transition_to(FileState.OPEN)
            await self._journal.commit(*self._row(version))

    def _fail(self, version: FileVersion, error: FusecacheError) -> None:
        if version.error is None:
            log.error("write failed path=%s error=%s", version.record.key, error)
            version.error = error
        self._queue.discard(version)
        if version.state is not FileState.FAILED:
            version.transition_to(FileState.FAILED, error=str(error))
            self._journal.submit(*self._row(version))

    async def _journal_close(self, node: Node, version: FileVersion) -> None:
        """Journal what a close promises."""
        version.changed_since_flush = False
        if not self._tree.is_linked(node):
            return  # unlinked while open: its content goes with the last handle
        changes = self._mark_flushed(node, version)
        version.closing += 1
        try:
            await self._journal.commit(*changes)
        finally:
            version.closing -= 1
        version.flushed_at = max(version.flushed_at, trio.current_time())
        self.on_sealed()

    def _mark_flushed(self, node: Node, version: FileVersion) -> list[Change]:
        """Make content FLUSHED under a new sequence, or under the place of an older generation of the same key.

        Content that is never published becomes LOCAL instead. Return what is to be journaled.
        """
        version.changed_since_flush = False
        version.flushed_changes = version.changes
        self._queue.discard(version)
        key = self._tree.key(node)
        self.enospc_log.on_closed(self._tree.relative(key), version.size)
        changes: list[Change] = [*self.drop_replaced(version)]
        if self.is_local(node):
            self.local.add(version)
            attributes = attributes_of(node)
            record = version.transition_to(
                FileState.LOCAL, key=key, size=version.size, sequence=0, attributes=attributes
            )
            return [*changes, PutFile(record)]
        sequence, base_etag = self.placement.assign(node, version, key)
        record = version.transition_to(
            FileState.FLUSHED,
            key=key,
            size=version.size,
            sequence=sequence,
            base_etag=base_etag,
            attributes=attributes_of(node),
            boot_id=self._boot_id,
            moment=time.time(),
            **self._verified(version),
        )
        version.flushed_at = trio.current_time()
        version.waiting_since = min(version.waiting_since, version.flushed_at)
        self._flushed.add(version)
        self._queue.add(version)
        return [*changes, PutFile(record)]

    def _verified(self, version: FileVersion) -> dict[str, bool | str]:
        """Return what a row says of bytes on the disk: verified, if they are those of the last fsync."""
        if version.writes or not version.checksums.are_current:
            return {"synced": False, "checksum": ""}
        version.granule_checksums = version.checksums.checksums
        return {"synced": True, "checksum": checksum_of_checksums(version.granule_checksums)}

    async def _journal_late_pages(self, node: Node, version: FileVersion) -> None:
        """Pages came after the close (a mapping): same promise, same place, the newer bytes.

        A place of their own if what was closed is published already, or was promised under another name.
        """
        key = self._tree.key(node)
        if not version.sequence or version.record.key != key:
            await self._journal_close(node, version)
            return
        self._queue.discard(version)
        base = self._queue.base_for(key, node.published_etag(key), version.sequence)
        verified = self._verified(version)
        record = version.transition_to(
            FileState.FLUSHED, key=key, size=version.size, base_etag=base, **verified
        )
        version.changed_since_flush = False
        version.flushed_changes = version.changes
        self._flushed.add(version)
        self._queue.add(version)
        await self._journal.commit(PutFile(record))

    def _seal_closed(self, node: Node, version: FileVersion) -> None:
        """Seal what was promised, unless another writer came meanwhile, whose end seals, or it was removed.

        What another file was renamed over is still to be published, before that.
        """
        if node.writers or version.state is not FileState.FLUSHED or version not in self._queue:
            return
        rows = self._sealed(version)
        # What was replaced goes with its row: that is not put off.
        submit = self._journal.submit_lazily if len(rows) == 1 else self._journal.submit
        submit(*rows)
        self.on_sealed()

    def _sealed(self, version: FileVersion) -> list[Change]:
        """Make content immutable, and queue it; return what says so."""
        version.transition_to(FileState.SEALED, size=version.size)
        version.sealed_at = trio.current_time()
        self._trim(version)
        if version not in self._queue:
            self._queue.add(version)
        changes = self.placement.supersede(version)
        return [*changes, PutFile(version.record)]


def _raise_failure(node: Node) -> None:
    """Raise why content is not published; an upload that is only tried again is no failure of its writer."""
    if node.write_error is not None:
        raise node.write_error
    version = node.version
    if version is None or version.error is None:
        return
    if version.state in {FileState.FAILED, FileState.REJECTED}:
        raise version.error


def _is_unfinished(version: FileVersion, handle: FileHandle) -> bool:
    """Return whether the process that wrote through a handle is being killed, and note it."""
    if is_killed(handle):
        version.killed_writer = handle
    elif version.killed_writer is not handle:
        version.killed_writer = None
    # Else a child that outlived it closes the same open file.
    return version.killed_writer is not None


def _is_unfinished_at_end(version: FileVersion, handle: FileHandle) -> bool:
    """Return whether content must not be published although its last writer is gone."""
    if version.killed_writer is not None:
        return True
    if version.changes == version.flushed_changes:
        return False  # a close promised just this
    # A mapping's late pages, of a process that may have been killed; or nothing was written, and nothing closed.
    return is_killed(handle) or not (version.changes or version.sequence)


def is_killed(handle: FileHandle) -> bool:
    """Return whether the process that opened a file for writing is being ended by a signal."""
    return is_being_killed(handle.process or handle.pid)
