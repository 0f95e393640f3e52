"""Calls in worker threads: each gets its own result, no more run than may, and a cancelled caller waits or leaves."""

import threading

import pytest
import trio

from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor

pytestmark = pytest.mark.real_time


def offload(threads: int) -> Offload:
    """Return an offload with so many threads for requests that read."""
    return Offload(Supervisor(), network_threads=threads, upload_threads=1)


class Held:
    """A call that runs until `go` is set."""

    def __init__(self) -> None:
        self.begun, self.go, self.has_ended = trio.Event(), threading.Event(), False
        self._token = trio.lowlevel.current_trio_token()

    def __call__(self) -> None:
        self._token.run_sync_soon(self.begun.set)
        self.go.wait(10)
        self.has_ended = True


async def test_each_caller_gets_its_own_result_or_error() -> None:
    threads = offload(4)
    results: dict[int, int | str] = {}

    def double(number: int) -> int:
        if number % 3 == 0:
            raise ValueError(f"no {number}")
        return 2 * number

    async def ask(number: int) -> None:
        try:
            results[number] = await threads.network(double, number)
        except ValueError as exc:
            results[number] = str(exc)

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(ask, number)
    assert results == {number: 2 * number if number % 3 else f"no {number}" for number in range(100)}


async def test_as_many_calls_run_at_once_as_may_and_no_more() -> None:
    threads = offload(3)
    together, lock = threading.Barrier(3), threading.Lock()
    running = most = 0

    def meet() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(10)  # BrokenBarrierError if fewer than three run
        with lock:
            running -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(9):
            nursery.start_soon(threads.network, meet)
    assert most == 3


async def test_a_cancelled_caller_waits_for_its_call_on_the_disk() -> None:
    call = Held()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offload(1).disk, call)
        await call.begun.wait()
        nursery.cancel_scope.cancel()
        trio.lowlevel.current_trio_token().run_sync_soon(call.go.set)
    assert call.has_ended


async def test_a_cancelled_caller_that_has_no_thread_yet_leaves() -> None:
    threads, calls, begun = offload(1), [Held() for _ in range(4)], []
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(threads.rows, call)
        for call in calls:
            await call.begun.wait()
        with trio.move_on_after(0.01) as patience:
            await threads.rows(begun.append, "cancelled")
        for call in calls:
            call.go.set()
    await threads.rows(begun.append, "next")
    assert (patience.cancelled_caught, begun) == (True, ["next"])


async def test_at_the_end_of_the_process_a_caller_leaves_its_call_behind() -> None:
    threads, call = offload(1), Held()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.network, call)
        await call.begun.wait()
        threads.abandon_reads()
        nursery.cancel_scope.cancel()
    assert not call.has_ended
    call.go.set()
