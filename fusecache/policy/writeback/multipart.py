"""How a file is cut for upload, and which of its parts the bucket holds while it may still change."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fusecache.model.errors import TooLarge
from fusecache.model.objects import MIB, TIB

# Cloudflare R2: objects end at 4.995 TiB, an upload has at most 10 000 parts, all but the last of one size.
OBJECT_BYTES_MAX = int(4.995 * TIB)
PARTS_MAX = 10_000
# Up to here one PutObject: one class A operation instead of three or more.
SINGLE_PUT_BYTES_MAX = 64 * MIB
_PART_BYTES_MIN = 64 * MIB
_PART_STEP = 16 * MIB
# Below the limit of 10 000, so that a rounding never reaches it.
_PARTS_AIM = 9_000
# A file that outgrows its parts begins anew with parts that last for so many times its size: twice at most.
_GROWTH = 8
# The kernel writes pages back roughly in order: so far behind the writer, as a share of a part, few come late.
_LAG_SHARE = 4
# A writer that came back so often to what was sent writes at random: the rest waits for the close.
_WASTED_MAX = 2


def choose_part_bytes(size: int) -> int:
    """Return the size of every part but the last for a file of `size` bytes; 0 means one PutObject.

    Raises TooLarge above the largest object.
    """
    if size > OBJECT_BYTES_MAX:
        raise TooLarge(f"a file of {size} bytes is larger than the largest object ({OBJECT_BYTES_MAX} bytes)")
    if size <= SINGLE_PUT_BYTES_MAX:
        return 0
    share = -(-size // _PARTS_AIM)
    return max(_PART_BYTES_MIN, -(-share // _PART_STEP) * _PART_STEP)


def part_extents(size: int, part_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, size) of every part, in order."""
    return [(offset, min(part_bytes, size - offset)) for offset in range(0, size, part_bytes)]


def choose_growing_part_bytes(size: int) -> int:
    """Return the size of the parts of a file that has `size` bytes by now and may get more."""
    part_bytes = _PART_BYTES_MIN
    while size > part_bytes * _PARTS_AIM:
        part_bytes *= _GROWTH
    return min(part_bytes, choose_part_bytes(OBJECT_BYTES_MAX))


def ready_parts(written: int, part_bytes: int) -> int:
    """Return how many parts, from the first, a writer has left behind that has written so far."""
    return max(0, written - part_bytes // _LAG_SHARE) // part_bytes


def first_ready_at() -> int:
    """Return how far a file must be written before a part of it may be sent."""
    part_bytes = max(_PART_BYTES_MIN, SINGLE_PUT_BYTES_MAX)
    return part_bytes + _PART_BYTES_MIN // _LAG_SHARE


@dataclass(frozen=True, slots=True)
class DigestAttempt:
    """One sending of one part. changes: how often its bytes had changed when it began."""

    index: int
    offset: int
    size: int
    changes: int


@dataclass(frozen=True, slots=True)
class Digests:
    """What is known of a part's bytes: their MD5, and the checksums of their granules."""

    md5: bytes
    checksums: bytes


@dataclass(slots=True)
class _Part:
    changes: int = 0
    is_under_way: bool = False
    begun: int = 0  # how often it had changed when the attempt under way began
    etag: str = ""
    digests: Digests | None = None
    is_doubted: bool = False


@dataclass(slots=True)
class PartTable:
    """Which parts of one file the bucket holds as they are. Parts are numbered from 0 here.

    Invariants:
    1. Never two attempts of one part at once: a second one that fails would destroy what the first one stored.
    2. A part has an ETag, and digests, only if none of its bytes changed since the attempt began that brought them.
    """

    part_bytes: int
    wasted: int = 0
    _parts: list[_Part] = field(default_factory=list)

    def restore(self, etags: tuple[str, ...]) -> None:
        """Take over what an earlier run stored: "" for a part that was not."""
        self._parts = [_Part(etag=etag) for etag in etags]

    @property
    def is_worth_it(self) -> bool:
        """Whether the file is written from its start to its end, as far as can be told."""
        return self.wasted < _WASTED_MAX

    def change(self, start: int, stop: int) -> bool:
        """Bytes [start, stop) are others now, or gone; return whether a part is no longer held."""
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
        """Return the first part below `stop_index` that is neither held nor under way."""
        return self._next(stop_index, lambda part: not part.etag)

    def next_unread(self, stop_index: int) -> int | None:
        """Return the first of these of which no digests are known either."""
        return self._next(stop_index, lambda part: not part.etag and part.digests is None)

    def _next(self, stop_index: int, is_wanted: Callable[[_Part], bool]) -> int | None:
        for index, part in enumerate(self._parts[:stop_index]):
            if not part.is_under_way and is_wanted(part):
                return index
        return len(self._parts) if len(self._parts) < stop_index else None

    def begin(self, index: int, file_bytes: int) -> DigestAttempt:
        """Begin to send a part of a file that has so many bytes."""
        while len(self._parts) <= index:
            self._parts.append(_Part())
        part = self._parts[index]
        assert not part.is_under_way, f"part {index} is under way"
        part.is_under_way, part.begun = True, part.changes
        offset = index * self.part_bytes
        return DigestAttempt(index, offset, min(self.part_bytes, file_bytes - offset), part.changes)

    def is_current(self, attempt: DigestAttempt) -> bool:
        """Whether no byte of the part changed since the attempt began."""
        return self._parts[attempt.index].changes == attempt.changes

    def record_digests(self, attempt: DigestAttempt, digests: Digests) -> None:
        """What an attempt has read is this: true until the part changes, however the attempt ends."""
        if self.is_current(attempt):
            part = self._parts[attempt.index]
            part.digests, part.is_doubted = digests, False

    def doubt(self, attempt: DigestAttempt) -> None:
        """The bytes are perhaps no longer those of the digests: these are to be taken again."""
        self._parts[attempt.index].is_doubted = True

    def needs_reading(self, index: int) -> bool:
        """Return whether the digests of a part are not known, or to be taken again."""
        return self.digests(index) is None or self.is_doubted(index)

    def is_doubted(self, index: int) -> bool:
        """Return whether the digests of a part are to be taken again."""
        return index < len(self._parts) and self._parts[index].is_doubted

    def end(self, attempt: DigestAttempt, etag: str = "") -> bool:
        """The attempt is over, with this ETag ("": it failed); return whether the part is held now."""
        part = self._parts[attempt.index]
        part.is_under_way = False
        if not self.is_current(attempt) or not etag:
            return False
        part.etag = etag
        return True

    def etags(self, count: int | None = None) -> tuple[str, ...]:
        """Return the ETag of each of `count` parts, or of those begun; "" for one that is not held."""
        etags = tuple(part.etag for part in self._parts[:count])
        return etags if count is None else etags + ("",) * (count - len(etags))

    def digests(self, index: int) -> Digests | None:
        """Return what is known of a part's bytes as they are."""
        return self._parts[index].digests if index < len(self._parts) else None

    def held_bytes(self, file_bytes: int) -> int:
        """Return how many bytes of the file the bucket holds."""
        return sum(self._size(index, file_bytes) for index, part in enumerate(self._parts) if part.etag)

    def under_way_bytes(self, file_bytes: int) -> int:
        """Return how many bytes of the file are being sent."""
        return sum(
            self._size(index, file_bytes) for index, part in enumerate(self._parts) if part.is_under_way
        )

    def _size(self, index: int, file_bytes: int) -> int:
        return max(0, min(self.part_bytes, file_bytes - index * self.part_bytes))

    def is_complete(self, file_bytes: int) -> bool:
        """Whether every part of a file of so many bytes is held."""
        return all(self.etags(-(-file_bytes // self.part_bytes)))
