"""Moves file versions between their states, and journals each move: OPEN, FLUSHED, SEALED, LOCAL, FAILED.

close(2) makes the version FLUSHED, with its place in the order: its journal row is synced, then the close is
acknowledged with 0. The release of the last writer makes it SEALED, and immutable, and queues it. If more bytes are
written in between, the version becomes OPEN again. If the mount ends before the release, what the close covers is
sealed then.

Which of these a close or a release asks for is decided in `close.py`. Versions that the bucket does not get end in
`disposal.py`. The order of publishing is decided in `engine/writeback/placement.py`.

Invariants:
1. When `journal_close` returns, the close survives a crash of the daemon: the next mount finds what it acknowledged.
2. A sealed version never changes, and a version whose write failed is never published.
"""

import logging
import time
from dataclasses import dataclass, field, replace

import trio

from fusecache.disk.staging import checksum_of_checksums
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileVersion, Node, attributes_of
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.disposal import LocalOnly, VersionDisposal, kept_reason, named_row
from fusecache.engine.write.staging_space import StagingSpace
from fusecache.engine.writeback.placement import QueuePlacement
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, PutFile
from fusecache.model.errors import FusecacheError
from fusecache.model.records import FileState, PosixAttributes, Reason

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class VersionStates:
    """Changes the states of file versions, with their place in the queue and their journal rows."""

    _tree: Tree
    _journal: JournalWriter
    _queue: WritebackQueue
    _placement: QueuePlacement
    _space: StagingSpace
    _local_only: LocalOnly
    _disposal: VersionDisposal
    _events: Events
    _boot_id: str
    # Versions being written, or closed and not released; `dirty_versions` takes out the ones that ended.
    _dirty: set[FileVersion] = field(init=False, default_factory=set)

    # ---- while it is written

    async def mark_changed(self, version: FileVersion) -> None:
        """Mark a version as changed, and revoke its close, if there was one, until the next close or the release.

        The row that revokes the close is synced before the first byte changes. Otherwise a mixture of old and new bytes
        could be published after a crash, as if it had been closed.
        """
        version.close_state.changed_since_flush = True
        if version.close_state.dirty_since == float("inf"):
            version.close_state.dirty_since = trio.current_time()
            self._dirty.add(version)
            self._events.on_dirty()
        while version.state is FileState.FLUSHED:
            version.transition_to(FileState.OPEN)
            await self._journal.commit(*self.row_of(version))

    def fail(self, version: FileVersion, error: FusecacheError) -> None:
        """Bytes that a program wrote are missing in a version: it is never published. The first error counts."""
        if version.error is None:
            log.error("write failed path=%s error=%s", version.record.key, error)
            version.error = error
        if version.state is not FileState.FAILED:
            version.transition_to(FileState.FAILED, error=str(error))
            self._journal.submit(*self.row_of(version))
            if version.node is not None:
                self._tree.on_failed(version.node)

    def forget_write_error(self, node: Node) -> None:
        """The error of a write counts for the node's version from now on."""
        self._tree.set_write_error(node, None)

    def set_attributes(
        self, version: FileVersion, attributes: PosixAttributes, *, sets_time: bool | None
    ) -> None:
        """Record new attributes of the file, and journal them. sets_time: as in `FileIo.set_attributes`."""
        if sets_time is None:
            sets_time = version.record.sets_time
        version.record = replace(version.record, attributes=attributes, sets_time=sets_time)
        is_acknowledged = not (version.is_mutable and version.close_state.changed_since_flush)
        # The kernel sets the mtime of written content just before it sends the close, whose row has it too: that
        # row need not be synced by itself.
        submit = self._journal.submit if is_acknowledged else self._journal.submit_lazily
        submit(*self.row_of(version))

    def has_name(self, node: Node) -> bool:
        """Return whether a file still has a name."""
        return self._tree.is_linked(node)

    def row_of(self, version: FileVersion) -> list[PutFile]:
        """Return the row of a version, to be journaled; nothing for an unlinked file that is not queued."""
        return named_row(version, self._tree, self._queue)

    def dirty_versions(self) -> list[FileVersion]:
        """Return the versions that were changed and are not sealed yet: OPEN, or FLUSHED."""
        self._dirty = {each for each in self._dirty if each.state in {FileState.OPEN, FileState.FLUSHED}}
        return list(self._dirty)

    # ---- closing

    async def journal_close(self, node: Node, version: FileVersion) -> None:
        """Journal a close: it is durable when this returns. Nothing is journaled for an unlinked file."""
        version.close_state.changed_since_flush = False
        if not self._tree.is_linked(node):
            return  # unlinked while open: its content ends with the last handle
        changes = self._mark_flushed(node, version)
        await self._journal.commit(*changes)

    async def journal_late_pages(self, node: Node, version: FileVersion) -> None:
        """Journal pages of a mapping that came after the close: the same sequence, with the newer bytes.

        Changes made since the close may depend on them: `del memmap` often comes after the marker is written.
        They get a sequence of their own if what was closed is published already, or was closed under another name;
        and in a commit marker, as they may name what was written since the close.
        """
        key = self._tree.key(node)
        if not version.sequence or version.record.key != key or self._queue.is_commit_marker(key):
            await self.journal_close(node, version)
            return
        base = self._queue.base_for(key, node.published_etag(key), version.sequence)
        verified = self._verified(version)
        record = version.transition_to(
            FileState.FLUSHED, key=key, size=version.size, base_etag=base, **verified
        )
        version.close_state.mark_flushed()
        await self._journal.commit(PutFile(record))

    def seal_closed(self, node: Node, version: FileVersion) -> None:
        """Seal a closed version, unless another writer has the file open (its release seals), or it was removed."""
        if node.writers or version.state is not FileState.FLUSHED or not self._tree.is_linked(node):
            return
        rows = self._seal(node, version)
        # Several rows: this version replaces a queued one, whose staging file goes with its row. So do not delay them.
        submit = self._journal.submit_lazily if len(rows) == 1 else self._journal.submit
        submit(*rows)
        self._events.on_sealed()

    # ---- sealing without a close

    def seal_acknowledged(self) -> None:
        """Seal what the last closes cover, as the mount is gone: no release follows, and no program has a file open.

        The kernel drops the releases that it had not sent yet. What changed since its close, or changes right now,
        stays unfinished.
        """
        for version in list(self._dirty):
            node, is_whole = (
                version.node,
                version.close_state.killed_writer is None and not version.use.writers,
            )
            if (
                version.state is FileState.FLUSHED
                and is_whole
                and node is not None
                and self._tree.is_linked(node)
            ):
                self._journal.submit(*self._seal(node, version))
        self._events.on_sealed()

    def seal_as_closed(self, node: Node, version: FileVersion) -> list[Change]:
        """Seal a version that is OPEN or FLUSHED as if its last writer had just closed it; return the rows."""
        changes = [*self._mark_flushed(node, version), *self._seal(node, version)]
        self._events.on_sealed()
        return changes

    def requeue(self, node: Node, version: FileVersion) -> list[Change]:
        """Queue a rejected version again, as if it had been closed just now; return the rows."""
        key = self._tree.key(node)
        version.error = None
        self._disposal.discard_upload(version)
        base = self._queue.base_for(key, node.published_etag(key))
        sequence = self._journal.next_number()
        version.transition_to(
            FileState.SEALED,
            key=key,
            sequence=sequence,
            base_etag=base,
            error="",
            reason=kept_reason(version),
        )
        version.sealed_at = version.waiting_since = trio.current_time()
        changes = self._placement.queue_sealed(version)
        self._events.on_sealed()
        return [*changes, PutFile(version.record)]

    # ---- local-only content

    def adopt_open(self, version: FileVersion) -> None:
        """Go on with a version that programs write through a mount that outlived its daemon."""
        self._dirty.add(version)
        if version.state is FileState.FLUSHED:
            return
        version.close_state.dirty_since = trio.current_time()
        self._journal.submit(*self.row_of(version))
        self._events.on_dirty()

    def adopt_local_only(self, versions: list[FileVersion]) -> None:
        """Take over local-only versions of the previous daemon; queue any that `local_only` does not match now."""
        for version in versions:
            node = version.node
            if node is None:
                continue
            if self._local_only.covers(node):
                self._local_only.add(version)
            else:
                self._journal.submit(*self.seal_as_closed(node, version))

    def end_local_only(self, node: Node, version: FileVersion) -> list[Change]:
        """Handle a rename of local-only content; return the rows, to be journaled with the rename."""
        key = self._tree.key(node)
        if self._local_only.covers(node):
            version.record = replace(version.record, key=key)
            return [PutFile(version.record)]
        self._local_only.discard(version)
        if node.writers:
            self._dirty.add(version)
            self._events.on_dirty()
            # Under its new name it is as new as the rename: a release without another flush seals it under this
            # sequence.
            version.close_state.changed_since_flush = True
            return [
                PutFile(version.transition_to(FileState.OPEN, key=key, sequence=self._journal.next_number()))
            ]
        return self.seal_as_closed(node, version)

    # ---- inside

    def _mark_flushed(self, node: Node, version: FileVersion) -> list[Change]:
        """Make a version FLUSHED under a new sequence, or LOCAL if it is local-only content; return the rows."""
        version.close_state.mark_flushed()
        key = self._tree.key(node)
        self._space.enospc_log.on_closed(self._tree.relative(key), version.size)
        sequence, reason = self._sequence_of_rejected(version, key), kept_reason(version.replaces)
        changes: list[Change] = [*self._disposal.drop_replaced(version)]
        if self._local_only.covers(node):
            self._local_only.add(version)
            attributes = attributes_of(node)
            record = version.transition_to(
                FileState.LOCAL, key=key, size=version.size, sequence=0, attributes=attributes
            )
            return [*changes, PutFile(record)]
        record = version.transition_to(
            FileState.FLUSHED,
            key=key,
            size=version.size,
            sequence=sequence or self._journal.next_number(),
            base_etag=self._queue.base_for(key, node.published_etag(key), sequence),
            attributes=attributes_of(node),
            boot_id=self._boot_id,
            moment=time.time(),
            reason=reason if reason is not Reason.NONE else version.record.reason,
            **self._verified(version),
        )
        version.waiting_since = min(version.waiting_since, trio.current_time())
        self._dirty.add(version)
        return [*changes, PutFile(record)]

    def _sequence_of_rejected(self, version: FileVersion, key: str) -> int:
        """Return the sequence of the rejected content that a closed version replaces; 0: it has none to take over.

        Commit markers that were closed in between, and are not held yet, come after the newer content, too. A marker
        itself names what was written in between.
        """
        rejected = version.replaces
        if rejected is None or rejected.state is not FileState.REJECTED or rejected.record.key != key:
            return 0
        return 0 if self._queue.is_commit_marker(key) else rejected.sequence

    def _verified(self, version: FileVersion) -> dict[str, bool | str]:
        """Return the row's `synced` and `checksum`: set if the last fsync covered the bytes as they are now."""
        if version.use.writers or not version.checksums.are_current:
            return {"synced": False, "checksum": ""}
        version.granule_checksums = version.checksums.checksums
        return {"synced": True, "checksum": checksum_of_checksums(version.granule_checksums)}

    def _seal(self, node: Node, version: FileVersion) -> list[Change]:
        """Make a version immutable (SEALED), and queue it; return the rows."""
        key = version.record.key
        base = self._queue.base_for(key, node.published_etag(key), version.sequence)
        version.transition_to(FileState.SEALED, size=version.size, base_etag=base)
        version.sealed_at = trio.current_time()
        self._space.trim(version)
        self._dirty.discard(version)
        changes = self._placement.queue_sealed(version)
        return [*changes, PutFile(version.record)]
