"""Lists, restores and deletes content that was written here and is not in the bucket under its name.

There are three kinds, and each entry has a number:
- Orphans (never closed) and suspects (perhaps damaged) are quarantined in folders of the cache directory.
- Rejected files show on the mount. Rejected changes of names have no bytes here; they are repeated or dropped.
- In a conflict, our version is an object of its own.

Invariants:
1. An entry is deleted only by its number, on request, and a restore never takes a name that is taken. One exception:
   content whose writer was killed gives its space to writers if newer content of its name stands for it.
2. Row, file and reserved space go together. A crash in between leaves a row that the next start finishes.
"""

import logging
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio

from fusecache.disk.staging import StagingDirectory
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import CloseState, FileVersion, Kind, Node, Operation, in_use
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace_ops.operations import NamespaceOps
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.recovery.journal_replay import ReplayResult
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.write.parts import WriteParts
from fusecache.engine.writeback.conflict_log import ConflictLog
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, DropFile, PutFile
from fusecache.model.errors import AlreadyExists, FusecacheError, NotADirectory, NotFound, NotPermitted
from fusecache.model.names import CONTROL_NAME, decode_name, marked_name
from fusecache.model.records import (
    DOUBTFUL,
    ConflictRecord,
    FileRecord,
    FileState,
    OperationKind,
    OperationRecord,
    PosixAttributes,
    Reason,
)

log = logging.getLogger(__name__)

# Entries in one listing, the newest ones: more than anyone reads at once. The others are counted.
LISTED = 1000


@dataclass(eq=False, repr=False)
class Quarantine:
    """The entries of `fusecache recover`, by number. Runs on the loop."""

    _tree: Tree
    _lookup: Lookup
    _namespace_ops: NamespaceOps
    _write: WriteParts
    _events: Events
    _queue: WritebackQueue
    _journal: JournalWriter
    _publisher: Publisher
    _conflict_log: ConflictLog
    _staging: StagingDirectory
    _cache: BlockCache
    _offload: Offload
    _boot_id: str
    _resolve: Callable[[str], Awaitable[Node]]

    def __post_init__(self) -> None:
        self._states = self._write.states
        self._disposal = self._write.disposal
        self._placement = self._write.placement
        self._local_only = self._write.local_only
        # The rows of quarantined files, and the bytes that the ledger counts for each.
        self._quarantined: dict[int, tuple[FileRecord, int]] = {}
        self._making_space = trio.Lock()
        self._times_made = 0

    def restore_rows(self, found: ReplayResult) -> None:
        """Load the quarantined files that the start found."""
        self._quarantined = {record.generation: (record, held) for record, held in found.quarantined}

    def on_quarantined(self, record: FileRecord) -> None:
        """A file of this run was quarantined: list it."""
        self._quarantined[record.generation] = (record, record.size)

    # ---- listing

    def statistics(self) -> dict[str, int]:
        """Return how many files are quarantined, and their bytes."""
        suspects = sum(record.reason in DOUBTFUL for record, _ in self._quarantined.values())
        return {
            "orphans": len(self._quarantined) - suspects,
            "suspects": suspects,
            "aside_bytes": sum(held for _, held in self._quarantined.values()),
        }

    async def listing(self) -> dict[str, Any]:
        """Return the newest LISTED entries as plain values, and how many there are."""
        local_paths = await self._offload.disk(self._staging.quarantined)
        rows = [
            quarantine_row(record, self._tree.relative(record.key), local_paths.get(record.generation))
            for record, _ in self._quarantined.values()
        ]
        rows += [self._rejected_row(version) for version in self._rejected().values()]
        rows += [operation_row(each.record, self._tree.relative) for each in self._operations().values()]
        rows += [self._conflict_row(record) for record in self._conflict_log.all()]
        return listing_of(rows)

    def _rejected(self) -> dict[int, FileVersion]:
        items = (item for item in self._publisher.rejections.rejected if isinstance(item, FileVersion))
        return {item.record.generation: item for item in items}

    def _operations(self) -> dict[int, Operation]:
        return {
            item.sequence: item for item in self._publisher.rejections.rejected if isinstance(item, Operation)
        }

    def _rejected_row(self, version: FileVersion) -> dict[str, Any]:
        record = version.record
        row = quarantine_row(record, self._tree.relative(record.key), version.file.path)
        return {**row, "kind": "refused", "message": str(version.error or record.error)}

    def _conflict_row(self, record: ConflictRecord) -> dict[str, Any]:
        return conflict_row(record, self._tree.relative(record.key), self._tree.relative(record.kept_as))

    # ---- restoring

    async def restore(self, number: int, to: str) -> str:
        """Make an entry a file of the mount, at the path `to` ("": beside its old name); return the path.

        A rejected file keeps its name unless `to` is given, and is queued again. Our version of a conflict is renamed.
        A rejected change of names is sent again as it was.
        Raises NotFound, AlreadyExists if the path is taken, LocalDiskError if the bytes are gone.
        """
        self._journal.check_writable()
        rejected, operation = self._rejected().get(number), self._operations().get(number)
        conflict = self._conflict_log.get(number)
        if rejected is not None:
            return await self._requeue(rejected, to)
        if operation is not None:
            return await self._repeat(operation, to)
        if conflict is not None:
            return await self._rename_copy(conflict, to)
        if number not in self._quarantined:
            raise NotFound(f"{number}: no such entry to restore; list them with `fusecache recover`")
        return await self._restore(number, to)

    async def _restore(self, number: int, to: str) -> str:
        record, held = self._quarantined[number]
        parent, name = await self._free_name(to, self._tree.relative(record.key) or f"file-{number}")
        if self._quarantined.pop(number, None) is None:
            raise NotFound(f"{number}: another `fusecache recover` is restoring or deleting it")
        try:
            with in_use(parent):
                file = await self._offload.disk(self._staging.restore, number)
        except FusecacheError:
            self._quarantined[number] = (record, held)
            raise
        # ---- from here to the commit nothing is awaited
        if name in parent.children or not self._tree.is_linked(parent):
            file.close()
            self._staging.quarantine(number, "suspect" if record.reason in DOUBTFUL else "orphans")
            self._quarantined[number] = (record, held)
            raise AlreadyExists(
                f"{name}: was made, or its directory removed, during the restore; try again with another --to PATH"
            )
        version = FileVersion(
            record,
            file,
            None,
            size=record.size,
            reserved=held,
            close_state=CloseState(changed_since_flush=False),
        )
        changes: list[Change] = []
        self._queue_restored(version, parent, name, changes)
        path = self._tree.path(self._node_of(version))
        log.info("restored number=%d path=%s bytes=%d", number, path, version.size)
        await self._journal.commit(*changes)
        return path

    def _queue_restored(self, version: FileVersion, parent: Node, name: str, changes: list[Change]) -> None:
        """Give content a new node and name, and queue it as if it had been closed just now."""
        key = self._tree.child_key(parent, name)
        attributes = version.record.attributes
        if version.record.reason is Reason.UNKNOWN:
            own = self._tree.ownership
            attributes = PosixAttributes(attributes.mode, own.uid, own.gid, int(version.record.moment * 1e9))
        node = self._tree.make(parent, name, Kind.FILE, attributes=attributes)
        node.version, version.node = version, node
        self._tree.hold_local(node)
        fresh: dict[str, Any] = {
            **_FRESH,
            "key": key,
            "uuid": str(uuid.uuid4()),
            "size": version.size,
            "attributes": attributes,
            "boot_id": self._boot_id,
        }
        self._events.on_name_lost(parent, name)  # the kernel may have cached that there is no such name
        if self._local_only.covers(node):
            self._local_only.add(version)
            version.record = replace(version.record, state=FileState.LOCAL, sequence=0, **fresh)
            changes.append(PutFile(version.record))
            return
        base = self._queue.base_for(key, self._placement.collapse_delete(key, changes))
        # Set directly, not by a transition: the table allows none from ORPHAN, as such content is published only on
        # request.
        version.record = replace(version.record, state=FileState.SEALED, base_etag=base, **fresh)
        version.record = replace(version.record, sequence=self._journal.next_number())
        version.sealed_at = version.waiting_since = trio.current_time()
        self._queue.add(version)
        changes.append(PutFile(version.record))
        self._events.on_sealed()

    async def _requeue(self, version: FileVersion, to: str) -> str:
        node = self._node_of(version)
        if to:
            await self._rename(self._tree.path(node), to)
        is_newest = node.version is version and self._tree.is_linked(node)
        if version.state is not FileState.REJECTED or not is_newest:
            raise NotFound(
                f"{version.record.key}: was removed or written again, so there is nothing to restore"
            )
        version.is_forced = True
        changes = self._states.requeue(node, version)
        path = self._tree.path(node)
        await self._journal.commit(*changes)
        return path

    async def _repeat(self, item: Operation, to: str) -> str:
        path = self._tree.relative(item.changed_keys()[-1])
        if to:
            raise NotPermitted(
                f"{item.sequence}: only the change of {path} itself can be repeated; try again without --to"
            )
        await self._publisher.repeat(item)
        return path

    async def _rename_copy(self, record: ConflictRecord, to: str) -> str:
        copy = self._tree.relative(record.kept_as)
        if not copy:
            raise NotFound(f"{record.number}: the change was abandoned; there are no bytes to restore")
        if not to:
            raise AlreadyExists(
                f"{record.number}: our version is on the mount as {copy}; rename it with --to PATH"
            )
        await self._rename(copy, to)
        # The file name is the same, the directory another.
        if self._conflict_log.get(record.number) is not None:
            self._conflict_log.drop(record.number)
        return to

    async def _rename(self, old: str, new: str) -> None:
        parent, name = await self._free_name(new, "")
        with in_use(parent):
            folder = await self._directory(old.rpartition("/")[0])
            with in_use(folder):
                await self._namespace_ops.rename(folder, old.rpartition("/")[2], parent, name, replace=False)
        self._events.on_name_lost(folder, old.rpartition("/")[2])
        self._events.on_name_lost(parent, name)

    async def _free_name(self, to: str, old: str) -> tuple[Node, str]:
        """Return the directory and name for a restore: those of `to`, or beside `old` the first name that is free."""
        folder, _, last = (to or old).rpartition("/")
        name = decode_name(last.encode())
        parent = await self._directory(folder)
        if parent is self._tree.root and name == CONTROL_NAME:
            raise AlreadyExists(f"{name}: this name is reserved for the daemon; give another path")
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
        self._tree.child_key(parent, name)  # raises for a key that is too long before anything is moved
        try:
            await self._lookup.lookup(parent, name)
        except NotFound:
            return False
        return True

    def _node_of(self, version: FileVersion) -> Node:
        if version.node is None:
            raise NotFound(f"{version.record.key}: was removed")
        return version.node

    # ---- deleting

    async def delete(self, number: int) -> int:
        """Delete an entry for good; return the bytes freed here. Raises NotFound, NotPermitted if it is in use."""
        self._journal.check_writable()
        rejected, operation = self._rejected().get(number), self._operations().get(number)
        conflict = self._conflict_log.get(number)
        if rejected is not None:
            return await self._delete_rejected(rejected)
        if operation is not None:
            await self._journal.commit(*self._publisher.rejections.drop(operation))
            return 0
        if conflict is not None:
            return await self._delete_copy(conflict)
        if number not in self._quarantined:
            raise NotFound(f"{number}: no such entry to delete; list them with `fusecache recover`")
        return await self._delete(number)

    async def _delete(self, number: int) -> int:
        record, held = self._quarantined.pop(number)
        # Three steps (row, file, row), so that the next start finishes what a crash interrupts.
        await self._journal.commit(PutFile(replace(record, state=FileState.DROPPED)))
        await self._offload.disk(self._staging.delete_quarantined, number)
        await self._cache.free_staging(held)
        await self._journal.commit(DropFile(number))
        log.info("deleted number=%d key=%s bytes=%d reason=%s", number, record.key, held, record.reason.value)
        return held

    async def make_space(self, key: str) -> bool:
        """Free the space of the oldest attempt at a file that newer content stands for; return whether there was one.

        A local file system has one file for all attempts at a name. key: of the file that is to be written now.
        """
        times = self._times_made
        async with self._making_space:
            if times != self._times_made:
                return True  # another writer made space while this one waited
            records = [record for record, _ in self._quarantined.values() if record.reason in _ATTEMPTS]
            newest = {record.key: record.generation for record in sorted(records, key=_generation)}
            newest[key] = sys.maxsize
            replaced = (each for each in records if self._is_replaced(each, newest[each.key]))
            oldest = min(replaced, key=_generation, default=None)
            if oldest is None:
                return False
            log.warning(
                "deleted an older attempt, as space is short path=%s bytes=%d reason=%s",
                self._tree.relative(oldest.key), oldest.size, oldest.reason.value,
            )  # fmt: skip
            with trio.CancelScope(shield=True):
                await self._delete(oldest.generation)
            self._times_made += 1
            return True

    def _is_replaced(self, record: FileRecord, newest: int) -> bool:
        """Return whether newer content of the name is here or in the bucket. newest: generation of the last attempt."""
        node = self._tree.find(record.key)
        if newest > record.generation or node is None:
            return newest > record.generation
        version, published = node.version, node.object
        return (version is not None and version.record.generation > record.generation) or (
            published is not None and published.modified > record.moment
        )

    async def _delete_rejected(self, version: FileVersion) -> int:
        node = self._node_of(version)
        if node.handles:
            raise NotPermitted(f"{self._tree.path(node)}: a program has it open; close it first")
        parent, name, size = node.parent, node.name, version.size
        dropped = self._disposal.drop(version)
        if parent is not None:
            self._tree.detach(node)
            self._events.on_name_lost(parent, name)  # the name shows again what the bucket has
        await self._journal.commit(*dropped)
        return size

    async def _delete_copy(self, record: ConflictRecord) -> int:
        copy = self._tree.relative(record.kept_as)
        if copy:
            folder, _, name = copy.rpartition("/")
            try:
                parent = await self._directory(folder)
                with in_use(parent):
                    await self._namespace_ops.unlink(parent, name)
                self._events.on_name_lost(parent, name)
            except NotFound:
                log.info("conflict copy already gone path=%s", copy)
        if self._conflict_log.get(record.number) is not None:
            self._conflict_log.drop(record.number)
        await self._journal.wait_committed()
        return 0


# Never closed, so a newer attempt at the name stands for it.
_ATTEMPTS = frozenset({Reason.KILLED, Reason.UNCLOSED})


def _generation(record: FileRecord) -> int:
    return record.generation


# Fields of a restored row that start empty: what the old row knew of an upload and of synced bytes is of no use.
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
    rows.sort(key=lambda row: (row["time"], row["id"]))
    nbytes = sum(row["bytes"] for row in rows if row["local_path"])
    return {"entries": rows[-LISTED:], "count": len(rows), "bytes": nbytes}


def quarantine_row(record: FileRecord, path: str, local_path: Path | None) -> dict[str, Any]:
    """Return an entry of the listing. time: seconds since 1970, 0 if unknown; local_path: of the bytes, "" if gone."""
    return {
        "id": record.generation,
        "kind": "suspect" if record.reason in DOUBTFUL else "orphan",
        "path": path,
        "bytes": record.size,
        "time": record.moment,
        "reason": record.reason.value,
        "message": record.error,
        "local_path": "" if local_path is None else str(local_path),
    }


_CHANGES = {
    OperationKind.DELETE: "its removal",
    OperationKind.MKDIR: "the new directory",
    OperationKind.RMDIR: "the removal of the directory",
    OperationKind.SYMLINK: "the symlink",
}


def operation_row(record: OperationRecord, path_of: Callable[[str], str]) -> dict[str, Any]:
    """Return an entry of the listing for a rejected change of names. path_of: returns the path of a key."""
    is_rename = record.kind is OperationKind.RENAME
    what = f"the rename from {path_of(record.key)}" if is_rename else _CHANGES[record.kind]
    return {
        "id": record.sequence,
        "kind": "refused",
        "path": path_of(record.target if is_rename else record.key).rstrip("/"),
        "bytes": 0,
        "time": record.moment,
        "reason": "",
        "message": f"the bucket rejected {what}: {record.error}",
        "local_path": "",
        "change": record.kind.value,
    }


def conflict_row(record: ConflictRecord, path: str, kept_as: str) -> dict[str, Any]:
    """Return an entry of the listing for a conflict. kept_as: the path of our version, "" if there is none."""
    return {
        "id": record.number,
        "kind": "conflict",
        "path": path,
        "bytes": record.size,
        "time": record.moment,
        "reason": "",
        "message": record.error,
        "local_path": "",
        "kept_as": kept_as,
        "settled": record.settled,
    }
