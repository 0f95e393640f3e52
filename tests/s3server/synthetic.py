"""Bytes that need no storage: a pure function of (seed, offset), fast enough to feed a socket.

The stream of a seed is one fixed random block repeated, begun at a place that depends on the seed, with a
stamp over the first 8 bytes of every granule of the object. Invariants:
1. The period is prime, so bytes moved by any multiple of a power of two differ from those that belong there.
2. The stamp names granule and seed, so two granules of one object never hold the same bytes.
"""

import hashlib
import struct

GRANULE_BYTES = 65_536  # one stamp each: 128 a range of 8 MiB, which costs less than 1 % of copying it
PERIOD_BYTES = 4_194_319  # the first prime above 4 MiB
_STAMP = struct.Struct("<Q")
_BLOCK = memoryview(hashlib.shake_256(b"synthetic objects").digest(PERIOD_BYTES))


def synthetic_bytes(seed: int, offset: int, size: int) -> bytes:
    """Return bytes [offset, offset + size) of the endless stream named `seed`."""
    buffer = bytearray(size)
    fill_synthetic(memoryview(buffer), seed, offset)
    return bytes(buffer)


def fill_synthetic(buffer: memoryview, seed: int, offset: int) -> None:
    """Fill `buffer` with the stream's bytes from `offset` on."""
    start, base = _seed_numbers(seed)
    size = len(buffer)
    done = 0
    place = (start + offset) % PERIOD_BYTES
    while done < size:
        count = min(size - done, PERIOD_BYTES - place)
        buffer[done : done + count] = _BLOCK[place : place + count]
        done += count
        place = 0
    for granule in range(offset // GRANULE_BYTES, (offset + size + GRANULE_BYTES - 1) // GRANULE_BYTES):
        stamp = _STAMP.pack((base + granule) % 2**64)
        at = granule * GRANULE_BYTES - offset  # negative where the buffer begins inside the stamp
        first, last = max(at, 0), min(at + _STAMP.size, size)
        if first < last:
            buffer[first:last] = stamp[first - at : last - at]


def synthetic_etag(seed: int, offset: int, size: int) -> str:
    """Return that piece's fixed ETag, without quotes. Not an MD5 of the bytes: 5 TiB would take hours."""
    return hashlib.md5(f"synthetic {seed} {offset} {size}".encode(), usedforsecurity=False).hexdigest()


def _seed_numbers(seed: int) -> tuple[int, int]:
    digest = hashlib.sha256(str(seed).encode()).digest()
    return int.from_bytes(digest[:8], "little") % PERIOD_BYTES, int.from_bytes(digest[8:16], "little")
