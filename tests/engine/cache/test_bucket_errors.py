"""What readers see when the bucket fails, under a virtual clock."""

from pathlib import Path

import pytest
import trio

from fusecache.engine.cache.block_cache import CacheOptions
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.model.errors import AccessDenied, ObjectChanged, Throttled, Unavailable
from fusecache.model.objects import KIB, MIB, Extent
from tests.support.block_caches import bucket_of_one, new_bucket, running_cache, some_bytes
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload


async def test_a_failure_that_passes_is_not_seen_by_the_reader(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(MIB)
    store = FaultyStore(bucket.watched, Fault(Unavailable("reset"), times=3))  # type: ignore[arg-type]
    async with running_cache(store, tmp_path, threads=False) as cache:
        assert await cache.read(cache.open(object_id, MIB), 0, MIB) == data
        assert cache.statistics().errors == 3
    assert trio.current_time() >= 1


async def test_a_retry_asks_only_for_what_has_not_come(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(MIB)
    broken = Fault(Unavailable("short body"), deliver_bytes=300 * KIB)
    store = FaultyStore(bucket.watched, broken)  # type: ignore[arg-type]
    async with running_cache(store, tmp_path, threads=False) as cache:
        assert await cache.read(cache.open(object_id, MIB), 0, MIB) == data
    # The first extent is what the broken body delivered: four whole granules and a bit.
    assert [extent.start for extent in bucket.watched.extents] == [0, 256 * KIB]


async def test_an_outage_is_an_error_after_a_minute_not_before(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id = bucket.put("a", some_bytes(MIB))
    store = FaultyStore(bucket.watched, Fault(Unavailable("down"), times=None))  # type: ignore[arg-type]
    async with running_cache(store, tmp_path, threads=False) as cache:
        began = trio.current_time()
        with pytest.raises(Unavailable, match="down"):
            await cache.read(cache.open(object_id, MIB), 0, 10)
        assert 55 <= trio.current_time() - began <= 65
        store.heal()
        assert len(await cache.read(cache.open(object_id, MIB), 0, 10)) == 10


async def test_refused_credentials_are_an_error_after_a_few_tries(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id = bucket.put("a", some_bytes(MIB))
    store = FaultyStore(bucket.watched, Fault(AccessDenied("403"), times=None))  # type: ignore[arg-type]
    async with running_cache(store, tmp_path, threads=False) as cache:
        with pytest.raises(AccessDenied):
            await cache.read(cache.open(object_id, MIB), 0, 10)
    assert len(store.calls("get_into")) == 4
    assert trio.current_time() < 20


async def test_errors_of_read_ahead_never_reach_readers(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(40 * MIB)
    refused: list[Extent] = []

    def refuse_all_but_the_first_chunk(extent: Extent, received: int) -> None:
        if extent.start >= 8 * MIB:
            refused.append(extent)
            raise ObjectChanged("odd")

    bucket.watched.on_progress = refuse_all_but_the_first_chunk
    async with running_cache(bucket.watched, tmp_path, threads=False) as cache:
        handle = cache.open(object_id, len(data))
        for offset in range(0, 8 * MIB, MIB):
            assert await cache.read(handle, offset, MIB) == data[offset : offset + MIB]
        await trio.sleep(1)
        assert refused
        bucket.watched.on_progress = lambda extent, received: None
        for offset in range(8 * MIB, 40 * MIB, MIB):
            assert await cache.read(handle, offset, MIB) == data[offset : offset + MIB]


async def test_throttling_slows_the_whole_client_down(tmp_path: Path) -> None:
    bucket = new_bucket()
    objects = [bucket.put(f"o{n}", some_bytes(KIB, seed=n)) for n in range(20)]
    store = FaultyStore(bucket.watched, Fault(Throttled("429"), times=25))  # type: ignore[arg-type]
    async with running_cache(store, tmp_path, threads=False) as cache, trio.open_nursery() as nursery:
        for object_id in objects:
            nursery.start_soon(cache.read, cache.open(object_id, KIB), 0, KIB)
    assert len(store.calls("get_into")) == 45
    assert cache.request_limit.limit < CacheOptions(tmp_path, 1).connections


def throttled(retry_after_seconds: float) -> Throttled:
    error = Throttled("429")
    error.retry_after_seconds = retry_after_seconds
    return error


async def test_a_bucket_that_says_for_how_long_is_asked_nothing_until_then(tmp_path: Path) -> None:
    bucket = new_bucket()
    objects = [bucket.put(f"o{n}", some_bytes(KIB, seed=n)) for n in range(3)]
    store = FaultyStore(bucket.watched, Fault(throttled(20.0)))  # type: ignore[arg-type]
    async with running_cache(store, tmp_path, threads=False) as cache, trio.open_nursery() as nursery:
        nursery.start_soon(cache.read, cache.open(objects[0], KIB), 0, KIB)
        await trio.sleep(0.1)
        for object_id in objects[1:]:
            nursery.start_soon(cache.read, cache.open(object_id, KIB), 0, KIB)
        await trio.sleep(19)
        assert len(store.calls("get_into")) == 1
        await trio.sleep(1)
        assert len(store.calls("get_into")) == 4


async def test_names_and_reads_slow_down_together(tmp_path: Path) -> None:
    bucket = new_bucket()
    object_id = bucket.put("a", some_bytes(KIB))
    store = FaultyStore(bucket.memory, Fault(throttled(20.0), "head"), Fault(throttled(30.0), "get_into"))
    async with running_cache(store, tmp_path, threads=False) as cache:
        requests = MetadataClient(store, InlineOffload(), cache.request_limit)
        most = cache.request_limit.limit
        await requests.call(store.head, "a")
        assert trio.current_time() >= 20
        assert cache.request_limit.limit <= most // 2 + 1
        await cache.read(cache.open(object_id, KIB), 0, KIB)
        assert cache.request_limit.limit <= most // 4 + 2
        now = trio.current_time()
        assert now >= 50
        await requests.call(store.head, "a")
        assert trio.current_time() == now
