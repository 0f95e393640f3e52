"""Prefetches the planned reads of jobs: the soonest needed first, as far ahead as disk space allows.

Each job has two cursors (`plan_cursor`): one for exact plans, one for the others. Each stops at its first missing
piece. `policy.cache.prefetch_horizon` decides which piece comes next, and whether cached bytes may be evicted for it.
Used on the trio loop.

Invariants:
1. Prefetches start after the fetches that readers wait for, and take at most a quarter of the large buffers.
2. A prefetch never evicts bytes that are read as soon as its own. Bytes that would find no space are not fetched.
3. No error of a hint reaches a reader.
"""

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.cache.evictor import SOON
from fusecache.engine.cache.range_cache import CachedRange
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.prefetch.plan_cursor import REST_SECONDS, FetchPiece, PieceFinder, PlanCursor
from fusecache.engine.prefetch.plan_index import PlanIndex, PlannedRead
from fusecache.engine.prefetch.timeline import Job, Timeline
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.model.errors import FusecacheError, InternalError, NoSpace, RemoteError
from fusecache.policy.cache.prefetch_horizon import JobFront, choose_front, lead_bytes

log = logging.getLogger(__name__)

# Fewer small pieces than a node has connections (64); large ones are bounded by the buffers too.
_SMALL_AT_ONCE = 48
_SMALL_BYTES = 128 * 1024
# At most 2 large pieces of whole files while exact bytes are in flight: a reader will wait for the exact bytes of the
# next steps soon, and both share the loop and the link.
_LARGE_BESIDE_EXACT = 2
# Disk space becomes free, and silent jobs are forgotten, without an event: poll every second.
_POLL_SECONDS = 1.0
# A job reads the first exact bytes of its plan at once, or only after it has loaded a model. Other prefetches wait for
# that read at most 2 s.
_HOLD_SECONDS = 2.0
# The job unpacks and distributes its first bytes right after reading them. Whole files wait that time, to leave the
# job CPU and link.
_HAND_OUT_SECONDS = 0.25


@dataclass(eq=False, slots=True)
class _PieceInFlight:
    """A piece in flight. is_urgent: the job cannot begin without it."""

    planned: PlannedRead
    nbytes: int
    is_urgent: bool


@dataclass(eq=False, repr=False)
class Prefetcher:
    """Runs the prefetches of all jobs of a timeline."""

    _timeline: Timeline
    _tree: Tree
    _lookup: Lookup
    _cache: BlockCache
    _resolve: Callable[[str], Awaitable[Node]]
    _tasks: TaskNursery

    def __post_init__(self) -> None:
        self._finder = PieceFinder(self._timeline, self._tree, self._lookup, self._cache, self._resolve)
        self._cursors: dict[tuple[str, bool], PlanCursor] = {}
        self._fetches: set[_PieceInFlight] = set()
        # Exact ranges in memory, each with its job and the step of its last read.
        self._ranges: list[tuple[Job, int, CachedRange]] = []
        # First ranges of jobs, fetched and not read yet, each with the time until which other prefetches wait for it.
        self._unread: deque[tuple[CachedRange, float]] = deque()
        self._handed_out_until = -math.inf
        self._large = self._small = 0
        self._woken = trio.Event()

    async def run(self) -> None:
        """Prefetch until cancelled."""
        while True:
            self._woken = trio.Event()
            if not self._timeline.jobs:
                await self._woken.wait()
            elif not await self._start_one():
                now = trio.current_time()
                is_begun = self._handed_out_until <= now
                with trio.move_on_at(now + _POLL_SECONDS if is_begun else self._handed_out_until):
                    await self._woken.wait()

    def wake(self) -> None:
        """A job sent a hint, moved, or was forgotten."""
        self._woken.set()
        done = [entry for entry in self._ranges if not self._is_wanted(*entry[:2])]
        if done:
            self._ranges = [entry for entry in self._ranges if self._is_wanted(*entry[:2])]
        for _, _, cached_range in done:
            self._cache.range_cache.drop(cached_range)
        for which, cursor in list(self._cursors.items()):
            cursor.rests_until = -math.inf
            if not self._finder.is_live(cursor):
                self._finder.leave(cursor)
                del self._cursors[which]

    def lead_bytes(self, job: Job) -> int:
        """Return how many prefetched bytes a job may have ahead by evicting other bytes."""
        space = self._cache.maintenance.free_space_bytes()
        return lead_bytes(space, job.bytes_per_second, len(self._timeline.running()))

    def fetched(self, plan: PlanIndex) -> int:
        """Return how many extents of a plan, counted from its first, were fetched, or were cached when checked."""
        under_way = (fetch.planned.row for fetch in self._fetches if fetch.planned.index is plan)
        return min(under_way, default=plan.front)

    def _is_wanted(self, job: Job, last: int) -> bool:
        return self._timeline.jobs.get(job.name) is job and job.step <= last and not job.has_ended

    # ---- choosing

    async def _start_one(self) -> bool:
        """Start the next fetch; False if none can be started before something changes."""
        now = trio.current_time()
        for cursor in self._all_cursors():
            if now >= cursor.rests_until and self._finder.is_live(cursor):
                await self._finder.find_next(cursor)
        cursors = [
            cursor
            for cursor in self._cursors.values()
            if cursor.piece is not None and cursor.rests_until <= now and self._finder.is_live(cursor)
        ]
        running = sum(fetch.nbytes for fetch in self._fetches)
        free = max(0, self._cache.maintenance.free_bytes() - running)
        chosen = self._choose(self._whole_file_share(cursors, free), free) or self._choose(cursors, free)
        return chosen is not None and await self._evict_and_start(chosen, free, running)

    def _whole_file_share(self, cursors: list[PlanCursor], free: int) -> list[PlanCursor]:
        """Return the cursors whose large piece of a whole file may start before exact bytes.

        Without this share, exact bytes could delay whole files for ever, and they are needed only until the files are
        cached. The first exact bytes of a job still go first.
        """
        most = min(_LARGE_BESIDE_EXACT, self._cache.maintenance.large_at_once // 2)
        if self._whole_in_flight() >= most or any(_begins(cursor) for cursor in cursors):
            return []
        return [
            cursor
            for cursor in cursors
            if not cursor.is_exact and cursor.piece is not None and _SMALL_BYTES < cursor.piece.nbytes <= free
        ]

    def _choose(self, cursors: list[PlanCursor], free: int) -> PlanCursor | None:
        """Return the cursor whose piece to fetch now, None if none may start. free: bytes of free disk space."""
        lead = min((self.lead_bytes(cursor.job) for cursor in cursors), default=0)
        cursors = [*cursors]
        while cursors:
            chosen = choose_front([_front(cursor) for cursor in cursors], lead=lead, free_bytes=free)
            if chosen is None:
                return None
            cursor = cursors.pop(chosen)
            if self._may_start(cursor):
                return cursor
        return None

    def _all_cursors(self) -> list[PlanCursor]:
        """Return all cursors, two for each running job."""
        for job in self._timeline.running():
            for is_exact in (True, False):
                cursor = self._cursors.get((job.name, is_exact))
                if cursor is None or cursor.job is not job:
                    self._cursors[job.name, is_exact] = PlanCursor(job, is_exact)
        return list(self._cursors.values())

    def _may_start(self, cursor: PlanCursor) -> bool:
        """Return whether there are buffers for a cursor's piece, and no job is beginning.

        Whole files would compete with a job's first bytes for the link. These take one or two round trips and a short
        time to be read; then the first batch is ready.
        """
        assert cursor.piece is not None
        assert cursor.planned is not None
        if not self._has_buffers(cursor.piece, is_exact=cursor.is_exact):
            return False
        if cursor.planned.index.plan.is_exact:
            # Also begin half a batch more: the second batch is then in flight while the job reads the first.
            plan = cursor.planned.index
            later = plan.later_bytes + cursor.piece.nbytes
            return cursor.planned.begins_its_plan or 2 * later <= plan.first_bytes or not self._is_beginning()
        return not self._is_beginning() and self._handed_out_until <= trio.current_time()

    def _is_beginning(self) -> bool:
        now, unread = trio.current_time(), self._unread
        while unread and (unread[0][0].read_at <= now or unread[0][1] <= now):
            read_at = unread.popleft()[0].read_at
            if read_at <= now:
                self._handed_out_until = max(self._handed_out_until, read_at + _HAND_OUT_SECONDS)
        return bool(unread) or any(fetch.is_urgent for fetch in self._fetches)

    def fetch_range(self, job: Job, last: int, cached_range: CachedRange) -> None:
        """Fetch an exact range that a reader waits for, and hold it until the job is past a step."""

        def give_up(_error: InternalError | None = None) -> None:
            self._cache.range_cache.drop(cached_range)
            cached_range.ended.set()

        if self._tasks.is_open:
            self._tasks.start_soon(
                "hinted-read", self._fetch_range, job, last, cached_range, on_failed=give_up
            )
        else:
            give_up()

    async def _fetch_range(self, job: Job, last: int, cached_range: CachedRange) -> None:
        try:
            await self._cache.range_cache.fetch(cached_range)
        except RemoteError as exc:
            log.debug(
                "exact range not fetched, the cache retries object=%s error=%s", cached_range.object_id, exc
            )
        else:
            self._hold(job, last, cached_range)

    def _hold(self, job: Job, last: int, cached_range: CachedRange) -> None:
        if self._is_wanted(job, last):
            self._ranges.append((job, last, cached_range))
        else:
            self._cache.range_cache.drop(cached_range)  # its job ended or moved past it during the fetch

    def on_read(self) -> None:
        """A reader read bytes while there are hints: a job's first bytes may be among them."""
        if self._unread:
            self._woken.set()

    async def _evict_and_start(self, cursor: PlanCursor, free: int, running: int) -> bool:
        """Start a cursor's piece. If it finds no disk space, the cursor rests, so that others may start."""
        piece, planned = cursor.piece, cursor.planned
        assert piece is not None
        assert planned is not None
        if piece.mask and piece.nbytes > free:
            seconds = max(SOON, cursor.job.seconds_until(planned.first))
            if not await self._cache.maintenance.evict_for(running + piece.nbytes, seconds):
                cursor.rests_until = trio.current_time() + REST_SECONDS
                return True
            if cursor.piece is not piece or not cursor.is_current() or not self._finder.is_live(cursor):
                return True
        assert cursor.handle is not None
        found = None if piece.mask else self._cache.range_cache.find(cursor.handle.object_id, piece.extent)
        if found is None:
            self._start(cursor, planned, piece)
            return True
        cursor.piece = None  # a reader or another job has requested it already
        if planned.begins_its_plan:
            self._unread.append((found, trio.current_time() + _HOLD_SECONDS))
        return True

    def _has_buffers(self, piece: FetchPiece, *, is_exact: bool) -> bool:
        if piece.nbytes <= _SMALL_BYTES:
            return self._small < _SMALL_AT_ONCE
        if self._large >= self._cache.maintenance.large_at_once:
            return False
        if is_exact or not any(fetch.planned.index.plan.is_exact for fetch in self._fetches):
            return True
        return self._whole_in_flight() < _LARGE_BESIDE_EXACT

    def _whole_in_flight(self) -> int:
        """Return how many large pieces of whole files are in flight. Exact bytes may be large, too."""
        return sum(
            fetch.nbytes > _SMALL_BYTES and not fetch.planned.index.plan.is_exact for fetch in self._fetches
        )

    # ---- fetching

    def _start(self, cursor: PlanCursor, planned: PlannedRead, piece: FetchPiece) -> None:
        job = cursor.job
        assert cursor.handle is not None
        cursor.piece = None
        handle = self._cache.open(cursor.handle.object_id, cursor.handle.size)
        is_urgent = cursor.is_exact and planned.begins_its_plan
        deadline = trio.current_time() + job.seconds_until(planned.first)
        fetch = _PieceInFlight(planned, piece.nbytes, is_urgent)
        self._fetches.add(fetch)
        self._count(piece, 1)
        job.on_fetched(planned, piece.nbytes, trio.current_time())
        depth = int(max(0.0, deadline) * 10)  # tenths of a second of the loop's clock
        if piece.mask:
            transfer = self._fetch_granules(handle, piece, depth)
        else:
            cached_range = self._cache.range_cache.begin(handle.object_id, handle.size, piece.extent, depth)
            transfer = self._fetch_exact(job, planned.last, cached_range, fetch)
        self._tasks.start_soon(
            "hinted-fetch",
            *(self._fetch, job, planned, handle, piece, fetch, transfer),
            about=planned.path,
            on_failed=partial(self._finder.skip, job, planned.path),
        )

    async def _fetch(
        self,
        job: Job,
        planned: PlannedRead,
        handle: ReadHandle,
        piece: FetchPiece,
        fetch: _PieceInFlight,
        transfer: Callable[[], Awaitable[None]],
    ) -> None:
        try:
            await transfer()
            job.late += job.step > planned.first
        except NoSpace as exc:
            log.debug("prefetched bytes were not cached path=%s error=%s", planned.path, exc)
        except FusecacheError as exc:
            self._finder.skip(job, planned.path, exc)
        finally:
            self._fetches.discard(fetch)
            self._count(piece, -1)
            self._cache.close(handle)
            self._woken.set()

    def _fetch_granules(
        self, handle: ReadHandle, piece: FetchPiece, depth: int
    ) -> Callable[[], Awaitable[None]]:
        fill = self._cache.maintenance.fill
        return partial(fill, handle.entry, piece.index, mask=piece.mask, depth=depth, attempts=1)

    def _fetch_exact(
        self, job: Job, last: int, cached_range: CachedRange, fetch: _PieceInFlight
    ) -> Callable[[], Awaitable[None]]:
        async def transfer() -> None:
            await self._cache.range_cache.fetch(cached_range)
            self._hold(job, last, cached_range)
            if fetch.is_urgent:
                self._unread.append((cached_range, trio.current_time() + _HOLD_SECONDS))

        return transfer

    def _count(self, piece: FetchPiece, change: int) -> None:
        if piece.nbytes <= _SMALL_BYTES:
            self._small += change
        else:
            self._large += change


def _begins(cursor: PlanCursor) -> bool:
    """Return whether a cursor is at the first exact bytes of a plan."""
    return cursor.is_exact and cursor.planned is not None and cursor.planned.begins_its_plan


def _front(cursor: PlanCursor) -> JobFront:
    """Return a cursor's piece as input of the policy. Exact bytes take no disk space."""
    assert cursor.piece is not None
    assert cursor.planned is not None
    nbytes = cursor.piece.nbytes if cursor.piece.mask else 0
    return JobFront(cursor.job.seconds_until(cursor.planned.first), nbytes, cursor.job.ahead_bytes)
