"""Disk space of the cache: reserves it on the ledger, and asks for evictions when it is short.

Used on the trio loop; calls that may block go through `offload`. Not here: which blocks go, and how (`evictor`).

Invariant: space is reserved on the ledger, if needed after an eviction, before any byte is written.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from fusecache.disk.cache_files import CacheFiles
from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.evictor import Evictor, ReadHints
from fusecache.engine.cache.statistics import Counters
from fusecache.engine.runtime.offload import Offload
from fusecache.index.cache_index import CacheIndex
from fusecache.model.errors import LocalDiskError, NoSpace
from fusecache.model.objects import MIB
from fusecache.policy.cache.space_ledger import SpaceLedger

# One eviction frees 64 MiB, or 1/16 of a small cache: sampling and hole punching are then paid once for many blocks.
_EVICT_BATCH_BYTES = 64 * MIB
_EVICT_SHARE = 16
# With hints, space that is freed and not filled yet costs hits: evict less at a time.
_EVICT_SHARE_HINTED = 128
# The file system's own extents and directories: at worst 16 bytes per 64 KiB, in leaves that are half full.
_BOOKKEEPING_SHARE = 1024
# A search for blocks read later that finds none is futile for blocks read as late or later. They skip it for 1 s, or
# until hints move.
_FUTILE_SECONDS = 1.0


@dataclass(eq=False, repr=False)
class DiskSpace:
    """Reserves space for cache blocks and staging files. A cache block must be worth the eviction of others."""

    _offload: Offload
    _files: CacheFiles
    _index: CacheIndex
    _table: BlockTable
    ledger: SpaceLedger
    _counters: Counters
    evictor: Evictor
    floor_bytes: int = field(kw_only=True)

    def __post_init__(self) -> None:
        self._free_bytes = self._files.free_bytes()
        # (time, seconds): until `time`, a search for blocks read later than in `seconds` is futile.
        self._futile_until: tuple[float, float] = -math.inf, math.inf

    def use_hints(self, hints: ReadHints | None) -> None:
        """Keep the blocks that are read soonest by hints, which are new or have moved; None: no hints any more."""
        self.evictor.use_hints(hints)
        self._futile_until = -math.inf, math.inf

    async def reserve_cache(self, nbytes: int, *, incoming_use: float | None = None) -> bool:
        """Reserve space for cache blocks, evicting others if needed. False if they are not admitted or find none.

        incoming_use: the next use of the incoming blocks, None if unknown. Blocks with a known use evict only blocks
        that are read later or have no known use. Blocks without a known use evict only blocks without one.
        """
        if self._floor_shortage(nbytes) <= 0 and self.ledger.reserve_cache(nbytes):
            return True
        if incoming_use is None and not await self.evictor.is_admitted():
            self._counters.not_admitted += 1
            return False
        until, use = self._futile_until
        if incoming_use is not None and incoming_use >= use and trio.current_time() < until:
            self._counters.not_admitted += 1
            return False
        spare = math.inf if incoming_use is None else incoming_use
        ledger = self.ledger
        reserve, give_back = partial(ledger.reserve_cache, nbytes), partial(ledger.cancel_cache, nbytes)
        if await self._evict_and_reserve(nbytes, reserve, give_back, spare):
            return True
        if incoming_use:
            self._counters.not_admitted += 1  # no sampled block is read later
            self._futile_until = trio.current_time() + _FUTILE_SECONDS, incoming_use
            return False
        self.count_uncached()
        return False

    def count_uncached(self) -> None:
        """Count blocks that found no space. Warns once."""
        self._counters.uncached += 1
        self._table.warn_once(
            "space",
            "no disk space for new blocks, reads continue uncached; raise --cache-size or free disk space",
        )

    def free_bytes(self) -> int:
        """Return how many bytes may be cached without an eviction."""
        ledger = self.ledger
        on_disk = self._free_bytes - self.floor_bytes - ledger.reserved_bytes
        return max(0, min(ledger.limit_bytes - ledger.total_bytes, on_disk))

    async def evict_for(self, nbytes: int, incoming_use: float) -> bool:
        """Evict blocks read later than `nbytes` that will come soon; False if those would find no space."""
        if not await self.reserve_cache(nbytes, incoming_use=incoming_use):
            return False
        self.ledger.cancel_cache(nbytes)
        return True

    async def reserve_staging(self, nbytes: int, bucket: str) -> None:
        """Reserve space for staging files, evicting clean blocks if needed. Raises NoSpace."""
        if self.reserve_staging_nowait(nbytes, bucket):
            return
        ledger = self.ledger
        if nbytes > (left := ledger.staging_left(bucket)):
            raise NoSpace(
                f"files waiting to upload would take {ledger.staging_bytes + nbytes} bytes of at most "
                f"{ledger.staging_bytes + left}: wait for uploads, or raise --cache-size"
            )
        reserve, give_back = (
            partial(self.reserve_staging_nowait, nbytes, bucket),
            partial(ledger.release_staging, nbytes, bucket),
        )
        if not await self._evict_and_reserve(nbytes, reserve, give_back):
            raise NoSpace(
                f"the cache has no space for {nbytes} more bytes, and nothing clean is left to evict: "
                "wait for uploads, free disk space, or raise --cache-size"
            )

    def writable_bytes(self, bucket: str) -> int:
        """Return how many bytes new writes may take if all clean blocks are evicted for them."""
        return self.ledger.writable_bytes(bucket, self.clean_limit_bytes())

    def reserve_staging_nowait(self, nbytes: int, bucket: str) -> bool:
        """Reserve space for staging files if there is enough now; evicts nothing."""
        if self._floor_shortage(nbytes) > 0 or not self.ledger.reserve_staging(nbytes, bucket):
            return False
        # No event tells when they are written: count them as written until the next measurement.
        self._free_bytes -= nbytes
        return True

    def _floor_shortage(self, nbytes: int) -> int:
        """Return how many bytes the file system lacks for `nbytes` and all reserved bytes, above the floor."""
        return self.floor_bytes + self.ledger.reserved_bytes + nbytes - self._free_bytes

    async def _evict_and_reserve(
        self,
        nbytes: int,
        reserve: Callable[[], bool],
        give_back: Callable[[], None],
        spare: float | None = None,
    ) -> bool:
        """Evict until `reserve` succeeds; False if eviction frees too little. A cancelled caller reserves nothing."""
        is_wanted, is_granted = True, False

        def reserve_if_wanted() -> bool:
            nonlocal is_granted
            is_granted = is_wanted and reserve()
            return is_granted

        try:
            return await self._table.run_to_completion(
                self._evict_until, nbytes, reserve_if_wanted, lambda: is_wanted, spare, name="cache-eviction"
            )
        except trio.Cancelled:
            is_wanted = False
            if is_granted:
                give_back()
            raise

    async def _evict_until(
        self, nbytes: int, reserve: Callable[[], bool], is_wanted: Callable[[], bool], spare: float | None
    ) -> bool:
        async with self.evictor.lock:
            while is_wanted():
                await self.measure_free_space()
                floor_shortage = self._floor_shortage(nbytes)
                if floor_shortage <= 0 and reserve():
                    return True
                short = max(self.ledger.shortage_bytes(nbytes), floor_shortage, 1)
                share = _EVICT_SHARE if not self.evictor.has_hints else _EVICT_SHARE_HINTED
                batch = min(_EVICT_BATCH_BYTES, self.ledger.limit_bytes // share)
                if not await self.evictor.evict(max(short, batch), spare):
                    return floor_shortage <= 0 and reserve()
            return False

    async def shrink(self) -> None:
        """Evict blocks of an earlier run that exceed the limit, if the limit was lowered since."""
        # Checked before the overhead is measured: an excess by overhead alone must not evict blocks at every start.
        if self.ledger.shortage_bytes(0):
            await self._evict_and_reserve(0, lambda: not self.ledger.shortage_bytes(0), lambda: None)

    def clean_limit_bytes(self) -> int:
        """Return how many bytes the cache could hold now if everything clean were evicted."""
        ledger = self.ledger
        on_disk = ledger.cache_bytes + ledger.reserved_bytes + self._free_bytes - self.floor_bytes
        return max(0, min(ledger.limit_bytes - ledger.staging_bytes - ledger.overhead_bytes, on_disk))

    def usable_bytes(self) -> int:
        """Return how many bytes of the limit may be used, bytes in use included, above the file system's floor."""
        ledger = self.ledger
        return max(0, min(ledger.limit_bytes, ledger.total_bytes + self._free_bytes - self.floor_bytes))

    async def measure_free_space(self) -> None:
        """Measure free disk space and the size of the index. Between two calls, free space is estimated.

        If the disk fails to answer, it counts as full.
        """
        try:
            self._free_bytes, self.ledger.overhead_bytes = await self._offload.disk(self._measure)
        except LocalDiskError as exc:
            self._free_bytes = 0
            self._table.count_disk_error(exc)

    def _measure(self) -> tuple[int, int]:
        """Run in a thread."""
        own = self.ledger.limit_bytes // _BOOKKEEPING_SHARE
        return self._files.free_bytes(), self._index.size_bytes() + own

    def on_disk_full(self) -> None:
        """The file system is at its floor: reserve nothing until the next measurement."""
        self._free_bytes = 0

    def count_written(self, nbytes: int) -> None:
        """Lower the estimate of free space by bytes written, until the next measurement."""
        self._free_bytes -= nbytes
