"""What was written here and is not in the bucket under its name: lists it, brings it back, lets it go.

Orphans (never closed) and suspects (perhaps damaged) lie aside, refused files in the tree, and our versions of files
in conflict are objects of their own. A number names each.

Invariants:
1. Nothing goes without being told to by its number, and nothing takes a name that is taken.
2. Row, file and the room on the ledger go together; a crash in between leaves a row that the next start ends.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from fusecache.disk.staging import StagingDirectory
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.lookup import Names
from fusecache.engine.namespace.nodes import Generation, Kind, Node, in_use
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace_ops.operations import Changes
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.recovery.journal_replay import Recovered
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.write.file_io import Contents
from fusecache.engine.writeback.conflict_log import Conflicts
from fusecache.engine.writeback.queue import Owed
from fusecache.index.journal import Change, DropFile, PutFile
from fusecache.model.errors import AlreadyExists, FusecacheError, NotADirectory, NotFound, NotPermitted
from fusecache.model.names import CONTROL_NAME, decode_name, marked_name
from fusecache.model.records import DOUBTFUL, ConflictRecord, FileRecord, PosixAttributes, Reason
from fusecache.model.states import FileState

log = logging.getLogger(__name__)

# More are counted: nobody reads them all at once.
LISTED = 1000


class Recovering:
    """Knows what is kept aside, by number. Runs on the loop."""

    def __init__(  # noqa: PLR0913  # all that a file kept aside passes on its way back
        self,
        tree: Tree,
        names: Names,
        changes: Changes,
        contents: Contents,
        owed: Owed,
        journal: JournalWriter,
        publisher: Publisher,
        conflicts: Conflicts,
        staging: StagingDirectory,
        cache: BlockCache,
        offload: Offload,
        boot_id: str,
        resolve: Callable[[str], Awaitable[Node]],
    ) -> None:
        self._tree = tree
        self._names = names
        self._changes = changes
        self._contents = contents
        self._owed = owed
        self._journal = journal
        self._publisher = publisher
        self._conflicts = conflicts
        self._staging = staging
        self._cache = cache
        self._offload = offload
        self._boot_id = boot_id
        self._resolve = resolve
        # The rows of what lies aside, and the bytes that the ledger counts for each.
        self._aside: dict[int, tuple[FileRecord, int]] = {}
        contents.on_aside = self._note_aside
        changes.on_removed, changes.on_moved = conflicts.removed, conflicts.moved
        publisher.on_conflict, publisher.on_published = conflicts.note, conflicts.published

    def restore_rows(self, found: Recovered) -> None:
        """Take over what the start found aside."""
        self._aside = {record.generation: (record, held) for record, held in found.aside}

    def _note_aside(self, record: FileRecord) -> None:
        self._aside[record.generation] = (record, record.size)

    # ---- looking

    def statistics(self) -> dict[str, int]:
        """Return how much lies aside."""
        suspects = sum(record.reason in DOUBTFUL for record, _ in self._aside.values())
        return {
            "orphans": len(self._aside) - suspects,
            "suspects": suspects,
            "aside_bytes": sum(held for _, held in self._aside.values()),
        }

    async def listing(self) -> dict[str, Any]:
        """Return the newest LISTED things as plain values, and how many there are."""
        places = await self._offload.disk(self._staging.aside)
        rows = [
            aside_row(record, self._tree.relative(record.key), places.get(record.generation))
            for record, _ in self._aside.values()
        ]
        rows += [self._refused_row(generation) for generation in self._refused().values()]
        rows += [self._conflict_row(record) for record in self._conflicts.all()]
        return listing_of(rows)

    def _refused(self) -> dict[int, Generation]:
        items = (item for item in self._publisher.rejected if isinstance(item, Generation))
        return {item.record.generation: item for item in items}

    def _refused_row(self, generation: Generation) -> dict[str, Any]:
        record = generation.record
        row = aside_row(record, self._tree.relative(record.key), generation.file.path)
        words = str(generation.error or record.error)
        kept = [self._tree.relative(each.record.key) for each in self._owed.put_off_behind(record.key)]
        if kept:
            words += f"; the bucket keeps its older version as {', '.join(kept)}"
        return {**row, "kind": "refused", "words": words}

    def _conflict_row(self, record: ConflictRecord) -> dict[str, Any]:
        return conflict_row(record, self._tree.relative(record.key), self._tree.relative(record.kept_as))

    # ---- bringing back

    async def bring_back(self, number: int, to: str) -> str:
        """Make it a file of the mount, at the path `to` ("": beside its old name); return the path.

        A refused file keeps its name, and is offered to the bucket again.
        Raises NotFound, AlreadyExists if the path is taken, LocalDiskError if its bytes are gone.
        """
        self._journal.check_writable()
        refused = self._refused().get(number)
        conflict = self._conflicts.get(number)
        if refused is not None:
            return await self._offer_again(refused, to)
        if conflict is not None:
            return await self._rename_copy(conflict, to)
        if number not in self._aside:
            raise NotFound(f"{number}: there is no such thing to bring back; see `fusecache recover`")
        return await self._bring_back(number, to)

    async def _bring_back(self, number: int, to: str) -> str:
        record, held = self._aside[number]
        parent, name = await self._free_place(to, self._tree.relative(record.key) or f"file-{number}")
        if self._aside.pop(number, None) is None:
            raise NotFound(f"{number}: somebody else is bringing it back")
        try:
            with in_use(parent):
                file = await self._offload.disk(self._staging.bring_back, number)
        except FusecacheError:
            self._aside[number] = (record, held)
            raise
        # ---- from here to the commit nothing is awaited
        if name in parent.children or not self._tree.is_linked(parent):
            file.close()
            self._staging.move_aside(number, "suspect" if record.reason in DOUBTFUL else "orphans")
            self._aside[number] = (record, held)
            raise AlreadyExists(f"{name}: was made meanwhile")
        generation = Generation(
            record, file, None, size=record.size, reserved=held, changed_since_flush=False
        )
        changes: list[Change] = []
        self._place(generation, parent, name, changes)
        path = self._tree.path(self._node_of(generation))
        log.info("brought back number=%d path=%s bytes=%d", number, path, generation.size)
        await self._journal.commit(*changes)
        return path

    def _place(self, generation: Generation, parent: Node, name: str, changes: list[Change]) -> None:
        """Give content a new name, and queue it as if it had been closed just now."""
        key = self._tree.child_key(parent, name)
        attributes = generation.record.attributes
        if generation.record.reason is Reason.UNKNOWN:
            own = self._tree.ownership
            attributes = PosixAttributes(
                attributes.mode, own.uid, own.gid, int(generation.record.moment * 1e9)
            )
        node = self._tree.make(parent, name, Kind.FILE, attributes=attributes)
        node.generation, generation.node = generation, node
        self._tree.pin(node)
        fresh: dict[str, Any] = {
            **_FRESH,
            "key": key,
            "uuid": str(uuid.uuid4()),
            "size": generation.size,
            "attributes": attributes,
            "boot_id": self._boot_id,
        }
        self._contents.on_name_lost(parent, name)  # the kernel may remember that there was none
        if self._contents.is_local(node):
            self._contents.local.add(generation)
            generation.record = replace(generation.record, state=FileState.LOCAL, sequence=0, **fresh)
            changes.append(PutFile(generation.record))
            return
        base = self._owed.base_for(key, self._contents.places.collapse_delete(key, changes))
        # A new life, not a step of the old one: what must not be published never is, by itself.
        generation.record = replace(generation.record, state=FileState.SEALED, base_etag=base, **fresh)
        generation.record = replace(generation.record, sequence=self._journal.next_number())
        generation.sealed_at = generation.flushed_at = trio.current_time()
        self._owed.add(generation)
        changes.append(PutFile(generation.record))
        self._contents.on_sealed()

    async def _offer_again(self, generation: Generation, to: str) -> str:
        node = self._node_of(generation)
        if to:
            await self._rename(self._tree.path(node), to)
        is_newest = node.generation is generation and self._tree.is_linked(node)
        if generation.state is not FileState.REJECTED or not is_newest:
            raise NotFound(f"{generation.record.key}: was removed or written again meanwhile")
        generation.is_forced = True
        changes = self._contents.offer_again(node, generation)
        path = self._tree.path(node)
        await self._journal.commit(*changes)
        return path

    async def _rename_copy(self, record: ConflictRecord, to: str) -> str:
        copy = self._tree.relative(record.kept_as)
        if not copy:
            raise NotFound(f"{record.number}: the change was given up; there are no bytes to bring back")
        if not to:
            raise AlreadyExists(
                f"{record.number}: it is on the mount as {copy}; --to PATH gives it another name"
            )
        await self._rename(copy, to)
        if self._conflicts.get(record.number) is not None:  # of the same name, in another directory
            self._conflicts.drop(record.number)
        return to

    async def _rename(self, old: str, new: str) -> None:
        parent, name = await self._free_place(new, "")
        with in_use(parent):
            folder = await self._directory(old.rpartition("/")[0])
            with in_use(folder):
                await self._changes.rename(folder, old.rpartition("/")[2], parent, name, replace=False)
        self._contents.on_name_lost(folder, old.rpartition("/")[2])
        self._contents.on_name_lost(parent, name)

    async def _free_place(self, to: str, old: str) -> tuple[Node, str]:
        """Return where something comes back: at the path `to`, or beside `old` under the first name that is free."""
        folder, _, last = (to or old).rpartition("/")
        name = decode_name(last.encode())
        parent = await self._directory(folder)
        if parent is self._tree.root and name == CONTROL_NAME:
            raise AlreadyExists(f"{name}: is the daemon's own")
        with in_use(parent):
            if to:
                if await self._is_taken(parent, name):
                    raise AlreadyExists(f"{to}: exists; give another path, or remove that file first")
                return parent, name
            number = 1
            while await self._is_taken(parent, free := marked_name(name, f".recovered-{number}")):
                number += 1
            return parent, free

    async def _directory(self, path: str) -> Node:
        try:
            node = await self._resolve(path)
        except NotFound as exc:
            raise NotFound(f"{path}: there is no such directory; make it, or give another path") from exc
        if node.kind is not Kind.DIRECTORY:
            raise NotADirectory(f"{path}: is not a directory")
        return node

    async def _is_taken(self, parent: Node, name: str) -> bool:
        self._tree.child_key(parent, name)  # a key that is too long is refused before anything moves
        try:
            await self._names.lookup(parent, name)
        except NotFound:
            return False
        return True

    def _node_of(self, generation: Generation) -> Node:
        if generation.node is None:
            raise NotFound(f"{generation.record.key}: was removed")
        return generation.node

    # ---- letting go

    async def delete(self, number: int) -> int:
        """Remove it for good; return the bytes freed here. Raises NotFound, NotPermitted if it is in use."""
        self._journal.check_writable()
        refused = self._refused().get(number)
        conflict = self._conflicts.get(number)
        if refused is not None:
            return await self._delete_refused(refused)
        if conflict is not None:
            return await self._delete_copy(conflict)
        if number not in self._aside:
            raise NotFound(f"{number}: there is no such thing to delete; see `fusecache recover`")
        record, held = self._aside.pop(number)
        # Three steps, so that the next start ends what a crash interrupts.
        await self._journal.commit(PutFile(replace(record, state=FileState.DROPPED)))
        await self._offload.disk(self._staging.delete_aside, number)
        self._cache.release_staging(held)
        await self._journal.commit(DropFile(number))
        log.info("deleted number=%d key=%s bytes=%d reason=%s", number, record.key, held, record.reason.value)
        return held

    async def _delete_refused(self, generation: Generation) -> int:
        node = self._node_of(generation)
        if node.handles:
            raise NotPermitted(f"{self._tree.path(node)}: somebody has it open")
        parent, name, size = node.parent, node.name, generation.size
        shown = self._contents.places.forget_removals(generation.record.key)
        dropped = [*self._contents.drop(generation), *shown]
        if parent is not None:
            self._tree.detach(node)
            self._contents.on_name_lost(parent, name)  # what the bucket has shows again
        await self._journal.commit(*dropped)
        return size

    async def _delete_copy(self, record: ConflictRecord) -> int:
        copy = self._tree.relative(record.kept_as)
        if copy:
            folder, _, name = copy.rpartition("/")
            try:
                parent = await self._directory(folder)
                with in_use(parent):
                    await self._changes.unlink(parent, name)
                self._contents.on_name_lost(parent, name)
            except NotFound:
                log.info("the copy of a conflict was gone already path=%s", copy)
        if self._conflicts.get(record.number) is not None:
            self._conflicts.drop(record.number)
        await self._journal.settled()
        return 0


# What was known of an upload, or of bytes on the disk, is of no use to the next one.
_FRESH: dict[str, Any] = {
    "reason": Reason.NONE,
    "error": "",
    "synced": False,
    "checksum": "",
    "upload_id": "",
    "part_bytes": 0,
    "part_etags": (),
}


def listing_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the newest LISTED rows, oldest first, the count of all, and their bytes on this disk."""
    rows.sort(key=lambda row: (row["when"], row["id"]))
    nbytes = sum(row["bytes"] for row in rows if row["place"])
    return {"things": rows[-LISTED:], "count": len(rows), "bytes": nbytes}


def aside_row(record: FileRecord, path: str, place: Path | None) -> dict[str, Any]:
    """Return a row of the listing. when: seconds since 1970, 0 if nobody knows; place: of its bytes, "" if gone."""
    return {
        "id": record.generation,
        "kind": "suspect" if record.reason in DOUBTFUL else "orphan",
        "path": path,
        "bytes": record.size,
        "when": record.moment,
        "reason": record.reason.value,
        "words": record.error,
        "place": "" if place is None else str(place),
    }


def conflict_row(record: ConflictRecord, path: str, kept_as: str) -> dict[str, Any]:
    """Return a row of the listing for a conflict; kept_as: the path of our version, "" if there is none."""
    return {
        "id": record.number,
        "kind": "conflict",
        "path": path,
        "bytes": record.size,
        "when": record.moment,
        "reason": "",
        "words": record.error,
        "place": "",
        "kept_as": kept_as,
        "settled": record.settled,
    }
