"""Runs the mount's background tasks: an unexpected exception of one must not end the mount.

The exception is logged with its traceback and counted. Then there are two kinds of tasks:
- A *service* runs as long as the mount: it starts again after a back-off. All that it needs is in its owner's state,
  not in its local variables.
- A *child task* does one thing that callers wait for: they get an InternalError.

Not here: the FUSE session, which cannot start again.

Unwraps the exception groups that trio's nurseries raise, so that callers can catch a single error.
"""

import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import trio

from fusecache.model.errors import FusecacheError, InternalError
from fusecache.policy.backoff import LONGEST_SECONDS, backoff_seconds

log = logging.getLogger(__name__)


@contextmanager
def unwrap_single_error() -> Iterator[None]:
    """Raise the first FusecacheError of a group by itself; a group with any other error is raised unchanged.

    Ctrl-C ends all tasks, and is raised whatever they raised on the way.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from None
        failures, others = group.split(FusecacheError)
        if failures is None or others is not None:
            raise
        raise next(_leaves(failures)) from None


def _leaves(group: BaseExceptionGroup[FusecacheError]) -> Iterator[FusecacheError]:
    for inner in group.exceptions:
        if isinstance(inner, BaseExceptionGroup):
            yield from _leaves(inner)
        else:
            yield inner


# A bug that each read runs into must not fill the disk: a task's failures are all counted, and so many a minute logged.
_LOGGED_PER_MINUTE = 10
# An exception's text may hold all objects that it names.
_ERROR_CHARACTERS = 300


class Service(Protocol):
    """A task that reports when it has started, as `trio.Nursery.start` expects."""

    def __call__(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]:
        """Run until cancelled."""
        ...


@dataclass(slots=True)
class FailedTask:
    """How often a task failed, and its last error. minute: when the failures `in_minute` began, in loop time."""

    failures: int = 0
    last_error: str = ""
    minute: float = float("-inf")
    in_minute: int = 0

    def count(self, error: str, now: float) -> bool:
        """Count a failure; return whether to log it."""
        self.failures, self.last_error = self.failures + 1, error
        if now >= self.minute + 60:
            self.minute, self.in_minute = now, 0
        self.in_minute += 1
        return self.in_minute <= _LOGGED_PER_MINUTE


class Supervisor:
    """Runs background tasks, and records each failure. One per mount."""

    def __init__(self) -> None:
        self._failed: dict[str, FailedTask] = {}

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return `failures` and `last_error` of every task that has failed, by name."""
        return {
            name: {"failures": task.failures, "last_error": task.last_error}
            for name, task in self._failed.items()
        }

    def record(self, name: str, error: BaseException, about: str = "") -> InternalError:
        """Log and count a failure; return the error for callers that wait for the task.

        name: one of few, as `status` lists them. about: what the task worked on, such as a key.
        """
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        failed = self._failed.setdefault(name, FailedTask())
        what, text = f"{name} {about}".rstrip(), repr(error)[:_ERROR_CHARACTERS]
        if failed.count(text, trio.current_time()):
            log.error(
                "background task failed unexpectedly task=%s failures=%d",
                *(what, failed.failures),
                exc_info=error,
            )
        return InternalError(
            f"{what}: unexpected error in the daemon: {text}; please report it with the traceback in the log"
        )

    async def run(self, name: str, service: Callable[[], Awaitable[object]]) -> None:
        """Run a service until it returns or is cancelled; restart it whenever it raises an Exception."""
        attempt = 0
        while True:
            began = trio.current_time()
            failure: BaseException | None = None
            try:
                await service()
            except* Exception as group:  # noqa: BLE001  # that is its purpose
                failure = group
                self.record(name, group)
            if failure is None:
                return
            attempt = 1 if trio.current_time() - began > LONGEST_SECONDS else attempt + 1
            await trio.sleep(backoff_seconds(attempt, random.random()))

    async def run_service(
        self, name: str, service: Service, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run a service, for `trio.Nursery.start`. Before it has started, its exception is the caller's."""
        start = _Start(task_status)
        early: Exception | None = None

        async def attempt() -> None:
            nonlocal early
            try:
                await service(task_status=start)
            except Exception as exc:
                if start.is_started:
                    raise
                early = exc  # not a failure of a running task: raised below

        await self.run(name, attempt)
        if early is not None:
            raise early

    async def guard(
        self,
        name: str,
        task: Callable[..., Awaitable[object]],
        *args: object,
        about: str = "",
        on_failed: Callable[[InternalError], object] | None = None,
    ) -> None:
        """Run a child task once. If it raises an Exception, `on_failed` gets the error for its waiters.

        It is called before any other task runs. So what the task did in its `finally` blocks, such as waking its
        waiters, has no effect before it.
        """
        try:
            await task(*args)
        except* Exception as group:  # noqa: BLE001  # that is its purpose
            error = self.record(name, group, about)
            try:
                if on_failed is not None:
                    on_failed(error)
            except Exception as exc:  # noqa: BLE001
                self.record(name, exc, about)


class TaskNursery:
    """The tasks of some parts of the engine, which end together. One that fails ends no other.

    is_open: whether the parts may begin new work; False once the mount ends.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.is_open = False
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the tasks until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self.is_open = True
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self.is_open = False

    def keep(self, services: Mapping[str, Callable[[], Awaitable[object]]]) -> None:
        """Start services by name, as `Supervisor.run` does."""
        for name, service in services.items():
            self._opened().start_soon(self.supervisor.run, name, service, name=name)

    def start_soon(
        self,
        name: str,
        task: Callable[..., Awaitable[object]],
        *args: object,
        about: str = "",
        on_failed: Callable[[InternalError], object] | None = None,
    ) -> None:
        """Start a child task, as `Supervisor.guard` runs it."""
        guarded = partial(self.supervisor.guard, name, task, *args, about=about, on_failed=on_failed)
        self._opened().start_soon(guarded, name=f"{name} {about}".rstrip())

    def _opened(self) -> trio.Nursery:
        if self._nursery is None:
            raise RuntimeError("tasks cannot start before `TaskNursery.run`")
        return self._nursery


class _Start(trio.TaskStatus[None]):
    """Passes on the first start of a service."""

    def __init__(self, inner: trio.TaskStatus[None]) -> None:
        self._inner = inner
        self.is_started = False

    def started(self, value: None = None) -> None:
        """Report the start; a restart is not reported again."""
        if not self.is_started:
            self.is_started = True
            self._inner.started(value)
