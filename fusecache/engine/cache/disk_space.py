"""Room on the local disk: the ledger, and eviction when it is short.

Used on the loop; calls that may block go through `offload`.

Invariants:
1. Room is reserved on the ledger, and made by eviction, before anything is written.
2. Eviction takes a block out of memory's table and out of the index before its bytes go.
"""

import math
import random
from collections.abc import Callable, Iterable
from functools import partial

import trio

from fusecache.disk.cache_files import CacheFiles
from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.chunks import CachedObject, Chunk
from fusecache.engine.cache.statistics import Counters
from fusecache.engine.runtime.offload import Offload
from fusecache.index.cache_index import CacheIndex, Evicted
from fusecache.model.errors import LocalDiskError, NoSpace
from fusecache.model.objects import BLOCK_BYTES, GRANULE_BYTES, GRANULES_PER_BLOCK, MIB, ObjectId
from fusecache.policy.cache.eviction import (
    CANDIDATES_PER_VICTIM,
    EvictionCandidate,
    choose_victims,
    is_admitted,
)
from fusecache.policy.cache.granules import BLOCK_MASK, BLOCKS_PER_CHUNK, CHUNK_BYTES, runs
from fusecache.policy.cache.space_ledger import SpaceLedger

# One eviction frees this much, or this part of a small cache, so that sampling and punching are paid once for many
# blocks …
_EVICT_BATCH_BYTES = 64 * MIB
_EVICT_SHARE = 16
# … from this many random places, a few neighbours each: neighbours are one hole to punch.
_SAMPLE_SEEKS = 128
_SAMPLE_RUN = 8
# With hints, what is freed and not filled yet would have answered somebody: less at a time, of fewer places.
_EVICT_SHARE_HINTED = 128
_SAMPLE_SEEKS_LEAST = 16
# Extents and folders of the file system: 16 bytes for each 64 KiB at worst, in leaves that are half full.
_BOOKKEEPING_SHARE = 1024
# What may evict nothing that is needed as soon as itself looks so often for something else.
_SEARCHES = 32
# … and if it is in vain, nobody who is needed later does so for this long, unless jobs have moved.
_FUTILE_SECONDS = 1.0


class DiskSpace:
    """Grants room to cache blocks and staging files. Cache blocks ask whether they are worth evicting others."""

    def __init__(
        self,
        offload: Offload,
        files: CacheFiles,
        index: CacheIndex,
        table: BlockTable,
        ledger: SpaceLedger,
        counters: Counters,
        *,
        floor_bytes: int,
    ) -> None:
        self._offload = offload
        self._files = files
        self._index = index
        self._table = table
        self._counters = counters
        self.floor_bytes = floor_bytes
        self._free_bytes = files.free_bytes()
        self._lock = trio.Lock()
        self._random = random.Random()
        # Blocks whose hole is being punched: a write there now would be lost. At most one eviction's victims.
        self._punching: set[tuple[int, int]] = set()
        self.ledger = ledger
        # Whether an object is pinned; None: none is.
        self.is_pinned: Callable[[ObjectId], bool] | None = None
        self._pinned: set[int] = set()
        # What warm-ups say; nothing until somebody sets it.
        self.next_use: Callable[[CachedObject | None, EvictionCandidate], float | None] = (
            lambda entry, candidate: None
        )
        # In how many seconds hints say that bytes [start, stop) of an object are read; None: there are no hints.
        self.hinted_use: Callable[[ObjectId, int, int], float | None] | None = None
        self._sampled: dict[int, ObjectId] = {}
        # Until when nothing is looked for that is read later than in so many seconds: there was nothing.
        self._futile_until: tuple[float, float] = -math.inf, math.inf

    def listen_to_hints(self, hinted_use: Callable[[ObjectId, int, int], float | None] | None) -> None:
        """Keep what is read soonest, by hints that are new or have moved; None: there are none any more."""
        self.hinted_use = hinted_use
        self._futile_until = -math.inf, math.inf

    async def reserve_cache(self, nbytes: int, *, incoming_use: float | None = None) -> bool:
        """Reserve room for cache blocks, evicting others if needed.

        incoming_use: when they will be read, if somebody said so: they evict nothing that is needed as soon. If nobody
        did, they evict nothing of which somebody did.
        """
        if self._floor_shortage(nbytes) <= 0 and self.ledger.reserve_cache(nbytes):
            return True
        if incoming_use is None and not await self._is_admitted():
            self._counters.not_admitted += 1
            return False
        until, use = self._futile_until
        if incoming_use is not None and incoming_use >= use and trio.current_time() < until:
            self._counters.not_admitted += 1
            return False
        spare = math.inf if incoming_use is None else incoming_use
        ledger = self.ledger
        reserve, give_back = partial(ledger.reserve_cache, nbytes), partial(ledger.cancel_cache, nbytes)
        if await self._evict_for_staging(nbytes, reserve, give_back, spare):
            return True
        if incoming_use:
            self._counters.not_admitted += 1  # all that is here is read sooner
            self._futile_until = trio.current_time() + _FUTILE_SECONDS, incoming_use
            return False
        self._counters.uncached += 1
        self._table.warn_once("room", "no room in the cache: reads go on, uncached")
        return False

    async def _is_admitted(self) -> bool:
        """Ask policy whether new blocks are worth the eviction of others."""
        try:
            async with self._table.rows_lock:
                sample = await self._offload.rows(self._index.sample, self._random, CANDIDATES_PER_VICTIM, 1)
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)
            return False
        candidates = [EvictionCandidate(number, block, row.size, row.stamp) for number, block, row in sample]
        await self._look_at_objects(candidates)
        return not candidates or is_admitted(
            candidates,
            clock=self._table.clock,
            next_use=self._next_use,
            incoming_use=None,
            chance=self._random.random(),
        )

    async def _look_at_objects(self, candidates: list[EvictionCandidate]) -> None:
        """Learn what the files in a sample are, if anybody pins or hints, and which of them are pinned."""
        if self.is_pinned is None and self.hinted_use is None:
            return
        numbers = {candidate.file_number for candidate in candidates}
        self._sampled = await self._offload.rows(self._index.objects_of, numbers)
        if self.is_pinned is not None:
            self._pinned = {
                number for number, object_id in self._sampled.items() if self.is_pinned(object_id)
            }

    def _next_use(self, candidate: EvictionCandidate) -> float | None:
        """Return when a block is read next: now, if it is pinned or warmed; as hints say; None if nobody said."""
        number = candidate.file_number
        if number in self._pinned:
            return 0.0
        entry = self._table.by_number.get(number)
        use = self.next_use(entry, candidate)
        if use is not None or self.hinted_use is None:
            return use
        object_id = entry.object_id if entry is not None else self._sampled.get(number)
        if object_id is None:
            return None
        start = candidate.block * BLOCK_BYTES
        return self.hinted_use(object_id, start, start + BLOCK_BYTES)

    def incoming_use(self, chunk: Chunk, mask: int) -> float | None:
        """Return when granules of a chunk that are about to be written are read: as for those that are there."""
        if chunk.owner.warming:
            return 0.0
        if self.hinted_use is None:
            return None
        start, stop = next(runs(mask))
        base = chunk.index * CHUNK_BYTES
        object_id = chunk.owner.object_id
        return self.hinted_use(object_id, base + start * GRANULE_BYTES, base + stop * GRANULE_BYTES)

    def free_bytes(self) -> int:
        """Return how much may be cached without anything going for it."""
        ledger = self.ledger
        on_disk = self._free_bytes - self.floor_bytes - ledger.reserved_bytes
        return max(0, min(ledger.limit_bytes - ledger.total_bytes, on_disk))

    async def evict_for(self, nbytes: int, incoming_use: float) -> bool:
        """Evict what is read later than so many bytes that will come soon; False if they would find no room."""
        if not await self.reserve_cache(nbytes, incoming_use=incoming_use):
            return False
        self.ledger.cancel_cache(nbytes)
        return True

    async def reserve_staging(self, nbytes: int) -> None:
        """Reserve room for staging files, evicting clean blocks if needed. Raises NoSpace."""
        if self.reserve_staging_nowait(nbytes):
            return
        ledger = self.ledger
        if not ledger.staging_fits(nbytes):
            raise NoSpace(
                f"files not yet in the bucket would take {ledger.staging_bytes + nbytes} of the "
                f"{ledger.staging_limit_bytes} bytes they may: wait for uploads, or raise the limit"
            )
        reserve, give_back = (
            partial(self.reserve_staging_nowait, nbytes),
            partial(ledger.release_staging, nbytes),
        )
        if not await self._evict_for_staging(nbytes, reserve, give_back):
            raise NoSpace(f"the disk has no room for {nbytes} more bytes, and nothing clean is left to evict")

    def reserve_staging_nowait(self, nbytes: int) -> bool:
        """Reserve room for staging files if there is enough right now."""
        if self._floor_shortage(nbytes) > 0 or not self.ledger.reserve_staging(nbytes):
            return False
        self._free_bytes -= nbytes  # nobody says when they are written: until it is measured again, they are
        return True

    def _floor_shortage(self, nbytes: int) -> int:
        """Return how many bytes the file system lacks for `nbytes` more above the floor; reserved ones count."""
        return self.floor_bytes + self.ledger.reserved_bytes + nbytes - self._free_bytes

    async def _evict_for_staging(
        self,
        nbytes: int,
        reserve: Callable[[], bool],
        give_back: Callable[[], None],
        spare: float | None = None,
    ) -> bool:
        """Evict until `reserve` succeeds; False if eviction frees too little. Who is cancelled gets nothing."""
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
        self,
        nbytes: int,
        reserve: Callable[[], bool],
        is_wanted: Callable[[], bool],
        spare: float | None,
    ) -> bool:
        async with self._lock:
            while is_wanted():
                await self.measure_free_space()
                floor_shortage = self._floor_shortage(nbytes)
                if floor_shortage <= 0 and reserve():
                    return True
                short = max(self.ledger.shortage_bytes(nbytes), floor_shortage, 1)
                share = _EVICT_SHARE if self.hinted_use is None else _EVICT_SHARE_HINTED
                batch = min(_EVICT_BATCH_BYTES, self.ledger.limit_bytes // share)
                if not await self._evict(max(short, batch), spare):
                    return floor_shortage <= 0 and reserve()
            return False

    async def shrink(self) -> None:
        """Evict what the run before cached beyond the limit, which was lowered since."""
        # Before the overhead is measured: what that alone is above the limit is no reason to evict at every start.
        if self.ledger.shortage_bytes(0):
            await self._evict_for_staging(0, lambda: not self.ledger.shortage_bytes(0), lambda: None)

    def clean_limit_bytes(self) -> int:
        """Return how many bytes of cache could lie here now if everything clean were evicted."""
        ledger = self.ledger
        on_disk = ledger.cache_bytes + ledger.reserved_bytes + self._free_bytes - self.floor_bytes
        return max(0, min(ledger.limit_bytes - ledger.staging_bytes - ledger.overhead_bytes, on_disk))

    def usable_bytes(self) -> int:
        """Return how much of the limit may be used, with what is here already, above the file system's floor."""
        ledger = self.ledger
        return max(0, min(ledger.limit_bytes, ledger.total_bytes + self._free_bytes - self.floor_bytes))

    async def measure_free_space(self) -> None:
        """Ask how much is free, and what the index takes; between two calls it is estimated.

        A disk that does not say has no room.
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
        """The file system was found at its floor: nothing is promised before it is measured again."""
        self._free_bytes = 0

    async def _evict(self, need_bytes: int, spare: float | None) -> int:
        """Evict about `need_bytes` of clean blocks; return how much it was. spare: what is read so soon stays."""
        try:
            return await self._evict_rows(need_bytes, spare)
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)
            return 0

    async def _evict_rows(self, need_bytes: int, spare: float | None) -> int:
        async with self._table.rows_lock:
            await self._table.write_rows()
            victims = await self._find_victims(need_bytes, spare)
            if not victims:
                return 0
            gone, deletable = await self._remove_row(victims)
        await self._free(victims, gone, deletable)
        self._counters.evicted_blocks += len(victims)
        self._counters.evicted_bytes += gone.size
        return gone.size

    async def _find_victims(self, need_bytes: int, spare: float | None) -> list[EvictionCandidate]:
        tries: list[float | None] = [spare] * (1 if spare in (None, math.inf) else _SEARCHES)
        if spare is None and self.is_pinned is not None:
            # What is pinned goes too if nothing else is left, as files that are written must have room.
            tries = [*[0.0] * _SEARCHES, None]
        for each in tries:
            victims = await self._victims(need_bytes, each)
            if victims:
                return victims
        return []

    async def _victims(self, need_bytes: int, spare: float | None) -> list[EvictionCandidate]:
        seeks = _SAMPLE_SEEKS
        if self.hinted_use is not None:
            places = CANDIDATES_PER_VICTIM * need_bytes // (BLOCK_BYTES * _SAMPLE_RUN)
            seeks = min(max(places, _SAMPLE_SEEKS_LEAST), _SAMPLE_SEEKS)
        sample = await self._offload.rows(self._index.sample, self._random, seeks, _SAMPLE_RUN)
        candidates = [
            EvictionCandidate(number, block, row.size, row.stamp)
            for number, block, row in sample
            if self._may_evict(number, block)
        ]
        await self._look_at_objects(candidates)
        return choose_victims(
            candidates,
            need_bytes,
            clock=self._table.clock,
            next_use=self._next_use,
            used_no_later_than=spare,
        )

    async def drop(self, blocks: list[tuple[int, int]]) -> int:
        """Evict (file number, block) pairs, but those in use just now or gone; return the bytes freed."""
        return await self._table.run_to_completion(self._drop, blocks, name="cache-drop")

    async def _drop(self, blocks: list[tuple[int, int]]) -> int:
        async with self._lock:
            async with self._table.rows_lock:
                await self._table.write_rows()
                # Somebody else may have evicted some since they were listed.
                there = await self._offload.rows(self._index.sizes, blocks)
                victims = [
                    EvictionCandidate(number, block, size, 0)
                    for (number, block), size in there.items()
                    if self._may_evict(number, block)
                ]
                if not victims:
                    return 0
                gone, deletable = await self._remove_row(victims)
            await self._free(victims, gone, deletable)
        return gone.size

    async def _remove_row(self, victims: list[EvictionCandidate]) -> tuple[Evicted, set[int]]:
        """Take victims out of memory and index, under the rows' lock; return what goes, and files to delete."""
        hidden = [self._hide(victim) for victim in victims]
        self._punching = {(victim.file_number, victim.block) for victim in victims}
        try:
            gone = await self._offload.rows(
                self._index.evict, [(victim.file_number, victim.block) for victim in victims]
            )
        except BaseException:  # or cancelled before it began: the rows are still there
            for victim, mask in zip(victims, hidden, strict=True):
                self._show(victim, mask)
            self._punching = set()
            raise
        return gone, self._forget_emptied(gone)

    async def _free(self, victims: list[EvictionCandidate], gone: Evicted, deletable: set[int]) -> None:
        """Give the bytes of victims back to the disk."""
        try:
            await self._offload.disk(self._free_files, victims, deletable)
        except trio.Cancelled:
            # Stopping: no row names these bytes any more, so that nobody would free them later.
            self._free_files(victims, deletable)
            raise
        finally:
            self._punching = set()
            self.ledger.release_cache(gone.size)

    def _may_evict(self, number: int, block: int) -> bool:
        """Say whether a sampled block is not being read, written, or changed."""
        chunk = self._chunk_in_memory(number, block)
        if chunk is None:
            return True
        local = block % BLOCKS_PER_CHUNK
        return not (chunk.disk_operations or chunk.loading is not None or chunk.dirty >> local & 1)

    def _chunk_in_memory(self, number: int, block: int) -> Chunk | None:
        entry = self._table.by_number.get(number)
        return entry.chunks.get(block // BLOCKS_PER_CHUNK) if entry is not None else None

    def punching_mask(self, chunk: Chunk) -> int:
        """Return the granules of a chunk whose blocks are being evicted right now."""
        mask = 0
        if self._punching:
            first = chunk.index * BLOCKS_PER_CHUNK
            for block in range(BLOCKS_PER_CHUNK):
                if (chunk.owner.number, first + block) in self._punching:
                    mask |= BLOCK_MASK << (block * GRANULES_PER_BLOCK)
        return mask

    def _hide(self, victim: EvictionCandidate) -> int | None:
        """Take a victim out of memory's table; return which granules of its chunk that were, None if unknown."""
        entry = self._table.by_number.get(victim.file_number)
        if entry is None:
            return None
        chunk = entry.chunks.get(victim.block // BLOCKS_PER_CHUNK)
        if chunk is None or not chunk.loaded:
            entry.blocks -= 1
            return None
        local = victim.block % BLOCKS_PER_CHUNK
        mask = chunk.present & BLOCK_MASK << (local * GRANULES_PER_BLOCK)
        dirty = chunk.dirty
        chunk.drop_present(mask)
        chunk.dirty = dirty  # the index is told by the eviction itself
        return mask

    def _show(self, victim: EvictionCandidate, mask: int | None) -> None:
        """Take `_hide` back."""
        entry = self._table.by_number.get(victim.file_number)
        if entry is None:
            return
        chunk = entry.chunks.get(victim.block // BLOCKS_PER_CHUNK)
        if mask is None:
            entry.blocks += 1
        elif chunk is not None:
            dirty = chunk.dirty
            chunk.add_present(mask)
            chunk.dirty = dirty

    def _forget_emptied(self, gone: Evicted) -> set[int]:
        """Return files without a block and without a writer; their objects lose their number."""
        deletable = set()
        for number in gone.emptied:
            entry = self._table.by_number.get(number)
            if entry is not None:
                if entry.blocks or entry.disk_operations:
                    continue
                entry.number = None
                del self._table.by_number[number]
            deletable.add(number)
        return deletable

    def _free_files(self, victims: Iterable[EvictionCandidate], deletable: set[int]) -> None:
        """Run in a thread: delete emptied files, punch the others. A failure leaves bytes behind."""
        holes: dict[int, list[tuple[int, int]]] = {}
        for victim in sorted(victims, key=lambda victim: (victim.file_number, victim.block)):
            if victim.file_number in deletable:
                continue
            file_holes = holes.setdefault(victim.file_number, [])
            offset = victim.block * BLOCK_BYTES
            if file_holes and sum(file_holes[-1]) == offset:
                file_holes[-1] = (file_holes[-1][0], file_holes[-1][1] + BLOCK_BYTES)
            else:
                file_holes.append((offset, BLOCK_BYTES))
        try:
            for number in deletable:
                self._files.delete(number)
            for number, extents in holes.items():
                self._files.punch(number, extents)
        except LocalDiskError as exc:
            self._offload.call_soon(self._table.count_disk_error, exc)

    def count_written(self, nbytes: int) -> None:
        """Bytes were written: the estimate of free space follows until it is measured again."""
        self._free_bytes -= nbytes
