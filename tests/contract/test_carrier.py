"""Bodies that a mover fetches, and buffers that it stores, beside a real server: the same bytes and the same errors."""

import os
import pickle
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from fusecache.disk.cache_files import CacheFiles, granule_checksums
from fusecache.disk.direct_reads import LARGE_BYTES, AlignedBuffers
from fusecache.fuse import mover
from fusecache.fuse.movers import _Mover
from fusecache.model.errors import (
    AccessDenied,
    ObjectChanged,
    ObjectMissing,
    RemoteError,
    Unavailable,
    Untrusted,
)
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.movers.carrier import IDLE_MAX, Carrier
from fusecache.movers.orders import DONE, ORDER_BYTES, POOLS_MAX, InterruptOrder, Orders, StoreOrder, packed
from fusecache.remote.endpoints import Credentials, Endpoint, Transport
from fusecache.remote.http.connection_pool import Peer
from fusecache.remote.http.peers import PeerNodes
from fusecache.remote.http.ranged_get import ReceiverEnded
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import Interruption
from tests.mount.bad_peer import FULL, GONE, GOOD, HALF, LONG, MODES, TRICKLE, bad_peer
from tests.s3server import S3Server
from tests.s3server.ports import reserve

DATA = os.urandom(5 * MIB + 12_345)
KEY = "folder/object"


class Carried:
    """A mover that takes orders, its buffers, and a store that has its bodies fetched there."""

    def __init__(self, server: S3Server, keys: Credentials | None = None) -> None:
        self.buffers = AlignedBuffers(32 * MIB, is_shared=True)
        self.carrier = Carrier()
        self.carrier.attach(self.buffers.offset_of)
        with open(os.devnull, "rb") as device:
            self.mover = _Mover(device.fileno(), self.buffers.fd)
        self.store = S3Store(
            server.bucket,
            Endpoint(server.endpoint_url, "auto"),
            credentials=keys or Credentials(server.access_key, server.secret_key),
            transport=Transport(carry=self.carrier.fetch),
        )
        self.fetched: list[int] = []

    async def ready(self) -> "Carried":
        told: set[bytes] = set()
        with trio.fail_after(20):
            while {mover.READY, mover.TAKES_ORDERS} - told:
                await trio.lowlevel.wait_readable(self.mover.socket)
                told.add(self.mover.socket.recv(64))
        self.line = self.carrier.add(self.mover.orders)
        return self

    def get(
        self, object_id: ObjectId, extent: Extent, at: int = 0, ended: Interruption | None = None
    ) -> bytes:
        target = self.buffers.large[1][at : at + extent.size]
        self.store.get_into(object_id, extent, target, self.fetched.append, ended)
        return bytes(target)

    async def fetch(self, *arguments: object) -> bytes:
        return await trio.to_thread.run_sync(partial(self.get, *arguments))

    def close(self) -> None:
        self.carrier.remove(self.line)
        self.mover.socket.close()
        self.mover.close()
        self.store.close()
        self.buffers.close()


@asynccontextmanager
async def carried(server: S3Server, keys: Credentials | None = None) -> AsyncIterator[Carried]:
    made = Carried(server, keys)
    try:
        yield await made.ready()
    finally:
        made.close()


def connections_of(pid: int) -> int:
    """Return how many sockets to a server a process has."""
    inodes = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(f"socket:[{row[9]}]" in inodes for row in rows)


def unix_sockets_of(pid: int) -> int:
    """Return how many sockets to processes of this machine a process has."""
    sockets = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # of this process: what it has just looked with
            sockets.add(os.readlink(each))
    rows = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    return sum(f"socket:[{row.split()[6]}]" in sockets for row in rows)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_mover_fetches_the_same_bytes_on_connections_of_its_own(
    tls: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with S3Server(tls=tls) as server:
        if tls:
            monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca_path))
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            for extent in (
                Extent(0, len(DATA)),
                Extent(1, 2),
                Extent(70_000, 3 * MIB),
                Extent(len(DATA) - 1, len(DATA)),
            ):
                one.fetched.clear()
                assert await one.fetch(object_id, extent, 4096) == DATA[extent.start : extent.stop]
                assert one.fetched[-1] == extent.size
                assert one.fetched == sorted(one.fetched)
            assert one.store.statistics().gets == 4
            assert one.line.busy == 0
            if os.geteuid() == 0:
                assert connections_of(one.mover.process.pid) == 1


async def test_a_carried_fetch_leaves_the_connections_of_the_daemon_to_other_requests() -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            (idle,) = one.store._http._route.pool._idle
            # 80 s
            server.control.set(bandwidth=64 * 1024)
            ended = Interruption()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(interrupted, one, object_id, ended)
                with trio.fail_after(40):
                    while not one.fetched:  # noqa: ASYNC110  # a thread sends no event
                        await trio.sleep(0.01)
                await trio.to_thread.run_sync(one.store.head, KEY)
                assert one.store._http._route.pool._idle == [idle]
                ended.interrupt()


async def interrupted(one: Carried, object_id: ObjectId, ended: Interruption) -> None:
    with pytest.raises(Unavailable):
        await one.fetch(object_id, Extent(0, len(DATA)), 0, ended)


async def test_an_interrupt_that_finds_the_way_to_the_mover_full_comes_later() -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            # 80 s
            server.control.set(bandwidth=64 * 1024)
            ended = Interruption()
            with trio.fail_after(40):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(interrupted, one, object_id, ended)
                    while not one.fetched:  # noqa: ASYNC110  # as above
                        await trio.sleep(0.01)
                    one.mover.process.send_signal(signal.SIGSTOP)
                    with suppress(BlockingIOError):
                        while True:
                            one.line.socket.send(packed(InterruptOrder(0)), socket.MSG_DONTWAIT)
                    ended.interrupt()
                    one.mover.process.send_signal(signal.SIGCONT)


async def test_errors_of_the_bucket_are_those_of_a_fetch_by_the_daemon() -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            with pytest.raises(ObjectMissing):
                await one.fetch(ObjectId("no-such-key", object_id.etag), Extent(0, 10))
            with pytest.raises(ObjectChanged):
                await one.fetch(ObjectId(KEY, "0" * 32), Extent(0, 10))
            assert await one.fetch(object_id, Extent(0, 10)) == DATA[:10]
        async with carried(server, Credentials(server.access_key, "wrong")) as one:
            with pytest.raises(AccessDenied) as refused:
                await one.fetch(object_id, Extent(0, 10))
            assert refused.value.status == 403


async def test_a_certificate_that_a_mover_does_not_trust_is_named_as_by_the_daemon() -> None:
    with S3Server(tls=True) as server:
        async with carried(server) as one:
            with pytest.raises(Untrusted):
                await one.fetch(ObjectId(KEY, "0" * 32), Extent(0, 10))


async def test_what_a_mover_without_the_trusted_certificates_does_not_do_is_done_by_the_daemon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are replaced on the disk just now; the daemon has read them at its start."""
    trusted = tmp_path / "ca.pem"
    with S3Server(tls=True) as server:
        shutil.copy(server.ca_path, trusted)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(trusted))
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            trusted.unlink()
            assert await one.fetch(object_id, Extent(0, len(DATA))) == DATA
            shutil.copy(server.ca_path, trusted)
            assert await one.fetch(object_id, Extent(0, len(DATA))) == DATA
            if os.geteuid() == 0:
                assert connections_of(one.mover.process.pid) == 1


async def test_a_fetch_that_is_interrupted_ends_at_once_and_leaves_its_buffer_alone() -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            server.control.set(bandwidth=MIB)
            ended = Interruption()

            def interrupt() -> None:
                while not one.fetched:
                    time.sleep(0.01)
                ended.interrupt()

            threading.Thread(target=interrupt).start()
            began = time.monotonic()
            with pytest.raises(Unavailable):
                await one.fetch(object_id, Extent(0, len(DATA)), 0, ended)
            assert time.monotonic() - began < 3
            before = bytes(one.buffers.large[1])
            await trio.sleep(0.5)
            assert bytes(one.buffers.large[1]) == before
            assert before[: one.fetched[-1]] == DATA[: one.fetched[-1]]


async def test_a_mover_that_dies_within_a_fetch_is_a_lost_connection() -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            server.control.set(bandwidth=MIB)

            def kill() -> None:
                while not one.fetched:
                    time.sleep(0.01)
                one.mover.kill()

            threading.Thread(target=kill).start()
            with pytest.raises(Unavailable, match="ended"):
                await one.fetch(object_id, Extent(0, len(DATA)))
            server.control.set(bandwidth=None)
            # The next one finds no mover, and the daemon does it.
            assert await one.fetch(object_id, Extent(0, 1000)) == DATA[:1000]


async def stored(one: Carried, files: CacheFiles, number: int, size: int) -> bytes:
    return await trio.to_thread.run_sync(files.store, number, 2 * MIB, one.buffers.large[0], size)


async def test_a_mover_stores_buffers_with_their_checksums(tmp_path: Path) -> None:
    with S3Server() as server:
        async with carried(server) as one:
            one.buffers.large[0][: len(DATA)] = DATA
            asked: list[int] = []
            carry = one.carrier.store

            def counted(*arguments: object) -> bytes | None:
                answer = carry(*arguments)  # type: ignore[arg-type]
                asked.append(answer is not None)
                return answer

            files = CacheFiles(tmp_path / "files", counted)
            for number, size in enumerate((len(DATA), 100, LARGE_BYTES), 1):
                memory = one.buffers.large[0][:size]
                assert await stored(one, files, number, size) == granule_checksums(memory)
                path = tmp_path / "files" / f"{number:02x}" / f"{number:x}"
                assert path.read_bytes()[2 * MIB :][:size] == bytes(memory)
            assert asked == [True] * 3
            one.mover.kill()
            one.mover.process.wait()
            assert await stored(one, files, 9, len(DATA)) == granule_checksums(
                one.buffers.large[0][: len(DATA)]
            )
            assert asked[3:] == [False]


def stop(pid: int) -> None:
    """Stop a process; return when all its threads stand."""
    os.kill(pid, signal.SIGSTOP)
    for task in Path(f"/proc/{pid}/task").iterdir():
        while (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)


async def test_a_buffer_that_a_mover_had_when_it_died_is_stored_by_the_daemon(tmp_path: Path) -> None:
    with S3Server() as server:
        async with carried(server) as one:
            one.buffers.large[0][: len(DATA)] = DATA
            files = CacheFiles(tmp_path / "files", one.carrier.store)
            stop(one.mover.process.pid)
            threading.Timer(0.3, one.mover.kill).start()
            began = time.monotonic()
            assert await stored(one, files, 1, len(DATA)) == granule_checksums(
                one.buffers.large[0][: len(DATA)]
            )
            assert time.monotonic() - began >= 0.3
            assert (tmp_path / "files/01/1").read_bytes()[2 * MIB :][: len(DATA)] == DATA


async def test_a_fetch_whose_mover_dies_before_its_first_byte_is_done_by_the_daemon() -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            stop(one.mover.process.pid)
            threading.Timer(0.3, one.mover.kill).start()
            assert await one.fetch(object_id, Extent(0, 1000)) == DATA[:1000]
            assert one.line.busy == 0


def test_an_order_for_which_the_system_has_no_thread_waits_for_one_of_the_movers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memoryview(bytearray(DATA))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    answers, their_answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orders, goes_on = Orders(memory), threading.Event()
    running = threading.Thread(target=orders.run, args=(theirs,))
    running.start()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, ours, theirs, answers, open(tmp_path / "file", "wb") as file:
        patch.setattr(threading.Thread, "start", start)
        with suppress(RuntimeError):
            orders._threads.submit(goes_on.wait)
        order = StoreOrder(1, 0, len(DATA), len(DATA), 0)
        socket.send_fds(ours, [packed(order)], [their_answers.fileno(), file.fileno()])
        their_answers.close()
        ours.shutdown(socket.SHUT_WR)
        running.join()
        goes_on.set()
        assert answers.recv(ORDER_BYTES) == DONE + granule_checksums(memory)
    orders._threads.shutdown()
    orders._answers[order.answers].close()
    assert (tmp_path / "file").read_bytes() == DATA


@pytest.mark.parametrize("lacks", ["descriptors", "memory"])
async def test_what_a_mover_without_descriptors_or_memory_does_not_do_is_done_by_the_daemon(
    tmp_path: Path, lacks: str
) -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            proc = Path(f"/proc/{one.mover.process.pid}")
            if lacks == "descriptors":
                limit, most = resource.RLIMIT_NOFILE, len(list((proc / "fd").iterdir())) + 1
            else:
                limit, most = resource.RLIMIT_AS, int((proc / "statm").read_text().split()[0]) * 4096
            resource.prlimit(one.mover.process.pid, limit, (most, most))
            files = CacheFiles(tmp_path / "files", one.carrier.store)
            sizes = range(100_000, 900_000, 100_000)

            async def fetch_and_store(number: int, size: int) -> None:
                at = number * MIB
                assert await one.fetch(object_id, Extent(size, 2 * size), at) == DATA[size : 2 * size]
                memory = one.buffers.large[1][at : at + MIB]
                await trio.to_thread.run_sync(files.store, number + 1, 0, memory, size)

            async with trio.open_nursery() as nursery:
                for number, size in enumerate(sizes):
                    nursery.start_soon(fetch_and_store, number, size)
            for number, size in enumerate(sizes, 1):
                path = tmp_path / "files" / f"{number:02x}" / f"{number:x}"
                assert path.read_bytes()[:size] == DATA[size : 2 * size]


async def test_orders_one_after_the_other_share_one_socket_for_their_answers(tmp_path: Path) -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            files = CacheFiles(tmp_path / "files", one.carrier.store)
            for number in range(5):
                assert await one.fetch(object_id, Extent(number, 1000)) == DATA[number:1000]
                with pytest.raises(ObjectMissing):
                    await one.fetch(ObjectId("no-such-key", object_id.etag), Extent(0, 10))
                memory = one.buffers.large[0][:1000]
                assert await stored(one, files, number + 1, 1000) == granule_checksums(memory)
            assert len(one.line.idle) == 1


async def test_a_burst_of_orders_leaves_few_sockets_for_answers_open_on_both_sides() -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            assert await one.fetch(object_id, Extent(0, 1000)) == DATA[:1000]
            # Only root sees the mover's.
            pids = [os.getpid(), one.mover.process.pid][: 2 if os.geteuid() == 0 else 1]
            before = list(map(unix_sockets_of, pids))
            # All of a burst run at once.
            server.control.set(latency=0.3)
            for _ in range(2):
                async with trio.open_nursery() as nursery:
                    for number in range(40):
                        nursery.start_soon(one.fetch, object_id, Extent(number, number + 1), number * 4096)
            # The mover takes orders one after the other: it has closed its ends before it answers this one.
            assert await one.fetch(object_id, Extent(0, 1000)) == DATA[:1000]
            more = [unix_sockets_of(pid) - early for pid, early in zip(pids, before, strict=True)]
            assert more == [IDLE_MAX - 1] * len(pids)


async def test_many_fetches_at_once_fill_their_own_places() -> None:
    with S3Server() as server:
        server.control.put(KEY, DATA)
        async with carried(server) as one:
            object_id = (await trio.to_thread.run_sync(one.store.head, KEY)).object_id
            found: dict[int, bytes] = {}

            async def fetch(number: int) -> None:
                extent = Extent(number * 100_000, number * 100_000 + 65_536)
                found[number] = await one.fetch(object_id, extent, number * 65_536)

            async with trio.open_nursery() as nursery:
                for number in range(48):
                    nursery.start_soon(fetch, number)
            assert all(found[each] == DATA[each * 100_000 : each * 100_000 + 65_536] for each in range(48))


PIECE = Extent(8 * MIB, 10 * MIB + 12_345)


@asynccontextmanager
async def beside_a_node(mode: str) -> AsyncIterator[tuple[Carried, str]]:
    """A mover, and the address of another node that behaves like this."""
    with S3Server() as server, reserve() as held:
        port = held.getsockname()[1]
        with bad_peer(port, mode):
            async with carried(server) as one:
                yield one, f"127.0.0.1:{port}"


async def asked(one: Carried, peers: PeerNodes, node: str) -> str:
    """Ask the node for a piece; return the error, "" if there was none."""
    peers.set_nodes((node,), "")
    target = one.buffers.large[0]
    target[: PIECE.size] = bytes(PIECE.size)
    words = node, ObjectId(KEY, "etag"), PIECE.stop, PIECE, target, one.fetched.append, Interruption()
    try:
        await trio.to_thread.run_sync(peers.get_into, *words)
    except RemoteError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        peers.close()
    return ""


def nodes(one: Carried, *, has_mover: bool = True) -> PeerNodes:
    return PeerNodes("bucket", "secret", granule_checksums, carry=one.carrier.fetch if has_mover else None)


async def test_a_mover_fetches_from_another_node() -> None:
    async with beside_a_node(GOOD) as (one, node):
        peers = nodes(one)
        assert await asked(one, peers, node) == ""
        assert bytes(one.buffers.large[0][: PIECE.size]) == b"x" * PIECE.size
        assert one.fetched[-1] == PIECE.size
        assert peers.statistics()["received_bytes"] == {node: PIECE.size}
        assert peers._peers[node].http._route.pool._idle == []
        if os.geteuid() == 0:
            assert connections_of(one.mover.process.pid) == 1


# Of the slow one that sends wrong bytes, either may be seen first.
@pytest.mark.parametrize("mode", [*(each for each in MODES if each != "slow"), TRICKLE, GONE, FULL, LONG])
async def test_a_node_that_does_not_what_it_should_fails_alike_with_and_without_a_mover(mode: str) -> None:
    async with beside_a_node(mode) as (one, node):
        found = []
        for has_mover in (False, True):
            peers = nodes(one, has_mover=has_mover)
            said = await asked(one, peers, node)
            facts = peers.statistics()
            # How much came in how long differs.
            found.append((said.partition(" slow:")[:2], facts["failures"][node], facts["refusals"][node]))
        assert found[0] == found[1]
        (text, _), failures, refusals = found[0]
        assert text
        assert failures + refusals == 1


async def test_a_node_does_not_rest_because_a_mover_died() -> None:
    async with beside_a_node(HALF) as (one, node):
        peers = nodes(one)

        def kill() -> None:
            while not any(one.fetched):  # if it dies before the first bytes, the daemon asks itself
                time.sleep(0.01)
            one.mover.kill()

        threading.Thread(target=kill).start()
        assert (await asked(one, peers, node)).startswith(ReceiverEnded.__name__)
        facts = peers.statistics()
        assert (facts["failures"], facts["resting"]) == ({node: 0}, {})


def place_of(host: str) -> bytes:
    return pickle.dumps((Peer(host, 80, None, 1.0, 1.0), None))


def test_a_mover_keeps_connections_to_the_bucket_and_to_the_nodes_that_it_used_last() -> None:
    orders = Orders(memoryview(b""))
    places = [place_of(f"node{each}") for each in range(POOLS_MAX + 1)]
    bucket = orders._pool(place_of("bucket"), is_node=False)
    pools = [orders._pool(place, is_node=True) for place in places[:-1]]
    assert orders._pool(places[0], is_node=True) is pools[0]
    orders._pool(places[-1], is_node=True)
    assert orders._pool(places[0], is_node=True) is pools[0]
    assert orders._pool(places[1], is_node=True) is not pools[1]
    assert orders._pool(place_of("bucket"), is_node=False) is bucket
    orders._threads.shutdown()
