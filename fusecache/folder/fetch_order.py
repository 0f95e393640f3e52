"""Decides which object a pull fetches next: what a reader waits for, then what hints name, then the rest.

Hints are those of docs/hints.md. An object is fetched as a whole, so of a plan only the first step of each path counts.
"""

from collections.abc import Iterable

from fusecache.model.hints import CURSOR, PLAN, HintError, Plan, decode_cursor, decode_plan, is_job

# As many as a mount accepts.
JOBS_MAX = 64


class FetchOrder:
    """The objects that no worker has begun, by name."""

    def __init__(self, names: Iterable[str], late: Iterable[str] = ()) -> None:
        """names: in the order without hints. late: begun only for a reader or a hint, until `release_late`."""
        self._default = dict.fromkeys(names)
        self._late = dict.fromkeys(late)
        self._left = {**self._default, **self._late}
        self._asked: dict[str, None] = {}
        self._jobs: dict[str, dict[int, Plan]] = {}
        self._steps: dict[str, int] = {}
        self._hinted: list[str] = []  # the next one last

    def release_late(self) -> list[str]:
        """From now on the late objects are begun as the others are; return their names."""
        names, self._late = list(self._late), {}
        self._default = dict.fromkeys(names)
        return names

    def drop(self, name: str) -> None:
        """Never begin an object."""
        for names in (self._left, self._default, self._late, self._asked):
            names.pop(name, None)

    def ask(self, name: str) -> None:
        """A reader waits for an object: it comes next."""
        if name in self._left:
            self._asked[name] = None

    @property
    def is_asked(self) -> bool:
        """Whether a reader waits for an object that no worker has begun."""
        return bool(self._asked)

    def next(self) -> str | None:
        """Return the object to fetch now, and count it as begun; None if there is none."""
        while self._hinted and self._hinted[-1] not in self._left:
            self._hinted.pop()
        hinted = self._hinted[-1:]
        name = next(iter((*self._asked, *hinted)), None) or next(iter(self._default), None)
        if name is not None:
            self.drop(name)
        return name

    def take(self, file: str, message: bytes) -> None:
        """Take a hint; b"" withdraws the job's. file: `<job>.plan` or `<job>.cursor`. Raises HintError."""
        job, dot, kind = file.rpartition(".")
        if not is_job(job) or dot + kind not in (PLAN, CURSOR):
            raise HintError(f"{file!r}: not the name of a hint")
        if not message:
            self._jobs.pop(job, None)
        elif dot + kind == CURSOR:
            cursor = decode_cursor(message)
            if job not in self._jobs:
                raise HintError(f"{job}: no plan")
            if not cursor.by_reads:  # a folder does not see reads
                self._steps[job] = cursor.step
            return  # the files that are read next were the next ones before, too
        else:
            plan = decode_plan(message)
            if job not in self._jobs and len(self._jobs) >= JOBS_MAX:
                raise HintError(f"{job}: {JOBS_MAX} jobs are the most of all jobs together")
            windows = self._jobs.get(job, {})
            self._jobs[job] = {number: old for number, old in windows.items() if number < plan.window}
            self._jobs[job][plan.window] = plan
            self._steps[job] = plan.step
        self._sort()

    def _sort(self) -> None:
        """Order the objects by the steps until a job needs them."""
        needed: dict[str, int] = {}
        for job, windows in self._jobs.items():
            step = self._steps[job]
            for plan in windows.values():
                first: dict[int, int] = {}
                for path, at in zip(plan.path, plan.first, strict=True):
                    first.setdefault(path, at - step)
                for path, steps in first.items():
                    name = plan.paths[path]
                    if name in self._left:
                        needed[name] = min(steps, needed.get(name, steps))
        self._hinted = sorted(needed, key=needed.__getitem__)[::-1]
