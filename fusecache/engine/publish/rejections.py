"""Handles changes that no retry can publish: conflicts with another client, and permanent errors of the bucket or disk.

It decides nothing about retries: `publisher.py` does.

Invariant: such a change is kept and reported. It blocks only commit markers that announce it, and deletes below a
marker that is held for it. The delete of the object that it was renamed from is given up: the old name shows again.

Keeps the base ETags of local changes current: the version that each of them expects in the bucket.

It never asks the bucket: it only learns from answers to our own requests.
"""

import logging
import socket
import time
import uuid
from dataclasses import replace
from itertools import islice
from typing import TypeGuard

import trio

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import (
    FileVersion,
    Node,
    Operation,
    QueuedChange,
    attributes_of,
    dropped_row,
    is_removal,
)
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.publish.bucket_writer import CREATES, REMOVES
from fusecache.engine.publish.commit_markers import CommitMarkers, Held
from fusecache.engine.publish.preparer import Preparer
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.parts import WriteParts
from fusecache.engine.writeback.placement import rejected_before
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, DropOperation, PutFile, PutOperation
from fusecache.model.errors import FusecacheError, ObjectChanged, UploadLost
from fusecache.model.names import KEY_BYTES_MAX, NAME_BYTES_MAX
from fusecache.model.objects import ObjectId, ObjectInfo, symlink_target
from fusecache.model.records import ANOTHERS, FileState, OperationKind, OperationRecord, Reason

log = logging.getLogger(__name__)


class BaseEtags:
    """Passes the ETag that the bucket shows under a key on to the next change of that key."""

    def __init__(self, tree: Tree, queue: WritebackQueue, journal: JournalWriter) -> None:
        self._tree = tree
        self._queue = queue
        self._journal = journal

    def update(self, key: str, etag: str | None, shown: ObjectInfo | None = None) -> list[Change]:
        """The bucket shows this version under a key now (None: no object): return the rows that it changes.

        shown: that version, if more than its ETag is known.
        """
        follower = self._queue.rebase(key, etag, shown)
        changes: list[Change] = [] if follower is None else [row_of(follower)]
        if is_removal(follower) and etag is not None:
            follower.readers = follower.readers or self._tree.nameless_reader(ObjectId(key, etag))
        node = self._tree.find(key)
        is_its_own = follower is None or (isinstance(follower, FileVersion) and follower.node is node)
        if node is not None and node.version is not None and is_its_own:
            # Local content under this name, open or queued, is older than this answer: this is its base from now on.
            self._tree.set_object(node, None if etag is None else shown or ObjectInfo(key, etag, 0, 0.0))
            if follower is None and node.version.state is FileState.FLUSHED:
                node.version.record = replace(node.version.record, base_etag=etag)
                changes.append(PutFile(node.version.record))
            rejected = rejected_before(node)
            if rejected is not None:
                rejected.record = replace(rejected.record, base_etag=etag)
                changes.append(PutFile(rejected.record))
        return changes

    def on_rebased(self, item: QueuedChange) -> None:
        """A queued item inherited its base ETag: journal that."""
        self._journal.submit(row_of(item))


def row_of(item: QueuedChange) -> PutFile | PutOperation:
    """Return the journal row of a queued change."""
    return PutFile(item.record) if isinstance(item, FileVersion) else PutOperation(item.record)


# Newest conflicts kept in memory; the journal has every one that no person has resolved yet.
CONFLICTS_REMEMBERED = 1000
# A name that was free in a listing of this age is free for a directory: a HEAD would tell little more.
LISTED_SECONDS = 1.0


class Rejections:
    """Keeps rejected changes and conflicts. Each method journals what it changes, or returns the rows."""

    def __init__(
        self,
        tree: Tree,
        lookup: Lookup,
        write: WriteParts,
        queue: WritebackQueue,
        journal: JournalWriter,
        preparer: Preparer,
        events: Events,
    ) -> None:
        self._tree = tree
        self._lookup = lookup
        self._disposal = write.disposal
        self._placement = write.placement
        self._queue = queue
        self._journal = journal
        self._preparer = preparer
        self._events = events
        # A dict as an ordered set: items are removed one by one.
        self._rejected: dict[QueuedChange, None] = {}
        self._news = trio.Event()
        # The newest conflicts: where the local version of a key is kept, "" if the change was dropped.
        self.conflicts: dict[str, str] = {}
        self.base_etags = BaseEtags(tree, queue, journal)
        self.commit_markers = CommitMarkers(tree, queue, write.states, journal, lambda: self.rejected)
        lookup.lister.watch_hidden(self._on_hidden)

    @property
    def rejected(self) -> list[QueuedChange]:
        """Changes that the bucket rejected, or whose bytes could not be read, unless removed or replaced since."""
        gone = [
            item
            for item in self._rejected
            if isinstance(item, FileVersion) and item.state is not FileState.REJECTED
        ]  # operations leave in `forget`
        for item in gone:
            del self._rejected[item]
        return list(self._rejected)

    def restore(self, items: list[QueuedChange], *, publishes: bool) -> None:
        """Take over the changes that were rejected before this start. publishes: not a read-only mount."""
        self._rejected = dict.fromkeys(items)
        if publishes:
            self.commit_markers.restore(items)

    def forget(self, keys: tuple[str, ...]) -> list[Change]:
        """The bucket accepted a change of these keys: forget operations of them that it rejected before."""
        changes: list[Change] = []
        for item in self.operations():
            if item.changed_keys()[-1] in keys:
                changes += self.drop(item)
        return changes

    def operations(self) -> list[Operation]:
        """Return the rejected changes of names, in the order in which they are to be repeated."""
        return [each for each in self._rejected if isinstance(each, Operation)]

    def drop(self, item: Operation) -> list[Change]:
        """Forget a rejected change of names; return the rows."""
        self._rejected.pop(item, None)
        return [DropOperation(item.sequence)]

    def has(self, item: QueuedChange) -> bool:
        """Return whether a change is rejected."""
        return item in self._rejected

    async def wait_rejected(self) -> None:
        """Return when one more change of names is rejected."""
        await self._news.wait()

    def keep(self, item: Operation, error: FusecacheError) -> Change:
        """A change of names was rejected, perhaps again: it is repeated after all others. Returns its row."""
        item.error = error
        item.record = replace(item.record, error=str(error), moment=item.record.moment or time.time())
        self._rejected.pop(item, None)
        self._rejected[item] = None
        return PutOperation(item.record)

    def on_repeated(self, item: Operation) -> None:
        """The bucket carried out a rejected change after all: its names are looked up again."""
        for key in item.changed_keys():
            node = self._tree.find(key)
            if node is not None:
                node.verified = float("-inf")
            if node is not None and item.record.kind is OperationKind.RENAME:
                self._let_go(node)
            self._reveal(key)

    def _let_go(self, node: Node) -> None:
        """Take the name from a node that is not being changed: another object has it, or none."""
        parent, name = node.parent, node.name
        if parent is not None and node.version is None and not node.local_refs:
            self._tree.detach(node)
            self._events.on_name_lost(parent, name)

    async def handle_error(self, item: QueuedChange, error: FusecacheError) -> None:
        """Handle an error that no retry fixes: restart a lost upload, resolve a conflict, or reject the change."""
        if isinstance(error, UploadLost):
            if isinstance(item, FileVersion):
                log.warning("multipart upload expired, starting again key=%s", item.record.key)
                self._preparer.restart(item)
        elif isinstance(error, ObjectChanged):
            await self._conflict(item, error)
        else:
            await self._reject(item, error)

    async def replace_remote(self, item: FileVersion, etag: str | None) -> None:
        """Make the remote version the base, so that the next attempt replaces it. etag None: it was removed."""
        key = item.record.key
        log.warning("conflict, replacing the remote version key=%s conflict=last-wins", key)
        item.transition_to(FileState.SEALED)
        await self._journal.submit(*self.base_etags.update(key, etag)).committed()

    def is_directory_there(self, item: FileVersion) -> bool:
        """Return whether a new file has the name of a directory that another client made: as a listing shows."""
        node = item.node
        if item.record.base_etag is not None or node is None or node.parent is None:
            return False
        if not self._tree.is_linked(node) or self._tree.key(node) != item.record.key:
            return False  # it was removed, perhaps with its directory, or renamed
        return any(row.is_directory for row in self._lookup.listed(node.parent, node.name)[0])

    def may_hide(self, item: Operation) -> bool:
        """Return whether a directory's marker may hide another client's file: a HEAD tells, unless a listing does."""
        node = item.node
        if item.record.kind is not OperationKind.MKDIR or self._queue.for_key(item.record.key.rstrip("/")):
            return False  # the file is our own, and goes
        if node is None or node.parent is None:
            return True
        rows, seen = self._lookup.listed(node.parent, node.name)
        if any(row.is_directory for row in rows):
            return False  # it shows already, and is empty now
        return bool(rows) or seen < trio.current_time() - LISTED_SECONDS

    def set_aside(self, hidden: ObjectInfo, node: Node | None = None) -> list[Change]:
        """A directory hides a file, one of which another client made: rename the file; return the rows."""
        number = self._journal.next_number()
        copy_key = self._free_conflict_key(hidden.key, number)
        error = ObjectChanged(f"{hidden.key}: one client made a file of this name, another a directory")
        self._record_conflict(hidden.key + "/", copy_key, hidden.size, error, number)
        record = OperationRecord(
            number,
            OperationKind.RENAME,
            hidden.key,
            copy_key,
            source_etag=hidden.etag,
            size=hidden.size,
            modified=hidden.modified,
            uuid=str(uuid.uuid4()),
            attributes=attributes_of(node) if node is not None else None,
            link=symlink_target(hidden.metadata) if node is None else node.target,
        )
        self._tree.add_tombstone(hidden.key)
        self._queue.add(Operation(record, node))
        if node is not None:
            self._tree.hold_local(node)
            self._show_as(node, hidden.key, copy_key)
        return [PutOperation(record)]

    def _on_hidden(self, ours: Node) -> None:
        if ours.object is not None:
            self._journal.submit(*self.set_aside(ours.object, ours))

    def _show_as(self, node: Node, key: str, copy_key: str) -> None:
        """Have the local version show under the name of a conflict's copy."""
        parent, name = node.parent, node.name
        if parent is None:
            return
        folder = parent
        for _ in range(key.count("/") - copy_key.count("/")):
            folder = folder.parent or folder
        self._tree.move(node, folder, copy_key.rpartition("/")[2])
        self._events.on_name_lost(parent, name)

    async def _conflict(self, item: QueuedChange, error: FusecacheError) -> None:
        """Another client changed the key first: keep both versions."""
        node = item.node
        if isinstance(item, FileVersion):
            key = item.record.key
            copy_key = self._free_conflict_key(key, item.sequence)
            self._record_conflict(key, copy_key, item.size, error, item.sequence)
            self._queue.remove(item, published=True)
            self._preparer.restart(item)
            record = item.transition_to(FileState.SEALED, key=copy_key, base_etag=None)
            self._queue.add(item)
            if node is not None and self._tree.is_linked(node) and self._tree.key(node) == key:
                # The name shows the remote version from now on. The local one, and what writers still add to it, goes
                # by the name of the copy.
                self._show_as(node, key, copy_key)
            rows = self.base_etags.update(key, None)
            follower = next(iter(self._queue.for_key(key)), None)
            if isinstance(follower, Operation) and follower.record.kind is OperationKind.RENAME:
                # Our queued rename must not move the remote version.
                follower.record = replace(follower.record, source_etag=ANOTHERS)
                rows.append(row_of(follower))
            await self._journal.submit(PutFile(record), *rows).committed()
            return
        self._record_conflict(item.changed_keys()[-1], "", 0, error)
        await self._abandon(item, node, DropOperation(item.sequence))

    def _free_conflict_key(self, key: str, sequence: int) -> str:
        """Return the key for the local version. A mount with the same host name may have used the first choice."""
        path = self._tree.relative(key)
        prefix = key.removesuffix(path)
        copy_key, count = _conflict_key(prefix, path, f"{sequence}"), 1
        while self._tree.find(copy_key) is not None:
            count += 1
            copy_key = _conflict_key(prefix, path, f"{sequence}-{count}")
        return copy_key

    def _record_conflict(
        self, key: str, copy_key: str, size: int, error: FusecacheError, number: int = 0
    ) -> None:
        if copy_key:
            log.error("conflict key=%s kept_as=%s error=%s", key, copy_key, error)
        else:
            log.error("conflict, change dropped key=%s error=%s", key, error)
        self.conflicts.pop(key, None)
        self.conflicts[key] = copy_key
        for oldest in list(islice(self.conflicts, max(0, len(self.conflicts) - CONFLICTS_REMEMBERED))):
            del self.conflicts[oldest]
        self._events.on_conflict(key, copy_key, size, str(error), number)

    async def _reject(self, item: QueuedChange, error: FusecacheError) -> None:
        """The bucket rejects the change permanently, or its bytes cannot be read: keep it, and unblock the others."""
        log.error("change rejected key=%s error=%s", item.changed_keys()[-1], error)
        if isinstance(item, Operation):
            same = [each for each in self.operations() if _does_the_same(each, item)]
            rows = [row for each in same for row in self.drop(each)]
            node, item.node = item.node, None
            await self._abandon(item, node, *rows, self.keep(item, error))
            self._news.set()
            self._news = trio.Event()
            return
        item.error = error
        self._queue.remove(item)
        self._preparer.restart(item)  # abort the upload: its parts are useless now
        key, node = item.record.key, item.node
        newer = next(iter(self._queue.for_key(key)), None)
        if node is not None and newer is not None and _is_content(newer, node):
            rows = self._give_way(item, newer)
            await self._journal.submit(*rows).committed()
            return
        reason = item.record.reason if isinstance(error, Held) else Reason.NONE
        item.transition_to(FileState.REJECTED, error=str(error), reason=reason)
        changes = self._disposal.drop_replaced(item)
        if node is not None:
            changes += self._drop_renames(node, key)
        if node is not None and self._tree.is_linked(node):
            self._rejected[item] = None
            changes += self._keep_rejected(item, node)
        elif node is not None and node.handles and node.version is item:
            changes.append(dropped_row(item))  # unlinked, but open: its last close disposes of it
        else:
            changes += self._disposal.drop(item)
        await self._journal.submit(*changes).committed()

    def _give_way(self, item: FileVersion, newer: FileVersion) -> list[Change]:
        """Newer content of the file is next in the queue of its name: it stands for what was rejected."""
        if self._queue.is_commit_marker(item.record.key):
            item.successor = newer  # that names files that were written in between: it keeps its place
            return [*self._disposal.drop(item), *self._give_deletes_up(item.record.key)]
        return [*self._placement.take_place(item, newer), PutFile(newer.record)]

    def _drop_renames(self, node: Node, key: str) -> list[Change]:
        """Drop queued renames of rejected content if nothing was published under its name: they would move nothing.

        Objects that the bucket has at their targets stay.
        """
        changes: list[Change] = []
        first = next(iter(self._queue.for_key(key)), None)
        moves_nothing = isinstance(first, Operation) and not first.record.source_etag
        while moves_nothing and isinstance(first, Operation) and _renames(first, node, key):
            self._queue.remove(first)
            self._tree.clear_tombstone(key, gone=False)
            self._tree.release_local(node)
            changes.append(DropOperation(first.sequence))
            key, shown = first.record.target, first.record.base_etag
            self._tree.set_object(node, None if shown is None else ObjectInfo(key, shown, 0, 0.0))
            first = next(iter(self._queue.for_key(key)), None)
        return changes

    def _keep_rejected(self, item: FileVersion, node: Node) -> list[Change]:
        """Keep rejected content under the file's present name; newer content of the file replaces it there."""
        key, key_now = item.record.key, self._tree.key(node)
        if key_now != key:
            # Its sequence follows the rename's. While changes of that name are queued, its base is not known yet.
            base = self._queue.base_for(key_now, node.published_etag(key_now))
            item.record = replace(
                item.record, key=key_now, sequence=self._journal.next_number(), base_etag=base
            )
        elif item.record.base_etag is not None and node.published_etag(key) is None:
            # It had superseded a removal: from now on only the node records what the bucket shows.
            self._tree.set_object(node, ObjectInfo(key, item.record.base_etag, 0, 0.0))
        newer = next((each for each in self._queue.for_key(key_now) if _is_content(each, node)), None)
        if newer is None:
            newer = node.version if node.version is not item else None
        changes: list[Change] = []
        if newer is not None:
            changes = self._disposal.drop_replaced(newer)
            newer.replaces = item
            if newer.state is FileState.FLUSHED and not self._queue.for_key(key_now):
                newer.record = replace(newer.record, base_etag=item.record.base_etag)
                changes.append(PutFile(newer.record))  # its release, which looks for the base, may never come
        return [*changes, *self._give_deletes_up(key), PutFile(item.record)]

    def _give_deletes_up(self, key: str) -> list[Change]:
        """Withdraw the deletes that wait for content of `key`, which was rejected: the old names show again."""
        changes: list[Change] = []
        for removal in self._queue.deletes_waiting_for(key):
            name = removal.record.key
            is_first = self._queue.for_key(name)[0] is removal
            changes += self._placement.withdraw(removal)
            if is_first:  # content of that name that is not queued yet replaces the object
                changes += self.base_etags.update(name, removal.record.base_etag)
            self._reveal(name)
        return changes

    async def _abandon(self, item: Operation, node: Node | None, *rows: Change) -> None:
        """Take a change of names of a node out of the queue. rows: what the journal has of it from now on."""
        self._queue.remove(item)
        changes = [*rows, *self._disarm_rename(item, node)]
        if item.record.kind in REMOVES:
            self._tree.clear_tombstone(item.record.key, gone=False)
            if item.record.kind is OperationKind.DELETE and not self._queue.for_key(item.record.key):
                # Content of that name that is not queued yet replaces the object.
                changes += self.base_etags.update(item.record.key, item.record.base_etag)
            self._reveal(item.record.key)
        if node is not None:
            self._tree.release_local(node)
            node.verified = float("-inf")
            if item.record.kind in CREATES:
                self._let_go(node)  # the name shows what the bucket has there, and the object its old name
        await self._journal.submit(*changes).committed()

    def _disarm_rename(self, item: Operation, node: Node | None) -> list[Change]:
        """A dropped operation brought nothing to its key: a rename queued behind it must not move what is there."""
        key = item.changed_keys()[-1]
        follower = next(iter(self._queue.for_key(key)), None)
        if node is None or not isinstance(follower, Operation) or not _renames(follower, node, key):
            return []
        follower.record = replace(follower.record, source_etag=ANOTHERS)
        return [PutOperation(follower.record)]

    def _reveal(self, key: str) -> None:
        """A dropped removal leaves its object in the bucket: have the kernel look the name up again."""
        folder, name = self._lookup.on_unknown(key)
        if folder is not None:
            self._events.on_name_lost(folder, name)


def _does_the_same(one: Operation, other: Operation) -> bool:
    return one.record.kind is other.record.kind and one.changed_keys() == other.changed_keys()


def _renames(item: Operation, node: Node, key: str) -> bool:
    record = item.record
    return record.kind is OperationKind.RENAME and item.node is node and record.key == key


def _is_content(item: QueuedChange, node: Node) -> TypeGuard[FileVersion]:
    return isinstance(item, FileVersion) and item.node is node


def _conflict_key(prefix: str, path: str, number: str) -> str:
    """Return the key for the local version of a path in conflict; a name that gets too long is cut at its end.

    If the key of its directory leaves no space for any of the name, use the nearest directory above that does.
    """
    folder, slash, name = path.rpartition("/")
    suffix = f".conflict-{socket.gethostname()[:60]}-{number}"
    while True:
        directory = prefix + folder + slash
        space = min(NAME_BYTES_MAX, KEY_BYTES_MAX - len(directory.encode())) - len(suffix.encode())
        stem = name.encode()[: max(0, space)].decode(errors="ignore")
        if stem or not folder:
            return directory + stem + suffix
        folder, slash, _ = folder.rpartition("/")
