"""Changes of names: mkdir, rmdir, symlink, unlink, rename. Each is decided without awaiting, then journaled as one.

Invariants:
1. One change of the tree is one transaction of the journal, and every item in it a place in the publish
order. 2. No call waits for the bucket to take anything. Two ask it for names: rmdir (is it empty?) and
rename of a directory (what lies in it?).
"""

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from fusecache.engine.content import Contents
from fusecache.engine.endings import disowned
from fusecache.engine.groups import one_failure
from fusecache.engine.journaling import JournalWriter
from fusecache.engine.names import Names
from fusecache.engine.nodes import Generation, Item, Kind, Node, Operation, attributes_of, in_use
from fusecache.engine.owed import Owed, base_of
from fusecache.engine.requests import Requests
from fusecache.engine.rotating import Rotating
from fusecache.engine.tree import Tree
from fusecache.index.journal import Change, DropOperation, PutFile, PutOperation
from fusecache.model.errors import (
    AlreadyExists,
    InvalidName,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    ObjectMissing,
)
from fusecache.model.names import check_key, unusable_name
from fusecache.model.nouns import ObjectInfo
from fusecache.model.records import OperationKind, OperationRecord
from fusecache.model.states import FileState

if TYPE_CHECKING:
    from collections.abc import Callable


class Changes:
    """Carries out changes of names on the tree, the queue and the journal."""

    def __init__(
        self,
        tree: Tree,
        names: Names,
        contents: Contents,
        owed: Owed,
        journal: JournalWriter,
        requests: Requests,
    ) -> None:
        self._tree = tree
        self._names = names
        self._contents = contents
        self._owed = owed
        self._journal = journal
        self._requests = requests
        self._rotating = Rotating(owed, contents.drop, self._to_the_end)
        self.on_removed: Callable[[str], None] = lambda _key: None
        self.on_moved: Callable[[str, str], None] = lambda _before, _now: None

    # ---- making

    async def create(self, parent: Node, name: str, mode: int) -> Node:
        """Make an empty file, not yet promised to anyone. Raises AlreadyExists, NoSpace."""
        await self._contents.check_room()
        await self._check_free(parent, name)
        node = self._tree.make(parent, name, Kind.FILE)
        node.mode = mode
        self._contents.create(node)
        return node

    async def mkdir(self, parent: Node, name: str, mode: int) -> Node:
        """Make a directory; the bucket gets a marker, so that other nodes see it while it is empty."""
        self._journal.check_writable()
        await self._check_free(parent, name)
        key = self._tree.child_key(parent, name, directory=True)
        node = self._tree.make(parent, name, Kind.DIRECTORY)
        node.mode = mode
        node.has_marker = True
        self._names.note_made(node)
        changes: list[Change] = []
        self._add(node, OperationKind.MKDIR, key, changes)
        self._collapse_rmdir(key, changes)
        await self._journal.commit(*changes)
        return node

    async def symlink(self, parent: Node, name: str, target: str) -> Node:
        """Make a symlink: a zero-byte object with its target in the metadata."""
        self._journal.check_writable()
        await self._check_free(parent, name)
        key = self._tree.child_key(parent, name)
        node = self._tree.make(parent, name, Kind.SYMLINK, target=target)
        changes: list[Change] = []
        base = self._contents.places.collapse_delete(key, changes)
        self._add(node, OperationKind.SYMLINK, key, changes, target=target, base_etag=base)
        await self._journal.commit(*changes)
        return node

    # ---- removing

    async def unlink(self, parent: Node, name: str) -> None:
        """Remove a file or symlink; open handles keep working. Raises NotFound, IsADirectory."""
        self._journal.check_writable()
        await self._names.look_into(parent)
        node = await self._names.lookup(parent, name)
        if node.kind is Kind.DIRECTORY:
            raise IsADirectory(f"{self._tree.path(node)}: is a directory")
        changes: list[Change] = []
        self.on_removed(self._tree.key(node))
        self._remove_content(node, changes)
        self._tree.detach(node)
        self._names.note_gone(parent, name)
        self._keep_directory(parent, changes)
        await self._journal.commit(*changes)

    async def rmdir(self, parent: Node, name: str) -> None:
        """Remove an empty directory and its marker. Raises NotFound, NotADirectory, NotEmpty."""
        self._journal.check_writable()
        await self._names.look_into(parent)
        node = await self._names.lookup(parent, name)
        if node.kind is not Kind.DIRECTORY:
            raise NotADirectory(f"{self._tree.path(node)}: is not a directory")
        if not await self._names.reader.is_empty(node):
            raise NotEmpty(f"{self._tree.path(node)}: is not empty")
        changes: list[Change] = []
        self._remove_marker(node, self._tree.key(node), changes)
        self._tree.detach(node)
        self._names.note_gone(parent, name + "/")
        self._keep_directory(parent, changes)
        await self._journal.commit(*changes)

    # ---- moving

    async def rename(
        self, old_parent: Node, old_name: str, new_parent: Node, new_name: str, *, replace: bool
    ) -> None:
        """Give a file, symlink or directory another name, atomically on this node.

        replace: whether an existing target goes. Raises NotFound, AlreadyExists, NotEmpty, IsADirectory,
        NotADirectory.
        """
        self._journal.check_writable()
        await self._names.look_into(old_parent)
        try:
            target: Node | None = await self._names.lookup(new_parent, new_name)
        except NotFound:
            target = None
        with in_use(target):
            node = await self._names.lookup(old_parent, old_name)
        # Another client may have made, replaced or removed it while we looked the other name up.
        target = new_parent.children.get(new_name)
        if target is node:
            return
        self._check_replaceable(target, replace=replace)
        if node.kind is Kind.DIRECTORY:
            await self._rename_directory(node, target, new_parent, new_name, replace=replace)
            return
        if target is not None and target.kind is Kind.DIRECTORY:
            raise IsADirectory(f"{self._tree.path(target)}: is a directory")
        if node.kind is Kind.FILE:
            new_key = self._tree.child_key(new_parent, new_name)
            self._contents.check_stays_published(self._tree.key(node), new_key)
        changes: list[Change] = []
        self._move_file(node, target, new_parent, new_name, changes)
        self._names.note_gone(old_parent, old_name)
        self._keep_directory(old_parent, changes)
        await self._journal.commit(*changes)

    async def _rename_directory(
        self,
        node: Node,
        target: Node | None,
        new_parent: Node,
        new_name: str,
        *,
        replace: bool,
    ) -> None:
        while True:
            old_key, new_key = (
                self._tree.key(node),
                self._tree.child_key(new_parent, new_name, directory=True),
            )
            await self._check_directory_target(node, target, new_key)
            with self._tree.keeping():
                began = self._tree.now()
                remote = await self._everything_below(old_key, began)
                while (there := new_parent.children.get(new_name)) is not target:
                    target = there  # another client made or removed it meanwhile
                    self._check_replaceable(target, replace=replace)
                    await self._check_directory_target(node, target, new_key)
                if not (self._tree.is_linked(node) and self._tree.is_linked(new_parent)):
                    raise NotFound(
                        f"{node.name}: another client removed it, or the directory that it was to be moved to"
                    )
                now = self._tree.key(node), self._tree.child_key(new_parent, new_name, directory=True)
                if now == (old_key, new_key):  # else a directory above was moved meanwhile
                    changes = self._move_directory(node, target, new_parent, new_name, remote, began)
                    break
        await self._journal.commit(*changes)

    def _move_directory(
        self,
        node: Node,
        target: Node | None,
        new_parent: Node,
        new_name: str,
        remote: list[ObjectInfo],
        began: float,
    ) -> list[Change]:
        """Move a directory with all that is below it, as known here and by a listing begun at `began`."""
        old_key, old_parent, old_name = self._tree.key(node), node.parent, node.name
        new_key = self._tree.child_key(new_parent, new_name, directory=True)
        files = (self._tree.key(member) for member in self._tree.walk(node) if member.kind is Kind.FILE)
        for key in (*files, *(info.key for info in remote if not info.key.endswith("/"))):
            self._contents.check_stays_published(key, new_key + key[len(old_key) :])
        for info in remote:
            check_key(new_key + info.key[len(old_key) :])
            self._materialise(node, info, old_key, began)
        self._forget_gone(node, {info.key for info in remote}, began)
        changes: list[Change] = []
        if target is not None:
            self._remove_marker(target, new_key, changes)
            self._tree.detach(target)
        members = sorted(self._tree.walk(node), key=self._order_of_moving)
        moved = [(member, self._tree.key(member)) for member in members]
        places = self._places_of(moved)
        self._tree.move(node, new_parent, new_name)
        directories = []
        for member, key_before in moved:
            key_now = self._tree.key(member)
            if member.kind is Kind.DIRECTORY:
                directories.append((member, key_before))
                member.listing.expire()
                member.has_marker = True
                self._add(member, OperationKind.MKDIR, key_now, changes)  # pins before the other unpins
                self._take_back_marker(member, key_before, changes)
            else:
                self._move_content(member, key_before, key_now, None, changes)
        # The old markers go last, children first: the old name is hidden here until its last object is gone.
        for member, key_before in reversed(directories):
            self._remove_marker(member, key_before, changes)
        if old_parent is not None:
            self._names.note_gone(old_parent, old_name + "/")
            self._keep_directory(old_parent, changes)
        self._note_left(places, changes)
        return changes

    def _check_replaceable(self, target: Node | None, *, replace: bool) -> None:
        if target is not None and not replace:
            raise AlreadyExists(f"{self._tree.path(target)}: exists")

    def _order_of_moving(self, member: Node) -> tuple[int, float, str]:
        """Order what a renamed directory holds as it came to the bucket: what speaks of others comes after them."""
        key = self._tree.key(member)
        if member.kind is Kind.DIRECTORY:
            return 0, 0.0, key  # parents before their children
        places = [item.sequence for item in self._owed.for_key(key) if item.node is member]
        if places:
            return 2, places[0], key
        return 1, member.object.modified if member.object is not None else 0.0, key

    async def _check_directory_target(self, node: Node, target: Node | None, new_key: str) -> None:
        if new_key.startswith(self._tree.key(node)):
            raise InvalidName(f"{self._tree.path(node)}: cannot be moved into itself")
        if target is None:
            return
        if target.kind is not Kind.DIRECTORY:
            raise NotADirectory(f"{self._tree.path(target)}: is not a directory")
        if not await self._names.reader.is_empty(target):
            raise NotEmpty(f"{self._tree.path(target)}: is not empty")

    async def _everything_below(self, prefix: str, began: float) -> list[ObjectInfo]:
        """Return what the bucket shows below a directory, of symlinks with their targets."""
        found: list[ObjectInfo] = []
        token: str | None = None
        while True:
            page = await self._requests.ask(self._requests.store.list_page, prefix, token=token)
            shown = {info.key: info for info in page.objects if not self._tree.is_hidden(info.key, began)}
            with one_failure():
                async with trio.open_nursery() as nursery:
                    for info in page.objects:
                        if info.size == 0 and not info.key.endswith("/") and info.key in shown:
                            nursery.start_soon(self._look_at_empty, info.key, shown)
            found += shown.values()
            token = page.next_token
            if token is None:
                return found

    async def _look_at_empty(self, key: str, shown: dict[str, ObjectInfo]) -> None:
        """Ask what a zero-byte object is: it may be a symlink, only a HEAD tells."""
        try:
            shown[key] = await self._requests.ask(self._requests.store.head, key)
        except ObjectMissing:
            del shown[key]  # removed since

    def _forget_gone(self, top: Node, listed: set[str], began: float) -> None:
        """Drop nodes below `top` that another client removed: there is nothing to rename."""
        for member in list(self._tree.walk(top)):
            is_clean = member.pins == 0 and member.verified < began and not member.children
            if member.kind is not Kind.DIRECTORY and is_clean and self._tree.key(member) not in listed:
                self._tree.detach(member)

    def _materialise(self, top: Node, info: ObjectInfo, prefix: str, listed: float) -> None:
        """Make nodes for one remote object below `top`, unless this node knows better."""
        *folders, name = info.key[len(prefix) :].split("/")
        if any(unusable_name(part) for part in folders) or (name and unusable_name(name)):
            raise InvalidName(
                f"{info.key}: this key cannot be a path, so its directory cannot be renamed here"
            )
        if self._tree.is_hidden(info.key, listed):
            return
        directory = top
        for part in folders:
            child = directory.children.get(part)
            if child is None:
                child = self._tree.make(directory, part, Kind.DIRECTORY)
            if child.kind is not Kind.DIRECTORY:
                return
            directory = child
        if not name:
            directory.has_marker = True
            return
        child = directory.children.get(name)
        if (
            child is not None
            and child.pins == 0
            and child.verified < listed
            and child.object is not None
            and child.object.etag != info.etag
        ):
            self._tree.detach(child)  # another client replaced it since this node last looked
            child = None
        if child is None:
            self._names.make_file(directory, info)

    def _move_file(
        self, node: Node, target: Node | None, new_parent: Node, new_name: str, changes: list[Change]
    ) -> None:
        key_before = self._tree.key(node)
        base: str | None = None
        if target is not None:
            self.on_removed(self._tree.key(target))
            base = self._shown(target)
            if target.generation is not None and target.handles == 0 and not self._is_owed(target):
                changes += self._contents.drop(target.generation)
            elif target.generation is not None and not self._is_owed(target):
                changes += self._contents.drop_replaced(target.generation)
                if target.generation.state in {FileState.LOCAL, FileState.REJECTED}:
                    changes.append(disowned(target.generation))  # ends with its last handle
            self._tree.detach(target)
        places = self._places_of([(node, key_before)])
        self._tree.move(node, new_parent, new_name)
        self._move_content(node, key_before, self._tree.key(node), base, changes)
        self._note_left(places, changes)

    def _shown(self, node: Node, key: str = "") -> str | None:
        """Return what the bucket shows under the node's key (or the one that it had): the first that is queued knows.

        The node knows only if nothing is: it may be a new one, made after an older was removed.
        """
        key = key or self._tree.key(node)
        queued = self._owed.for_key(key)
        return base_of(queued[0], key) if queued else node.published_etag(key)

    def _is_owed(self, node: Node) -> bool:
        return any(item.node is node for item in self._owed.for_key(self._tree.key(node)))

    def _move_content(
        self, node: Node, key_before: str, key_now: str, base: str | None, changes: list[Change]
    ) -> None:
        """The file or symlink has a new key: what is unpublished changes its key, what is published is copied."""
        self.on_moved(key_before, key_now)
        changes += self._contents.places.follow(key_before, key_now)
        self._move_promised(node, key_before, key_now, base, changes)
        generation = node.generation
        if generation is not None and generation in self._contents.local:
            changes += self._contents.leave_local(node, generation)

    def _move_promised(
        self, node: Node, key_before: str, key_now: str, base: str | None, changes: list[Change]
    ) -> None:
        queued = [item for item in self._owed.for_key(key_before) if item.node is node]
        generation, published = node.generation, node.published_etag(key_before)
        shown = self._shown(node, key_before)
        followers = self._followers(queued, key_before, shown)
        if followers is None or (not queued and (generation is None or published is not None)):
            # Under a writer too: what it adds is not closed yet, and what is closed must not be under neither name.
            self._add_rename(node, key_before, key_now, base, changes)
            if generation is not None and generation not in self._owed:
                changes += self._rekey(generation, key_now, None)
            return
        last = queued[-1] if queued else None
        for replaced in [item for item in queued[:-1] if isinstance(item, Generation)]:
            # The new name never held what was replaced before the rename.
            queued.remove(replaced)
            replaced.successor = last if isinstance(last, Generation) else None
            changes += self._contents.drop(replaced)
        if queued:
            collapsed = self._contents.places.collapse_delete(key_now, changes)
            base = collapsed if collapsed is not None else base
        for item in queued:
            self._requeue(item, base, changes, key=key_now)
        for removal in followers:
            if removal in self._owed:  # else the content went back to where it came from
                self._requeue(removal, removal.record.base_etag, changes, target=key_now)
        if generation is not None and generation not in queued:
            changes += self._rekey(generation, key_now, base)
        if self._owed.exists_after(key_before, shown):
            target = key_now if queued else ""
            self._add(None, OperationKind.DELETE, key_before, changes, target=target, base_etag=shown)
            self._tree.hide(key_before)
        # What the bucket shows under the new name, for content that is promised later.
        node.object = None if base is None else ObjectInfo(key_now, base, 0, 0.0)

    def _places_of(self, nodes: list[tuple[Node, str]]) -> dict[str, tuple[int, str]]:
        """Return the first place in the queue of any of the nodes, and its key, by the directory of their keys."""
        first: dict[str, tuple[int, str]] = {}
        for node, key in nodes:
            places = [(item.sequence, key) for item in self._owed.for_key(key) if item.node is node]
            folder = key.rpartition("/")[0]
            if places:
                first[folder] = min(places[0], first.get(folder, places[0]))
        return first

    def _note_left(self, places: dict[str, tuple[int, str]], changes: list[Change]) -> None:
        """Nodes have moved that had these places before."""
        for sequence, key in places.values():
            item = self._owed.get(sequence)
            if item is None or key not in item.changed_keys():
                changes += self._rotating.note_left(sequence, key)

    def _to_the_end(self, removal: Operation, changes: list[Change]) -> None:
        self._requeue(removal, removal.record.base_etag, changes)

    def _requeue(
        self, item: Generation | Operation, base: str | None, changes: list[Change], **names: str
    ) -> None:
        """Give what is promised the last place of the queue, and another `key` or `target`."""
        self._owed.remove(item)
        sequence, key = self._journal.next_number(), names.get("key", item.record.key)
        place = {"sequence": sequence, "base_etag": self._owed.base_for(key, base), **names}
        if isinstance(item, Generation):
            item.record = replace(item.record, **place)  # type: ignore[arg-type]  # names of its fields
            self._contents.on_key_changed(item)
            changes.append(PutFile(item.record))
        else:
            changes.append(DropOperation(item.sequence))
            item.record = replace(item.record, **place)  # type: ignore[arg-type]
            changes.append(PutOperation(item.record))
        self._owed.add(item)

    def _followers(self, queued: list[Item], key: str, shown: str | None) -> list[Operation] | None:
        """Return the removals that are to come after what is queued for `key` if that moves; None: it must not move.

        It is under way; or a writer may still take it back, and what was closed before it, which the bucket shows or
        is owed, has to move then; or such a removal cannot be put behind its new place, as something else was queued
        since. For what a writer may still take back, nobody waits.
        """
        if any(item.in_flight or _is_rename(item) for item in queued):
            return None
        if (shown is not None or len(queued) > 1) and any(_is_held(item) for item in queued):
            return None
        removals = self._owed.removals_behind(key) if queued else []
        followers = [each for each in removals if not each.in_flight and self._owed.ends_with(each)]
        are_sealed = all(item.state is FileState.SEALED for item in queued if isinstance(item, Generation))
        return None if removals != followers and are_sealed else followers

    def _rekey(self, generation: Generation, key: str, base: str | None) -> list[Change]:
        """Give content that is not promised, or was refused, another key. base: what the bucket shows under that."""
        # A promise that was taken back belongs to the old name: under the new one it is as new as the rename.
        sequence = self._journal.next_number() if generation.sequence else 0
        generation.record = replace(generation.record, key=key, sequence=sequence, base_etag=base)
        self._contents.on_key_changed(generation)
        refused = generation.replaces
        rows = [] if refused is None else self._rekey(refused, key, base)
        return [*rows, PutFile(generation.record)]

    def _add_rename(
        self, node: Node, key_before: str, key_now: str, base: str | None, changes: list[Change]
    ) -> None:
        collapsed = self._contents.places.collapse_delete(key_now, changes)
        self._add(
            node,
            OperationKind.RENAME,
            key_before,
            changes,
            target=key_now,
            base_etag=base if collapsed is None else collapsed,
            source=self._moving_object(node, key_before),
        )
        self._tree.hide(key_before)

    def _moving_object(self, node: Node, key: str) -> ObjectInfo | None:
        """Return what will lie under `key` when the node's rename has its turn; ETag "": not known yet."""
        version = node.object
        etag = version.etag if version is not None and version.key == key else ""
        for item in reversed(self._owed.for_key(key)):
            if isinstance(item, Generation) and item.node is node:
                return ObjectInfo(key, etag, item.size, item.record.attributes.mtime_ns / 1e9)
        return None if version is None else ObjectInfo(key, etag, version.size, version.modified)

    # ---- inside

    async def _check_free(self, parent: Node, name: str) -> None:
        try:
            there = await self._names.lookup(parent, name)
        except NotFound:
            self._tree.child_key(parent, name)
            return
        raise AlreadyExists(f"{self._tree.path(there)}: exists")

    def _add(
        self,
        node: Node | None,
        kind: OperationKind,
        key: str,
        changes: list[Change],
        *,
        target: str = "",
        base_etag: str | None = None,
        source: ObjectInfo | None = None,
        readers: Node | None = None,
    ) -> None:
        """Queue an operation, and journal it with `changes`; it pins its node."""
        changed_key = target if kind is OperationKind.RENAME else key
        record = OperationRecord(
            sequence=self._journal.next_number(),
            kind=kind,
            key=key,
            target=target,
            base_etag=self._owed.base_for(changed_key, base_etag),
            source_etag=source.etag if source is not None else "",
            size=source.size if source is not None else 0,
            modified=source.modified if source is not None else 0.0,
            uuid=str(uuid.uuid4()),
            attributes=attributes_of(node) if node is not None else None,
            link=node.target if kind is OperationKind.RENAME and node is not None else "",
        )
        self._owed.add(Operation(record, node, readers=readers))
        if node is not None:
            self._tree.pin(node)
        changes.append(PutOperation(record))

    def _remove_content(self, node: Node, changes: list[Change]) -> None:
        """Take back what is queued for the node's key, and delete what the bucket shows or will show under it."""
        key = self._tree.key(node)
        published = self._shown(node)
        left: list[Item] = []
        for item in self._owed.for_key(key):
            if (
                item.node is not node
                or item.in_flight
                or _is_rename(item)
                or self._rotating.is_relied_on(item)
            ):
                continue
            left.append(item)
            if isinstance(item, Generation):
                if node.handles and item is node.generation:
                    self._owed.remove(item)
                    changes.append(disowned(item))
                else:
                    changes += self._contents.drop(item)
            else:
                self._owed.remove(item)
                changes.append(DropOperation(item.sequence))
                self._tree.unpin(node)
        generation = node.generation
        # What is owed still stays so: it is relied on, or a rename stands behind it and moves what is there.
        if generation is not None and not generation.in_flight and generation not in self._owed:
            if not node.handles:
                changes += self._contents.drop(generation)
            else:
                self._contents.on_key_changed(generation)  # parts that were sent are for nobody
                changes += self._contents.drop_replaced(generation)
                if generation.state in {FileState.OPEN, FileState.LOCAL, FileState.REJECTED}:
                    changes.append(disowned(generation))
        if self._owed.exists_after(key, published):
            readers = node if node.handles and node.generation is None else None
            self._add(None, OperationKind.DELETE, key, changes, base_etag=published, readers=readers)
            self._tree.hide(key)
        changes += self._contents.places.queue_removals(key)
        for item in left:
            changes += self._rotating.note_left(item.sequence, key)

    def _take_back_marker(self, node: Node, key: str, changes: list[Change]) -> None:
        for item in self._owed.for_key(key):
            if isinstance(item, Operation) and not item.in_flight and item.node is node:
                self._owed.remove(item)
                changes.append(DropOperation(item.sequence))
                self._tree.unpin(node)

    def _remove_marker(self, node: Node, key: str, changes: list[Change]) -> None:
        self._take_back_marker(node, key, changes)
        # A marker may be there even if no listing told so: deleting one that is not is success, and free.
        self._add(None, OperationKind.RMDIR, key, changes)
        self._tree.hide(key)

    def _keep_directory(self, directory: Node, changes: list[Change]) -> None:
        """A directory without marker lives by its objects: when its last name goes, give it one."""
        if directory is self._tree.root or directory.has_marker or not self._tree.is_linked(directory):
            return
        if self._names.is_empty_as_known(directory):
            directory.has_marker = True
            self._add(directory, OperationKind.MKDIR, self._tree.key(directory), changes)

    def _collapse_rmdir(self, key: str, changes: list[Change]) -> None:
        for item in self._owed.for_key(key):
            if isinstance(item, Operation) and item.record.kind is OperationKind.RMDIR and not item.in_flight:
                self._owed.remove(item)
                self._tree.unhide(key, gone=False)
                changes.append(DropOperation(item.sequence))


def _is_rename(item: Generation | Operation) -> bool:
    return isinstance(item, Operation) and item.record.kind is OperationKind.RENAME


def _is_held(item: Generation | Operation) -> bool:
    """Return whether a writer may still take the promise back."""
    if not isinstance(item, Generation) or item.state is not FileState.FLUSHED:
        return False
    return item.node is not None and item.node.writers > 0
