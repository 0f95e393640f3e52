"""Replays the journal at start: the promises of the daemon before are this one's.

Invariants:
1. Closed content is queued again under its old sequence; unfinished content is kept aside, never published.
2. After a reboot only content that was synced and still matches its checksum is published; the rest goes to `suspect/`.
3. Nothing is deleted here but what the bucket has, and what nobody was ever promised has a place in `orphans/`.
4. Every file that is kept aside has a row, which says why, and every such row is told to `quarantine.py`.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fusecache.disk.staging import StagingDirectory, StagingFile, checksum_of_checksums
from fusecache.engine.namespace.nodes import FileVersion, Kind, Node, Operation, QueuedChange
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.recovery.lost_changes import LostChanges
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, DropFile, DropOperation, Journal, PutAbort, PutFile, PutOperation
from fusecache.model.errors import Refused
from fusecache.model.names import parent_prefix
from fusecache.model.objects import ObjectInfo
from fusecache.model.records import (
    ANOTHERS,
    DOUBTFUL,
    FileRecord,
    OperationKind,
    OperationRecord,
    PosixAttributes,
    Reason,
    without_upload,
)
from fusecache.model.states import OWED, FileState

if TYPE_CHECKING:
    from pathlib import Path

_NOT_KNOWN = PosixAttributes(0o600, 0, 0, 0)
log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReplayResult:
    """What was found. staged_bytes: what staging and the folders aside hold on disk.

    orphans, suspects: newly set aside. aside: the rows of all that is kept aside, with the bytes that each holds.
    """

    versions: list[FileVersion] = field(default_factory=list)
    rejected: list[FileVersion] = field(default_factory=list)
    local: list[FileVersion] = field(default_factory=list)
    operations: list[OperationRecord] = field(default_factory=list)
    # Removals that wait for something to be published where what they replaced was refused.
    deferred: list[OperationRecord] = field(default_factory=list)
    quarantined: list[tuple[FileRecord, int]] = field(default_factory=list)
    orphans: int = 0
    suspects: int = 0
    staged_bytes: int = 0
    # (key, UploadId) of those that the bucket has to be told to forget.
    uploads: list[tuple[str, str]] = field(default_factory=list)


class JournalReplay:
    """Reads the journal (blocking), then builds queue and tree from it (on the loop)."""

    def __init__(
        self,
        journal: Journal,
        staging: StagingDirectory,
        boot_id: str,
        tells: Callable[[str], bool] = lambda _key: False,
    ) -> None:
        """tells: whether the name of a key says that all the rest is there."""
        self._is_commit_marker = tells
        self._journal = journal
        self._staging = staging
        self._boot_id = boot_id
        # Bytes of the staging files, by generation, as they were at the start.
        self._sizes: dict[int, int] = {}

    def read(self) -> ReplayResult:
        """Look at every row and staging file; journal what became of them. Blocking: checksums may be read."""
        found = ReplayResult(operations=self._journal.operations(), uploads=self._journal.aborts())
        ended = {upload_id for _, upload_id in found.uploads}
        records = [
            without_upload(record) if record.upload_id in ended else record
            for record in self._journal.files()
        ]
        self._sizes = self._staging.sizes()
        changes: list[Change] = []
        for record in records:
            if record.state not in OWED:
                changes += self._recover_file(record, found)
        lost = {record.key for record in records if record.state is FileState.REJECTED}
        lost -= {version.record.key for version in found.rejected}
        queue = [record for record in records if record.state in OWED]
        changes += self._recover_queue(queue, lost, found)
        changes += self._end_replaced(found)
        _put_removals_off(found)
        without_row = self._sizes.keys() | self._staging.quarantined().keys()
        for number in sorted(without_row - {record.generation for record in records}):
            # Made, but killed before its row was written: nothing was promised.
            strange = FileRecord(number, FileState.OPEN, "", 0, 0, "", self._boot_id, _NOT_KNOWN)
            changes += self._quarantine(
                strange, Reason.UNKNOWN, "an unfinished file without a journal row", found
            )
        if changes:
            self._journal.apply(changes)
        found.staged_bytes = self._staging.quarantined_bytes() + sum(
            version.size for version in [*found.versions, *found.rejected, *found.local]
        )
        if found.versions or found.operations or found.orphans or found.suspects:
            log.warning(
                "recovered files=%d changes=%d orphans=%d suspects=%d",
                len(found.versions), len(found.operations), found.orphans, found.suspects,
            )  # fmt: skip
        return found

    def _recover_file(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        match record.state:
            case FileState.STORED:
                self._staging.delete(record.generation)
                return [DropFile(record.generation)]
            case FileState.DROPPED:
                self._staging.delete(record.generation)
                self._staging.delete_quarantined(record.generation)
                return [DropFile(record.generation)]
            case FileState.ORPHAN:
                return self._quarantine_row(record, found)
            case FileState.OPEN:
                return self._quarantine(
                    record, Reason.UNCLOSED, "was not closed before the daemon ended", found
                )
            case FileState.FAILED:
                return self._quarantine(record, Reason.FAILED, record.error, found)
            case FileState.LOCAL:
                local = self._find(record)
                if local is None:
                    return self._quarantine(record, Reason.LOST, "its staging file is gone", found)
                # It is changed in place: what the disk kept is what it is.
                local.size = self._sizes[record.generation]
                found.local.append(local)
                return []
            case FileState.REJECTED:
                return self._recover_refused(record, found)
            case _:
                raise ValueError(f"{record.state} is queued: `_recover_queue` takes it")

    def _recover_refused(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        version = self._find(record)
        if version is None:
            return self._quarantine(record, Reason.LOST, "its staging file is gone", found)
        version.error = Refused(record.error)
        found.rejected.append(version)
        return []

    def _recover_queue(self, records: list[FileRecord], lost: set[str], found: ReplayResult) -> list[Change]:
        """Look at what is queued, in order: what is set aside passes on what it knew of the bucket.

        lost: keys of content that is not to be had.
        """
        changes: list[Change] = []
        operations, found.operations = found.operations, []
        written: dict[str, int] = {}
        for each in records:
            folder = parent_prefix(each.key)
            written[folder] = max(each.sequence, written.get(folder, 0))
        passing = LostChanges(lost, self._is_commit_marker, written)
        queue: list[FileRecord | OperationRecord] = [*records, *operations]
        for item in sorted(queue, key=lambda item: item.sequence):
            if isinstance(item, FileRecord):
                record = passing.begin(item)
                missing = passing.missing_for(record)
                if missing is not None:
                    aside = self._hold_commit_marker(record, missing, found)
                else:
                    aside = self._recover_queued(record, found)
                if aside:
                    passing.lose(record, is_new=missing is None)
                else:
                    passing.queued(record)
                changes += aside or ([PutFile(record)] if record is not item else [])
                continue
            operation = passing.operation(item)
            if operation is None:
                log.warning(
                    "the bucket keeps what was removed or moved, as newer content is lost key=%s", item.key
                )
                changes.append(DropOperation(item.sequence))
                continue
            if operation is not item:
                changes.append(PutOperation(operation))
            found.operations.append(operation)
        return changes

    def _hold_commit_marker(
        self, record: FileRecord, missing: FileRecord, found: ReplayResult
    ) -> list[Change]:
        """Keep from the bucket, under its name here, what says that all the rest is there, as it is not."""
        changes = self._recover_queued(record, found)
        if not changes:
            words = (
                f"{record.key}: {missing.key} was closed before it, and is lost or damaged: it may say that this is "
                "there"
            )
            log.warning("kept from the bucket %s", words)
            version = found.versions.pop()
            version.error = Refused(words)
            found.rejected.append(version)
            refused = {"refused_at": record.sequence, "reason": Reason.POWER_CUT}
            changes = [PutFile(version.transition_to(FileState.REJECTED, error=words, **refused))]
        return changes

    def _end_replaced(self, found: ReplayResult) -> list[Change]:
        """What was refused is not wanted any more where newer content of its name was closed."""
        newest: dict[str, int] = {}
        for each in [*found.versions, *found.rejected]:
            newest[each.record.key] = max(each.sequence, newest.get(each.record.key, 0))
        changes: list[Change] = []
        for refused in [each for each in found.rejected if each.sequence < newest[each.record.key]]:
            found.rejected.remove(refused)
            changes += self._recover_file(refused.transition_to(FileState.DROPPED), found)
        return changes

    def _recover_queued(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        # Stays PUBLISHING: the request may have been sent, so that only the bucket can tell what it did.
        state = FileState.PUBLISHING if record.state is FileState.PUBLISHING else FileState.SEALED
        queued = record if record.state is state else replace(record, state=state)
        version = self._find(queued)
        if version is None:
            return self._quarantine(record, Reason.LOST, "its staging file is gone", found)
        words = self._suspect(record, version.file)
        version.file.close()  # thousands may be pending; each upload opens its own
        if words:
            reason = Reason.DAMAGED if record.boot_id == self._boot_id else Reason.POWER_CUT
            return self._quarantine(record, reason, words, found)
        if self._sizes[record.generation] > record.size:
            version.file.truncate(record.size)
            version.file.close()
        found.versions.append(version)
        return []  # FLUSHED or SEALED, the next start would decide the same

    def _suspect(self, record: FileRecord, file: StagingFile) -> str:
        """Return why the bytes may not be the ones that were closed, or ""."""
        size = self._sizes[record.generation]
        if size < record.size:
            return f"only {size} of {record.size} bytes are on the disk"
        if record.boot_id == self._boot_id:
            return ""  # the page cache outlived the daemon
        if not record.synced:
            return "the machine went down before it was synced"
        if checksum_of_checksums(file.checksums()) != record.checksum:
            return "its bytes do not match their checksum"
        return ""

    def _find(self, record: FileRecord) -> FileVersion | None:
        if record.generation not in self._sizes:
            log.error("a staging file is gone key=%s generation=%d", record.key, record.generation)
            return None
        file = self._staging.known(record.generation)
        return FileVersion(record, file, None, size=record.size, changed_since_flush=False)

    def _quarantine(
        self, record: FileRecord, reason: Reason, words: str, found: ReplayResult
    ) -> list[Change]:
        """Move a file aside; return its row."""
        if reason in DOUBTFUL:
            found.suspects += 1
        else:
            found.orphans += 1
        place = self._quarantine_file(record.generation, reason)
        size, moment = record.size, record.moment
        if place is not None:
            facts = place.stat()
            size, moment = facts.st_size, moment or facts.st_mtime
        log.warning("kept aside reason=%s: %s at=%s", record.key, words, place or "nowhere: its file is gone")
        aborts: list[Change] = []
        if record.upload_id:
            found.uploads.append((record.key, record.upload_id))
            aborts.append(PutAbort(record.key, record.upload_id))
        kept = replace(
            without_upload(record),
            state=FileState.ORPHAN,
            size=size,
            moment=moment,
            reason=reason,
            error=words,
        )
        found.quarantined.append((kept, 0 if place is None else size))
        return [*aborts, PutFile(kept)]

    def _quarantine_row(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        """A file that was set aside before: its move may not have reached the disk, its row may be an older one."""
        place = self._quarantine_file(record.generation, record.reason)
        if place is None:
            found.quarantined.append((record, 0))
            return []
        facts = place.stat()
        reason = record.reason
        if reason is Reason.NONE:
            reason = Reason.POWER_CUT if place.parent.name == "suspect" else Reason.UNKNOWN
        moment = record.moment or facts.st_mtime
        known = replace(record, size=facts.st_size, moment=moment, reason=reason)
        found.quarantined.append((known, facts.st_size))
        return [] if known == record else [PutFile(known)]

    def _quarantine_file(self, version: int, reason: Reason) -> "Path | None":
        """Return where the file is kept aside now; None: it is gone."""
        there = self._staging.path_of(version)
        if there is not None:
            return there
        try:
            return self._staging.quarantine(version, "suspect" if reason in DOUBTFUL else "orphans")
        except FileNotFoundError:
            return None


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Have nobody look for garbage while rows by the thousand are made, and all kept: it takes half as long again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def rebuild_tree(found: ReplayResult, tree: Tree, queue: WritebackQueue, now: float) -> None:
    """Build the queue, and the part of the tree that only this node knows, in the order of the sequences."""
    items: list[FileVersion | OperationRecord] = [*found.versions, *found.rejected, *found.operations]
    for item in sorted(items, key=lambda item: item.sequence):
        if isinstance(item, FileVersion):
            item.reserved = item.size
            _place_content(item, tree)
            if item.state is not FileState.REJECTED:
                item.sealed_at = now
                queue.add(item)
        else:
            queue.add(_replay(item, tree))
    for record in found.deferred:
        tree.add_tombstone(record.key)
        queue.defer(Operation(record, None))
    for version in found.local:  # under the names that they have after all changes
        version.reserved = version.size
        _place_content(version, tree)


def _put_removals_off(found: ReplayResult) -> None:
    """Take out of the queue the removals of what stays until something is published where its newer content went."""
    refused = {each.record.key for each in found.rejected}
    places: dict[str, list[int]] = {}
    for each in found.versions:
        places.setdefault(each.record.key, []).append(each.sequence)
    changed = Counter(each.key for each in found.operations)
    changed.update(each.target for each in found.operations if each.kind is OperationKind.RENAME)
    for record in list(found.operations):
        if record.kind is not OperationKind.DELETE or not record.target:
            continue
        is_first = record.key not in places and changed[record.key] == 1
        # What was moved was refused, or was, and newer content is to be there; else it is queued before the removal.
        there = places.get(record.target, [])
        if is_first and (record.target in refused or (there and min(there) > record.sequence)):
            found.operations.remove(record)
            found.deferred.append(record)


def _place_content(version: FileVersion, tree: Tree) -> None:
    record = version.record
    node = _node_at(tree, record.key, Kind.FILE, record.attributes)
    node.version = version
    version.node = node
    if record.base_etag is not None:
        # What the bucket shows until this is published: a rename or unlink must take it away too.
        node.object = ObjectInfo(record.key, record.base_etag, 0, 0.0)
    tree.hold_local(node)


def _replay(record: OperationRecord, tree: Tree) -> QueuedChange:
    node: Node | None = None
    match record.kind:
        case OperationKind.MKDIR:
            node = _node_at(tree, record.key, Kind.DIRECTORY, record.attributes)
            node.has_marker = True
        case OperationKind.SYMLINK:
            node = _node_at(tree, record.key, Kind.SYMLINK, record.attributes)
            node.target = record.target
        case OperationKind.DELETE | OperationKind.RMDIR:
            gone = tree.find(record.key)
            if gone is not None:
                tree.detach(gone)
            tree.add_tombstone(record.key)
        case OperationKind.RENAME:
            node = _replay_rename(record, tree)
            tree.add_tombstone(record.key)
    if node is not None:
        tree.hold_local(node)
    # A marker that is gone already may be made again all the same, as nothing is asked of what is there.
    return Operation(record, node, in_flight=record.kind is not OperationKind.RMDIR)


def _replay_rename(record: OperationRecord, tree: Tree) -> Node | None:
    replaced = tree.find(record.target)
    if replaced is not None:
        tree.detach(replaced)
    node = tree.find(record.key)
    if node is not None:
        folder = _folder_of(tree, record.target)
        tree.move(node, folder, record.target.rpartition("/")[2])
        return node
    if record.source_etag in {"", ANOTHERS}:
        return None  # it never was in the bucket, or is not ours, and what was here is gone
    node = _node_at(tree, record.target, Kind.SYMLINK if record.link else Kind.FILE, record.attributes)
    node.object = ObjectInfo(record.key, record.source_etag, record.size, record.modified)
    node.target = record.link
    return node


def _folder_of(tree: Tree, key: str) -> Node:
    """Return the directory that holds `key`, making those above it that are not there."""
    directory = tree.root
    for part in tree.relative(key).rstrip("/").split("/")[:-1]:
        child = directory.children.get(part)
        if child is None:
            child = tree.make(directory, part, Kind.DIRECTORY)
        directory = child
    return directory


def _node_at(tree: Tree, key: str, kind: Kind, attributes: PosixAttributes | None) -> Node:
    folder = _folder_of(tree, key)
    name = key.rstrip("/").rpartition("/")[2]
    node = folder.children.get(name)
    if node is not None and node.kind is not kind:
        tree.detach(node)
        node, folder = None, _folder_of(tree, key)  # a directory goes with the last that it held
    if node is None:
        node = tree.make(folder, name, kind, attributes=attributes)
    return node
