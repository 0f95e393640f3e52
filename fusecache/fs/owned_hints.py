"""Hints with owners: the user who first sends a plan of a job owns it. Other users cannot replace, move or withdraw it.

Root and the owners of the mount may, for every job. Invariant: at most one row for each job that has a plan, or whose
plan is being read.
"""

from collections import Counter

from fusecache.engine.prefetch.hint_service import HintService, job_of
from fusecache.model.errors import NotPermitted


class OwnedHints:
    """The hint service, as one user may use it."""

    def __init__(self, service: HintService, owners: frozenset[int]) -> None:
        """owners: ids of the users who may change the hints of every job."""
        self.service = service
        self._owners = owners
        self._users: dict[str, int] = {}
        # Plans that are being read, which takes a while: until the last is, the job may have no plan yet.
        self._receiving: Counter[str] = Counter()

    async def receive(self, file: str, message: bytes | bytearray, *, user: int, pid: int = 0) -> None:
        """Receive a hint file's content. Raises NotPermitted for another user's job, and as the service does."""
        job = job_of(file)[0]
        self._check(job, user)
        self._users.setdefault(job, user)
        self._receiving[job] += 1
        try:
            await self.service.receive(file, message, pid)
        finally:
            self._receiving[job] -= 1
            self._receiving = +self._receiving
            known = {*self.service.jobs(), *self._receiving}
            self._users = {name: each for name, each in self._users.items() if name in known}

    def forget(self, file: str, *, user: int) -> None:
        """Withdraw all hints of a hint file's job. Raises HintError, NotPermitted."""
        job = job_of(file)[0]
        self._check(job, user)
        self.service.forget(job)

    def _check(self, job: str, user: int) -> None:
        if job not in self._receiving and job not in self.service.jobs():
            self._users.pop(job, None)  # forgotten after a silence: the name is free
        owner = self._users.get(job, user)
        if owner != user and user not in self._owners:
            raise NotPermitted(f"{job}: user {owner} owns the hints of this job; use another job name")
