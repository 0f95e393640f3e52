"""Who owns the hints of a job while plans are still being read."""

import pytest
import trio
import trio.testing

from fusecache.engine.prefetch.hint_service import PLAN
from fusecache.fs.hint_files import OwnedHints
from fusecache.model.errors import NotPermitted

pytestmark = pytest.mark.real_time


class SlowService:
    """Reads each plan until `opened`, and knows the job only then."""

    def __init__(self) -> None:
        self.opened = trio.Event()
        self._jobs: set[str] = set()

    def jobs(self) -> set[str]:
        return self._jobs

    async def receive(self, file: str, message: bytes, pid: int) -> None:
        await self.opened.wait()
        self._jobs.add(file.removesuffix(PLAN))


async def test_another_user_does_not_get_a_job_whose_first_plan_is_being_read() -> None:
    service = SlowService()
    hints = OwnedHints(service, frozenset({0}))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: hints.receive(f"job{PLAN}", b"", user=1000))
        nursery.start_soon(lambda: hints.receive(f"other{PLAN}", b"", user=3000))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(NotPermitted, match="user 1000 owns"):
            await hints.receive(f"job{PLAN}", b"", user=2000)
        service.opened.set()
    with pytest.raises(NotPermitted, match="user 1000 owns"):
        hints.forget(f"job{PLAN}", user=2000)
    with pytest.raises(NotPermitted, match="user 3000 owns"):
        hints.forget(f"other{PLAN}", user=2000)


async def test_a_plan_that_failed_leaves_no_owner() -> None:
    service = SlowService()
    hints = OwnedHints(service, frozenset({0}))  # type: ignore[arg-type]
    with trio.move_on_after(0):
        await hints.receive(f"job{PLAN}", b"", user=1000)
    service.opened.set()
    await hints.receive(f"job{PLAN}", b"", user=2000)
    with pytest.raises(NotPermitted, match="user 2000 owns"):
        hints.forget(f"job{PLAN}", user=1000)
