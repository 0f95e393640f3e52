"""Supervises background tasks: an unexpected exception of one must not end the mount.

The exception is logged with its traceback and counted, and the task starts again after a back-off. Supervise only a
task that may start again at any point: all that it needs is in its owner's state, not in its local variables.
Not here: publishing, whose own rule is in `engine/publish/publisher.py`, and the FUSE session, which cannot start
again.
"""

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import trio

from fusecache.policy.backoff import LONGEST_SECONDS, backoff_seconds

log = logging.getLogger(__name__)


class Service(Protocol):
    """A task that reports when it has started, as `trio.Nursery.start` expects."""

    def __call__(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]:
        """Run until cancelled."""
        ...


@dataclass(slots=True)
class FailedTask:
    """How often a task failed, and its last error."""

    failures: int = 0
    last_error: str = ""


class Supervisor:
    """Runs background tasks, and restarts each after a failure."""

    def __init__(self) -> None:
        self._failed: dict[str, FailedTask] = {}

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return `failures` and `last_error` of every task that has failed, by name."""
        return {name: asdict(task) for name, task in self._failed.items()}

    def record(self, name: str, error: BaseException) -> None:
        """Log and count a failure."""
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        failed = self._failed.setdefault(name, FailedTask())
        failed.failures += 1
        failed.last_error = repr(error)
        log.error(
            "background task failed unexpectedly task=%s failures=%d", name, failed.failures, exc_info=error
        )

    async def run(self, name: str, task: Callable[[], Awaitable[object]]) -> None:
        """Run a task until it returns or is cancelled; restart it whenever it raises an Exception."""
        attempt = 0
        while True:
            began = trio.current_time()
            failure: BaseException | None = None
            try:
                await task()
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
