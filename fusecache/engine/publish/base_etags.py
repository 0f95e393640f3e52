"""Keeps the base ETags of local changes current: the version that each of them expects in the bucket.

It never asks the bucket: it only learns from answers to our own requests.
"""

from dataclasses import replace

from fusecache.engine.namespace.nodes import FileVersion, Node, QueuedChange, is_removal
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, PutFile, PutOperation
from fusecache.model.objects import ObjectId, ObjectInfo
from fusecache.model.states import FileState


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
            rejected = rejected_before(node)
            if rejected is not None:
                rejected.record = replace(rejected.record, base_etag=etag)
                changes.append(PutFile(rejected.record))
        return changes

    def on_rebased(self, item: QueuedChange) -> None:
        """A queued item inherited its base ETag: journal that."""
        self._journal.submit(row_of(item))


def rejected_before(node: Node | None) -> FileVersion | None:
    """Return the rejected content that a node shows, or that the content being written there will replace."""
    content = node.version if node is not None else None
    if content is None or content.state is FileState.REJECTED:
        return content
    replaced = content.replaces
    return replaced if replaced is not None and replaced.state is FileState.REJECTED else None


def row_of(item: QueuedChange) -> PutFile | PutOperation:
    """Return the journal row of a queued change."""
    return PutFile(item.record) if isinstance(item, FileVersion) else PutOperation(item.record)
