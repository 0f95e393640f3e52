"""Evicts cached blocks: samples candidates, chooses victims, and removes their rows and bytes.

Invariants:
1. Eviction removes a block from the table in memory and from the index before it removes its bytes.
2. One eviction at a time: callers of `evict` hold `lock`, and `drop` takes it.

Disk space of the cache: reserves it on the ledger, and asks for evictions when it is short.

Used on the trio loop; calls that may block go through `offload`.

Invariant: space is reserved on the ledger, if needed after an eviction, before any byte is written.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

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
    ELSEWHERE,
    EvictionCandidate,
    choose_victims,
    is_admitted,
)
from fusecache.policy.cache.granules import BLOCK_MASK, BLOCKS_PER_CHUNK, CHUNK_BYTES, full_mask, runs
from fusecache.policy.cache.space_ledger import SpaceLedger
from fusecache.policy.name_patterns import PinnedKeys
from fusecache.remote.store import Peers

# Victims are sampled at 128 random places of the index, 8 neighbours each: neighbours are one hole to punch. With
# hints, fewer places are sampled, as less is evicted at a time.
_SAMPLE_SEEKS = 128
_SAMPLE_RUN = 8
_SAMPLE_SEEKS_LEAST = 16
# Next use 0.0 means pinned, or being warmed. What is read now must rank below that.
SOON = 1e-6
# An incoming block with a known next use takes up to 32 samples to find blocks that are read later.
_SEARCHES = 32


class ReadHints(Protocol):
    """The hints of jobs, as far as the cache uses them."""

    def names(self, object_id: ObjectId) -> bool:
        """Return whether a job's plan names this object version."""
        ...

    def next_use(self, object_id: ObjectId, start: int, stop: int) -> float | None:
        """Return in how many seconds bytes [start, stop) of a version are read; None: unknown."""
        ...

    async def read_exactly(
        self, object_id: ObjectId, size: int, start: int, stop: int, *, is_random: bool
    ) -> memoryview | None:
        """Fetch exactly bytes [start, stop), or return None. is_random: the reads of this stream jump."""
        ...

    def on_read(self, object_id: ObjectId, offset: int, nbytes: int, *, has_waited: bool) -> None:
        """Bytes of a version were read. has_waited: whether the reader waited for the bucket."""
        ...


def _use_as_a_whole(entry: CachedObject) -> float | None:
    """Return when an object is read next that is being fetched as a whole, or sent; None for others."""
    if entry.warming:
        return 0.0
    return SOON if entry.is_loading or entry.sending else None


class WarmedFiles:
    """The files that warm-ups under way have fetched."""

    def __init__(self) -> None:
        self._warmed: list[set[int]] = []

    @contextmanager
    def protect(self) -> Iterator[set[int]]:
        """Yield a set: new cache blocks do not evict blocks of the files whose numbers are in it; staging files may."""
        warmed: set[int] = set()
        self._warmed.append(warmed)
        try:
            yield warmed
        finally:
            self._warmed = [other for other in self._warmed if other is not warmed]

    def next_use(self, entry: CachedObject | None, candidate: EvictionCandidate) -> float | None:
        """Return 0.0 for a block that a warm-up under way has fetched, SOON for one of a load; None for others."""
        if entry is not None and (seconds := _use_as_a_whole(entry)) is not None:
            return seconds
        return 0.0 if any(candidate.file_number in warmed for warmed in self._warmed) else None


@dataclass(eq=False, repr=False)
class Evictor:
    """Removes the most useless of the cached blocks.

    pins: None if no object is pinned. peers: None if no other node keeps blocks for this one.
    """

    _offload: Offload
    _files: CacheFiles
    _index: CacheIndex
    _table: BlockTable
    _ledger: SpaceLedger
    _counters: Counters
    _warmed: WarmedFiles
    _pins: PinnedKeys | None
    _peers: Peers | None = None
    _random: random.Random = field(init=False, default_factory=random.Random)
    # Blocks whose hole is being punched: a write there now would be lost. At most the victims of one eviction.
    _punching: set[tuple[int, int]] = field(init=False, default_factory=set)
    _sampled: dict[int, ObjectId] = field(init=False, default_factory=dict)
    _pinned: set[int] = field(init=False, default_factory=set)
    lock: trio.Lock = field(init=False, default_factory=trio.Lock)
    _hints: ReadHints | None = field(init=False, default=None)

    @property
    def has_hints(self) -> bool:
        """Whether jobs say what they read next."""
        return self._hints is not None

    def use_hints(self, hints: ReadHints | None) -> None:
        """Keep the blocks that are read soonest by these hints; None: there are none."""
        self._hints = hints

    async def is_admitted(self) -> bool:
        """Return whether the policy lets new blocks evict others."""
        try:
            async with self._table.rows_lock:
                sample = await self._offload.rows(self._index.sample, self._random, CANDIDATES_PER_VICTIM, 1)
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)
            return False
        candidates = [EvictionCandidate(number, block, row.size, row.stamp) for number, block, row in sample]
        await self._look_up_objects(candidates)
        return not candidates or is_admitted(
            candidates,
            clock=self._table.clock,
            next_use=self._next_use,
            chance=self._random.random(),
        )

    def incoming_use(self, chunk: Chunk, mask: int) -> float | None:
        """Return when granules about to be written are read next; as `_next_use` for cached blocks."""
        if (seconds := _use_as_a_whole(chunk.owner)) is not None:
            return seconds
        start, stop = next(runs(mask))
        base = chunk.index * CHUNK_BYTES
        return self._use_of(chunk.owner.object_id, base + start * GRANULE_BYTES, base + stop * GRANULE_BYTES)

    def _use_of(self, object_id: ObjectId, start: int, stop: int) -> float | None:
        """Return when bytes of one chunk are read next, by hints; ELSEWHERE if another node keeps them."""
        use = None if self._hints is None else self._hints.next_use(object_id, start, stop)
        if (
            use is None
            and self._peers is not None
            and not self._peers.is_own(object_id, start // CHUNK_BYTES)
        ):
            return ELSEWHERE
        return use

    async def evict(self, need_bytes: int, spare: float | None) -> int:
        """Evict about `need_bytes` of clean blocks; return the bytes freed. The caller holds `lock`.

        spare: blocks read as soon as this, or sooner, stay; None: any block may go.
        """
        try:
            return await self._evict_rows(need_bytes, spare)
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)
            return 0

    async def drop(self, blocks: list[tuple[int, int]]) -> int:
        """Evict (file number, block) pairs, except those in use or already gone; return the bytes freed."""
        return await self._table.run_to_completion(self._drop, blocks, name="cache-drop")

    def unwritable_mask(self, chunk: Chunk) -> int:
        """Return the granules of a chunk whose blocks are being evicted right now, or whose file programs read."""
        if chunk.owner.number in self._table.held:
            return full_mask(chunk.size)
        mask = 0
        if self._punching:
            first = chunk.index * BLOCKS_PER_CHUNK
            for block in range(BLOCKS_PER_CHUNK):
                if (chunk.owner.number, first + block) in self._punching:
                    mask |= BLOCK_MASK << (block * GRANULES_PER_BLOCK)
        return mask

    async def _evict_rows(self, need_bytes: int, spare: float | None) -> int:
        async with self._table.rows_lock:
            await self._table.write_rows()
            victims = await self._find_victims(need_bytes, spare)
            if not victims:
                return 0
            gone, deletable = await self._remove_rows(victims)
        await self._free(victims, gone, deletable)
        self._counters.evicted_bytes += gone.size
        return gone.size

    async def _drop(self, blocks: list[tuple[int, int]]) -> int:
        async with self.lock:
            async with self._table.rows_lock:
                await self._table.write_rows()
                # Some may have been evicted since they were listed.
                cached = await self._offload.rows(self._index.sizes, blocks)
                victims = [
                    EvictionCandidate(number, block, size, 0)
                    for (number, block), size in cached.items()
                    if self._may_evict(number, block)
                ]
                if not victims:
                    return 0
                gone, deletable = await self._remove_rows(victims)
            await self._free(victims, gone, deletable)
        return gone.size

    async def _find_victims(self, need_bytes: int, spare: float | None) -> list[EvictionCandidate]:
        tries: list[float | None] = [spare] * (1 if spare in (None, math.inf, ELSEWHERE) else _SEARCHES)
        if spare is None and self._pins is not None:
            # Pinned blocks go too if nothing else is left: files that are written must get space.
            tries = [*[0.0] * _SEARCHES, None]
        for each in tries:
            victims = await self._victims(need_bytes, each)
            if victims:
                return victims
        return []

    async def _victims(self, need_bytes: int, spare: float | None) -> list[EvictionCandidate]:
        seeks = _SAMPLE_SEEKS
        if self._hints is not None:
            places = CANDIDATES_PER_VICTIM * need_bytes // (BLOCK_BYTES * _SAMPLE_RUN)
            seeks = min(max(places, _SAMPLE_SEEKS_LEAST), _SAMPLE_SEEKS)
        sample = await self._offload.rows(self._index.sample, self._random, seeks, _SAMPLE_RUN)
        candidates = [
            EvictionCandidate(number, block, row.size, row.stamp)
            for number, block, row in sample
            if self._may_evict(number, block)
        ]
        await self._look_up_objects(candidates)
        return choose_victims(
            candidates, need_bytes, clock=self._table.clock, next_use=self._next_use, used_no_later_than=spare
        )

    async def _look_up_objects(self, candidates: list[EvictionCandidate]) -> None:
        """If there are pins, hints or peers, look up the objects of a sample and which of them are pinned."""
        if self._pins is None and self._hints is None and self._peers is None:
            return
        numbers = {candidate.file_number for candidate in candidates}
        self._sampled = await self._offload.rows(self._index.objects_of, numbers)
        if self._pins is not None:
            self._pinned = {
                number for number, object_id in self._sampled.items() if object_id.key in self._pins
            }

    def _next_use(self, candidate: EvictionCandidate) -> float | None:
        """Return when a block is read next: 0.0 if pinned or warmed, else by hints; None if unknown."""
        number = candidate.file_number
        if number in self._pinned:
            return 0.0
        entry = self._table.by_number.get(number)
        use = self._warmed.next_use(entry, candidate)
        if use is not None:
            return use
        object_id = entry.object_id if entry is not None else self._sampled.get(number)
        if object_id is None:
            return None
        start = candidate.block * BLOCK_BYTES
        return self._use_of(object_id, start, start + BLOCK_BYTES)

    def _may_evict(self, number: int, block: int) -> bool:
        """Return whether a sampled block is not being read, written, or changed, and its file is not held."""
        if number in self._table.held:
            return False
        chunk = self._chunk_in_memory(number, block)
        if chunk is None:
            return True
        local = block % BLOCKS_PER_CHUNK
        return not (chunk.disk_operations or chunk.loading is not None or chunk.dirty >> local & 1)

    def _chunk_in_memory(self, number: int, block: int) -> Chunk | None:
        entry = self._table.by_number.get(number)
        return entry.chunks.get(block // BLOCKS_PER_CHUNK) if entry is not None else None

    async def _remove_rows(self, victims: list[EvictionCandidate]) -> tuple[Evicted, set[int]]:
        """Remove victims from memory and index, under the rows' lock. Return what was removed, and files to delete."""
        hidden = [self._hide(victim) for victim in victims]
        self._punching = {(victim.file_number, victim.block) for victim in victims}
        try:
            gone = await self._offload.rows(
                self._index.evict, [(victim.file_number, victim.block) for victim in victims]
            )
        except BaseException:  # also if cancelled before it began: the rows are still there
            for victim, mask in zip(victims, hidden, strict=True):
                self._show(victim, mask)
            self._punching = set()
            raise
        return gone, self._forget_emptied(gone)

    def _hide(self, victim: EvictionCandidate) -> int | None:
        """Remove a victim from the table in memory. Return its granules, None if its chunk is not loaded."""
        self._table.intact.pop(victim.file_number, None)
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
        chunk.dirty = dirty  # the eviction removes the rows from the index itself
        return mask

    def _show(self, victim: EvictionCandidate, mask: int | None) -> None:
        """Undo `_hide`."""
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
        """Return the files without a block and without a writer. Their objects lose their file number."""
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

    async def _free(self, victims: list[EvictionCandidate], gone: Evicted, deletable: set[int]) -> None:
        """Delete or punch the bytes of victims on disk."""
        try:
            await self._offload.disk(self._free_files, victims, deletable)
        except trio.Cancelled:
            # The daemon stops: no row names these bytes any more, so they would never be freed later.
            self._free_files(victims, deletable)
            raise
        finally:
            self._punching = set()
            self._ledger.release_cache(gone.size)

    def _free_files(self, victims: Iterable[EvictionCandidate], deletable: set[int]) -> None:
        """Run in a thread: delete emptied files and punch holes in the others. A failure leaves bytes on disk."""
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

    async def reserve_staging(self, nbytes: int) -> None:
        """Reserve space for staging files, evicting clean blocks if needed. Raises NoSpace."""
        if self.reserve_staging_nowait(nbytes):
            return
        ledger = self.ledger
        if nbytes > (left := ledger.staging_left()):
            raise NoSpace(
                f"files waiting to upload would take {ledger.staging_bytes + nbytes} bytes of at most "
                f"{ledger.staging_bytes + left}: wait for uploads, or raise --cache-size"
            )
        reserve, give_back = (
            partial(self.reserve_staging_nowait, nbytes),
            partial(ledger.release_staging, nbytes),
        )
        if not await self._evict_and_reserve(nbytes, reserve, give_back):
            raise NoSpace(
                f"the cache has no space for {nbytes} more bytes, and nothing clean is left to evict: "
                "wait for uploads, free disk space, or raise --cache-size"
            )

    def writable_bytes(self) -> int:
        """Return how many bytes new writes may take if all clean blocks are evicted for them."""
        return self.ledger.writable_bytes(self.clean_limit_bytes())

    def reserve_staging_nowait(self, nbytes: int) -> bool:
        """Reserve space for staging files if there is enough now; evicts nothing."""
        if self._floor_shortage(nbytes) > 0 or not self.ledger.reserve_staging(nbytes):
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
