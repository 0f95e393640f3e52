"""Replays the journal at start, so that this daemon keeps what the previous one acknowledged.

Not the uploads: replay only rebuilds the queue, and the part of the tree that only this node knows.

Invariants:
1. Closed content is queued again under its old sequence. Unfinished content is quarantined, and never published.
2. After a reboot content is published only if it was synced and still matches its checksum. The rest goes to
   `suspect/`.
3. Content is deleted here only if the bucket has it, or its row says DROPPED. A row of rejected content becomes DROPPED
   if newer content of its name was closed. Content that no close ever acknowledged goes to `orphans/`.
4. Every quarantined file has a row that says why, and every such row is passed on to `quarantine.py`.

Places in the tree for keys of the journal, and the open files that have none.

Adapts queued changes to content that replay finds lost: successors inherit its base ETag, dependent changes go.

When replay drops a lost change, the next change of its key inherits the base ETag (the precondition). Deletes, renames
and commit markers that presume the lost content are dropped or held.

Invariant: nothing in the bucket is moved, deleted, or named by a commit marker on account of lost content.
"""

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fusecache.disk.staging import StagingDirectory, StagingFile, checksum_of_checksums
from fusecache.engine.namespace.nodes import (
    CloseState,
    FileHandle,
    FileVersion,
    Kind,
    Node,
    Operation,
    QueuedChange,
    in_use,
)
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import (
    Change,
    DropFile,
    DropOperation,
    Journal,
    PutAbort,
    PutFile,
    PutOperation,
    PutStart,
)
from fusecache.model.errors import Refused
from fusecache.model.names import parent_prefix
from fusecache.model.objects import ObjectInfo
from fusecache.model.predecessor import KeptNode, Predecessor
from fusecache.model.records import (
    ANOTHERS,
    DOUBTFUL,
    OWED,
    FileRecord,
    FileState,
    OperationKind,
    OperationRecord,
    PosixAttributes,
    Reason,
    without_upload,
)

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def nameless_files(left: Predecessor | None, tree: Tree) -> "Iterator[None]":
    """Make the nodes of open files that have lost their names, and keep them while the tree is rebuilt around them."""
    kept = [] if left is None else [each for each in left.files if not each.parent]
    with ExitStack() as stack:
        for each in kept:
            stack.enter_context(in_use(make_nameless(each, tree)))
        yield


def make_nameless(kept: KeptNode, tree: Tree) -> Node:
    """Make the node of a file that lost its name."""
    return tree.make_nameless(
        kept.number, kept.name, kept.attributes, kept.object, is_local=kept.generation != 0
    )


def folder_of(tree: Tree, key: str) -> Node:
    """Return the directory that holds `key`; missing directories are made."""
    directory = tree.root
    for part in tree.relative(key).rstrip("/").split("/")[:-1]:
        child = directory.children.get(part)
        if child is None:
            child = tree.make(directory, part, Kind.DIRECTORY)
        directory = child
    return directory


def node_at(tree: Tree, key: str, kind: Kind, attributes: PosixAttributes | None) -> Node:
    """Return the node with a key and a kind, made if it is not there."""
    folder = folder_of(tree, key)
    name = key.rstrip("/").rpartition("/")[2]
    node = folder.children.get(name)
    if node is not None and node.kind is not kind:
        tree.detach(node)
        node, folder = None, folder_of(tree, key)  # the directory's node may have gone with its last child
    if node is None:
        node = tree.make(folder, name, kind, attributes=attributes)
    return node


class LostChanges:
    """Receives each queued change in order, and says how it is to be queued now."""

    def __init__(
        self, lost: set[str], is_commit_marker: Callable[[str], bool], written: dict[str, int]
    ) -> None:
        """lost: keys of content that is gone. is_commit_marker: returns whether a key is that of a commit marker.

        written: the last sequence of content in each directory.
        """
        self._written = written
        self._lost = lost
        self._is_commit_marker = is_commit_marker
        # What the bucket shows under keys whose first changes are lost, until the next change inherits it.
        self._bases: dict[str, str | None] = {}
        # The rows of content that this start found lost, by key, while no newer content of the key is queued.
        self._missing: dict[str, FileRecord] = {}
        # Keys that were to be deleted, or moved away, and that the bucket keeps.
        self._kept: dict[str, OperationKind] = {}

    def begin(self, record: FileRecord) -> FileRecord:
        """Return the row of a version with the base that it inherits. The caller then calls `queued` or `lose`."""
        if record.key not in self._bases:
            return record
        return replace(record, base_etag=self._bases.pop(record.key))

    def queued(self, record: FileRecord) -> None:
        """Record that the content is queued."""
        self._missing.pop(record.key, None)

    def lose(self, record: FileRecord, *, is_new: bool = True) -> None:
        """Record that content is lost, or held because other content is.

        is_new: whether this start found it lost; False for a commit marker that is held.
        """
        self._lost.add(record.key)
        if is_new:
            self._missing[record.key] = record
        self._bases[record.key] = record.base_etag

    def missing_for(self, record: FileRecord) -> FileRecord | None:
        """Return older lost content that a commit marker may name, or None: below its directory."""
        if not self._is_commit_marker(record.key):
            return None
        folder, lost = parent_prefix(record.key), self._missing.values()
        return next((each for each in lost if each.key != record.key and each.key.startswith(folder)), None)

    def operation(self, operation: OperationRecord) -> OperationRecord | None:
        """Return an operation with the base that it inherits; None: it is dropped.

        A RENAME of lost content is dropped: its old name may have another version in the bucket. So is one that would
        replace that version, and an RMDIR above what a dropped change leaves.
        """
        kind, key, target = operation.kind, operation.key, operation.target
        if kind is OperationKind.DELETE and self._presumes_lost_content(operation):
            self._kept[key] = kind
            self._bases[key] = operation.base_etag
            return None
        if kind is OperationKind.RMDIR and any(each.startswith(key) for each in self._kept):
            return None
        if kind is OperationKind.RENAME and (key in self._bases or self._kept.get(target) is kind):
            self._kept[key] = kind
            self._bases.setdefault(key, operation.source_etag or None)
            self._bases.setdefault(target, operation.base_etag)
            return None
        replaced = target if kind is OperationKind.RENAME else key
        if replaced not in self._bases:
            return operation
        return replace(operation, base_etag=self._bases.pop(replaced))

    def _presumes_lost_content(self, operation: OperationRecord) -> bool:
        """Return whether a delete may presume lost content.

        - Its newer content moved to `target`, and is lost: the deleted name shows its old object again.
        - Any content is lost. A delete waits for every older write of the mount, and without one of these
          the daemon cannot tell whether anything complete is left. One delete stays: that of a commit marker in whose
          directory content is written later.
        """
        is_rewritten = (
            self._is_commit_marker(operation.key)
            and self._written.get(parent_prefix(operation.key), 0) > operation.sequence
        )
        return operation.target in self._lost or (bool(self._missing) and not is_rewritten)


_NOT_KNOWN = PosixAttributes(0o600, 0, 0, 0)


@dataclass(slots=True)
class ReplayResult:
    """What replay found.

    orphans, suspects: how many files this start quarantined. quarantined: the rows of all quarantined files, with the
    bytes that each holds on disk.
    """

    versions: list[FileVersion] = field(default_factory=list)
    rejected: list[FileVersion] = field(default_factory=list)
    local: list[FileVersion] = field(default_factory=list)
    # Content that a program still writes, through a mount that outlived its daemon, by generation.
    open: dict[int, FileVersion] = field(default_factory=dict)
    # Published content of open files, by generation. Without bytes if the cache has taken it over.
    stored: dict[int, FileVersion] = field(default_factory=dict)
    # The handles of files that programs have open, by number.
    handles: dict[int, FileHandle] = field(default_factory=dict)
    operations: list[OperationRecord] = field(default_factory=list)
    rejected_operations: list[OperationRecord] = field(default_factory=list)
    quarantined: list[tuple[FileRecord, int]] = field(default_factory=list)
    orphans: int = 0
    suspects: int = 0
    # (key, UploadId) of the multipart uploads to abort.
    uploads: list[tuple[str, str]] = field(default_factory=list)

    def staged_bytes(self) -> Iterator[int]:
        """Yield the bytes on disk of each file in staging or in quarantine."""
        yield from (held for _, held in self.quarantined)
        for version in (
            *self.versions,
            *self.rejected,
            *self.local,
            *self.open.values(),
            *self.stored.values(),
        ):
            yield version.size


@dataclass(eq=False, repr=False)
class JournalReplay:
    """Reads the journal (blocking), then builds queue and tree from it (on the loop).

    start_file: a file without bytes, which each start touches. is_commit_marker: returns whether a key is that of a
    commit marker (`order_last`).
    """

    _journal: Journal
    _staging: StagingDirectory
    _boot_id: str
    _start_file: "Path"
    _is_commit_marker: Callable[[str], bool] = lambda _key: False
    # Sizes of the staging files at the start, by generation.
    _sizes: dict[int, int] = field(init=False, default_factory=dict)
    _left: Predecessor | None = field(init=False, default=None)
    # Files that programs have open, through a mount that outlived its daemon, by generation.
    _still_open: Mapping[int, KeptNode] = field(init=False, default_factory=dict)

    def read(self, left: Predecessor | None = None) -> ReplayResult:
        """Check every row and staging file, and journal what becomes of them. Blocks: it may read whole files.

        left: what the daemon before left, if the mount outlived it.
        """
        self._left = left
        self._still_open = {each.generation: each for each in left.files} if left is not None else {}
        changes: list[Change] = []
        operations = self._operations(changes)
        found = ReplayResult(
            operations=[each for each in operations if not each.error],
            rejected_operations=[each for each in operations if each.error],
            uploads=self._journal.aborts(),
        )
        ended = {upload_id for _, upload_id in found.uploads}
        records = [
            without_upload(record) if record.upload_id in ended else record
            for record in self._journal.files()
        ]
        self._sizes = self._staging.sizes()
        for record in records:
            if record.state not in OWED:
                changes += self._recover_file(record, found)
        lost = {record.key for record in records if record.state is FileState.REJECTED}
        lost -= {each.record.key for each in found.rejected if each.record.reason is not Reason.NONE}
        queue = [record for record in records if record.state in OWED]
        changes += self._recover_queue(queue, lost, found)
        changes += self._end_replaced(found)
        without_row = self._sizes.keys() | self._staging.quarantined().keys()
        for number in sorted(without_row - {record.generation for record in records}):
            # The daemon was killed before it wrote the file's row, so no close was acknowledged.
            unknown = FileRecord(number, FileState.OPEN, "", 0, 0, "", self._boot_id, _NOT_KNOWN)
            if number in self._still_open:
                changes += self._recover_open(replace(unknown, uuid=str(uuid.uuid4())), found)
            elif left is not None and left.is_whole and number in self._sizes:
                # No program was told of it: an unfinished copy of content that is to be changed, say.
                self._staging.delete(number)
            else:
                changes += self._quarantine(
                    unknown, Reason.UNKNOWN, "an unfinished file without a journal row", found
                )
        self._start_file.touch()
        self._journal.apply([*changes, PutStart(self._start_file.stat().st_mtime_ns)])
        if found.versions or found.operations or found.orphans or found.suspects:
            # A successor goes on with what was pending: that is no cause to look, unless something was quarantined.
            is_usual = left is not None and not (found.orphans or found.suspects)
            log.log(
                logging.INFO if is_usual else logging.WARNING,
                "recovered files=%d changes=%d orphans=%d suspects=%d",
                len(found.versions), len(found.operations), found.orphans, found.suspects,
            )  # fmt: skip
        return found

    def _operations(self, changes: list[Change]) -> list[OperationRecord]:
        """Return the rows of operations. If an earlier version ran last, it did not record which DELETEs it sent.

        It touched the file. It sent no DELETE with a target.
        """
        operations = self._journal.operations()
        started_ns = self._start_file.stat().st_mtime_ns if self._start_file.exists() else 0
        if started_ns == self._journal.last_start_ns():
            return operations
        known = [
            replace(each, sent=True) if each.kind is OperationKind.DELETE and not each.target else each
            for each in operations
        ]
        changes += [PutOperation(each) for each in known if each.sent]
        return known

    def _recover_file(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        match record.state:
            case FileState.STORED if self._is_shown(record):
                return self._recover_stored(record, found)
            case FileState.STORED | FileState.DROPPED if record.generation in self._still_open:
                # It lost its name, and ends with its last handle.
                unlinked = replace(without_upload(record), state=FileState.OPEN, key="", sequence=0)
                return self._recover_open(unlinked, found)
            case FileState.STORED | FileState.DROPPED:
                self._staging.delete(record.generation)
                self._staging.delete_quarantined(record.generation)
                return [DropFile(record.generation)]
            case FileState.ORPHAN:
                return self._quarantine_row(record, found)
            case FileState.OPEN:
                return self._recover_open(record, found)
            case FileState.FAILED:
                return self._quarantine(record, Reason.FAILED, record.error, found)
            case FileState.LOCAL:
                local = self._find(record)
                if local is None:
                    return self._quarantine(record, Reason.LOST, "its staging file is gone", found)
                # Local-only content is changed in place: the bytes that the disk kept are the content.
                local.size = self._sizes[record.generation]
                found.local.append(local)
                return []
            case FileState.REJECTED:
                return self._recover_rejected(record, found)
            case _:
                raise ValueError(f"{record.state} content is queued: `_recover_queue` handles it")

    def _recover_open(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        """Keep content open that programs still write; quarantine all other content."""
        generation, is_open = record.generation, record.generation in self._still_open
        if self._left is not None and not is_open and not self._sizes.get(generation):
            # The program was not told yet that it has the file, and asks again.
            self._staging.delete(generation)
            return [DropFile(generation)]
        version = self._find(record) if is_open else None
        if version is None:
            return self._quarantine(record, Reason.UNCLOSED, "was not closed before the daemon ended", found)
        # Parts may have been uploaded that were changed since.
        version.record = kept = without_upload(record)
        version.size = self._sizes[generation]
        version.close_state.changed_since_flush = True
        found.open[generation] = version
        if not record.upload_id:
            return []
        found.uploads.append((record.key, record.upload_id))
        return [PutFile(kept), PutAbort(record.key, record.upload_id)]

    def _is_shown(self, record: FileRecord) -> bool:
        """Return whether published content is that of an open file that has its name, or is in the cache."""
        kept = self._still_open.get(record.generation)
        return kept is not None and (kept.parent > 0 or record.generation not in self._sizes)

    def _recover_stored(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        """Keep the bytes of published content for the cache: the bucket may lose them while programs read them."""
        generation = record.generation
        version = FileVersion(record, self._staging.known(generation), None, self._sizes.get(generation, 0))
        found.stored[generation] = version
        return []

    def _recover_rejected(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        version = self._find(record)
        if version is None:
            return self._quarantine(record, Reason.LOST, "its staging file is gone", found)
        version.error = Refused(record.error)
        found.rejected.append(version)
        return []

    def _recover_queue(self, records: list[FileRecord], lost: set[str], found: ReplayResult) -> list[Change]:
        """Check what is queued, in order. The successors of quarantined content inherit its base ETag.

        lost: keys of rejected content, apart from commit markers that are held.
        """
        changes: list[Change] = []
        operations, found.operations = found.operations, []
        written: dict[str, int] = {}
        for each in records:
            folder = parent_prefix(each.key)
            written[folder] = max(each.sequence, written.get(folder, 0))
        lost_changes = LostChanges(lost, self._is_commit_marker, written)
        queue: list[FileRecord | OperationRecord] = [*records, *operations]
        for item in sorted(queue, key=lambda item: item.sequence):
            if isinstance(item, FileRecord):
                record = lost_changes.begin(item)
                missing = lost_changes.missing_for(record)
                if missing is not None:
                    rows = self._hold_commit_marker(record, missing, found)
                else:
                    rows = self._recover_queued(record, found)
                if rows:
                    lost_changes.lose(record, is_new=missing is None)
                else:
                    lost_changes.queued(record)
                changes += rows or ([PutFile(record)] if record is not item else [])
                continue
            operation = lost_changes.operation(item)
            if operation is None:
                log.warning("dropped a queued delete or rename, as newer content is lost key=%s", item.key)
                changes.append(DropOperation(item.sequence))
                continue
            if operation is not item:
                changes.append(PutOperation(operation))
            found.operations.append(operation)
        return changes

    def _hold_commit_marker(
        self, record: FileRecord, missing: FileRecord, found: ReplayResult
    ) -> list[Change]:
        """Hold a commit marker back from the bucket, as content that it may name is lost; it keeps its name here.

        Its version becomes REJECTED. If the marker's own bytes are lost or damaged too, it is quarantined instead.
        """
        changes = self._recover_queued(record, found)
        if not changes:
            message = (
                f"{record.key}: not uploaded, as it may name {missing.key}, which was closed before it, and is lost or "
                "damaged"
            )
            log.warning("commit marker held reason=%s", message)
            version = found.versions.pop()
            version.error = Refused(message)
            found.rejected.append(version)
            row = version.transition_to(FileState.REJECTED, error=message, reason=Reason.POWER_CUT)
            changes = [PutFile(row)]
        return changes

    def _end_replaced(self, found: ReplayResult) -> list[Change]:
        """Drop rejected content where newer content of the same name was closed."""
        newest: dict[str, int] = {}
        for each in [*found.versions, *found.rejected]:
            newest[each.record.key] = max(each.sequence, newest.get(each.record.key, 0))
        changes: list[Change] = []
        for rejected in [each for each in found.rejected if each.sequence < newest[each.record.key]]:
            found.rejected.remove(rejected)
            changes += self._recover_file(rejected.transition_to(FileState.DROPPED), found)
        return changes

    def _recover_queued(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        # PUBLISHING stays: the request may have been sent, so only the bucket knows whether it took effect.
        state = FileState.PUBLISHING if record.state is FileState.PUBLISHING else FileState.SEALED
        if record.state is FileState.FLUSHED and self._left and record.generation in self._left.written:
            state = FileState.FLUSHED  # its release is still to come, or more bytes
        queued = record if record.state is state else replace(record, state=state)
        version = self._find(queued)
        if version is None:
            return self._quarantine(record, Reason.LOST, "its staging file is gone", found)
        message = self._find_damage(record, version.file)
        version.file.close()  # thousands may be pending; each upload opens its own
        if message:
            reason = Reason.DAMAGED if record.boot_id == self._boot_id else Reason.POWER_CUT
            return self._quarantine(record, reason, message, found)
        if self._sizes[record.generation] > record.size:
            version.file.truncate(record.size)
            version.file.close()
        found.versions.append(version)
        return []  # no new row: from FLUSHED or SEALED the next start would decide the same

    def _find_damage(self, record: FileRecord, file: StagingFile) -> str:
        """Return why the bytes may differ from the ones that were closed, or ""."""
        size = self._sizes[record.generation]
        if size < record.size:
            return f"only {size} of {record.size} bytes are on the disk"
        if record.boot_id == self._boot_id:
            return ""  # no reboot: the page cache outlived the daemon
        if not record.synced:
            return "the machine went down before it was synced"
        if checksum_of_checksums(file.checksums()) != record.checksum:
            return "its bytes do not match their checksum"
        return ""

    def _find(self, record: FileRecord) -> FileVersion | None:
        if record.generation not in self._sizes:
            log.error("staging file missing key=%s generation=%d", record.key, record.generation)
            return None
        file = self._staging.known(record.generation)
        return FileVersion(
            record, file, None, size=record.size, close_state=CloseState(changed_since_flush=False)
        )

    def _quarantine(
        self, record: FileRecord, reason: Reason, message: str, found: ReplayResult
    ) -> list[Change]:
        """Quarantine a file; return its row, and one that aborts its multipart upload."""
        if reason in DOUBTFUL:
            found.suspects += 1
        else:
            found.orphans += 1
        path = self._quarantine_file(record.generation, reason)
        size, moment = record.size, record.moment
        if path is not None:
            stat = path.stat()
            size, moment = stat.st_size, moment or stat.st_mtime
        log.warning(
            "quarantined key=%s reason=%s at=%s", record.key, message, path or "nowhere (file is gone)"
        )
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
            error=message,
        )
        found.quarantined.append((kept, 0 if path is None else size))
        return [*aborts, PutFile(kept)]

    def _quarantine_row(self, record: FileRecord, found: ReplayResult) -> list[Change]:
        """Check a file that was quarantined before: its move may not have reached the disk, its row may be outdated."""
        path = self._quarantine_file(record.generation, record.reason)
        if path is None:
            found.quarantined.append((record, 0))
            return []
        stat = path.stat()
        reason = record.reason
        if reason is Reason.NONE:
            reason = Reason.POWER_CUT if path.parent.name == "suspect" else Reason.UNKNOWN
        moment = record.moment or stat.st_mtime
        known = replace(record, size=stat.st_size, moment=moment, reason=reason)
        found.quarantined.append((known, stat.st_size))
        return [] if known == record else [PutFile(known)]

    def _quarantine_file(self, generation: int, reason: Reason) -> "Path | None":
        """Return the path of the quarantined file, moving it there if needed; None: it is gone."""
        there = self._staging.path_of(generation)
        if there is not None:
            return there
        try:
            return self._staging.quarantine(generation, "suspect" if reason in DOUBTFUL else "orphans")
        except FileNotFoundError:
            return None


def rebuild_tree(found: ReplayResult, tree: Tree, queue: WritebackQueue, now: float) -> None:
    """Rebuild the queue, and the part of the tree that only this node knows, in the order of the sequences."""
    items: list[FileVersion | OperationRecord] = [*found.versions, *found.rejected, *found.operations]
    for item in sorted(items, key=lambda item: item.sequence):
        if isinstance(item, FileVersion):
            item.reserved = item.size
            _place_content(item, tree)
            if item.state is FileState.FLUSHED:
                item.close_state.mark_flushed()
            elif item.state is not FileState.REJECTED:
                item.sealed_at = now
                queue.add(item)
        else:
            queue.add(_replay(item, tree, queue))
    for version in found.local:  # their rows have the names that they have after all queued changes
        version.reserved = version.size
        _place_content(version, tree)


def _place_content(version: FileVersion, tree: Tree) -> None:
    record = version.record
    node = node_at(tree, record.key, Kind.FILE, record.attributes)
    node.version = version
    version.node = node
    if record.base_etag is not None:
        # What the bucket shows until this version is published: a rename or unlink must remove that too.
        node.object = ObjectInfo(record.key, record.base_etag, 0, 0.0)
    tree.hold_local(node)


def _replay(record: OperationRecord, tree: Tree, queue: WritebackQueue) -> QueuedChange:
    node = readers = None
    match record.kind:
        case OperationKind.MKDIR:
            attributes = tree.kept_attributes(record.key) or record.attributes
            node = node_at(tree, record.key, Kind.DIRECTORY, attributes)
            node.has_marker = True
        case OperationKind.SYMLINK:
            node = node_at(tree, record.key, Kind.SYMLINK, record.attributes)
            node.target = record.target
        case OperationKind.DELETE | OperationKind.RMDIR:
            gone = tree.find(record.key)
            if gone is not None:
                tree.detach(gone)
            tree.add_tombstone(record.key)
            readers = tree.nameless_reader(*queue.objects_before(record.key, record.base_etag))
        case OperationKind.RENAME:
            node = _replay_rename(record, tree)
            tree.add_tombstone(record.key)
    if node is not None:
        tree.hold_local(node)
    # The previous daemon may have sent the request. The row of a DELETE says whether. An RMDIR counts as not sent, as a
    # mkdir may cancel it regardless: if the directory marker is gone already, the MKDIR makes it again, as that has no
    # precondition.
    sent = record.sent if record.kind is OperationKind.DELETE else record.kind is not OperationKind.RMDIR
    return Operation(replace(record, sent=sent), node, readers=readers)


def _replay_rename(record: OperationRecord, tree: Tree) -> Node | None:
    replaced = tree.find(record.target)
    if replaced is not None:
        tree.detach(replaced)
    node = tree.find(record.key)
    if node is not None and node.kind is not Kind.DIRECTORY:
        folder = folder_of(tree, record.target)
        tree.move(node, folder, record.target.rpartition("/")[2])
        return node
    if record.source_etag in {"", ANOTHERS}:
        return None  # never in the bucket, or another client's object; and not on this node
    node = node_at(tree, record.target, Kind.SYMLINK if record.link else Kind.FILE, record.attributes)
    node.object = ObjectInfo(record.key, record.source_etag, record.size, record.modified)
    node.target = record.link
    return node
