"""Rows of the journal: what a restarted daemon needs to complete the write-back of the previous one.

All rows are frozen: a change is a new row under the same number. docs/on-disk.md describes every field.

The life cycle of one version of a file's content on the node, from `create` until the bucket has it.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class FileState(Enum):
    """The state of one version. OPEN, FLUSHED and LOCAL content may still be written in place."""

    OPEN = "open"  # being written; nothing is acknowledged; after a crash it is an orphan
    FLUSHED = "flushed"  # a close returned 0 and is journaled (L1); a writer may still hold the file
    LOCAL = "local"  # closed under a local-only name: kept, and changed in place
    SEALED = "sealed"  # closed by its last writer: immutable, queued for upload
    PUBLISHING = "publishing"  # the request that makes it visible in the bucket may have been sent
    STORED = "stored"  # the bucket has it (L2); the local copy is cache
    DROPPED = "dropped"  # removed or replaced before it was published; nothing to keep
    ORPHAN = "orphan"  # its writer was killed, or it was never closed: quarantined, never published
    FAILED = "failed"  # a write to it failed: never published, the error is reported at fsync and close
    REJECTED = (
        "rejected"  # the bucket rejected it permanently, or it cannot be read back: bytes kept, alarm raised
    )


TRANSITIONS: dict[FileState, frozenset[FileState]] = {
    FileState.OPEN: frozenset(
        {
            FileState.OPEN,
            FileState.FLUSHED,
            FileState.LOCAL,
            FileState.DROPPED,
            FileState.ORPHAN,
            FileState.FAILED,
        }
    ),
    FileState.FLUSHED: frozenset(
        {
            FileState.FLUSHED,
            FileState.OPEN,
            FileState.SEALED,
            FileState.DROPPED,
            FileState.ORPHAN,
            FileState.FAILED,
        }
    ),
    # LOCAL -> OPEN, FLUSHED: it was renamed to a name that is published.
    FileState.LOCAL: frozenset(
        {FileState.LOCAL, FileState.OPEN, FileState.FLUSHED, FileState.DROPPED, FileState.FAILED}
    ),
    FileState.SEALED: frozenset(
        {FileState.SEALED, FileState.PUBLISHING, FileState.DROPPED, FileState.REJECTED}
    ),
    # PUBLISHING -> SEALED: the request certainly had no effect, and will be sent again.
    FileState.PUBLISHING: frozenset(
        {FileState.PUBLISHING, FileState.SEALED, FileState.STORED, FileState.REJECTED, FileState.DROPPED}
    ),
    FileState.STORED: frozenset(),
    FileState.DROPPED: frozenset(),
    # The operator may restore its bytes as a new version, or discard them: engine/recovery/quarantine.py.
    FileState.ORPHAN: frozenset(),
    FileState.FAILED: frozenset({FileState.DROPPED, FileState.ORPHAN}),
    FileState.REJECTED: frozenset({FileState.DROPPED, FileState.SEALED}),
}

# Content in these states may be changed in place. In all others a writer gets a new version.
MUTABLE = frozenset({FileState.OPEN, FileState.FLUSHED, FileState.LOCAL, FileState.FAILED})
# Content that is queued for the bucket.
OWED = frozenset({FileState.FLUSHED, FileState.SEALED, FileState.PUBLISHING})


def check_transition(old: FileState, new: FileState) -> None:
    """Raise ValueError if a version cannot go from `old` to `new`."""
    if new not in TRANSITIONS[old]:
        raise ValueError(f"a file version cannot go from {old.value} to {new.value}")


@dataclass(frozen=True, slots=True)
class PosixAttributes:
    """Mode (permissions only; `special_files` says what else), owner, time of last change in nanoseconds since 1970."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


# As mtime_ns of an object's attributes that this node keeps: the time is the bucket's, as on all other nodes.
BUCKET_TIME = -(1 << 63)


class Reason(Enum):
    """Why content is quarantined or rejected instead of published."""

    NONE = ""  # it is neither
    KILLED = "killed"  # its writer was killed before it closed the file
    UNCLOSED = "unclosed"  # the daemon ended before the file was closed
    FAILED = "failed"  # a write to it failed
    POWER_CUT = "power-cut"  # the machine went down, and the bytes may differ from what was closed
    DAMAGED = "damaged"  # fewer bytes than were closed, without a power cut
    LOST = "lost"  # its staging file is gone
    INCOMPLETE = "incomplete"  # a REJECTED commit marker: the bucket rejected a file that it covers
    UNKNOWN = "unknown"  # a file without a row, or a row written before reasons were recorded


# Closed, but no longer trustworthy: in `suspect/`. Content with other reasons was never closed: in `orphans/`.
DOUBTFUL = frozenset({Reason.POWER_CUT, Reason.DAMAGED, Reason.LOST})


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One version of a file's content. Its bytes are in the staging file named after its generation.

    generation: number, never reused. sequence: position in the publish order; 0 until a close is journaled.
    base_etag: the version that the bucket shows under `key` before this one, the precondition; None: there is none.
    carries: the key of the object whose content this one continues or replaces, so that its headers and metadata stay;
    "" for a new file. uuid: identity in the object's metadata, to recognise a request whose response was lost.
    boot_id: the boot in which the bytes were last written. synced: bytes and `checksum` are durable.
    checksum: xxh3_128 hex of the granules' checksums; empty until synced. upload_id, part_bytes, part_etags:
    the multipart upload in progress ("" for a part not stored yet); upload_attributes: those in its object's metadata.
    moment: when it was closed, or quarantined if it never was, in seconds since 1970 (0: unknown). reason: why it is
    quarantined or held; error: the same as text. sets_time: whether a program set the time; else it is the one of the
    last write.
    """

    generation: int
    state: FileState
    key: str
    size: int
    sequence: int
    uuid: str
    boot_id: str
    attributes: PosixAttributes
    base_etag: str | None = None
    synced: bool = False
    checksum: str = ""
    upload_id: str = ""
    part_bytes: int = 0
    part_etags: tuple[str, ...] = ()
    upload_attributes: PosixAttributes | None = None
    error: str = ""
    moment: float = 0.0
    reason: Reason = Reason.NONE
    carries: str = ""
    sets_time: bool = False


def without_upload(record: FileRecord) -> FileRecord:
    """Return the record without its multipart upload."""
    return replace(record, upload_id="", part_bytes=0, part_etags=(), upload_attributes=None)


@dataclass(frozen=True, slots=True)
class ConflictRecord:
    """A conflict: another client changed the same name in the bucket first.

    kept_as: the key of the local version, "" if the change was dropped. moment: seconds since 1970. settled: this node
    has published the name again since, so only the copy is left to look at.
    """

    number: int
    key: str
    kept_as: str
    size: int
    moment: float
    error: str
    settled: bool = False


class OperationKind(Enum):
    """Changes of the bucket other than a file's content."""

    DELETE = "delete"  # a file: its object is deleted
    MKDIR = "mkdir"  # an empty directory: the marker `key` (ends with '/') is created
    RMDIR = "rmdir"  # the marker is deleted
    SYMLINK = "symlink"  # a zero-byte object with `target` in its metadata is created
    RENAME = "rename"  # `key` is copied to `target` in the bucket, then deleted


# The size in the row of a DELETE that was not sent. An earlier version does not read it there.
_UNSENT = 1
# The ETag of a rename's source if the object there belongs to another client.
ANOTHERS = "another's"


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """One change, numbered by its sequence. base_etag: what the bucket shows under the name that changes.

    For RENAME `target` is the new key and base_etag belongs to it. source_etag, size and modified (seconds since 1970)
    describe the object under `key`; link is its target if it is a symlink; with_directory: it is one of those of a
    directory's rename. For SYMLINK `target` is the symlink's target. For DELETE `target` is the key that newer,
    unpublished content of the name was moved to, or empty.
    error: why the bucket rejected it, at `moment` (seconds since 1970); "": it is queued. sent: the request may have
    been sent; a restart asks only the row of a DELETE for it.
    """

    sequence: int
    kind: OperationKind
    key: str
    target: str = ""
    base_etag: str | None = None
    source_etag: str = ""
    size: int = 0
    modified: float = 0.0
    uuid: str = ""
    attributes: PosixAttributes | None = None
    link: str = ""
    with_directory: bool = False
    error: str = ""
    moment: float = 0.0
    sent: bool = False


def to_row(record: FileRecord | OperationRecord | ConflictRecord) -> dict[str, Any]:
    """Return a record as plain values for the journal."""
    # Not `asdict`, which copies deeply: rows are encoded several times for each file.
    row: dict[str, Any] = {name: getattr(record, name) for name in record.__slots__}
    if isinstance(record, OperationRecord):  # an earlier version reads the rows of queued changes
        if not record.error:
            del row["error"], row["moment"]
        if not row.pop("sent") and record.kind is OperationKind.DELETE:
            row["size"] = _UNSENT
    for name, value in row.items():
        if isinstance(value, Enum):
            row[name] = value.value
        elif isinstance(value, PosixAttributes):
            row[name] = {each: getattr(value, each) for each in PosixAttributes.__slots__}
    return row


def file_from_row(row: dict[str, Any]) -> FileRecord:
    """Return the record of a row. Raises ValueError, TypeError or KeyError if the row is invalid."""
    row = _known(FileRecord, row, "refused_at")
    row["state"] = FileState(row["state"])
    row["attributes"] = PosixAttributes(**row["attributes"])
    row["part_etags"] = tuple(row["part_etags"])
    if row.get("upload_attributes") is not None:
        row["upload_attributes"] = PosixAttributes(**row["upload_attributes"])
    row["reason"] = Reason(row.get("reason", ""))
    return FileRecord(**row)


def operation_from_row(row: dict[str, Any]) -> OperationRecord:
    """Return the record of a row. Raises ValueError, TypeError or KeyError if the row is invalid."""
    row = _known(OperationRecord, row)
    kind = row["kind"] = OperationKind(row["kind"])
    if kind is OperationKind.DELETE:
        # An earlier version sent none with a target, and did not say whether it had sent the others.
        row["sent"] = row["size"] != _UNSENT and not row["target"]
        row["size"] = 0
    if row["attributes"] is not None:
        row["attributes"] = PosixAttributes(**row["attributes"])
    return OperationRecord(**row)


def conflict_from_row(row: dict[str, Any]) -> ConflictRecord:
    """Return the record of a row. Raises ValueError or TypeError if the row is invalid."""
    return ConflictRecord(**_known(ConflictRecord, row))


def _known(
    record: type[FileRecord] | type[OperationRecord] | type[ConflictRecord],
    row: dict[str, Any],
    *former: str,
) -> dict[str, Any]:
    """Return a row without the fields that only earlier versions of fusecache had."""
    unknown = set(row).difference(record.__slots__, former)
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}: written by a newer fusecache?")
    known = dict(row)
    for name in former:
        known.pop(name, None)
    return known
