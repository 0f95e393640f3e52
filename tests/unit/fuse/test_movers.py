"""Movers beside a session that a played kernel uses: who answers, and how long a buffer stays lent."""

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

import fusecache
from fusecache.fuse import mover, movers
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.kept_requests import make_memory
from fusecache.fuse.movers import MoverPlan
from fusecache.fuse.protocol import OUT_HEADER, READ_IN, Opcode
from fusecache.fuse.session import RELEASE_BYTES, OwnSession
from tests.unit.fuse.kernel import PlayedKernel

# More than movers are asked for, and less than a socket takes.
SIZE = RELEASE_BYTES + 4096
PLACES = 4
DATA = os.urandom(PLACES * SIZE)


class Lender(RequestHandlers):
    """A file in memory that movers can map. lent: how often each place is lent; given_back: how many were."""

    def __init__(self) -> None:
        import mmap

        self.fd = make_memory("test-pool")
        os.ftruncate(self.fd, len(DATA))
        self._map = mmap.mmap(self.fd, len(DATA))
        self._map[:] = DATA
        self.view = memoryview(self._map)
        self.lent = self.given_back = 0
        self._users = [0] * PLACES
        self.lack = trio.lowlevel.ParkingLot()

    async def read(self, fh: int, off: int, size: int) -> memoryview:
        self.view[off : off + size] = DATA[off : off + size]
        return self.view[off : off + size]

    def lend(self, payload: memoryview) -> tuple[int, Callable[[], None]] | None:
        self.lent += 1
        offset = DATA.index(payload[:64])
        self._users[offset // SIZE] += 1
        return offset, partial(self._give_back, offset // SIZE)

    def _give_back(self, place: int) -> None:
        """Other bytes come to all places that are not lent, as fetches wait for buffers."""
        self.given_back += 1
        self._users[place] -= 1
        for each in range(PLACES):
            if not self._users[each]:
                self.view[each * SIZE : (each + 1) * SIZE] = bytes(SIZE)

    async def lacking(self) -> None:
        await self.lack.park()

    def close(self) -> None:
        self.view.release()
        self._map.close()
        os.close(self.fd)


@asynccontextmanager
async def served(lender: Lender) -> AsyncIterator[tuple[PlayedKernel, OwnSession]]:
    kernel = PlayedKernel()
    kernel.send_init()
    session = OwnSession(lender, kernel.theirs.detach(), movers=MoverPlan(1, lender))
    kernel.read_init()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(session.serve))
        try:
            yield kernel, session
        finally:
            kernel.close()
    session.close()


def read_of(place: int) -> bytes:
    return READ_IN.pack(1, place * SIZE, SIZE, 0, 0, 0, 0)


async def lent_by(kernel: PlayedKernel, lender: Lender, session: OwnSession) -> None:
    """Return once a mover has sent a reply: until then the loop answers."""
    with trio.fail_after(20):
        while not lender.lent:
            assert await kernel.ask(Opcode.READ, read_of(0)) == (0, DATA[:SIZE])
            await trio.sleep(0.01)
        while only_mover(session).left():  # noqa: ASYNC110  # else it may be stopped before it says so
            await trio.sleep(0.01)


async def given_back(lender: Lender) -> None:
    with trio.fail_after(20):
        while lender.given_back < lender.lent:  # noqa: ASYNC110  # another process sends no event
            await trio.sleep(0.01)


def only_mover(session: OwnSession) -> movers._Mover:
    assert session._movers is not None
    (only,) = session._movers._all
    return only


def mover_pid(session: OwnSession) -> int:
    return only_mover(session).process.pid


@pytest.fixture
def lender() -> Iterator[Lender]:
    lender = Lender()
    yield lender
    lender.close()


def test_a_mover_writes_the_headers_of_the_protocol() -> None:
    assert (mover.OUT_HEADER.format, mover.OUT_HEADER.size) == (OUT_HEADER.format, OUT_HEADER.size)


async def test_a_mover_answers_and_the_buffer_is_given_back(lender: Lender) -> None:
    async with served(lender) as (kernel, session):
        await lent_by(kernel, lender, session)
        for place in range(PLACES):
            expected = DATA[place * SIZE : (place + 1) * SIZE]
            assert await kernel.ask(Opcode.READ, read_of(place)) == (0, expected)
        assert lender.lent == PLACES + 1
        await given_back(lender)


async def test_a_buffer_is_lent_before_another_one_is_given_back(lender: Lender) -> None:
    async with served(lender) as (kernel, session):
        await lent_by(kernel, lender, session)
        for number in range(40):
            place = number % PLACES
            assert await kernel.ask(Opcode.READ, read_of(place)) == (
                0,
                DATA[place * SIZE : (place + 1) * SIZE],
            )


async def test_a_fetch_that_finds_no_buffer_gets_one_as_soon_as_a_reply_was_copied(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movers, "_LOOK_SECONDS", 1000.0)
    async with served(lender) as (kernel, session):
        await lent_by(kernel, lender, session)
        os.kill(mover_pid(session), signal.SIGSTOP)
        number = kernel.send(Opcode.READ, read_of(1))
        await trio.sleep(0.1)
        lender.lack.unpark_all()
        await trio.sleep(0.1)
        assert lender.given_back < lender.lent
        os.kill(mover_pid(session), signal.SIGCONT)
        assert await kernel.reply(number) == (0, DATA[SIZE : 2 * SIZE])
        await given_back(lender)


async def test_what_a_killed_mover_had_is_answered_by_the_loop_and_the_next_mover_takes_over(
    lender: Lender, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(lender) as (kernel, session):
        await lent_by(kernel, lender, session)
        first = mover_pid(session)
        os.kill(first, signal.SIGSTOP)
        number = kernel.send(Opcode.READ, read_of(2))
        await trio.sleep(0.1)
        assert not kernel.has_reply()
        os.kill(first, signal.SIGKILL)
        assert await kernel.reply(number) == (0, DATA[2 * SIZE : 3 * SIZE])
        await given_back(lender)
        assert "a process for large replies ended" in caplog.text
        before = lender.lent
        with trio.fail_after(20):
            while lender.lent == before:
                assert await kernel.ask(Opcode.READ, read_of(3)) == (0, DATA[3 * SIZE :])
                await trio.sleep(0.05)
        assert mover_pid(session) != first


async def test_a_mover_that_stands_still_is_killed_and_its_buffers_stay_lent_until_it_is_gone(
    lender: Lender, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(movers._Mover, "kill", lambda each: killed.append(each.process.pid))
    async with served(lender) as (kernel, session):
        await lent_by(kernel, lender, session)
        await given_back(lender)
        pid = mover_pid(session)
        os.kill(pid, signal.SIGSTOP)
        began = trio.current_time()
        number = kernel.send(Opcode.READ, read_of(1))
        assert await kernel.reply(number) == (0, DATA[SIZE : 2 * SIZE])
        assert trio.current_time() - began >= movers.STALL_SECONDS
        assert killed == [pid]
        # It may still copy.
        assert lender.given_back == lender.lent - 1
        assert await kernel.ask(Opcode.READ, read_of(2)) == (0, DATA[2 * SIZE : 3 * SIZE])
        assert lender.given_back == lender.lent - 1
        os.kill(pid, signal.SIGKILL)
        await given_back(lender)
        assert "stands still" in caplog.text


async def test_a_request_that_is_answered_before_the_loop_looks_gives_its_memory_back_once(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = movers._Mover.send

    def slowly(each: movers._Mover, job: movers._Delivery, offset: int) -> bool:
        is_sent = send(each, job, offset)
        while is_sent and each.left():
            os.sched_yield()
        return is_sent

    async with served(lender) as (kernel, session):
        await lent_by(kernel, lender, session)
        await given_back(lender)
        monkeypatch.setattr(movers._Mover, "send", slowly)
        assert await kernel.ask(Opcode.READ, read_of(1)) == (0, DATA[SIZE : 2 * SIZE])
        await given_back(lender)
        places = [session._places.take() for _ in range(3)]
        assert len({place.number for place in places}) == 3
        for place in places:
            session._places.give_back(place)


async def test_a_buffer_that_a_mover_does_not_take_stays_lent_until_the_loop_has_answered(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(lender) as (kernel, session):
        await lent_by(kernel, lender, session)
        await given_back(lender)
        # Dead, and the loop has not seen it yet.
        monkeypatch.setattr(movers._Mover, "send", lambda *_: False)
        assert await kernel.ask(Opcode.READ, read_of(1)) == (0, DATA[SIZE : 2 * SIZE])
        await given_back(lender)
        assert lender.lent == 2


async def test_a_daemon_of_another_version_than_the_installed_package_works_without_movers(
    lender: Lender, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusecache, "__version__", "0.0.before")
    async with served(lender) as (kernel, session):
        with trio.fail_after(20):
            while "the package was updated" not in caplog.text:
                assert await kernel.ask(Opcode.READ, read_of(0)) == (0, DATA[:SIZE])
                await trio.sleep(0.01)
        assert session._movers is not None
        assert session._movers._all == []
        assert lender.lent == 0


class WaitsForBuffer(Lender):
    """The last place is read once nothing is lent any more. is_waiting: for that."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting = trio.Event()

    async def read(self, fh: int, off: int, size: int) -> memoryview:
        while off == (PLACES - 1) * SIZE and self.given_back < self.lent:
            self.is_waiting.set()
            await trio.sleep(0.01)
        return await super().read(fh, off, size)


async def test_a_mover_that_stands_still_does_not_hold_up_the_end_of_a_mount_that_was_aborted() -> None:
    lender = WaitsForBuffer()
    with trio.fail_after(20):
        async with served(lender) as (kernel, session):
            await lent_by(kernel, lender, session)
            await given_back(lender)
            os.kill(mover_pid(session), signal.SIGSTOP)
            kernel.send(Opcode.READ, read_of(1))
            while lender.given_back == lender.lent:  # noqa: ASYNC110  # as above
                await trio.sleep(0.01)
            kernel.send(Opcode.READ, read_of(PLACES - 1))
            await lender.is_waiting.wait()
    assert lender.given_back == lender.lent
    lender.close()


async def test_replies_that_a_mover_has_are_sent_before_the_session_ends(lender: Lender) -> None:
    kernel = PlayedKernel()
    kernel.send_init()
    session = OwnSession(lender, kernel.theirs.detach(), movers=MoverPlan(1, lender))
    kernel.read_init()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.serve)
        await lent_by(kernel, lender, session)
        os.kill(mover_pid(session), signal.SIGSTOP)
        number = kernel.send(Opcode.READ, read_of(1))
        with trio.fail_after(20):
            while lender.lent < 2:  # noqa: ASYNC110  # as above
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert await kernel.reply(number) == (0, DATA[SIZE : 2 * SIZE])
    assert lender.given_back == lender.lent
    kernel.close()
    session.close()
