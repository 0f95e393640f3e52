"""How a file is cut into parts for upload, and which parts the bucket holds while the file may still change. Pure."""

from dataclasses import dataclass, field

from fusecache.model.errors import TooLarge
from fusecache.model.objects import MIB, TIB

# Cloudflare R2: an object has at most 4.995 TiB, an upload at most 10 000 parts, all but the last of one size.
OBJECT_BYTES_MAX = int(4.995 * TIB)
PARTS_MAX = 10_000
# Files up to this size go up as one PutObject: one class A operation instead of three or more.
SINGLE_PUT_BYTES_MAX = 64 * MIB
_PART_BYTES_MIN = 64 * MIB
_PART_STEP = 16 * MIB
# Below the limit of 10 000, so that rounding never reaches it.
_PARTS_TARGET = 9_000
# A file that outgrows its parts starts its upload again with parts this many times larger: twice at most.
_GROWTH_FACTOR = 8
# The kernel writes dirty pages back roughly in order. A part is ready when the writer is this share (1/4) of a part
# past its end: few of its pages come later than that.
_LAG_SHARE = 4
# After this many changes to parts that were sent or in flight, the file counts as randomly written: the rest of its
# parts waits for the close.
_WASTED_MAX = 2


def choose_part_bytes(size: int) -> int:
    """Return the size of every part but the last for a file of `size` bytes; 0 means one PutObject.

    Raises TooLarge if the file is larger than the largest object.
    """
    if size > OBJECT_BYTES_MAX:
        raise TooLarge(f"a file of {size} bytes is larger than the largest object ({OBJECT_BYTES_MAX} bytes)")
    if size <= SINGLE_PUT_BYTES_MAX:
        return 0
    share = -(-size // _PARTS_TARGET)
    return max(_PART_BYTES_MIN, -(-share // _PART_STEP) * _PART_STEP)


def part_extents(size: int, part_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, size) of every part, in order."""
    return [(offset, min(part_bytes, size - offset)) for offset in range(0, size, part_bytes)]


def choose_growing_part_bytes(size: int) -> int:
    """Return the part size for a file that has `size` bytes so far and may grow."""
    part_bytes = _PART_BYTES_MIN
    while size > part_bytes * _PARTS_TARGET:
        part_bytes *= _GROWTH_FACTOR
    return min(part_bytes, choose_part_bytes(OBJECT_BYTES_MAX))


def ready_parts(written: int, part_bytes: int) -> int:
    """Return how many parts, from the first, are ready to send when the writer has reached offset `written`."""
    return max(0, written - part_bytes // _LAG_SHARE) // part_bytes


def first_ready_at() -> int:
    """Return how far a file must be written before its first part may be sent."""
    part_bytes = max(_PART_BYTES_MIN, SINGLE_PUT_BYTES_MAX)
    return part_bytes + _PART_BYTES_MIN // _LAG_SHARE


@dataclass(frozen=True, slots=True)
class DigestAttempt:
    """One attempt to send one part. changes: the change count of the part when the attempt began."""

    index: int
    offset: int
    size: int
    changes: int


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of a part's bytes: their MD5, and the checksums of their granules."""

    md5: bytes
    checksums: bytes


@dataclass(slots=True)
class _Part:
    changes: int = 0
    is_under_way: bool = False
    begun: int = 0  # the change count when the attempt in flight began
    etag: str = ""
    digests: Digests | None = None
    is_doubted: bool = False


@dataclass(slots=True)
class PartTable:
    """The parts of one file: which of them the bucket holds with their current bytes. Part indices start at 0 here.

    Invariants:
    1. A part never has two attempts at once: a second one that fails would destroy what the first one stored.
    2. A part has an ETag, or digests, only if none of its bytes changed since the attempt that brought them began.
    """

    part_bytes: int
    wasted: int = 0
    _parts: list[_Part] = field(default_factory=list)

    def restore(self, etags: tuple[str, ...]) -> None:
        """Load the ETags of the parts that an earlier run stored; "" for a part that it did not store."""
        self._parts = [_Part(etag=etag) for etag in etags]

    @property
    def is_worth_it(self) -> bool:
        """Whether the file seems to be written from start to end, so that sending parts early pays."""
        return self.wasted < _WASTED_MAX

    def change(self, start: int, stop: int) -> bool:
        """Record that bytes [start, stop) changed or were cut off; return whether the bucket lost a part by that."""
        is_less = False
        for part in self._parts[start // self.part_bytes : -(-stop // self.part_bytes)]:
            if part.etag or (part.is_under_way and part.begun == part.changes):
                self.wasted += 1
            part.changes += 1
            part.digests, part.is_doubted = None, False
            if part.etag:
                part.etag, is_less = "", True
        return is_less

    def next_unsent(self, stop_index: int) -> int | None:
        """Return the first part below `stop_index` that is neither stored nor in flight, or None."""
        for index, part in enumerate(self._parts[:stop_index]):
            if not part.is_under_way and not part.etag:
                return index
        return len(self._parts) if len(self._parts) < stop_index else None

    def begin(self, index: int, file_bytes: int) -> DigestAttempt:
        """Begin an attempt to send a part of a file of `file_bytes` bytes."""
        while len(self._parts) <= index:
            self._parts.append(_Part())
        part = self._parts[index]
        assert not part.is_under_way, f"part {index} has an attempt in flight"
        part.is_under_way, part.begun = True, part.changes
        offset = index * self.part_bytes
        return DigestAttempt(index, offset, min(self.part_bytes, file_bytes - offset), part.changes)

    def is_current(self, attempt: DigestAttempt) -> bool:
        """Whether no byte of the part changed since the attempt began."""
        return self._parts[attempt.index].changes == attempt.changes

    def record_digests(self, attempt: DigestAttempt, digests: Digests) -> None:
        """Record the digests of what an attempt read: valid until the part changes, however the attempt ends."""
        if self.is_current(attempt):
            part = self._parts[attempt.index]
            part.digests, part.is_doubted = digests, False

    def doubt(self, attempt: DigestAttempt) -> None:
        """Mark the digests as doubtful: the bytes may be others by now, so the digests must be computed again."""
        self._parts[attempt.index].is_doubted = True

    def needs_reading(self, index: int) -> bool:
        """Return whether the digests of a part are unknown, or must be computed again."""
        return self.digests(index) is None or self.is_doubted(index)

    def is_doubted(self, index: int) -> bool:
        """Return whether the digests of a part must be computed again."""
        return index < len(self._parts) and self._parts[index].is_doubted

    def end(self, attempt: DigestAttempt, etag: str = "") -> bool:
        """End an attempt with the ETag of the part ("": it failed); return whether the bucket holds the part now."""
        part = self._parts[attempt.index]
        part.is_under_way = False
        if not self.is_current(attempt) or not etag:
            return False
        part.etag = etag
        return True

    def etags(self, count: int | None = None) -> tuple[str, ...]:
        """Return the ETags of the first `count` parts (None: of the parts begun); "" for a part not held."""
        etags = tuple(part.etag for part in self._parts[:count])
        return etags if count is None else etags + ("",) * (count - len(etags))

    def digests(self, index: int) -> Digests | None:
        """Return the digests of a part's current bytes, or None if they are unknown."""
        return self._parts[index].digests if index < len(self._parts) else None

    def held_bytes(self, file_bytes: int) -> int:
        """Return how many bytes of the file the bucket holds."""
        return sum(self._size(index, file_bytes) for index, part in enumerate(self._parts) if part.etag)

    def under_way_bytes(self, file_bytes: int) -> int:
        """Return how many bytes of the file are in flight."""
        return sum(
            self._size(index, file_bytes) for index, part in enumerate(self._parts) if part.is_under_way
        )

    def _size(self, index: int, file_bytes: int) -> int:
        return max(0, min(self.part_bytes, file_bytes - index * self.part_bytes))

    def is_complete(self, file_bytes: int) -> bool:
        """Whether the bucket holds every part of a file of `file_bytes` bytes."""
        return all(self.etags(-(-file_bytes // self.part_bytes)))
