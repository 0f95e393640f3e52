"""Ends waits for the bucket whose process is being killed.

While a handler changes names, the kernel holds a lock of their directories. Until the handler answers, the process
cannot die, and no process that waits for the lock can. FUSE_INTERRUPT does not help: it would end a handler anywhere.

Invariant: only waits before the first change end early. They are marked with `ends_with_caller`. A write is one only
until the file's content may be changed, while one process alone has the file open for writing: else its bytes may be of
another one. As a program with threads that exits looks killed, all its threads must be.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import trio

from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.engine.runtime.procfs import (
    KILL_LOOK_SECONDS,
    KillDetector,
    is_killed_as_a_whole,
    thread_group,
)
from fusecache.model.errors import Interrupted

# Killed processes that wait for one lock get it one after the other, and each dies only after its first check.
_FIRST_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Caller:
    """Whose request a task works for. task: tasks that it starts inherit this, and may serve others, too.

    exits: whether the process may also be one that exits, which is not killed.
    """

    task: trio.lowlevel.Task
    thread: int
    exits: bool


_caller: ContextVar[_Caller | None] = ContextVar("caller", default=None)
_detector = KillDetector()


@contextmanager
def called_by(thread: int, *, exits: bool = False) -> Iterator[None]:
    """Say for which thread the body works, so that its waits in `ends_with_caller` end with that thread's process.

    exits: whether the request may be one that the kernel sends when a process exits.
    """
    token = _caller.set(_Caller(trio.lowlevel.current_task(), thread, exits))
    try:
        yield
    finally:
        _caller.reset(token)


@asynccontextmanager
async def ends_with_caller() -> AsyncIterator[None]:
    """End the body with Interrupted once the process of `called_by` is being killed. The body changes nothing."""
    caller = _caller.get()
    if caller is None or not caller.thread or caller.task is not trio.lowlevel.current_task():
        yield
        return
    with unwrap_single_error():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_raise_when_killed, caller, name=f"caller {caller.thread}")
            yield
            nursery.cancel_scope.cancel()


async def _raise_when_killed(caller: _Caller) -> None:
    await trio.sleep(_FIRST_LOOK_SECONDS)
    process = thread_group(caller.thread)
    while process:
        dying = _detector.is_dying(process, trio.current_time())
        if dying and not (caller.exits and not is_killed_as_a_whole(process)):
            raise Interrupted(f"process {process} is being killed")
        await trio.sleep(KILL_LOOK_SECONDS)
