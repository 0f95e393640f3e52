"""Room on the local disk: the ledger, and eviction when it is short.

Used on the loop; calls that may block go through `offload`.

Invariants:
1. Room is reserved on the ledger, and made by eviction, before anything is written.
2. Eviction takes a block out of memory's table and out of the index before its bytes go.
"""

import random
from collections.abc import Callable, Iterable

import trio

from fusecache.disk.cache_files import CacheFiles
from fusecache.engine.cache_statistics import Counters
from fusecache.engine.cache_table import CacheTable
from fusecache.engine.offload import Offload
from fusecache.engine.residents import CachedObject, Chunk
from fusecache.index.cache_index import CacheIndex, Evicted
from fusecache.model.errors import LocalDiskError, NoSpace
from fusecache.model.nouns import BLOCK_BYTES, GRANULES_PER_BLOCK, MIB
from fusecache.policy.eviction import CANDIDATES_PER_VICTIM, Candidate, choose_victims, is_admitted
from fusecache.policy.granules import BLOCK_MASK, BLOCKS_PER_CHUNK
from fusecache.policy.ledger import Ledger

# One eviction frees this much, so that sampling and punching are paid once for many blocks …
_EVICT_BATCH_BYTES = 64 * MIB
# … from this many random places, a few neighbours each: neighbours are one hole to punch.
_SAMPLE_SEEKS = 128
_SAMPLE_RUN = 8


class Room:
    """Grants room to cache blocks and staging files. Cache blocks ask whether they are worth evicting others."""

    def __init__(
        self,
        offload: Offload,
        files: CacheFiles,
        index: CacheIndex,
        table: CacheTable,
        ledger: Ledger,
        counters: Counters,
        *,
        floor_bytes: int,
    ) -> None:
        self._offload = offload
        self._files = files
        self._index = index
        self._table = table
        self._counters = counters
        self._floor_bytes = floor_bytes
        self._free_bytes = files.free_bytes()
        self._room_lock = trio.Lock()
        self._random = random.Random()
        # Blocks whose hole is being punched: a write there now would be lost. At most one eviction's victims.
        self._punching: set[tuple[int, int]] = set()
        self.ledger = ledger
        # What the hints say; nothing until somebody sets it.
        self.next_use: Callable[[CachedObject | None, Candidate], float | None] = lambda entry, candidate: (
            None
        )

    async def reserve_cache(self, nbytes: int) -> bool:
        """Reserve room for cache blocks, evicting others if needed."""
        if self._free_bytes - nbytes >= self._floor_bytes and self.ledger.reserve_cache(nbytes):
            return True
        if not await self._is_admitted():
            self._counters.not_admitted += 1
            return False
        if await self._make_room(nbytes, lambda: self.ledger.reserve_cache(nbytes)):
            return True
        self._counters.uncached += 1
        self._table.tell_once("room", "no room in the cache: reads go on, uncached")
        return False

    async def _is_admitted(self) -> bool:
        """Ask policy whether new blocks are worth the eviction of others."""
        async with self._table.rows_lock:
            sample = await self._offload.rows(self._index.sample, self._random, CANDIDATES_PER_VICTIM, 1)
        candidates = [Candidate(number, block, row.size, row.stamp) for number, block, row in sample]
        return not candidates or is_admitted(
            candidates,
            clock=self._table.clock,
            next_use=self._next_use,
            incoming_use=None,
            chance=self._random.random(),
        )

    def _next_use(self, candidate: Candidate) -> float | None:
        return self.next_use(self._table.by_number.get(candidate.file_number), candidate)

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
        if not await self._make_room(nbytes, lambda: ledger.reserve_staging(nbytes)):
            raise NoSpace(f"the disk has no room for {nbytes} more bytes, and nothing clean is left to evict")

    def reserve_staging_nowait(self, nbytes: int) -> bool:
        """Reserve room for staging files if there is enough right now."""
        return self._free_bytes - nbytes >= self._floor_bytes and self.ledger.reserve_staging(nbytes)

    async def _make_room(self, nbytes: int, reserve: Callable[[], bool]) -> bool:
        """Evict until `reserve` succeeds; False if eviction frees too little, or the caller is gone."""
        wanted = [True]
        try:
            return await self._table.to_its_end(
                self._evict_until, nbytes, lambda: wanted[0] and reserve(), name="cache-eviction"
            )
        finally:
            wanted[0] = False

    async def _evict_until(self, nbytes: int, reserve: Callable[[], bool]) -> bool:
        async with self._room_lock:
            while True:
                await self.measure_free_space()
                floor_shortage = self._floor_bytes + nbytes - self._free_bytes
                if floor_shortage <= 0 and reserve():
                    return True
                short = max(self.ledger.shortage_bytes(nbytes), floor_shortage, 1)
                batch = min(_EVICT_BATCH_BYTES, self.ledger.limit_bytes // 16)
                if not await self._evict(max(short, batch)):
                    return floor_shortage <= 0 and reserve()

    async def measure_free_space(self) -> None:
        """Ask the file system how much is free; between two calls it is estimated."""
        self._free_bytes = await self._offload.disk(self._files.free_bytes)

    async def _evict(self, need_bytes: int) -> int:
        """Evict about `need_bytes` of clean blocks; return how much it was."""
        async with self._table.rows_lock:
            await self._table.write_rows()
            sample = await self._offload.rows(self._index.sample, self._random, _SAMPLE_SEEKS, _SAMPLE_RUN)
            candidates = [
                Candidate(number, block, row.size, row.stamp)
                for number, block, row in sample
                if self._may_evict(number, block)
            ]
            victims = choose_victims(
                candidates,
                need_bytes,
                clock=self._table.clock,
                next_use=self._next_use,
            )
            if not victims:
                return 0
            for victim in victims:
                self._hide(victim)
            self._punching = {(victim.file_number, victim.block) for victim in victims}
            gone = await self._offload.rows(
                self._index.evict, [(victim.file_number, victim.block) for victim in victims]
            )
            deletable = self._forget_emptied(gone)
        try:
            await self._offload.disk(self._free_files, victims, deletable)
        except trio.Cancelled:
            # Stopping: no row names these bytes any more, so that nobody would free them later.
            self._free_files(victims, deletable)
            raise
        finally:
            self._punching = set()
            self.ledger.release_cache(gone.size)
            self._counters.evicted_blocks += len(victims)
            self._counters.evicted_bytes += gone.size
        return gone.size

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

    def _hide(self, victim: Candidate) -> None:
        """Take a victim out of memory's table."""
        entry = self._table.by_number.get(victim.file_number)
        if entry is None:
            return
        chunk = entry.chunks.get(victim.block // BLOCKS_PER_CHUNK)
        if chunk is None or not chunk.loaded:
            entry.blocks -= 1
            return
        local = victim.block % BLOCKS_PER_CHUNK
        mask = BLOCK_MASK << (local * GRANULES_PER_BLOCK)
        dirty = chunk.dirty
        chunk.drop_present(mask)
        chunk.dirty = dirty  # the index is told by the eviction itself

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

    def _free_files(self, victims: Iterable[Candidate], deletable: set[int]) -> None:
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
            self._offload.soon(self._table.count_disk_error, exc)

    def count_written(self, nbytes: int) -> None:
        """Bytes were written: the estimate of free space follows until it is measured again."""
        self._free_bytes -= nbytes
