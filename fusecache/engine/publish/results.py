"""Applies the bucket's success answers: to the tree, the queue and the journal.

It sends nothing; what the bucket does not accept goes to `rejections.py`.

Invariant: tree and queue change together, without a checkpoint in between. The journal follows; only then are local
bytes freed.
"""

from dataclasses import replace

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import FileVersion, Kind, Operation, attributes_of
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.publish.bucket_writer import REMOVES, PublishResult
from fusecache.engine.publish.rejections import Rejections
from fusecache.engine.publish.retirement import Retirement
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.parts import WriteParts
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import (
    Change,
    DropAttributes,
    DropOperation,
    PutAttributes,
    PutFile,
    PutOperation,
)
from fusecache.model.objects import GENERATION, ObjectId, ObjectInfo
from fusecache.model.records import BUCKET_TIME, FileState, OperationKind, OperationRecord, PosixAttributes


class PublishResults:
    """Applies answers. Each method journals what it changes."""

    def __init__(
        self,
        tree: Tree,
        lookup: Lookup,
        write: WriteParts,
        queue: WritebackQueue,
        journal: JournalWriter,
        retirement: Retirement,
        rejections: Rejections,
        events: Events,
    ) -> None:
        self._tree = tree
        self._lookup = lookup
        self._disposal = write.disposal
        self._queue = queue
        self._journal = journal
        self.retirement = retirement
        self.rejections = rejections
        self._base_etags = rejections.base_etags
        self._events = events

    def stored(self, version: FileVersion, published: ObjectInfo) -> None:
        """The bucket has the content: show its version under the name, journal that, then free the local bytes.

        Tree and queue change together at once, as the file's next write or removal needs the base ETag. The row comes
        before all later rows; only freeing the bytes waits for its commit.
        """
        record = version.transition_to(FileState.STORED)
        is_ours = (published.metadata or {}).get(
            GENERATION
        ) == record.uuid  # else another node had the same bytes
        self._queue.remove(version, published=True)
        self._events.on_published(published.key)
        self._events.on_gone(published.key, record.base_etag)
        changes = [
            PutFile(record),
            *_dropped_attributes(published.key, record.base_etag),
            *(
                self._kept_attributes(published, record.attributes, sets_time=record.sets_time)
                if is_ours
                else ()
            ),
            *self._base_etags.update(published.key, published.etag, published),
            *self._disposal.drop_replaced(version),
            *(PutOperation(removal.record) for removal in self._queue.settle_deletes(published.key)),
            *self.rejections.forget((published.key,)),
        ]
        if not is_ours:
            # Not as the node shows it: the next listing corrects that.
            published = replace(published, metadata=None)
        node = version.node
        if node is not None:
            self._tree.set_object(node, published)
            if self._tree.is_linked(node):
                if self._tree.key(node) == published.key:  # else a rename is queued behind it
                    self._lookup.on_published(node)
            else:
                self._lookup.on_removed(published)
            if node.version is version and (self._tree.is_linked(node) or node.handles == 0):
                node.staged = record.generation
                self._tree.set_version(node, None)
            self._tree.release_local(node)
        self.retirement.add(version, published, self._journal.submit_batched(*changes))

    async def _follow_copy(self, record: OperationRecord, copy: ObjectInfo | None) -> None:
        """A rename has replaced an object by a copy: the cache, and programs that read the object, go on with that."""
        if record.kind is OperationKind.RENAME and record.source_etag and copy is not None:
            source = ObjectId(record.key, record.source_etag)
            await self.retirement.rename(source, copy.object_id)
            reader = self._tree.nameless_reader(source)
            if reader is not None:
                self._tree.set_object(reader, copy)

    async def done(self, item: Operation, result: PublishResult) -> None:
        """The bucket carried out an operation: a delete, a rename, a directory marker or a symlink."""
        await self._follow_copy(item.record, result.version)
        if item in self._queue:  # else it was rejected before
            self._queue.remove(item, published=True)
        forgotten = self.rejections.forget(item.changed_keys())
        changes: list[Change] = [DropOperation(item.sequence), *forgotten, *self._shown(result)]
        record, node = item.record, item.node
        version = result.version
        if node is not None and version is not None and record.kind is OperationKind.RENAME:
            version = _with_metadata(version, node.object, record)
            sets_time = self._lookup.reconciler.has_set_time(record.key, record.source_etag or "")
            changes += self._kept_attributes(version, attributes_of(node), sets_time=sets_time)
        if record.kind in REMOVES:
            self._tree.clear_tombstone(record.key, gone=True)
            self._events.on_gone(record.key, record.source_etag or record.base_etag)
            changes += _dropped_attributes(record.key, record.source_etag or record.base_etag)
        if node is not None:
            if version is not None:
                self._tree.set_object(node, version)
            if self._tree.is_linked(node):
                self._lookup.on_published(node)
            elif version is not None:
                self._lookup.on_removed(version)
            self._tree.release_local(node)
        await self._journal.submit_batched(*changes).committed()

    def _shown(self, result: PublishResult) -> list[Change]:
        """Let other changes of the keys know what the bucket shows now; return the rows."""
        changes: list[Change] = []
        for key, etag in result.shows.items():
            is_new = result.version is not None and result.version.key == key
            changes += self._base_etags.update(key, etag, result.version if is_new else None)
            self._events.on_published(key)
        # A program may have removed the file since, with its directory.
        if result.hidden is not None and not self._queue.for_key(result.hidden.key):
            changes += self.rejections.set_aside(result.hidden)
        return changes

    def _kept_attributes(
        self, published: ObjectInfo, attributes: PosixAttributes, *, sets_time: bool
    ) -> list[Change]:
        """Return the row with the attributes that this node keeps of a version; none if they are the defaults.

        The time is the bucket's as soon as a listing has it, so that all nodes see one. Not if other nodes see the one
        that is stored with the object, nor if a program set it.
        """
        shows_stored = self._lookup.posix_metadata or not published.size
        if not shows_stored and not sets_time:
            attributes = replace(attributes, mtime_ns=BUCKET_TIME)
            default = self._tree.default_attributes(Kind.FILE, 0.0)
            if attributes == replace(default, mtime_ns=BUCKET_TIME):
                return []
        return [PutAttributes(published.key, published.etag, attributes)]


def _with_metadata(copy: ObjectInfo, before: ObjectInfo | None, record: OperationRecord) -> ObjectInfo:
    """Return a rename's copy with the metadata of its source, if it was copied as it was."""
    if copy.metadata is None and before is not None and before.etag == record.source_etag:
        return replace(copy, metadata=before.metadata)
    return copy


def _dropped_attributes(key: str, etag: str | None) -> list[Change]:
    """Return the row that removes the attributes of a version that was replaced or removed."""
    return [DropAttributes(key, etag)] if etag else []
