"""Fetches from other nodes. No node delivers the bytes, or a third node asks for the same bytes."""

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
from fusecache.engine.cache.chunks import FetchSource
from fusecache.engine.cache.fetcher import ACCESS_DENIED_RETRIES
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.errors import AccessDenied, Unavailable
from fusecache.model.objects import KIB, MIB, Extent, ObjectId
from fusecache.policy.cache.granules import CHUNK_BYTES
from tests.support.block_caches import bucket_of_one, read_all, until
from tests.support.inline_offload import InlineOffload

SIZE = 2 * CHUNK_BYTES


class DeadNodes:
    """Other nodes, none of which delivers."""

    def owner(self, object_id: ObjectId, group: int) -> str | None:
        """Return a node."""
        return "node"

    def is_own(self, object_id: ObjectId, group: int) -> bool:
        """All groups are of other nodes."""
        return False

    def on_bucket_body(self, nbytes: int, seconds: float) -> None:
        """Nothing is compared."""

    def get_into(self, *asked: Any) -> None:
        """Fail."""
        raise Unavailable("no answer")


async def test_new_token_has_its_time_after_nodes_that_failed(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(MIB)
    denials, send = [AccessDenied("not yet")] * ACCESS_DENIED_RETRIES, bucket.watched.get_into

    class Denying:
        """A bucket whose servers learn of the token one after the other."""

        def get_into(self, *asked: Any) -> None:
            """Refuse the first requests."""
            if denials:
                raise denials.pop()
            send(*asked)

    supervisor = Supervisor()
    options = CacheOptions(tmp_path, 1 << 30, buffer_bytes=64 * MIB, free_space_floor_bytes=0)
    cache = BlockCache(Denying(), InlineOffload(), options, supervisor, peers=DeadNodes())  # type: ignore[arg-type]  # any store
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        assert await read_all(cache, object_id, MIB) == data
        nursery.cancel_scope.cancel()
    assert not denials


class OutOfReach:
    """A bucket that no request reaches. asked: how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def get_into(self, *_: Any) -> None:
        """Fail."""
        self.asked += 1
        raise Unavailable("no answer")


class HeldNode(DeadNodes):
    """A node that sends `first` bytes, and the rest once `may_go_on` is set. asked: how often it was asked."""

    def __init__(self, data: bytes, first: int) -> None:
        self._data, self._first = data, first
        self.asked, self.may_go_on = 0, threading.Event()

    def get_into(self, *asked: Any) -> None:
        """Send, unless the fetch is interrupted."""
        _, _, _, extent, buffer, progress, interruption = asked
        buffer[:] = self._data[extent.start : extent.stop]
        progress(self._first)
        self.asked += 1
        is_interrupted = threading.Event()
        with interruption.by(is_interrupted.set):
            while not self.may_go_on.wait(0.001):
                if is_interrupted.is_set():
                    raise Unavailable("interrupted")
        progress(extent.size)


@dataclass(eq=False)
class Reading:
    """A node that reads an object from another one, and whose own bucket is out of reach."""

    cache: BlockCache
    bucket: OutOfReach
    object_id: ObjectId
    nursery: trio.Nursery
    found: list[bytes]

    async def third(self) -> bytes:
        """Ask for the first MiB, as a third node does."""
        async with self.cache.pieces.hold(self.object_id, SIZE, Extent(0, MIB), for_peer=True) as piece:
            data = os.pread(piece.fd, MIB, 0)
            os.close(piece.fd)
            return data


@asynccontextmanager
async def reading(folder: Path, node: HeldNode, object_id: ObjectId) -> AsyncIterator[Reading]:
    """Begin to read the first MiB."""
    supervisor, bucket = Supervisor(), OutOfReach()
    options = CacheOptions(folder, 1 << 30, buffer_bytes=64 * MIB, free_space_floor_bytes=0)
    offload = Offload(supervisor, network_threads=32, upload_threads=4)
    cache = BlockCache(bucket, offload, options, supervisor, peers=node)  # type: ignore[arg-type]  # any store
    found: list[bytes] = []

    async def read() -> None:
        handle = cache.open(object_id, SIZE)
        found.append(bytes(await cache.read(handle, 0, MIB)))
        cache.close(handle)

    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        nursery.start_soon(read)
        await until(lambda: node.asked == 1)
        try:
            yield Reading(cache, bucket, object_id, nursery, found)
        finally:
            node.may_go_on.set()
        await until(lambda: bool(found))
        nursery.cancel_scope.cancel()


@pytest.mark.real_time
async def test_what_a_node_sends_goes_on_though_a_third_one_waits_for_it(tmp_path: Path) -> None:
    _, object_id, data = bucket_of_one(SIZE)
    node, third = HeldNode(data, MIB // 2), list[bytes]()
    async with reading(tmp_path, node, object_id) as here:

        async def ask() -> None:
            third.append(await here.third())

        here.nursery.start_soon(ask)
        (chunk,) = here.cache._table.objects[object_id].chunks.values()
        await until(lambda: chunk.fetches[0].is_for_peer)
        node.may_go_on.set()
        await until(lambda: bool(third))
    assert (here.found, third) == ([data[:MIB]], [data[:MIB]])
    assert (node.asked, here.bucket.asked) == (1, 0)


class BusyNode(HeldNode):
    """A node that keeps large bodies back, and sends small ones at once."""

    def get_into(self, *asked: Any) -> None:
        """Send what is small."""
        extent, buffer, progress = asked[3], asked[4], asked[5]
        if extent.size > 128 * KIB:
            super().get_into(*asked)
            return
        buffer[:] = self._data[extent.start : extent.stop]
        progress(extent.size)


@pytest.mark.real_time
async def test_small_read_does_not_wait_for_large_ones(tmp_path: Path) -> None:
    """With little memory few large bodies are asked for at once; they keep no small one waiting."""
    size = 8 * CHUNK_BYTES
    _, object_id, data = bucket_of_one(size)
    node, supervisor = BusyNode(data, 0), Supervisor()
    options = CacheOptions(tmp_path, 1 << 30, buffer_bytes=40 * MIB, free_space_floor_bytes=0)
    offload = Offload(supervisor, network_threads=32, upload_threads=4)
    cache = BlockCache(OutOfReach(), offload, options, supervisor, peers=node)  # type: ignore[arg-type]  # any store

    async def read(offset: int, length: int) -> None:
        handle = cache.open(object_id, size)
        assert bytes(await cache.read(handle, offset, length)) == data[offset : offset + length]
        cache.close(handle)

    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        try:
            for index in range(4):
                nursery.start_soon(read, index * CHUNK_BYTES, MIB)
            await until(
                lambda: bool(node.asked) and any(cache._fetcher._queues[FetchSource.PEER, False].queued)
            )
            with trio.fail_after(10):
                await read(7 * CHUNK_BYTES, 64 * KIB)
        finally:
            node.may_go_on.set()
        nursery.cancel_scope.cancel()
