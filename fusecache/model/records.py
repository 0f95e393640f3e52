"""Rows of the journal: what a restarted daemon needs to keep the promises of the one before.

All rows are frozen: a change is a new row under the same number. Described field by field in docs/on-disk.md.
"""

from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from fusecache.model.states import FileState


@dataclass(frozen=True, slots=True)
class PosixAttributes:
    """Mode bits (permissions only), owner, and time of last change in nanoseconds since 1970."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One generation of a file's content; its bytes are in the staging file named after the generation.

    generation: number, never reused. sequence: place in the publish order; 0 while nothing is promised.
    base_etag: the version that the bucket shows under `key` before this one; None: there is none.
    uuid: identity in the bucket, in the object's metadata, for requests whose answer was lost.
    boot_id: the boot in which the bytes were last written. synced: bytes and `checksum` are on disk for good.
    checksum: xxh3_128 hex of the granules' checksums; empty until synced. upload_id, part_bytes, part_etags:
    the multipart upload under way ("" for a part not stored yet).
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
    error: str = ""


class OperationKind(Enum):
    """Changes of the bucket other than a file's content."""

    DELETE = "delete"  # a file: its object goes
    MKDIR = "mkdir"  # an empty directory: the marker `key` (ends with '/') comes
    RMDIR = "rmdir"  # the marker goes
    SYMLINK = "symlink"  # a zero-byte object with `target` in its metadata comes
    RENAME = "rename"  # `key` is copied to `target` in the bucket, then deleted


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """One change, numbered by its sequence. base_etag: what the bucket shows under the name that changes.

    For RENAME `target` is the new key and base_etag belongs to it; source_etag, size and modified (seconds since
    1970) describe the object under `key`. For SYMLINK `target` is what the link says.
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


def to_row(record: FileRecord | OperationRecord) -> dict[str, Any]:
    """Return a record as plain values for the journal."""
    row = asdict(record)
    for name, value in row.items():
        if isinstance(value, Enum):
            row[name] = value.value
    return row


def file_from_row(row: dict[str, Any]) -> FileRecord:
    """Return the record of a row. Raises ValueError, TypeError or KeyError if it is none."""
    row = _known(FileRecord, row)
    row["state"] = FileState(row["state"])
    row["attributes"] = PosixAttributes(**row["attributes"])
    row["part_etags"] = tuple(row["part_etags"])
    return FileRecord(**row)


def operation_from_row(row: dict[str, Any]) -> OperationRecord:
    """Return the record of a row. Raises ValueError, TypeError or KeyError if it is none."""
    row = _known(OperationRecord, row)
    row["kind"] = OperationKind(row["kind"])
    if row["attributes"] is not None:
        row["attributes"] = PosixAttributes(**row["attributes"])
    return OperationRecord(**row)


def _known(record: type[FileRecord] | type[OperationRecord], row: dict[str, Any]) -> dict[str, Any]:
    known = {entry.name for entry in fields(record)}
    strange = set(row) - known
    if strange:
        raise ValueError(f"unknown fields {sorted(strange)}: written by a newer fusecache?")
    return dict(row)
