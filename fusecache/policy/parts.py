"""How a file is cut for upload."""

from fusecache.model.errors import TooLarge
from fusecache.model.nouns import MIB, TIB

# Cloudflare R2: objects end at 4.995 TiB, an upload has at most 10 000 parts, all but the last of one size.
OBJECT_BYTES_MAX = int(4.995 * TIB)
PARTS_MAX = 10_000
# Up to here one PutObject: one class A operation instead of three or more.
SINGLE_PUT_BYTES_MAX = 64 * MIB
_PART_BYTES_MIN = 64 * MIB
_PART_STEP = 16 * MIB
# Below the limit of 10 000, so that a rounding never reaches it.
_PARTS_AIM = 9_000


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
