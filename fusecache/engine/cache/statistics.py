"""Counters of the read path, updated on the trio loop and returned as one frozen value."""

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fusecache.engine.cache.buffer_pool import BufferPool
from fusecache.engine.cache.chunks import Fetch, FetchSource
from fusecache.model.latency import Latency, LatencyHistogram
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.space_ledger import SpaceLedger


class ReadSource(enum.IntEnum):
    """Where the bytes of a read were; PEER: on another node. Of several places the largest value counts."""

    MEMORY = 0
    DISK = 1
    PEER = 2
    BUCKET = 3


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The cache at one moment: counts since the start, sizes in bytes, times in seconds.

    hits: reads that waited for no bucket and no peer. bytes_read: by readers; bytes_from: of these, by ReadSource.
    bytes_by_cause: fetched for demand, hint, readahead.
    wait_seconds: time that readers waited, summed over readers, by source or queue; read-ahead has no waiter.
    waiting_reads: reads that wait for the bucket now; longest_wait_seconds: of the longest of them.
    uncached: fetches that could not be stored on disk; not_admitted: not worth evicting other blocks.
    stalls: requests that were silent and were aborted, to retry on another connection. latency: of `read` as a whole.
    """

    hits: int
    misses: int
    requests: int
    bytes_by_cause: dict[str, int]
    bytes_read: int
    bytes_from: dict[str, int]
    wait_seconds: dict[str, float]
    waiting_reads: int
    longest_wait_seconds: float
    evicted_bytes: int
    used_bytes: int
    reserved_bytes: int
    staging_bytes: int
    limit_bytes: int
    buffers: int
    buffers_in_use: int
    errors: int
    disk_errors: int
    checksum_failures: int
    uncached: int
    not_admitted: int
    stalls: int
    latency: Latency

    def as_dict(self) -> dict[str, Any]:
        """Return what a status shows, as plain values."""
        facts = {name: getattr(self, name) for name in _SHOWN}
        return {**facts, "used_bytes": self.used_bytes + self.reserved_bytes}


_SHOWN = (
    "hits", "misses", "bytes_by_cause", "bytes_from", "wait_seconds", "evicted_bytes", "staging_bytes",
    "disk_errors", "checksum_failures", "uncached", "stalls",
)  # fmt: skip


@dataclass(slots=True)
class Counters:
    """The running counts behind CacheStatistics."""

    hits: int = 0
    misses: int = 0
    requests: int = 0
    bytes_from: Counter[ReadSource] = field(default_factory=Counter)
    evicted_bytes: int = 0
    errors: int = 0
    disk_errors: int = 0
    checksum_failures: int = 0
    uncached: int = 0
    not_admitted: int = 0
    stalls: int = 0
    bytes_by_cause: Counter[str] = field(default_factory=Counter)
    wait_seconds: dict[str, float] = field(
        default_factory=lambda: {"network": 0.0, "queue": 0.0, "disk": 0.0}
    )
    # Start times of the reads that wait for the bucket now, by wait number, the oldest first.
    waiting: dict[int, float] = field(default_factory=dict)
    waits: int = 0
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)

    def begin_wait(self, now: float) -> int:
        """A reader starts to wait for the bucket. Returns its key in `waiting`, which the caller removes."""
        self.waits += 1
        self.waiting[self.waits] = now
        return self.waits

    def count_wait(self, fetches: Sequence[Fetch], began: float, now: float) -> None:
        """Count a reader's wait for fetches: as queue time until the last one started, then as time of its source."""
        if not fetches:
            return
        last = max(fetches, key=lambda each: math.inf if each.started_at is None else each.started_at)
        started = now if last.started_at is None else min(now, max(began, last.started_at))
        self.wait_seconds["queue"] += started - began
        self.wait_seconds["disk" if last.source is FetchSource.DISK else "network"] += now - started

    def snapshot(self, ledger: SpaceLedger, buffer_pool: BufferPool, now: float) -> CacheStatistics:
        """Return the counters as one frozen value, with the use of disk and buffers at this moment."""
        began = next(iter(self.waiting.values()), None)
        return CacheStatistics(
            hits=self.hits,
            misses=self.misses,
            requests=self.requests,
            bytes_by_cause={cause.name.lower(): self.bytes_by_cause[cause.name.lower()] for cause in Cause},
            bytes_read=sum(self.bytes_from.values()),
            bytes_from={source.name.lower(): self.bytes_from[source] for source in ReadSource},
            wait_seconds=dict(self.wait_seconds),
            waiting_reads=len(self.waiting),
            longest_wait_seconds=now - began if began is not None else 0.0,
            evicted_bytes=self.evicted_bytes,
            used_bytes=ledger.cache_bytes,
            reserved_bytes=ledger.reserved_bytes,
            staging_bytes=ledger.staging_bytes,
            limit_bytes=ledger.limit_bytes,
            buffers=buffer_pool.large_count + buffer_pool.small_count,
            buffers_in_use=buffer_pool.in_use,
            errors=self.errors,
            disk_errors=self.disk_errors,
            checksum_failures=self.checksum_failures,
            uncached=self.uncached,
            not_admitted=self.not_admitted,
            stalls=self.stalls,
            latency=self.latency.latency(),
        )
