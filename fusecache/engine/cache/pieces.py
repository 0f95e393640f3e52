"""Holds pieces of cache files for another process, which sends them by itself: `fusecache serve`.

A piece is a part of one object version. It is fetched first if the disk lacks it, and joins fetches in flight. While it
is held, its chunks are neither evicted nor dropped from memory. The caller decides how long.

Invariant: a held piece's file has all its granules. They had the checksums that come with it when they were written.
"""

import math
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from mmap import mmap

import trio

from fusecache.disk.cache_files import CacheFiles
from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.chunks import Buffer, CachedObject, Chunk
from fusecache.engine.cache.evictor import DiskSpace
from fusecache.engine.cache.fetcher import Fetcher
from fusecache.engine.cache.maintenance import CacheMaintenance
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import unwrap_single_error
from fusecache.model.errors import NoSpace, Unavailable
from fusecache.model.objects import GRANULE_BYTES, MIB, Extent, ObjectId
from fusecache.policy.cache.fetch_order import Cause
from fusecache.policy.cache.granules import CHUNK_BYTES, mask_of_bytes, runs, split_by_chunk

# A larger piece costs the daemon fewer requests; all of it must be there before its first byte is sent.
LARGEST_PIECE_BYTES = 64 * MIB
# Of the usable disk space, what may be held at once for other nodes, and as much for programs. Readers and writers need
# the rest. Two shares: a piece for a program may wait for another node, and none for a node may wait for that.
_HELD_SHARE = 8
# A piece that finds no place for so long is refused.
_PLACE_SECONDS = 20.0
# After that another node is told to ask the bucket itself: this one may have a bad link.
_PEER_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A held piece. fd: of the cache file, which the holder closes; extent: aligned to granules, except at the end."""

    fd: int
    extent: Extent
    checksums: bytes


@dataclass(eq=False, repr=False)
class HeldPieces:
    """The pieces that are held now."""

    _offload: Offload
    _files: CacheFiles
    _table: BlockTable
    _disk_space: DiskSpace
    _fetcher: Fetcher
    _maintenance: CacheMaintenance

    def __post_init__(self) -> None:
        # By whether they are for other nodes.
        self.held_bytes = {True: 0, False: 0}
        self.served_bytes = {True: 0, False: 0}
        self._released = trio.Event()

    @asynccontextmanager
    async def hold(
        self,
        object_id: ObjectId,
        size: int,
        extent: Extent,
        *,
        is_doubted: bool = False,
        for_peer: bool = False,
    ) -> AsyncIterator[Piece]:
        """Yield a piece that begins with the granule of `extent.start`, and is held while the body runs.

        It ends at `extent.stop`, or earlier: it has at most LARGEST_PIECE_BYTES, and what the cache can hold.
        is_doubted: read it from the disk first, and fetch damaged granules again. for_peer: as for `Fetcher.request`.
        Raises the error of the fetch; NoSpace if the cache cannot keep it; Unavailable if too much is held.
        """
        extent = await self._cut(extent, size, for_peer=for_peer)
        try:
            entry = self._table.object_entry(object_id, size)
        except ValueError as exc:
            raise Unavailable(f"{object_id.key}: {exc}") from exc
        entry.handles += 1
        entry.sending += 1
        self.held_bytes[for_peer] += extent.size
        try:
            with ExitStack() as held:
                masks = {}
                parts = list(split_by_chunk(extent))
                chunks = await self._table.loaded_chunks(entry, parts[0][0], parts[-1][0] + 1)
                for chunk, (_, start, stop) in zip(chunks, parts, strict=True):
                    held.enter_context(_kept(chunk))
                    masks[chunk] = mask_of_bytes(start, stop)
                if is_doubted:
                    for chunk, mask in masks.items():
                        await self._check(chunk, mask)
                with unwrap_single_error():
                    async with trio.open_nursery() as nursery:
                        for chunk, mask in masks.items():
                            if mask & ~chunk.present:
                                nursery.start_soon(
                                    partial(self._fill, chunk, mask, for_peer=for_peer), name="piece"
                                )
                piece = await self._open(entry, masks, extent)
                self.served_bytes[for_peer] += extent.size
                yield piece
        finally:
            self.held_bytes[for_peer] -= extent.size
            self._released.set()
            self._released = trio.Event()
            entry.sending -= 1
            self._table.close_object(entry)

    async def _cut(self, extent: Extent, size: int, *, for_peer: bool) -> Extent:
        """Return what of a piece may be held, once that is something. Raises Unavailable if that takes too long."""
        start = extent.start - extent.start % GRANULE_BYTES
        with trio.move_on_after(_PLACE_SECONDS):
            while (left := self._left_bytes(for_peer=for_peer)) < CHUNK_BYTES:
                await self._released.wait()
        if left < CHUNK_BYTES:
            raise Unavailable(f"{self.held_bytes[for_peer]} bytes of the cache are being sent: try again")
        stop = -(-extent.stop // GRANULE_BYTES) * GRANULE_BYTES
        # To the end of a chunk, so that no granule is asked for twice.
        last = (start + min(left, LARGEST_PIECE_BYTES)) // CHUNK_BYTES * CHUNK_BYTES
        return Extent(start, min(stop, size, last))

    def _left_bytes(self, *, for_peer: bool) -> int:
        most = max(self._disk_space.usable_bytes() // _HELD_SHARE, CHUNK_BYTES)
        return most - self.held_bytes[for_peer]

    async def _fill(self, chunk: Chunk, mask: int, *, for_peer: bool) -> None:
        with trio.move_on_after(_PEER_SECONDS if for_peer else math.inf) as scope:
            await self._maintenance.fill(
                chunk.owner, chunk.index, mask=mask, cause=Cause.DEMAND, for_peer=for_peer
            )
        if scope.cancelled_caught:
            raise Unavailable(f"{chunk.owner.object_id.key}: the bucket is slow here: ask it yourself")

    async def _check(self, chunk: Chunk, mask: int) -> None:
        """Read granules from the disk: damaged ones count as missing then."""
        buffer = Buffer(memoryview(mmap(-1, CHUNK_BYTES)), small=False)
        for first, stop in runs(mask & chunk.present):
            await self._fetcher.disk.load(chunk, buffer, first, stop)

    async def _open(self, entry: CachedObject, masks: dict[Chunk, int], extent: Extent) -> Piece:
        """Return the piece, whose chunks are kept. Raises NoSpace if it is not on the disk."""
        number = entry.number
        if number is not None and _are_present(masks):
            fd = await self._offload.disk(self._files.open_piece, number)
            # The version may have been forgotten during the open: then the file is of no object.
            if entry.number == number and _are_present(masks):
                checksums = b"".join(
                    chunk.checksums_of(first, stop)
                    for chunk, mask in masks.items()
                    for first, stop in runs(mask)
                )
                return Piece(fd, extent, checksums)
            os.close(fd)
        raise NoSpace(
            f"{entry.object_id.key}: fetched, but not cached: the cache has no space or its disk fails; "
            "see `fusecache status`"
        )


def _are_present(masks: dict[Chunk, int]) -> bool:
    return not any(mask & ~chunk.present for chunk, mask in masks.items())


@contextmanager
def _kept(chunk: Chunk) -> Iterator[None]:
    """Keep a chunk in memory, and its blocks on the disk, while the body runs."""
    chunk.disk_operations += 1
    chunk.owner.disk_operations += 1
    try:
        yield
    finally:
        chunk.disk_operations -= 1
        chunk.owner.disk_operations -= 1
