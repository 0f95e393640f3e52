"""The nouns of the program: small frozen values, checked once at construction, then trusted."""

from dataclasses import dataclass, field

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
    send again, as the bucket has it, with names as in `model/metadata.py`; None: not known.
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
