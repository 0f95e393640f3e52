"""Requests that go silent are begun again on another connection; the real store on the test server."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import trio

from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
from fusecache.engine.cache.chunks import Fetch
from fusecache.engine.cache.fetcher import LOOK_SECONDS, FetchTasks
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.objects import GRANULE_BYTES, KIB, MIB, ObjectId
from fusecache.policy.cache.stall_timeout import FEWEST_WAITS, FLOOR_SECONDS
from fusecache.remote.endpoints import Credentials, Endpoint, Transport
from fusecache.remote.s3.store import S3Store
from tests.s3server import Fault, FaultAction, S3Server
from tests.support.block_caches import read_all, some_bytes, until

pytestmark = pytest.mark.real_time

# What the server stays silent for, and the store's own time-out: a test that takes as long has failed.
SILENT_SECONDS = 50.0
IN_TIME_SECONDS = 25.0


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server of the test's own: its end is the end of every silence."""
    with S3Server() as made:
        made.control.set_rules(write_interval_seconds=0.0)
        yield made


@asynccontextmanager
async def cache_on(
    server: S3Server, directory: Path, *, connections: int = 8, reads_before: int = FEWEST_WAITS
) -> AsyncIterator[BlockCache]:
    """A cache that has read enough to know how fast the server is."""
    store = S3Store(
        server.bucket,
        Endpoint(server.endpoint_url, "auto", is_r2=True),
        credentials=Credentials(server.access_key, server.secret_key),
        transport=Transport(read_timeout_seconds=SILENT_SECONDS),
    )
    options = CacheOptions(
        directory, 1 << 30, buffer_bytes=40 * MIB, connections=connections, free_space_floor_bytes=0
    )
    supervisor = Supervisor()
    offload = Offload(supervisor, network_threads=16, upload_threads=1)
    cache = BlockCache(store, offload, options, supervisor)
    with closing(store):
        async with trio.open_nursery() as nursery:
            await nursery.start(cache.run)
            for number in range(reads_before):
                etag = server.control.put(f"first-{number}", b"some bytes")
                await read_all(cache, ObjectId(f"first-{number}", etag), 10)
            server.control.clear_log()
            yield cache
            server.control.clear_faults()
            nursery.cancel_scope.cancel()


def silence(key: str, *, times: int = 1, after_bytes: int = 0) -> Fault:
    """The answer to a GET stops for a long while."""
    return Fault(
        FaultAction.STALL,
        operation="GetObject",
        key=key,
        times=times,
        after_bytes=after_bytes,
        seconds=SILENT_SECONDS,
    )


async def test_a_body_that_stops_is_continued_on_another_connection(server: S3Server, tmp_path: Path) -> None:
    data = some_bytes(6 * MIB)
    object_id = ObjectId("a", server.control.put("a", data))
    async with cache_on(server, tmp_path) as cache:
        server.control.faults(silence("a", after_bytes=700 * KIB))
        with trio.fail_after(IN_TIME_SECONDS):
            assert await read_all(cache, object_id, len(data)) == data
        assert cache.statistics().stalls == 1
        stalled, rest, *_ = server.control.log("GetObject", "a")
        assert stalled.range == "bytes=0-1048575"
        assert rest.range is not None
        start = int(rest.range.removeprefix("bytes=").partition("-")[0])
        # What had come was kept, but for the granule that was not whole.
        assert 256 * KIB <= start <= 700 * KIB
        assert start % GRANULE_BYTES == 0
        assert rest.connection != stalled.connection


@pytest.mark.parametrize("reads_before", [0, FEWEST_WAITS])
async def test_an_answer_that_does_not_begin_is_asked_for_again(
    server: S3Server, tmp_path: Path, reads_before: int
) -> None:
    """Also the first of a mount."""
    object_id = ObjectId("a", server.control.put("a", b"bytes"))
    async with cache_on(server, tmp_path, reads_before=reads_before) as cache:
        server.control.faults(Fault(FaultAction.HOLD, operation="GetObject", key="a", times=1))
        with trio.fail_after(IN_TIME_SECONDS):
            assert await read_all(cache, object_id, 5) == b"bytes"
        assert cache.statistics().stalls == 1


async def test_a_pause_of_the_whole_machine_is_no_stall(server: S3Server, tmp_path: Path) -> None:
    object_id = ObjectId("a", server.control.put("a", b"bytes"))
    async with cache_on(server, tmp_path) as cache, trio.open_nursery() as nursery:
        server.control.faults(Fault(FaultAction.HOLD, operation="GetObject", key="a"))
        nursery.start_soon(read_all, cache, object_id, 5)
        await until(lambda: server.control.log("GetObject", "a") != [])
        await trio.sleep(3 * LOOK_SECONDS)  # it has been seen under way
        time.sleep(FLOOR_SECONDS + 0.5)  # noqa: ASYNC251  # the loop stands still
        await trio.sleep(3 * LOOK_SECONDS)  # it has been looked at since
        server.control.clear_faults()
    assert cache.statistics().stalls == 0
    assert len(server.control.log("GetObject", "a")) == 1


async def test_a_reader_behind_stalled_requests_goes_on(server: S3Server, tmp_path: Path) -> None:
    stalled = [ObjectId(f"stalled-{n}", server.control.put(f"stalled-{n}", b"bytes")) for n in range(2)]
    other = ObjectId("other", server.control.put("other", b"other bytes"))
    async with cache_on(server, tmp_path, connections=2) as cache, trio.open_nursery() as nursery:
        server.control.faults(silence("stalled-*", times=2))
        for object_id in stalled:
            nursery.start_soon(read_all, cache, object_id, 5)
        with trio.fail_after(IN_TIME_SECONDS):
            await until(lambda: len(server.control.log("GetObject")) == 2)
            assert await read_all(cache, other, 11) == b"other bytes"


async def test_a_body_that_breaks_off_is_continued_without_a_pause(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    pause_and_go_on = FetchTasks._requeue_after

    async def noting(tasks: FetchTasks, request: Fetch, seconds: float) -> None:
        pauses.append(seconds)
        await pause_and_go_on(tasks, request, seconds)

    monkeypatch.setattr(FetchTasks, "_requeue_after", noting)
    data = some_bytes(MIB)
    object_id = ObjectId("a", server.control.put("a", data))
    async with cache_on(server, tmp_path) as cache:
        server.control.faults(
            Fault(FaultAction.SHORT_BODY, operation="GetObject", key="a", times=3, after_bytes=100 * KIB)
        )
        assert await read_all(cache, object_id, len(data)) == data
        asked = server.control.log("GetObject", "a")
        assert [entry.range for entry in asked] == [
            f"bytes={start}-1048575" for start in range(0, 4 * GRANULE_BYTES, GRANULE_BYTES)
        ]
        assert cache.statistics().stalls == 0
        assert not pauses


async def test_a_slow_but_steady_body_is_left_alone(server: S3Server, tmp_path: Path) -> None:
    data = some_bytes(MIB)
    object_id = ObjectId("a", server.control.put("a", data))
    async with cache_on(server, tmp_path) as cache:
        server.control.set(bandwidth=300_000)
        try:
            assert await read_all(cache, object_id, len(data)) == data
        finally:
            server.control.set(bandwidth=None)
        assert cache.statistics().stalls == 0
        assert len(server.control.log("GetObject", "a")) == 1
