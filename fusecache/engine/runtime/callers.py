"""Ends waits for the bucket whose process is being killed.

While a handler changes names, the kernel holds a lock of their directories. Until the handler answers, the process
cannot die, and no process that waits for the lock can. FUSE_INTERRUPT does not help: it would end a handler anywhere.

Invariant: only waits before the first change end early. They are marked with `ends_with_caller`. A write is none of
them: its bytes may be of a program that went on long ago, and one with threads that exits looks like a killed one.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import trio

from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.engine.runtime.procfs import KILL_LOOK_SECONDS, KillDetector, thread_group
from fusecache.model.errors import Interrupted

# Killed processes that wait for one lock get it one after the other, and each dies only after its first check.
_FIRST_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Caller:
    """Whose request a task works for. task: tasks that it starts inherit this, and may serve others, too."""

    task: trio.lowlevel.Task
    thread: int


_caller: ContextVar[_Caller | None] = ContextVar("caller", default=None)
_detector = KillDetector()


@contextmanager
def called_by(thread: int) -> Iterator[None]:
    """Say for which thread the body works, so that its waits in `ends_with_caller` end with that thread's process."""
    token = _caller.set(_Caller(trio.lowlevel.current_task(), thread))
    try:
        yield
    finally:
        _caller.reset(token)


@asynccontextmanager
async def ends_with_caller() -> AsyncIterator[None]:
    """End the body with Interrupted once the process of `called_by` is being killed.

    The body changes nothing, or the caller of this undoes that.
    """
    caller = _caller.get()
    if caller is None or not caller.thread or caller.task is not trio.lowlevel.current_task():
        yield
        return
    with unwrap_single_error():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_raise_when_killed, caller.thread, name=f"caller {caller.thread}")
            yield
            nursery.cancel_scope.cancel()


async def _raise_when_killed(thread: int) -> None:
    await trio.sleep(_FIRST_LOOK_SECONDS)
    process = thread_group(thread)
    while process:
        if _detector.is_dying(process, trio.current_time()):
            raise Interrupted(f"process {process} is being killed")
        await trio.sleep(KILL_LOOK_SECONDS)
