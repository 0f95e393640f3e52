"""The close protocol: the life of a file version from the close until it is sealed.

close(2) makes the version FLUSHED: its journal row is synced, then the close is acknowledged with 0. The release of the
last writer makes it SEALED, and immutable. In between, a close can be *revoked*: the version becomes OPEN again when
more bytes are written, or when a writer still holds the file (a forked child had closed its descriptor).

Not the upload: the publisher uploads what is closed here, in the order that `engine/writeback/placement.py` decides.
Versions that the bucket does not get end in `disposal.py`.

Invariants:
1. `flush` returns only when the journal row is synced. After any crash the next mount finds what it acknowledged.
2. A version whose write failed, or whose writer was killed, is never published.
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
    """Makes written content durable on this node, and queues it for the bucket."""

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
        # Versions that were closed, perhaps not by the last writer.
        self._flushed: set[FileVersion] = set()
        # Those of them that the last `revoke_unfinished_closes` found held open for too long.
        self._overdue: set[FileVersion] = set()
        # Versions being written; `dirty_versions` takes out the ones that ended.
        self._dirty: set[FileVersion] = set()
        self.enospc_log = EnospcLog()
        self.local_only: tuple[str, ...] = ()
        self.temp_names: tuple[str, ...] = ()
        self.wait_for_space: Callable[[FileHandle], Awaitable[None]] | None = None
        self.on_dirty: Callable[[], None] = lambda: None
        self.on_sealed: Callable[[], None] = lambda: None

    async def flush(self, handle: FileHandle) -> None:
        """Handle one close(2): make what was written durable on this node. Raises the file's first stored error."""
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
                # The acknowledged close was a forked child's. This one is of another process, perhaps being killed.
                _check_killed_writer(version, handle)
            await self._journal.wait_committed()  # the row of another close may be on its way to the disk
        elif self.is_local(node) or await self._may_journal_close(handle, version):
            version.flushed_by = handle
            await self._journal_close(node, version)

    async def _may_journal_close(self, handle: FileHandle, version: FileVersion) -> bool:
        """Wait for staging space; return whether the close is still to be journaled after that."""
        if self.wait_for_space is not None:
            if not version.writes:
                self._trim(version)
            await self.wait_for_space(handle)
            _raise_failure(handle.node)  # while it waited, a write through another handle may have failed
        if handle.node.version is not version or not version.is_mutable:
            return False  # published as a snapshot, or removed, while it waited
        return not _check_killed_writer(version, handle)

    async def fsync(self, handle: FileHandle) -> None:
        """Handle fsync(2): return when data and journal row are on the disk. Raises the file's first stored error."""
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
            # The kernel reports a failed sync only once, and later reads may return other bytes than were written.
            if version.is_mutable:
                self._fail(version, exc)
            raise
        await ticket.wait()

    async def _sync(self, version: FileVersion) -> None:
        """Sync the bytes to the disk, and compute their checksums concurrently, so that a close finds them verified."""
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
        """Revoke closes of files that a writer still holds after the settle delay: a forked child closed them.

        A close is revoked only at the second check that finds it overdue. At the first one the loop may have stood
        still, with the RELEASE of that close unread in the kernel. Return whether such a second check is needed soon.
        """
        overdue = self._overdue
        self._overdue = set()
        for version in list(self._flushed):
            if version.state is not FileState.FLUSHED:
                self._flushed.discard(version)
            elif (
                not version.closing
                and now - version.flushed_at >= settle_seconds
                and version.node is not None
                and version.node.writers
            ):
                if version not in overdue:
                    self._overdue.add(version)
                    continue
                self._queue.discard(version)
                version.transition_to(FileState.OPEN)
                version.changed_since_flush = True  # the writer's own close is still to come
                # The sequence stays: a RELEASE without another FLUSH (late pages of a mapping) seals the version
                # under it.
                self._journal.submit(*self._row(version))
        return bool(self._overdue)

    # ---- content that is never closed

    def dirty_versions(self) -> list[FileVersion]:
        """Return the versions that were changed and are not sealed yet: OPEN, or FLUSHED."""
        self._dirty = {each for each in self._dirty if each.state in {FileState.OPEN, FileState.FLUSHED}}
        return list(self._dirty)

    async def snapshot(self, node: Node, *, rested_seconds: float) -> FileVersion | None:
        """Seal what an open file holds now, so that it is published; return it, or None if nothing is to be published.

        Nothing is copied here: the version is sealed, and the next writer gets a copy of it. Waits until no write is in
        progress. rested_seconds: how much of its settle delay counts as over.
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
        """Queue a rejected version again, as if it had been closed just now; return the rows."""
        key = self._tree.key(node)
        version.error = None
        self.on_key_changed(version)  # parts of the rejected upload are of no use
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
        """Return whether the node's name matches `temp_names`: programs write under it, then rename."""
        return matches_any(node.name, self.temp_names)

    # ---- content that is never published

    def is_local(self, node: Node) -> bool:
        """Return whether the node's path matches `local_only`: its content is never published."""
        return bool(self.local_only) and is_at_or_below_any(self.local_only, self._tree.path(node))

    def check_stays_published(self, key_before: str, key_now: str) -> None:
        """Raise AcrossDevices (EXDEV) for a rename from a published to a local-only path.

        It would take the file out of the bucket. `mv` reacts to EXDEV by copying and removing.
        """
        if self.local_only:
            before, now = self._tree.relative(key_before), self._tree.relative(key_now)
            if is_at_or_below_any(self.local_only, now) and not is_at_or_below_any(self.local_only, before):
                raise AcrossDevices(
                    f"{now}: a local_only path is never uploaded; copy {before} and remove it"
                )

    def adopt_local_only(self, versions: list[FileVersion]) -> None:
        """Take over local-only versions of the previous daemon; queue any that `local_only` does not match now."""
        for version in versions:
            node = version.node
            if node is None:
                continue
            if self.is_local(node):
                self.local.add(version)
            else:
                self._journal.submit(*self._mark_flushed(node, version), *self._sealed(version))

    def end_local_only(self, node: Node, version: FileVersion) -> list[Change]:
        """Handle a rename of local-only content; return the rows, to be journaled with the rename."""
        key = self._tree.key(node)
        if self.is_local(node):
            version.record = replace(version.record, key=key)
            return [PutFile(version.record)]
        self.local.discard(version)
        if node.writers:
            self._dirty.add(version)
            self.on_dirty()
            # Under its new name it is as new as the rename: a release without another flush seals it under this
            # sequence.
            version.changed_since_flush = True
            return [
                PutFile(version.transition_to(FileState.OPEN, key=key, sequence=self._journal.next_number()))
            ]
        changes = [*self._mark_flushed(node, version), *self._sealed(version)]
        self.on_sealed()
        return changes

    async def _end_writing(self, handle: FileHandle, version: FileVersion) -> None:
        """Seal the version as its last writer is gone, or quarantine it."""
        node = handle.node
        error, node.write_error = node.write_error, None
        if error is not None:
            self._fail(version, error)  # bytes that a program wrote are missing in it
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
        """Handle the release of an unlinked file: a queued version is sealed, any other ends with the last handle.

        It is still queued if it is to be published before the file that was renamed over it. If its writer was killed,
        it leaves the queue and is not published.
        """
        node = handle.node
        if handle.writable and node.writers == 0 and _is_unfinished_at_end(version, handle):
            self._queue.discard(version)
        if version in self._queue:
            self._seal_closed(node, version)
        elif node.handles == 0:
            self._dispose_unlinked(version)

    # ---- inside

    async def _on_change(self, version: FileVersion) -> None:
        """Mark a version as changed, and revoke its close, if there was one, until the next close or the release.

        The row that revokes the close is synced before the first byte changes. Otherwise a mixture of old and new bytes
        could be published after a crash, as if it had been closed.
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
        """Journal a close: it is durable when this returns. Nothing is journaled for an unlinked file."""
        version.changed_since_flush = False
        if not self._tree.is_linked(node):
            return  # unlinked while open: its content ends with the last handle
        changes = self._mark_flushed(node, version)
        version.closing += 1
        try:
            await self._journal.commit(*changes)
        finally:
            version.closing -= 1
        version.flushed_at = max(version.flushed_at, trio.current_time())
        self.on_sealed()

    def _mark_flushed(self, node: Node, version: FileVersion) -> list[Change]:
        """Make a version FLUSHED under a new sequence, and queue it; return the rows.

        Local-only content becomes LOCAL instead, and is not queued.
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
        """Return the row's `synced` and `checksum`: set if the last fsync covered the bytes as they are now."""
        if version.writes or not version.checksums.are_current:
            return {"synced": False, "checksum": ""}
        version.granule_checksums = version.checksums.checksums
        return {"synced": True, "checksum": checksum_of_checksums(version.granule_checksums)}

    async def _journal_late_pages(self, node: Node, version: FileVersion) -> None:
        """Journal pages of a mapping that came after the close: the same sequence, with the newer bytes.

        They get a sequence of their own if what was closed is published already, or was closed under another name.
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
        """Seal a closed version, unless another writer has the file open (its release seals), or it was removed.

        A version that left its name because another file was renamed over it is still in the queue, and sealed.
        """
        if node.writers or version.state is not FileState.FLUSHED or version not in self._queue:
            return
        rows = self._sealed(version)
        # More rows end a version that this one supersedes: its bytes go with its row, so these are not delayed.
        submit = self._journal.submit_lazily if len(rows) == 1 else self._journal.submit
        submit(*rows)
        self.on_sealed()

    def _sealed(self, version: FileVersion) -> list[Change]:
        """Make a version immutable (SEALED), and queue it; return the rows."""
        version.transition_to(FileState.SEALED, size=version.size)
        version.sealed_at = trio.current_time()
        self._trim(version)
        if version not in self._queue:
            self._queue.add(version)
        changes = self.placement.supersede(version)
        return [*changes, PutFile(version.record)]


def _raise_failure(node: Node) -> None:
    """Raise the error for which the node's content is not published. An upload that is retried is not one."""
    if node.write_error is not None:
        raise node.write_error
    version = node.version
    if version is None or version.error is None:
        return
    if version.state in {FileState.FAILED, FileState.REJECTED}:
        raise version.error


def _check_killed_writer(version: FileVersion, handle: FileHandle) -> bool:
    """Return whether the process that wrote through a handle is being killed, and record that in the version."""
    if is_killed(handle):
        version.killed_writer = handle
    elif version.killed_writer is not handle:
        version.killed_writer = None
    # Else it stays recorded: a child that outlived the killed process closes the same open file.
    return version.killed_writer is not None


def _is_unfinished_at_end(version: FileVersion, handle: FileHandle) -> bool:
    """Return whether a version must not be published although its last writer is gone."""
    if version.killed_writer is not None:
        return True
    if version.changes == version.flushed_changes:
        return False  # a close acknowledged exactly these bytes
    # Late pages of a mapping, whose process may have been killed; or nothing was ever written, and nothing closed.
    return is_killed(handle) or not (version.changes or version.sequence)


def is_killed(handle: FileHandle) -> bool:
    """Return whether the process that opened a file for writing is being killed by a signal."""
    return is_being_killed(handle.process or handle.pid)
