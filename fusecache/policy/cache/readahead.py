"""Predicts the next reads of one open file from its reads so far. Pure values and functions.

A reader is sequential if it starts at the beginning of a file, or continues where it stopped. Its read-ahead window
grows each time it has to wait. A reader that jumps is random and gets only the granules that it reads.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusecache.model.objects import GRANULE_BYTES, KIB, MIB, Extent
from fusecache.policy.cache.granules import CHUNK_BYTES

# The first request of a sequential reader. A reader of the header alone costs no more than this.
FIRST_WINDOW_BYTES = MIB
# Smaller objects are fetched as a whole when their start is read. At 80 MB/s a connection, 4 MiB take about as long as
# the first byte of a second GET.
WHOLE_BYTES = 4 * MIB
# The kernel's own read-ahead reorders reads a little, and tools skip parts of a file. Both are still one stream.
FORWARD_SEEK_BYTES = 16 * MIB
BACKWARD_SEEK_BYTES = MIB
# A random reader counts as sequential again only after STREAK_FOR_SEQUENTIAL reads this near to each other.
NEAR_BYTES = 128 * KIB
STREAK_FOR_SEQUENTIAL = 2
# A strided reader (skip, small read, skip, …) looks sequential in each single read. After 3 skips it is random.
SKIPS_FOR_RANDOM = 3
# A reader that stops early wastes at most 4 times the bytes that it has read.
WASTE_FACTOR = 4
# A smaller request spends more time on latency than on its bytes.
LEAST_REQUEST_BYTES = MIB
MAX_WINDOW_BYTES = 24 * CHUNK_BYTES


class Phase(enum.Enum):
    """How a stream of reads is classified."""

    START = "nothing read yet"
    SEQUENTIAL = "reads on; read-ahead is on"
    RANDOM = "jumps; read-ahead is off"


@dataclass(frozen=True, slots=True)
class ReadPattern:
    """The state of one stream of reads, in bytes. position: the end of the farthest read of the stream.

    calm_until: the window is not shrunk again before this position. near_bytes: the largest distance at which a read
    of a random stream still counts as the next one.
    """

    phase: Phase = Phase.START
    position: int = 0
    window_bytes: int = FIRST_WINDOW_BYTES
    consumed_bytes: int = 0
    streak: int = 0
    skips: int = 0
    calm_until: int = 0
    near_bytes: int = NEAR_BYTES


def observe(pattern: ReadPattern, start: int, stop: int) -> ReadPattern:
    """Return the pattern after a read of [start, stop)."""
    step = start - pattern.position
    length = stop - start
    if pattern.phase is Phase.START:
        phase = Phase.SEQUENTIAL if start == 0 else Phase.RANDOM
        return ReadPattern(phase, position=stop, consumed_bytes=length, near_bytes=pattern.near_bytes)
    if pattern.phase is Phase.SEQUENTIAL:
        skips = pattern.skips + 1 if step > MIB else max(0, pattern.skips - 1) if step == 0 else pattern.skips
        if not -BACKWARD_SEEK_BYTES <= step <= FORWARD_SEEK_BYTES or skips >= SKIPS_FOR_RANDOM:
            return side_stream(stop, pattern.near_bytes)
        return ReadPattern(  # of each read: `replace` takes three times as long
            pattern.phase,
            max(pattern.position, stop),
            pattern.window_bytes,
            pattern.consumed_bytes + length,
            pattern.streak,
            skips,
            pattern.calm_until,
            pattern.near_bytes,
        )
    if not continues(pattern, start):
        return side_stream(stop, pattern.near_bytes)
    streak = pattern.streak + 1
    return ReadPattern(
        Phase.SEQUENTIAL if streak >= STREAK_FOR_SEQUENTIAL else Phase.RANDOM,
        max(pattern.position, stop),
        consumed_bytes=pattern.consumed_bytes + length,
        streak=streak,
        near_bytes=pattern.near_bytes,
    )


def grow(pattern: ReadPattern) -> ReadPattern:
    """Return the pattern after its reader had to wait: the window of a sequential one grows."""
    if pattern.phase is not Phase.SEQUENTIAL or pattern.consumed_bytes <= FIRST_WINDOW_BYTES:
        return pattern
    earned = max(CHUNK_BYTES, WASTE_FACTOR * pattern.consumed_bytes)
    wanted = max(CHUNK_BYTES, 2 * pattern.window_bytes)
    return replace(pattern, window_bytes=max(pattern.window_bytes, min(wanted, earned, MAX_WINDOW_BYTES)))


def shrink(pattern: ReadPattern) -> ReadPattern:
    """Return the pattern after its read-ahead found no buffer: half the window, at least a chunk.

    It shrinks at most once per window read, as buffers become free as fast as readers read.
    """
    if pattern.window_bytes <= CHUNK_BYTES or pattern.position < pattern.calm_until:
        return pattern
    window = max(CHUNK_BYTES, pattern.window_bytes // 2)
    return replace(pattern, window_bytes=window, calm_until=pattern.position + window)


def continues(pattern: ReadPattern, start: int) -> bool:
    """Return whether a read at `start` may continue the reads of the pattern."""
    step = start - pattern.position
    if pattern.phase is Phase.SEQUENTIAL:
        return -BACKWARD_SEEK_BYTES <= step <= FORWARD_SEEK_BYTES
    return -pattern.near_bytes <= step <= pattern.near_bytes


def choose_stream(patterns: Sequence[ReadPattern], start: int) -> int | None:
    """Return the index of the nearest pattern of one open file that a read at `start` continues; None if it jumps."""
    if patterns and patterns[0].position == start:
        return 0  # nearly always, and none is nearer
    nearest = [
        (abs(start - pattern.position), index)
        for index, pattern in enumerate(patterns)
        if continues(pattern, start)
    ]
    return min(nearest)[1] if nearest else None


def side_stream(stop: int, near_bytes: int = NEAR_BYTES) -> ReadPattern:
    """Return the pattern of a reader that jumped within an open file and read up to `stop`."""
    return ReadPattern(Phase.RANDOM, position=stop, near_bytes=near_bytes)


def reader_of_all(stop: int) -> ReadPattern:
    """Return the pattern of a reader that jumped and read up to `stop`, in a file of which all bytes will be read."""
    return ReadPattern(Phase.SEQUENTIAL, stop, window_bytes=CHUNK_BYTES, consumed_bytes=CHUNK_BYTES)


def demand_stop(pattern: ReadPattern, start: int, stop: int, size: int) -> int:
    """Return where the fetch for a read of [start, stop) should stop, after a cache miss.

    Random: at the end of the last granule touched. Sequential: at the end of the chunk or of a small object, or of the
    first small window.
    """
    if pattern.phase is not Phase.SEQUENTIAL:
        wanted = stop
    elif size <= WHOLE_BYTES:
        wanted = size
    else:
        chunk_end = (start // CHUNK_BYTES + 1) * CHUNK_BYTES
        wanted = max(stop, min(start + pattern.window_bytes, chunk_end))
    return min(size, -(-wanted // GRANULE_BYTES) * GRANULE_BYTES)


def request_bytes(pattern: ReadPattern) -> int:
    """Return the largest size of one request of a stream.

    One connection to a distant bucket carries some 80 MB/s. While the window is small, several parallel requests fetch
    it sooner than one. A large window has enough requests in flight anyway. The first bytes come in one request.
    """
    if pattern.phase is not Phase.SEQUENTIAL or pattern.consumed_bytes <= FIRST_WINDOW_BYTES:
        return CHUNK_BYTES
    return max(LEAST_REQUEST_BYTES, min(pattern.window_bytes // 4, CHUNK_BYTES))


def ahead(pattern: ReadPattern, size: int, bound_bytes: int) -> Extent | None:
    """Return the extent to prefetch: from the reader's position to the end of a chunk.

    None if the reader is not sequential, if its window is still the first small one, or at the end of the object.
    """
    if pattern.phase is not Phase.SEQUENTIAL or pattern.window_bytes < CHUNK_BYTES:
        return None
    stop = pattern.position + min(pattern.window_bytes, max(bound_bytes, CHUNK_BYTES))
    stop = min(size, -(-stop // CHUNK_BYTES) * CHUNK_BYTES)
    return Extent(pattern.position, stop) if pattern.position < stop else None


def fair_bound_bytes(buffers: int, readers: int) -> int:
    """Return how many bytes ahead each of `readers` may prefetch when they share `buffers` chunk-sized buffers.

    A quarter of the buffers stays free for demand, hints and buffers that are being written to disk.
    """
    return max(1, buffers * 3 // 4 // max(1, readers)) * CHUNK_BYTES
