"""Arithmetic of chunks, blocks and granules: which parts of an object a byte range touches.

A *chunk* is 8 MiB of an object, aligned. It is the largest single GET and the size of a large buffer. It holds 8
*blocks* of 1 MiB, the unit of eviction, and 128 *granules* of 64 KiB, the unit of checksums. A set of granules of one
chunk is an int used as a bit mask: bit g is granule g.
"""

from collections.abc import Iterator

from fusecache.model.objects import BLOCK_BYTES, GRANULE_BYTES, GRANULES_PER_BLOCK, MIB, Extent

# A smaller GET spends most of its time on latency; with a larger one, a seek wastes what was saved.
CHUNK_BYTES = 8 * MIB
GRANULES_PER_CHUNK = CHUNK_BYTES // GRANULE_BYTES
BLOCKS_PER_CHUNK = CHUNK_BYTES // BLOCK_BYTES
# File systems allocate space in this unit or multiples of it; direct I/O is aligned to it.
PAGE_BYTES = 4096
BLOCK_MASK = (1 << GRANULES_PER_BLOCK) - 1


def mask_between(first: int, stop: int) -> int:
    """Return the mask of granules first..stop-1."""
    return ((1 << (stop - first)) - 1) << first


def mask_of_bytes(start: int, stop: int) -> int:
    """Return the mask of granules that hold any of bytes [start, stop), counted from the start of the chunk."""
    return mask_between(start // GRANULE_BYTES, -(-stop // GRANULE_BYTES))


def runs(mask: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of neighbouring granules in `mask` as (first, stop), lowest first."""
    position = 0
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        length = (~mask & (mask + 1)).bit_length() - 1
        first = position + skipped
        yield first, first + length
        mask >>= length
        position = first + length


def pieces(mask: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of `mask`, cut to at most `most` granules each, lowest first."""
    for first, stop in runs(mask):
        for start in range(first, stop, most):
            yield start, min(start + most, stop)


def split_by_chunk(extent: Extent) -> list[tuple[int, int, int]]:
    """Cut an extent at chunk borders. Returns (chunk, start, stop), counted from the start of that chunk."""
    pieces = []
    start = extent.start
    while start < extent.stop:
        chunk = start // CHUNK_BYTES
        base = chunk * CHUNK_BYTES
        stop = min(extent.stop, base + CHUNK_BYTES)
        pieces.append((chunk, start - base, stop - base))
        start = stop
    return pieces


def chunk_size(object_size: int, chunk: int) -> int:
    """Return how many bytes of the object lie in this chunk."""
    return max(0, min(CHUNK_BYTES, object_size - chunk * CHUNK_BYTES))


def full_mask(size: int) -> int:
    """Return the mask of all granules of a chunk with `size` bytes."""
    return mask_between(0, -(-size // GRANULE_BYTES))


def mask_bytes(mask: int, size: int) -> int:
    """Return the bytes in the granules of `mask` of a chunk of `size` bytes (the last may be short)."""
    total = mask.bit_count() * GRANULE_BYTES
    granules = -(-size // GRANULE_BYTES)
    if granules and mask >> (granules - 1) & 1:
        total -= granules * GRANULE_BYTES - size
    return total


def disk_bytes(mask: int, size: int) -> int:
    """Return the disk space of the granules of `mask` of a chunk of `size` bytes: whole pages."""
    return mask_bytes(mask, -(-size // PAGE_BYTES) * PAGE_BYTES)


def blocks_of(mask: int) -> Iterator[int]:
    """Yield the blocks (0..7) of a chunk that have a granule in `mask`."""
    for block in range(BLOCKS_PER_CHUNK):
        if mask >> (block * GRANULES_PER_BLOCK) & BLOCK_MASK:
            yield block


def received_mask(first: int, stop: int, received: int) -> int:
    """Return which of granules first..stop-1 are complete after `received` bytes, counted from `first`."""
    return mask_between(first, min(stop, first + received // GRANULE_BYTES))
