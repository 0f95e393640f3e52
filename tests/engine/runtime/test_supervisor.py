"""What becomes of a background task that fails."""

import logging
from itertools import pairwise

import pytest
import trio

from fusecache.engine.runtime.supervisor import Supervisor, TaskNursery
from fusecache.model.errors import InternalError

TASK = "credentials"


async def test_a_failed_task_is_restarted(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure is logged with its traceback and counted, and the pauses grow."""
    supervisor, starts = Supervisor(), list[float]()

    async def task() -> None:
        starts.append(trio.current_time())
        if len(starts) == 5:
            await trio.sleep_forever()
        raise ValueError(f"failure {len(starts)}")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run, TASK, task)
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    pauses = [after - before for before, after in pairwise(starts)]
    assert len(pauses) == 4
    assert 0.5 <= pauses[0] <= 1 < 4 <= pauses[3] <= 8
    assert supervisor.statistics() == {TASK: {"failures": 4, "last_error": "ValueError('failure 4')"}}
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info is not None for record in records] == [True] * 4
    assert all(f"task={TASK}" in record.getMessage() for record in records)


async def test_a_task_that_ran_long_restarts_soon() -> None:
    """Rare failures do not add up to long pauses."""
    supervisor, starts = Supervisor(), list[float]()

    async def task() -> None:
        starts.append(trio.current_time())
        await trio.sleep(1000)
        raise ValueError("now and then")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run, TASK, task)
        await trio.sleep(20_000)
        nursery.cancel_scope.cancel()
    assert len(starts) == 20


async def test_a_group_of_failures_counts_as_one() -> None:
    """A task that fails in a nursery of its own raises a group, perhaps with a cancellation in it."""
    supervisor = Supervisor()

    async def fail() -> None:
        try:
            await trio.sleep(1)
        finally:
            raise ValueError("in a child")

    async def task() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(fail)

    with trio.move_on_after(1.5):
        await supervisor.run(TASK, task)
    assert supervisor.statistics()[TASK]["failures"] == 1


async def test_a_cancelled_task_that_fails_ends() -> None:
    """A failure while the mount ends is logged, and delays nothing."""
    supervisor, starts = Supervisor(), 0

    async def task() -> None:
        nonlocal starts
        starts += 1
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("at the end")

    with trio.move_on_after(1) as scope:
        await supervisor.run(TASK, task)
    assert scope.cancelled_caught
    assert starts == supervisor.statistics()[TASK]["failures"] == 1
    assert trio.current_time() < 2


async def test_a_service_that_cannot_start_raises() -> None:
    """Before it has started, the failure belongs to the caller: the mount fails with its error."""
    supervisor = Supervisor()

    async def service(*, task_status: trio.TaskStatus[None]) -> None:
        raise OSError("no socket")

    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="no socket")):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run_service, "control", service)
    assert supervisor.statistics() == {}


async def test_a_started_service_is_restarted() -> None:
    supervisor, starts = Supervisor(), 0

    async def service(*, task_status: trio.TaskStatus[None]) -> None:
        nonlocal starts
        starts += 1
        if starts == 2:
            raise OSError("not yet")  # before it says that it started again
        task_status.started()
        if starts == 1:
            raise OSError("gone")
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run_service, "control", service)
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert starts == 3
    assert supervisor.statistics()["control"] == {"failures": 2, "last_error": "OSError('not yet')"}


@pytest.mark.real_time
async def test_a_failed_child_task_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Its waiters learn of it before they run, and a mistake of theirs ends nothing either."""
    supervisor, told, results = Supervisor(), list[InternalError](), list[str]()
    tasks = TaskNursery(supervisor)

    async def fail() -> None:
        raise ValueError("a bug")

    async def work() -> None:
        await trio.sleep(0.01)
        results.append("done")

    def fail_too(error: InternalError) -> None:
        raise TypeError(f"told of {error}")

    async with trio.open_nursery() as nursery:
        await nursery.start(tasks.run)
        tasks.start_soon("work", work)
        tasks.start_soon("fetch", fail, about="a/file", on_failed=told.append)
        tasks.start_soon("fetch", fail, on_failed=fail_too)
        tasks.start_soon("fetch", fail)
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert results == ["done"]
    assert [str(error) for error in told] == [
        "fetch a/file: unexpected error in the daemon: ValueError('a bug'); please report it with the traceback in the "
        "log"
    ]
    assert supervisor.statistics()["fetch"]["failures"] == 4
    assert "task=fetch a/file failures=" in caplog.text


async def test_frequent_failures_are_counted_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in each read writes ten tracebacks a minute, and a bounded text to the status."""
    supervisor = Supervisor()
    for number in range(180):
        supervisor.record("cache-get", ValueError("x" * 10_000), f"file-{number}")
        await trio.sleep(1)
    assert supervisor.statistics()["cache-get"]["failures"] == 180
    assert len(supervisor.statistics()["cache-get"]["last_error"]) == 300
    assert len(caplog.records) == 30


async def test_a_cancelled_child_task_is_no_failure() -> None:
    """Though what it raises while it is cancelled is recorded."""
    supervisor = Supervisor()
    tasks = TaskNursery(supervisor)

    async def fail_at_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("at the end")

    async with trio.open_nursery() as nursery:
        await nursery.start(tasks.run)
        assert tasks.is_open
        tasks.start_soon("good", trio.sleep_forever)
        tasks.start_soon("bad", fail_at_end)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert not tasks.is_open
    assert list(supervisor.statistics()) == ["bad"]
