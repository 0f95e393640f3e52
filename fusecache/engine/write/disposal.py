"""Ends file versions that the bucket does not get: drops them now or with the last handle, or quarantines them.

Not for versions that the bucket has: `engine/publish/retirement.py` turns these into cache.

Invariant: content that a close acknowledged is dropped in two cases only. Newer content of the same file stands for it,
or a program or user on this node removed it.

Local-only content, which is never published: files whose path matches the option `local_only`, and special files.

Not their state changes: `version_states.py` makes them.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fusecache.disk.staging import StagingDirectory
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import (
    FileVersion,
    Node,
    QueuedChange,
    attributes_of,
    dropped_row,
    in_use,
)
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.writeback.queue import WritebackQueue, leaves_object
from fusecache.index.journal import Change, PutFile
from fusecache.model.errors import AcrossDevices, NoSpace
from fusecache.model.names import is_special
from fusecache.model.records import FileState, Reason
from fusecache.policy.name_patterns import is_at_or_below_any

log = logging.getLogger(__name__)


class LocalOnly:
    """Decides which files are local-only, and holds the set of their closed versions."""

    def __init__(self, tree: Tree, patterns: tuple[str, ...]) -> None:
        self._tree = tree
        self._patterns = patterns
        self._versions: set[FileVersion] = set()

    def __contains__(self, version: FileVersion) -> bool:
        return version in self._versions

    def __iter__(self) -> Iterator[FileVersion]:
        return iter(self._versions)

    def add(self, version: FileVersion) -> None:
        """A version was closed under a local-only path."""
        self._versions.add(version)

    def discard(self, version: FileVersion) -> None:
        """A version ended, or has another path."""
        self._versions.discard(version)

    def covers(self, node: Node) -> bool:
        """Return whether the node's content is never published."""
        if is_special(node.mode):
            return True
        return bool(self._patterns) and is_at_or_below_any(self._patterns, self._tree.path(node))

    def check_stays_published(self, key_before: str, key_now: str) -> None:
        """Raise AcrossDevices (EXDEV) for a rename from a published to a local-only path.

        It would take the file out of the bucket. `mv` reacts to EXDEV by copying and removing.
        """
        if self._patterns:
            before, now = self._tree.relative(key_before), self._tree.relative(key_now)
            if is_at_or_below_any(self._patterns, now) and not is_at_or_below_any(self._patterns, before):
                raise AcrossDevices(
                    f"{now}: a local_only path is never uploaded; copy {before} and remove it"
                )


@dataclass(eq=False, repr=False)
class VersionDisposal:
    """Ends file versions, and releases the space and the nodes that they held."""

    _tree: Tree
    _cache: BlockCache
    _staging: StagingDirectory
    _journal: JournalWriter
    _queue: WritebackQueue
    _local_only: LocalOnly
    _events: Events

    def drop(self, version: FileVersion) -> list[Change]:
        """End a version that is no longer needed; return the rows, to be journaled in one transaction with the cause.

        The caller must not drop a version that is in flight.
        """
        self._queue.discard(version)
        self._local_only.discard(version)
        version.transition_to(FileState.DROPPED)
        node = version.node
        version.node = None
        if node is not None:
            if node.version is version:
                self._tree.set_version(node, None)
            self._tree.release_local(node)
        self._events.on_version_dropped(version)
        return [dropped_row(version), *self.drop_replaced(version)]

    def dequeue(self, version: FileVersion) -> list[Change]:
        """Take a queued version out of the queue. It ends now, or with the last handle that has it open."""
        node = version.node
        if node is None or not node.handles or node.version is not version:
            return self.drop(version)
        self._queue.remove(version)
        return [dropped_row(version)]

    def drop_replaced(self, version: FileVersion) -> list[Change]:
        """Drop the rejected version that this one replaces, unless it was queued again."""
        rejected, version.replaces = version.replaces, None
        if rejected is None or rejected.state is not FileState.REJECTED:
            return []
        rejected.successor = version
        return self.drop(rejected)

    def discard_upload(self, version: FileVersion) -> None:
        """Discard the parts that were sent of a version: its key changed, or it must not be published as it is."""
        self._events.on_upload_obsolete(version)

    def end_unlinked(self, version: FileVersion) -> None:
        """End the version of an unlinked file, as its last handle is closed."""
        if version.state is FileState.STORED:
            version.node = None
            self._events.on_version_dropped(version)
        else:
            self._journal.submit(*self.drop(version))

    def quarantine(self, node: Node, version: FileVersion) -> None:
        """Quarantine content that must not be published. The name shows its previous content again.

        Content whose writer got ENOSPC is dropped instead, unless it is local-only.
        """
        parent, name = node.parent, node.name
        rejected, version.replaces = version.replaces, None
        if isinstance(version.error, NoSpace) and version not in self._local_only:
            # The writer got the error, and keeping the bytes would hold the very space that is missing. Local-only
            # content is kept: it is changed in place, so a close may have acknowledged it before.
            log.warning("removed unfinished file after ENOSPC path=%s", self._tree.path(node))
            self._journal.submit(*self.drop(version))
        else:
            self._queue.discard(version)
            self._local_only.discard(version)
            self.discard_upload(version)
            failed = version.error is not None
            record = version.transition_to(
                FileState.ORPHAN,
                size=version.size,
                moment=time.time(),
                reason=Reason.FAILED if failed else Reason.KILLED,
                error=str(version.error) if failed else "its writer was killed before it closed the file",
            )
            self._journal.submit(PutFile(record))
            version.file.close()
            path = self._staging.quarantine(record.generation, "orphans")
            log.warning(
                "quarantined unfinished file path=%s bytes=%d at=%s reason=%s",
                self._tree.path(node), record.size, path, record.error,
            )  # fmt: skip
            self._events.on_quarantined(record)
            self._cache.release_staging(version.reserved - version.size)
            version.reserved = 0  # the quarantine has the rest
            self._tree.set_version(node, None)
            version.node = None
            self._tree.release_local(node)
        if parent is not None and node.parent is not None:
            # The kernel caches the unfinished bytes under this inode, so the name needs another inode.
            with in_use(parent):  # else the parent's node goes with its only child
                self._tree.detach(node)
                self._restore_previous(node, parent, name, rejected)
                self._events.on_name_lost(parent, name)

    def renew(self, node: Node) -> None:
        """Give a published file another inode, as a write failed before there was a copy to be changed.

        The kernel caches the bytes of that write under the old inode, and neither the bucket nor this node has them.
        """
        parent, name = node.parent, node.name
        if parent is None or node.version is not None or node.local_refs:
            return
        with in_use(parent):
            self._tree.detach(node)
        self._events.on_name_lost(parent, name)

    def _restore_previous(self, node: Node, parent: Node, name: str, rejected: FileVersion | None) -> None:
        """Let the name show what was closed last: what is queued under it, else the rejected version.

        If there is neither, it shows a file that this node was renamed over, if that is still queued.
        """
        key = self._tree.child_key(parent, name)
        of_key = self._queue.for_key(key)
        queued = self._queued_of(node, key)
        if rejected is not None and rejected.state is FileState.REJECTED:
            queued.insert(0, rejected)
        if queued:
            self._hand_to_successor(node, parent, name, queued)
        elif of_key and leaves_object(of_key[-1], key):
            self._show_replaced(parent, name, key, of_key[-1])

    def _queued_of(self, node: Node, key: str) -> list[QueuedChange]:
        """Return what is queued for the node at `key`, in order, also under names that it had before queued renames."""
        keys, queued = [key], set[QueuedChange]()
        for each in keys:
            for item in self._queue.for_key(each):
                if item.node is node:
                    queued.add(item)
                    keys += [before for before in item.changed_keys() if before not in keys]
        return sorted(queued, key=lambda item: item.sequence)

    def _show_replaced(self, parent: Node, name: str, key: str, last: QueuedChange) -> None:
        """Give the name back to a file that this node was renamed over, and that is still queued for the bucket."""
        replaced = last.node
        if replaced is None or replaced.parent is not None:
            return
        queued = self._queued_of(replaced, key)
        if replaced.version is None or replaced.version in queued:
            self._tree.attach(replaced, parent, name)
        else:
            self._hand_to_successor(replaced, parent, name, queued)  # a writer still changes it, unlinked

    def _hand_to_successor(self, node: Node, parent: Node, name: str, queued: list[QueuedChange]) -> None:
        """Move what is queued for a node to a new node (a new inode) of that name."""
        successor = self._tree.make(
            parent, name, node.kind, attributes=attributes_of(node), version=node.object
        )
        for item in queued:
            item.node = successor
            self._tree.hold_local(successor)
            self._tree.release_local(node)
            if isinstance(item, FileVersion):
                self._tree.set_version(successor, item)


def kept_reason(held: FileVersion | None) -> Reason:
    """Return the reason of what is queued in place of a rejected version: INCOMPLETE if that was a held commit marker.

    Deletes wait until it is published, also after a restart.
    """
    is_held = held is not None and held.state is FileState.REJECTED and held.record.reason is not Reason.NONE
    return Reason.INCOMPLETE if is_held else Reason.NONE


def named_row(version: FileVersion, tree: Tree, queue: WritebackQueue) -> list[PutFile]:
    """Return the row of a version, to be journaled.

    An unlinked file must not come back after a crash. So it has a row only while its version is queued: a file that
    was replaced by a rename may have to be published before what replaced it. If the version had a sequence and is
    no longer queued, its row becomes DROPPED. Otherwise there is no row.
    """
    is_named = version.node is not None and tree.is_linked(version.node)
    if is_named or version in queue:
        return [PutFile(version.record)]
    return [dropped_row(version)] if version.sequence else []
