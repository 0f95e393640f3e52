"""How content ends that the bucket does not get: dropped, let go with its last handle, kept aside.

Invariant: nothing is dropped that was promised to anyone, unless newer content of the same file stands for it.
"""

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from fusecache.disk.staging import StagingDirectory
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import Generation, Item, Node, attributes_of, in_use
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.writeback.queue import Owed, leaves_object
from fusecache.index.journal import Change, PutFile
from fusecache.model.errors import NoSpace
from fusecache.model.records import FileRecord, Reason
from fusecache.model.states import FileState

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class Endings:
    """Ends generations, and gives back what they held."""

    def __init__(
        self,
        tree: Tree,
        cache: BlockCache,
        staging: StagingDirectory,
        journal: JournalWriter,
        owed: Owed,
    ) -> None:
        self._tree = tree
        self._cache = cache
        self._staging = staging
        self._journal = journal
        self._owed = owed
        # Content that is never published: of names that match `local_only`.
        self.local: set[Generation] = set()
        self.on_name_lost: Callable[[Node, str], None] = lambda _parent, _name: None
        self.on_dropped: Callable[[Generation], None] = lambda _generation: None
        self.on_key_changed: Callable[[Generation], None] = lambda _generation: None
        # What was refused has its name again.
        self.on_returned: Callable[[Generation], list[Change]] = lambda _generation: []
        # What the bucket refused, or what replaces that, is dropped, or offered to it again.
        self.on_settled: Callable[[Generation], list[Change]] = lambda _generation: []
        self.on_aside: Callable[[FileRecord], None] = lambda _record: None

    def drop(self, generation: Generation) -> list[Change]:
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
        return [disowned(generation), *self.drop_replaced(generation), *self.on_settled(generation)]

    def take_out(self, generation: Generation) -> list[Change]:
        """Have what is queued published no more: it ends now, or with the last handle that has it open."""
        node = generation.node
        if node is None or not node.handles or node.generation is not generation:
            return self.drop(generation)
        self._owed.remove(generation)
        return [disowned(generation)]

    def drop_replaced(self, generation: Generation) -> list[Change]:
        """The version that the bucket refused is not wanted any more, unless it was offered to it again."""
        refused, generation.replaces = generation.replaces, None
        if refused is None or refused.state is not FileState.REJECTED:
            return []
        refused.successor = generation
        return self.drop(refused)

    def _let_go(self, generation: Generation) -> None:
        """The last handle of an unlinked file is closed."""
        if generation.state is FileState.STORED:
            generation.node = None
            self.on_dropped(generation)
        else:
            self._journal.submit(*self.drop(generation))

    def _put_aside(self, node: Node, generation: Generation) -> None:
        """Keep content that must not be published; the published version shows again under the name."""
        parent, name = node.parent, node.name
        refused, generation.replaces = generation.replaces, None
        if isinstance(generation.error, NoSpace) and generation not in self.local:
            # Its writer was told; keeping it would hold the very room that is missing. What is changed in place was
            # closed before.
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
            self._journal.submit(PutFile(record), *self.on_settled(generation))
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
            with in_use(parent):  # or it goes with its only child
                self._tree.detach(node)
                self._hand_over(node, parent, name, refused)
                self.on_name_lost(parent, name)
        if refused is not None and refused.state is FileState.REJECTED:
            self._journal.submit(*self.on_returned(refused))

    def _hand_over(self, node: Node, parent: Node, name: str, refused: Generation | None) -> None:
        """Let the name show what was closed last of all that is queued under it, or was refused."""
        key = self._tree.child_key(parent, name)
        of_key = self._owed.for_key(key)
        queued = self._queued_of(node, key)
        if refused is not None and refused.state is FileState.REJECTED:
            queued.insert(0, refused)
        if queued:
            self._hand_to_heir(node, parent, name, queued)
        elif of_key and leaves_object(of_key[-1], key):
            self._show_replaced(parent, name, key, of_key[-1])

    def _queued_of(self, node: Node, key: str) -> list[Item]:
        """Return what is queued for a node that came to be `key`: renames lead back to the names that it had."""
        keys, queued = [key], set[Item]()
        for each in keys:
            for item in self._owed.for_key(each):
                if item.node is node:
                    queued.add(item)
                    keys += [before for before in item.changed_keys() if before not in keys]
        return sorted(queued, key=lambda item: item.sequence)

    def _show_replaced(self, parent: Node, name: str, key: str, last: Item) -> None:
        """The node was renamed over another one, which is owed to the bucket still: that has its name again."""
        replaced = last.node
        if replaced is None or replaced.parent is not None:
            return
        queued = self._queued_of(replaced, key)
        if replaced.generation is None or replaced.generation in queued:
            self._tree.attach(replaced, parent, name)
        else:
            self._hand_to_heir(replaced, parent, name, queued)  # somebody writes on, under no name

    def _hand_to_heir(self, node: Node, parent: Node, name: str, queued: list[Item]) -> None:
        """Give what is queued for a node to a new one of that name."""
        heir = self._tree.make(parent, name, node.kind, attributes=attributes_of(node), version=node.object)
        for item in queued:
            item.node = heir
            self._tree.pin(heir)
            self._tree.unpin(node)
            if isinstance(item, Generation):
                heir.generation = item

    def _trim(self, generation: Generation) -> None:
        """Nothing more is written into it for now: give back what was reserved for that."""
        if generation.reserved > generation.size:
            self._cache.release_staging(generation.reserved - generation.size)
            generation.reserved = generation.size

    def _row(self, generation: Generation) -> list[PutFile]:
        """Return the row to be journaled.

        Of a file that was unlinked: none, as it must not come back after a crash, unless it is to be published before
        what another was renamed over it for; if it was, and is not any more, its row says so.
        """
        is_named = generation.node is not None and self._tree.is_linked(generation.node)
        if is_named or generation in self._owed:
            return [PutFile(generation.record)]
        return [disowned(generation)] if generation.sequence else []


def disowned(generation: Generation) -> PutFile:
    """Return the row of content that must not come back after a crash: the next mount removes its file.

    The row goes when the file has gone: of one without a row nobody could tell that it is not wanted.
    """
    return PutFile(replace(generation.record, state=FileState.DROPPED))
