"""The nouns of the program: small frozen values, checked once at construction, then trusted.

User metadata of objects: what fusecache writes, and what it reads from objects of any client.

Names follow rclone and s3fs (`mode`, `uid`, `gid`, `mtime`), so files written by these keep their times and modes here.
"""

import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal

from fusecache.model.records import PosixAttributes

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

# The unit of allocation and eviction in the cache.
BLOCK_BYTES = MIB
# The unit of validity and checksums in the cache: a small random read fetches only the granules that it needs.
GRANULE_BYTES = 64 * KIB
GRANULES_PER_BLOCK = BLOCK_BYTES // GRANULE_BYTES
# Files that wait for upload may use this share of the cache size, so that one checkpoint does not evict the dataset.
STAGING_SHARE_PERCENT = 70


@dataclass(frozen=True, slots=True)
class ObjectId:
    """One immutable version in the bucket. A changed object is another object."""

    key: str
    etag: str

    def __post_init__(self) -> None:
        if not self.key or not self.etag:
            raise ValueError(f"an object needs a key and an etag, not {self.key!r} and {self.etag!r}")


@dataclass(frozen=True, slots=True)
class Extent:
    """Half-open byte range [start, stop) of one object. Invariant: 0 <= start < stop."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"empty or negative extent {self.start}..{self.stop}")

    @property
    def size(self) -> int:
        """Bytes in the extent."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object's properties in the bucket, from a LIST (metadata None: LIST returns none) or a HEAD.

    size in bytes; modified in seconds since 1970 (UTC); etag without quotes. carried: what a rewrite or a copy must
    send again, as the bucket has it, with names as in `model/objects.py`; None: not known.
    """

    key: str
    etag: str
    size: int
    modified: float
    metadata: dict[str, str] | None = None
    carried: dict[str, str] | None = field(default=None, compare=False)

    @property
    def object_id(self) -> ObjectId:
        """The identity of this version."""
        return ObjectId(self.key, self.etag)


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that was neither completed nor aborted. begun: in seconds since 1970."""

    key: str
    upload_id: str
    begun: float


GENERATION = "fusecache-generation"
SYMLINK_TARGET = "symlink-target"
# The ETag that a renamed object had under its old name: the copy's may differ (AWS: of an object that came in parts).
RENAMED_FROM = "fusecache-renamed-from"
# How the names of what is carried over to a new version begin: a standard header's, and that of user metadata whose
# value is sent as it was received.
STANDARD = ":"
RAW = "="
# Metadata that describe the bytes, so that new bytes get other ones or none: ours, and checksums of rclone and s3cmd.
_OF_CONTENT = frozenset(
    (GENERATION, SYMLINK_TARGET, RENAMED_FROM, "mode", "uid", "gid", "mtime", "md5chksum", "s3cmd-attrs")
)
# Limits of the kernel: 64 bits of nanoseconds, and 32 bits of an id without the value that means "none".
_SECONDS_MAX = 2**63 // 10**9
_ID_MAX = 2**32 - 2
_MODE_BITS = 0o7777
_TARGET_BYTES_MAX = 4095  # PATH_MAX, less the kernel's zero
# Programs of a bucket's writer never get another user's rights.
_SET_ID_BITS = stat.S_ISUID | stat.S_ISGID


def content_metadata(uuid: str, attributes: PosixAttributes) -> dict[str, str]:
    """Return the metadata of a file's object."""
    return {
        GENERATION: uuid,
        "mode": f"{stat.S_IFREG | attributes.mode:o}",
        "uid": str(attributes.uid),
        "gid": str(attributes.gid),
        "mtime": f"{Decimal(attributes.mtime_ns) / 10**9:.9f}",
    }


def carried_to_content(carried: Mapping[str, str]) -> dict[str, str]:
    """Return what new content of an object takes over from the version before."""
    return {name: value for name, value in carried.items() if name.removeprefix(RAW) not in _OF_CONTENT}


def renamed_metadata(source: ObjectInfo, uuid: str, link: str) -> dict[str, str]:
    """Return the metadata of a renamed object: its own, and where it comes from. link: a symlink's target, or ""."""
    new = {GENERATION: uuid, RENAMED_FROM: source.etag, **({SYMLINK_TARGET: link} if link else {})}
    kept = {
        name: value for name, value in (source.carried or {}).items() if name.removeprefix(RAW) not in new
    }
    return {**kept, **new}


def symlink_metadata(uuid: str, target: str, attributes: PosixAttributes) -> dict[str, str]:
    """Return the metadata of a symlink's zero-byte object."""
    return {**content_metadata(uuid, attributes), "mode": f"{stat.S_IFLNK | 0o777:o}", SYMLINK_TARGET: target}


def symlink_target(metadata: Mapping[str, str] | None) -> str:
    """Return a symlink's target, or "" if the object is not a symlink."""
    return (metadata or {}).get(SYMLINK_TARGET, "")


def has_target_in_body(info: ObjectInfo) -> bool:
    """Return whether an object is a symlink of s3fs, whose target is its body."""
    mode = (info.metadata or {}).get("mode", "")
    return 0 < info.size <= _TARGET_BYTES_MAX and not symlink_target(info.metadata) and _is_link_mode(mode)


def attributes_from_metadata(
    metadata: Mapping[str, str], default: PosixAttributes, *, with_owner: bool = False
) -> PosixAttributes | None:
    """Return mode, time and owner from the metadata, or None if it has none of these.

    default: used for missing and invalid values. with_owner: also use uid and gid, which are meaningful on another node
    only if all nodes have the same users.
    """
    found = {
        "mode": _mode(metadata.get("mode", "")),
        "mtime_ns": _nanoseconds(metadata.get("mtime", "")),
        "uid": _id(metadata.get("uid", "")) if with_owner else None,
        "gid": _id(metadata.get("gid", "")) if with_owner else None,
    }
    known = {name: value for name, value in found.items() if value is not None}
    return replace(default, **known) if known else None


def _mode(text: str) -> int | None:
    """Return the permission bits of a file's or a symlink's mode, without the set-user-id and set-group-id bits.

    Octal with or without its type, or decimal (s3fs).
    """
    for base in (8, 10):
        with suppress(ValueError, OverflowError):
            mode = int(text, base)
            if stat.S_ISREG(mode) or stat.S_ISLNK(mode) or (base == 8 and 0 <= mode <= _MODE_BITS):
                return stat.S_IMODE(mode) & ~_SET_ID_BITS
    return None


def _is_link_mode(text: str) -> bool:
    for base in (8, 10):
        with suppress(ValueError, OverflowError):
            if stat.S_ISLNK(int(text, base)):
                return True
    return False


def _nanoseconds(text: str) -> int | None:
    """Return a time given in seconds since 1970, in nanoseconds."""
    with suppress(ArithmeticError):
        seconds = Decimal(text)
        if abs(seconds) < _SECONDS_MAX:
            return int(seconds * 10**9)
    return None


def _id(text: str) -> int | None:
    with suppress(ValueError):
        if 0 <= int(text) <= _ID_MAX:
            return int(text)
    return None
