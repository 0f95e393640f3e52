"""The hints of jobs, from message to cache: receives, checks, merges, fetches, reports and forgets them.

A hint is a plan (what a job will read, step by step) or a cursor (the step where the job is). Used on the trio loop;
long messages are decoded in a thread.

Invariants:
1. A rejected message changes nothing.
2. No byte that a reader gets depends on a hint.

The reads of all files, for a recording: in memory until they are reported. Used on the trio loop.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.cache.evictor import SOON
from fusecache.engine.cache.range_cache import is_worth_it
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.prefetch.plan_index import PlanIndex, index_plan
from fusecache.engine.prefetch.prefetcher import Prefetcher
from fusecache.engine.prefetch.timeline import Job, Timeline
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.procfs import Process, process_of
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.errors import NotFound
from fusecache.model.hints import CURSOR, PLAN, HintError, decode_cursor, decode_plan, is_job
from fusecache.model.objects import GRANULE_BYTES, Extent, ObjectId
from fusecache.policy.cache.fetch_order import Cause

log = logging.getLogger(__name__)

# Reads between two reports, which come twice a second: some times what a daemon can answer.
MOST_READS = 1 << 16


class ReadLog:
    """Reads since the last report, in their order. Reads beyond MOST_READS are only counted."""

    def __init__(self) -> None:
        self._reads: list[tuple[str, int, int]] = []
        self._lost = 0

    def add(self, path: str, start: int, nbytes: int) -> None:
        """Log a read. path: below the mountpoint."""
        if len(self._reads) < MOST_READS:
            self._reads.append((path, start, nbytes))
        else:
            self._lost += 1

    def take(self) -> dict[str, Any]:
        """Return the reads since the last call, and how many are missing, as plain values."""
        found = {"reads": self._reads, "lost": self._lost}
        self._reads, self._lost = [], 0
        return found


# Every 2 s the daemon looks for silent jobs and for jobs whose process has ended: neither sends an event.
_POLL_SECONDS = 2.0


@dataclass(eq=False, repr=False)
class HintService:
    """Receives the hints of jobs and passes them to the cache."""

    _tree: Tree
    _lookup: Lookup
    _cache: BlockCache
    _offload: Offload
    _resolve: Callable[[str], Awaitable[Node]]
    _tasks: TaskNursery

    def __post_init__(self) -> None:
        self._timeline = Timeline()
        self._read_logs: list[ReadLog] = []
        # The process that sent a job's plan, where it is known. It is in `_cursor_senders` only if it sends the cursors
        # too: a shell that only copies a plan may end at once while its job continues.
        self._plan_senders: dict[str, Process] = {}
        self._cursor_senders: dict[str, Process] = {}
        self._prefetcher = Prefetcher(
            self._timeline, self._tree, self._lookup, self._cache, self._resolve, self._tasks
        )

    def start(self) -> None:
        """Start to prefetch hinted bytes, and to forget silent jobs."""
        self._tasks.keep({"prefetch": self._prefetcher.run, "hints": self._forget_jobs})

    async def _forget_jobs(self) -> None:
        while True:
            await trio.sleep(_POLL_SECONDS)
            self._end_jobs()
            silent = self._timeline.forget_silent(trio.current_time())
            for job in silent:
                self._forget_process(job)
            if silent:
                log.info("forgot silent jobs jobs=%s", ",".join(silent))
                self._changed()

    def _end_jobs(self) -> None:
        """Stop fetching for jobs whose process has ended: a killed job does not withdraw its hints."""
        ended = [job for job, process in self._cursor_senders.items() if process.has_ended()]
        for job in ended:
            self._forget_process(job)
            self._timeline.end(job, trio.current_time())
        if ended:
            log.info("job processes ended jobs=%s", ",".join(ended))
            self._changed()

    def _forget_process(self, job: str) -> None:
        self._plan_senders.pop(job, None)
        self._cursor_senders.pop(job, None)

    # ---- messages of jobs

    async def receive(self, file: str, message: bytes | bytearray, pid: int = 0) -> None:
        """Receive the content of a hint file, `<job>.plan` or `<job>.cursor`. pid: of the sending thread, or 0.

        Raises HintError; NotFound for the cursor of a job without a plan; NotPermitted if a limit on plans is reached.
        """
        job, kind = job_of(file)
        if kind == CURSOR:
            cursor = decode_cursor(message)
            if not self._timeline.move(job, None if cursor.by_reads else cursor.step, trio.current_time()):
                raise NotFound(f"{job}: this job has no plan, or it was forgotten: send the plan again")
            process = process_of(pid)
            if process is not None and process == self._plan_senders.get(job):
                self._cursor_senders[job] = process
            else:
                self._cursor_senders.pop(job, None)
        else:
            process = process_of(pid)
            index = await self._offload.disk(_read_plan, bytes(message))
            self._end_jobs()  # they make room
            self._timeline.add(job, index, trio.current_time())
            if process is None or process != self._plan_senders.get(job):
                self._forget_process(job)
            if process is not None:
                self._plan_senders[job] = process
            plan = index.plan
            log.info(
                "plan received job=%s window=%d extents=%d step=%d", job, plan.window, len(plan), plan.step
            )
        self._changed()

    def forget(self, job: str) -> bool:
        """Drop the hints of a job; False if it has none."""
        known = self._timeline.forget(job)
        self._forget_process(job)
        self._changed()
        return known

    def jobs(self) -> list[str]:
        """Return the names of the jobs that have a plan."""
        return list(self._timeline.jobs)

    def step(self, job: str) -> int | None:
        """Return the step of a job, None if it has no plan."""
        known = self._timeline.jobs.get(job)
        return None if known is None else known.step

    @contextmanager
    def recording(self) -> Iterator[ReadLog]:
        """Log the reads of all files while the body runs."""
        log_of_reads = ReadLog()
        self._read_logs.append(log_of_reads)
        self._changed()
        try:
            yield log_of_reads
        finally:
            self._read_logs.remove(log_of_reads)
            self._changed()

    @property
    def is_recording(self) -> bool:
        """Whether reads are logged."""
        return bool(self._read_logs)

    # ---- status

    def statistics(self) -> dict[str, Any]:
        """Return the hints of all jobs and their effect, as plain values."""
        return {"jobs": [self._job_as_dict(job) for job in self._timeline.jobs.values()]}

    def as_dict(self, job: str) -> dict[str, Any]:
        """Return the hints of one job and their effect. Raises NotFound."""
        known = self._timeline.jobs.get(job)
        if known is None:
            raise NotFound(f"{job}: this job has no plan")
        return self._job_as_dict(known)

    def _job_as_dict(self, job: Job) -> dict[str, Any]:
        front = job.front(is_exact=False)
        to_come = max((index.last for index in job.plans), default=job.step)
        checked_until = front.first if front is not None else to_come
        return {
            "job": job.name,
            "step": job.step,
            "seconds_a_step": round(job.step_rate.seconds_a_step, 6),
            "windows": [index.plan.window for index in job.plans],
            "fetched": [self._prefetcher.fetched(index) for index in job.plans],
            "extents": job.extents,
            "planned_steps": max(0, to_come - job.step),
            "horizon_steps": max(0, checked_until - job.step),
            "horizon_bytes": job.ahead_bytes,
            "lead_seconds": round(job.seconds_until(checked_until), 3),
            "fetched_bytes": job.fetched_bytes,
            "hit_bytes": job.hit_bytes,
            "missed_bytes": job.missed_bytes,
            "late": job.late,
            "skipped": job.skipped,
            "skipped_path": job.skipped_path,
            "is_astray": job.is_astray,
            "silent_seconds": round(trio.current_time() - job.last_message_at, 1),
            "ended_seconds": round(max(0.1, trio.current_time() - job.ended_at), 1) if job.has_ended else 0.0,
        }

    # ---- called by the cache

    def _changed(self) -> None:
        is_used = bool(self._timeline.jobs or self._read_logs)
        self._cache.use_hints(self if is_used else None)
        self._prefetcher.wake()

    def next_use(self, object_id: ObjectId, start: int, stop: int) -> float | None:
        """Return in how many seconds a job reads bytes [start, stop) of a version, by its hints; None: unknown."""
        seconds = self._timeline.next_use(self._tree.relative(object_id.key), start, stop)
        if seconds is None:
            return None
        node = self._tree.find(object_id.key)
        if node is not None and node.object is not None and node.object.etag != object_id.etag:
            return None  # the bucket has a newer version
        return max(SOON, seconds)

    def names(self, object_id: ObjectId) -> bool:
        """Return whether a job's plan names a file. If so, its read pattern is not guessed."""
        return bool(self._timeline.jobs) and self._timeline.names(self._tree.relative(object_id.key))

    def needs_reads(self, object_id: ObjectId) -> bool:
        """Return whether the reads of a file must be seen: of a job that sends no cursor, or for a recording."""
        return self.is_recording or (
            bool(self._timeline.jobs) and self._timeline.follows(self._tree.relative(object_id.key))
        )

    async def read_exactly(
        self, object_id: ObjectId, size: int, start: int, stop: int, *, is_random: bool
    ) -> memoryview | None:
        """Fetch exactly bytes [start, stop); None if more around them may be fetched, or if the fetch failed.

        Exact bytes are fetched for an exact plan. They are also fetched for random reads of a planned file when the
        cache has no free space for a granule.
        """
        cached_ranges, extent = self._cache.range_cache, Extent(start, stop)
        if not is_worth_it(extent):
            return None
        path = self._tree.relative(object_id.key)
        use = self._timeline.exact_use(path, start, stop)
        if use is None and is_random and self._cache.maintenance.free_bytes() < GRANULE_BYTES:
            # Its step is over: the range is dropped once this reader has it.
            use = self._timeline.long_use(path)
        if use is None or not cached_ranges.fits(extent):
            return None
        cached_range = cached_ranges.begin(object_id, size, extent, depth=0)
        cached_range.ticket.cause = Cause.DEMAND
        self._prefetcher.fetch_range(*use, cached_range)
        return await cached_ranges.read(object_id, start, stop)

    def on_read(self, object_id: ObjectId, offset: int, nbytes: int, *, has_waited: bool) -> None:
        """Bytes of a file were read: the jobs whose plans name it are alive."""
        path = self._tree.relative(object_id.key)
        for each in self._read_logs:
            each.add(path, offset, nbytes)
        self._prefetcher.on_read()
        if self._timeline.on_read(path, offset, nbytes, trio.current_time(), has_waited=has_waited):
            self._changed()


def job_of(file: str) -> tuple[str, str]:
    """Return the job and the kind, PLAN or CURSOR, of a hint file name. Raises HintError."""
    for kind in (PLAN, CURSOR):
        if file.endswith(kind) and is_job(file.removesuffix(kind)):
            return file.removesuffix(kind), kind
    raise HintError(f"{file!r} is not a hint file: name it <job>{PLAN} or <job>{CURSOR}")


def _read_plan(message: bytes) -> PlanIndex:
    """Run in a thread."""
    return index_plan(decode_plan(message))
