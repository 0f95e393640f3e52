"""Which objects an endpoint's copy can stand for: the same bytes under the same key, perhaps with another ETag."""

import enum
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from fusecache.model.objects import ObjectId
from fusecache.remote.store import ObjectContent

# Objects remembered for each endpoint, and how many of their keys a status names.
REMEMBERED_OBJECTS = 10_000
NAMED_KEYS = 5
# A copy that could not be used is asked for again after this long.
RECHECK_SECONDS = 60.0


class Copy(enum.Enum):
    """An endpoint's copy of one object version, compared with the primary's. Only SAME is ever read."""

    SAME = "same"
    MISSING = "missing"
    REFUSED = "refused"
    OLDER = "older version"
    OTHER = "other bytes"
    UNPROVEN = "not comparable"  # another ETag, and no checksum that both endpoints have
    UNKNOWN = "not compared yet"


@dataclass(frozen=True, slots=True)
class KnownCopy:
    """A copy, until a time. etag: with which a SAME copy is read."""

    copy: Copy
    etag: str
    until: float


def judge(original: ObjectContent, copy: ObjectContent) -> Copy:
    """Compare a copy with the original.

    ETags of one content differ if it was uploaded in other parts. Then sizes and checksums of all bytes decide. ETags
    without a part count are MD5s. Under SSE-KMS they are not, but then stores have other checksums.
    """
    if (original.etag, original.size) == (copy.etag, copy.size):
        return Copy.SAME
    common = original.checksums.keys() & copy.checksums.keys()
    if common:
        differs = any(original.checksums[name] != copy.checksums[name] for name in common)
    else:
        differs = "-" not in original.etag + copy.etag  # the MD5 of each
    if differs or original.size != copy.size:
        return Copy.OLDER if copy.modified < original.modified else Copy.OTHER
    return Copy.SAME if common else Copy.UNPROVEN


class Copies:
    """What is known of one endpoint's copies: the objects whose copy is not simply the same ETag. Not thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[ObjectId, KnownCopy] = OrderedDict()

    def etag_of(self, object_id: ObjectId, now: float) -> str | None:
        """Return the ETag under which to read an object; None if its copy cannot be used now."""
        known = self._known.get(object_id)
        if known is None or now >= known.until:
            return object_id.etag
        return known.etag if known.copy is Copy.SAME else None

    def record(self, object_id: ObjectId, copy: Copy, now: float, *, etag: str = "") -> None:
        """Remember a copy."""
        until = float("inf") if copy is Copy.SAME else now + RECHECK_SECONDS
        self._known[object_id] = KnownCopy(copy, etag, until)
        self._known.move_to_end(object_id)
        while len(self._known) > REMEMBERED_OBJECTS:
            self._known.popitem(last=False)

    def forget(self, object_id: ObjectId) -> None:
        """The endpoint has served the object with the same ETag."""
        self._known.pop(object_id, None)

    def facts(self) -> dict[str, Any]:
        """Return the status fields: how many copies are not used, by cause, and the newest of their keys."""
        unused = [(object_id.key, known.copy) for object_id, known in self._known.items()]
        unused = [row for row in unused if row[1] is not Copy.SAME]
        return {
            "unused_copies": dict(Counter(copy.value for _, copy in unused)),
            "unused_keys": [
                {"key": key, "cause": copy.value} for key, copy in reversed(unused[-NAMED_KEYS:])
            ],
        }
