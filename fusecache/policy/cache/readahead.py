"""What one handle's reads so far say about its next ones. Pure values and functions.

A reader that starts at the beginning of a file, or reads on where it stopped, is sequential; its window of
read-ahead grows each time it has to wait. A reader that jumps is random and gets no more than its granules.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusecache.model.objects import GRANULE_BYTES, KIB, MIB, Extent
from fusecache.policy.cache.granules import CHUNK_BYTES

# The first request of a sequential reader: a header that is read alone costs no more than this.
FIRST_WINDOW_BYTES = MIB
# Smaller objects are fetched whole when their start is read: at 80 MB/s a connection 4 MiB take about as long as
# the first byte of a second GET would.
WHOLE_BYTES = 4 * MIB
# The kernel's own read-ahead reorders a little, and tools skip over parts: still one stream.
FORWARD_SEEK_BYTES = 16 * MIB
BACKWARD_SEEK_BYTES = MIB
# A random reader is believed sequential again only after reads that really follow each other.
NEAR_BYTES = 128 * KIB
STREAK_FOR_SEQUENTIAL = 2
# A strided reader (skip, small read, skip, …) looks sequential read by read; after this many skips it is
# random.
SKIPS_FOR_RANDOM = 3
# A reader that stops early wastes at most this many times what it has read.
WASTE_FACTOR = 4
# Smaller requests spend more time on their way than on their bytes.
LEAST_REQUEST_BYTES = MIB
MAX_WINDOW_BYTES = 24 * CHUNK_BYTES


class Phase(enum.Enum):
    """What the reader is believed to be."""

    START = "nothing read yet"
    SEQUENTIAL = "reads on; read-ahead is on"
    RANDOM = "jumps; read-ahead is off"


@dataclass(frozen=True, slots=True)
class ReadPattern:
    """The state of one stream of reads, in bytes. position: the end of the farthest read of the stream.

    calm_until: up to this position it is not shrunk again. near_bytes: how near to each other reads of a random stream
    follow each other.
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
        return replace(
            pattern,
            position=max(pattern.position, stop),
            consumed_bytes=pattern.consumed_bytes + length,
            skips=skips,
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
    """Return the pattern after its reader had to wait: a sequential one looks farther ahead."""
    if pattern.phase is not Phase.SEQUENTIAL or pattern.consumed_bytes <= FIRST_WINDOW_BYTES:
        return pattern
    earned = max(CHUNK_BYTES, WASTE_FACTOR * pattern.consumed_bytes)
    wanted = max(CHUNK_BYTES, 2 * pattern.window_bytes)
    return replace(pattern, window_bytes=max(pattern.window_bytes, min(wanted, earned, MAX_WINDOW_BYTES)))


def shrink(pattern: ReadPattern) -> ReadPattern:
    """Return the pattern after there was no buffer for its read-ahead: half the window, a chunk at least.

    Once for each window that it reads: the buffers that are missing come back as fast as readers read.
    """
    if pattern.window_bytes <= CHUNK_BYTES or pattern.position < pattern.calm_until:
        return pattern
    window = max(CHUNK_BYTES, pattern.window_bytes // 2)
    return replace(pattern, window_bytes=window, calm_until=pattern.position + window)


def continues(pattern: ReadPattern, start: int) -> bool:
    """Return whether a read at `start` may go on where the pattern's reads were."""
    step = start - pattern.position
    if pattern.phase is Phase.SEQUENTIAL:
        return -BACKWARD_SEEK_BYTES <= step <= FORWARD_SEEK_BYTES
    return -pattern.near_bytes <= step <= pattern.near_bytes


def choose_stream(patterns: Sequence[ReadPattern], start: int) -> int | None:
    """Return which of the patterns of one open file a read at `start` continues: the nearest; None if it jumps."""
    nearest = [
        (abs(start - pattern.position), index)
        for index, pattern in enumerate(patterns)
        if continues(pattern, start)
    ]
    return min(nearest)[1] if nearest else None


def side_stream(stop: int, near_bytes: int = NEAR_BYTES) -> ReadPattern:
    """Return the pattern of a reader that jumped in an open file and read up to `stop`."""
    return ReadPattern(Phase.RANDOM, position=stop, near_bytes=near_bytes)


def demand_stop(pattern: ReadPattern, start: int, stop: int, size: int) -> int:
    """Return where the fetch for a read of [start, stop) that found nothing should stop.

    Random: the end of the last granule touched. Sequential: a whole chunk or small object, or the first small window.
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
    """Return how much one request of a stream asks for at most.

    A connection to a distant bucket brings some 80 MB/s: while the window is small, several side by side bring it
    sooner than one. A large window has enough requests in flight as it is; what is read first comes in one.
    """
    if pattern.phase is not Phase.SEQUENTIAL or pattern.consumed_bytes <= FIRST_WINDOW_BYTES:
        return CHUNK_BYTES
    return max(LEAST_REQUEST_BYTES, min(pattern.window_bytes // 4, CHUNK_BYTES))


def ahead(pattern: ReadPattern, size: int, bound_bytes: int) -> Extent | None:
    """Return what to fetch before it is asked for: from the reader's position on, to the end of a chunk.

    None for a reader that is not sequential, whose window is still the first small one, or who is at the end.
    """
    if pattern.phase is not Phase.SEQUENTIAL or pattern.window_bytes < CHUNK_BYTES:
        return None
    stop = pattern.position + min(pattern.window_bytes, max(bound_bytes, CHUNK_BYTES))
    stop = min(size, -(-stop // CHUNK_BYTES) * CHUNK_BYTES)
    return Extent(pattern.position, stop) if pattern.position < stop else None


def fair_bound_bytes(buffers: int, readers: int) -> int:
    """Return how far each of `readers` may run ahead when they share `buffers` chunk-sized buffers.

    A quarter stays free for demand, hints and buffers being written out.
    """
    return max(1, buffers * 3 // 4 // max(1, readers)) * CHUNK_BYTES
