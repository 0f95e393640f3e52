"""Fetches what jobs have said they will read: what is needed soonest first, as far ahead as the room is worth it.

A walk goes through a job's extents in the order of their steps and stops at the first piece that is not here: one
walk a job for exact plans, one for the others. `policy.horizon` says which of these pieces comes next, and whether
others may go for it. Used on the loop.

Invariants:
1. What is fetched goes behind what readers wait for, and takes at most a quarter of the large buffers.
2. Nothing is evicted that is read as soon as what comes; what would find no room is not fetched.
3. No error of a hint reaches a reader.
"""

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.cache.range_cache import Snippet, is_worth_it
from fusecache.engine.namespace.lookup import Names
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.prefetch.timeline import Job, Timeline, Use, Window
from fusecache.model.errors import FusecacheError, NoSpace, NotFound, RemoteError
from fusecache.model.objects import Extent, ObjectId
from fusecache.policy.cache.granules import CHUNK_BYTES, mask_bytes, mask_of_bytes, split_by_chunk
from fusecache.policy.cache.prefetch_horizon import Front, choose_front, lead_bytes, stalls
from fusecache.policy.rate_meter import Rate

log = logging.getLogger(__name__)

# As many small pieces as a node has connections; large ones are bounded by the buffers too.
_SMALL_AT_ONCE = 48
_SMALL_BYTES = 128 * 1024
# Whole files come more slowly while the exact bytes of the next steps are on their way: somebody is about to wait for
# those, and the loop, or the link, does only so much.
_LARGE_BESIDE_EXACT = 2
# So many extents and chunks that need nothing are looked at, some 10 µs each, before all others have a turn.
_LOOKS_AT_ONCE = 32
# Room comes with time too, and silent jobs go with it: look again.
_LOOK_SECONDS = 1.0
# A directory that was found is not looked up again for so long; its files are checked when they are opened.
_DIRECTORY_SECONDS = 30.0
_DIRECTORIES = 256
# Exact bytes that a job begins with are read at once, or not before a model is loaded.
_HOLD_SECONDS = 2.0
# What was read is unpacked and handed out a moment later: so long whole files leave the node and the line to that.
_HAND_OUT_SECONDS = 0.25
# A use of now is not as sacred as what is pinned.
_NOW = 1e-6


@dataclass(frozen=True, slots=True)
class Piece:
    """What is fetched at once: granules of a chunk, or the exact bytes of an extent (mask 0)."""

    index: int
    mask: int
    nbytes: int
    extent: Extent


@dataclass(eq=False, slots=True)
class Walk:
    """How far a job's hints, exact ones or others, were looked at.

    pieces: of the use it stands at, as the hint has them; piece: the first that is not here. Until rests_until there is
    no room for it.
    """

    job: Job
    is_exact: bool
    use: Use | None = None
    handle: ReadHandle | None = None
    pieces: deque[tuple[int, int, int]] = field(default_factory=deque)
    piece: Piece | None = None
    rests_until: float = -math.inf

    def is_current(self) -> bool:
        """Say whether the use it stands at is still ahead of its job."""
        use = self.use
        return use is not None and use.window in self.job.windows and use.row == use.window.front


@dataclass(eq=False, slots=True)
class _Fetch:
    """A piece of a use on its way. deadline: of the loop's clock; is_urgent: the job cannot begin without it."""

    use: Use
    deadline: float
    nbytes: int
    is_urgent: bool


class Prefetcher:
    """Runs the fetches of all jobs of a timeline."""

    def __init__(
        self,
        timeline: Timeline,
        tree: Tree,
        names: Names,
        cache: BlockCache,
        resolve: Callable[[str], Awaitable[Node]],
    ) -> None:
        self._timeline = timeline
        self._tree = tree
        self._names = names
        self._cache = cache
        self._resolve = resolve
        self._walks: dict[tuple[str, bool], Walk] = {}
        self._directories: dict[str, tuple[Node, float]] = {}
        self._fetches: set[_Fetch] = set()
        # Exact bytes that are here: whose, and the step of their last read.
        self._snippets: list[tuple[Job, int, Snippet]] = []
        # What jobs begin with, that was fetched and not read yet, and until when others wait for that.
        self._unread: deque[tuple[Snippet, float]] = deque()
        self._handed_out_at = -math.inf
        self._large = self._small = self._looks = 0
        self._fetched_bytes = 0
        self._rate = Rate()
        self._woken = trio.Event()
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetch until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                self._woken = trio.Event()
                if not self._timeline.jobs:
                    await self._woken.wait()
                elif not await self._start_one():
                    now = trio.current_time()
                    is_begun = self._handed_out_at <= now
                    with trio.move_on_at(now + _LOOK_SECONDS if is_begun else self._handed_out_at):
                        await self._woken.wait()

    def wake(self) -> None:
        """Jobs have said something, or have moved."""
        self._woken.set()
        done = [entry for entry in self._snippets if not self._is_wanted(*entry[:2])]
        if done:
            self._snippets = [entry for entry in self._snippets if self._is_wanted(*entry[:2])]
        for _, _, snippet in done:
            self._cache.snippets.drop(snippet)
        for which, walk in list(self._walks.items()):
            walk.rests_until = -math.inf
            if not self._is_live(walk):
                self._leave(walk)
                del self._walks[which]

    def lead_bytes(self, job: Job) -> int:
        """Return how much may lie ahead of a job at the cost of others."""
        room = self._cache.housekeeping.room_bytes()
        return lead_bytes(room, job.bytes_per_second, len(self._timeline.running()))

    def predicted_stalls(self) -> int:
        """Return how many of the pieces on their way will come after their step has begun."""
        now = trio.current_time()
        deadlines = sorted((fetch.deadline - now, fetch.nbytes) for fetch in self._fetches)
        return stalls(deadlines, self._rate.per_second())

    def fetched(self, window: Window) -> int:
        """Return how many extents of a window, counted from its first, were fetched, or were here when looked at."""
        under_way = (fetch.use.row for fetch in self._fetches if fetch.use.window is window)
        return min(under_way, default=window.front)

    def _is_wanted(self, job: Job, last: int) -> bool:
        return self._timeline.jobs.get(job.name) is job and job.step <= last and not job.has_ended

    def _is_live(self, walk: Walk) -> bool:
        return self._timeline.jobs.get(walk.job.name) is walk.job and not walk.job.has_ended

    # ---- choosing

    async def _start_one(self) -> bool:
        """Start the fetch that comes next; False if nothing can be started before something changes."""
        now = trio.current_time()
        for walk in self._all_walks():
            if now >= walk.rests_until and self._is_live(walk):
                await self._look(walk)
        walks = [
            walk
            for walk in self._walks.values()
            if walk.piece is not None and walk.rests_until <= now and self._is_live(walk)
        ]
        running = sum(fetch.nbytes for fetch in self._fetches)
        free = max(0, self._cache.housekeeping.free_bytes() - running)
        chosen = self._choose(self._owed(walks, free), free) or self._choose(walks, free)
        return chosen is not None and await self._make_way_and_start(chosen, free, running)

    def _owed(self, walks: list[Walk], free: int) -> list[Walk]:
        """Return those whose large piece of a whole file comes before exact bytes, of which there may always be more.

        These are needed only until the files are here; those that a job begins with come first all the same.
        """
        most = min(_LARGE_BESIDE_EXACT, self._cache.housekeeping.large_at_once // 2)
        if self._whole_under_way() >= most or any(_begins(walk) for walk in walks):
            return []
        return [
            walk
            for walk in walks
            if not walk.is_exact and walk.piece is not None and _SMALL_BYTES < walk.piece.nbytes <= free
        ]

    def _choose(self, walks: list[Walk], free: int) -> Walk | None:
        """Return the walk whose piece is to be fetched now, None if none is. free: bytes of room."""
        lead = min((self.lead_bytes(walk.job) for walk in walks), default=0)
        walks = [*walks]
        while walks:
            chosen = choose_front([_front(walk) for walk in walks], lead=lead, free_bytes=free)
            if chosen is None:
                return None
            walk = walks.pop(chosen)
            if self._may_start(walk):
                return walk
        return None

    def _all_walks(self) -> list[Walk]:
        """Return two walks for each job."""
        for job in self._timeline.running():
            for is_exact in (True, False):
                walk = self._walks.get((job.name, is_exact))
                if walk is None or walk.job is not job:
                    self._walks[job.name, is_exact] = Walk(job, is_exact)
        return list(self._walks.values())

    def _may_start(self, walk: Walk) -> bool:
        """Say whether there are buffers for a walk's piece, and no job begins just now.

        Whole files would take its first bytes' place on the line: these take a round trip or two, and a moment to be
        read, and then the first batch is there.
        """
        assert walk.piece is not None
        assert walk.use is not None
        if not self._has_buffers(walk.piece, is_exact=walk.is_exact):
            return False
        if walk.use.window.plan.is_exact:
            # Half a batch ahead, so that the second is not late: it is on its way when the first is read.
            window = walk.use.window
            later = window.later_bytes + walk.piece.nbytes
            return walk.use.begins_its_plan or 2 * later <= window.first_bytes or not self._is_beginning()
        return not self._is_beginning() and self._handed_out_at <= trio.current_time()

    def _is_beginning(self) -> bool:
        now, unread = trio.current_time(), self._unread
        while unread and (unread[0][0].read_at <= now or unread[0][1] <= now):
            read_at = unread.popleft()[0].read_at
            if read_at <= now:
                self._handed_out_at = max(self._handed_out_at, read_at + _HAND_OUT_SECONDS)
        return bool(unread) or any(fetch.is_urgent for fetch in self._fetches)

    def bring(self, job: Job, last: int, snippet: Snippet) -> None:
        """Fetch a snippet for somebody who waits for it, and hold it until the job has come past a step."""
        if self._nursery is None:
            self._cache.snippets.drop(snippet)
            snippet.ended.set()
        else:
            self._nursery.start_soon(self._bring, job, last, snippet, name="hinted-read")

    async def _bring(self, job: Job, last: int, snippet: Snippet) -> None:
        try:
            await self._cache.snippets.fetch(snippet)
        except RemoteError as exc:
            log.debug(
                "exact bytes did not come, the cache asks again object=%s error=%s", snippet.object_id, exc
            )
        else:
            self._keep(job, last, snippet)

    def _keep(self, job: Job, last: int, snippet: Snippet) -> None:
        if self._is_wanted(job, last):
            self._snippets.append((job, last, snippet))
        else:
            self._cache.snippets.drop(snippet)  # its job went while it came

    def note_read(self) -> None:
        """Somebody has read something that was hinted."""
        if self._unread:
            self._woken.set()

    async def _make_way_and_start(self, walk: Walk, free: int, running: int) -> bool:
        """Start a walk's piece, unless it finds no room: then others may."""
        piece, use = walk.piece, walk.use
        assert piece is not None
        assert use is not None
        if piece.mask and piece.nbytes > free:
            seconds = max(_NOW, walk.job.seconds_until(use.first))
            if not await self._cache.housekeeping.make_way(running + piece.nbytes, seconds):
                walk.rests_until = trio.current_time() + _LOOK_SECONDS
                return True
            if walk.piece is not piece or not walk.is_current() or not self._is_live(walk):
                return True
        assert walk.handle is not None
        there = None if piece.mask else self._cache.snippets.find(walk.handle.object_id, piece.extent)
        if there is None:
            self._start(walk, use, piece)
            return True
        walk.piece = None  # who reads it was quicker
        if use.begins_its_plan:
            self._unread.append((there, trio.current_time() + _HOLD_SECONDS))
        return True

    def _has_buffers(self, piece: Piece, *, is_exact: bool) -> bool:
        if piece.nbytes <= _SMALL_BYTES:
            return self._small < _SMALL_AT_ONCE
        if self._large >= self._cache.housekeeping.large_at_once:
            return False
        if is_exact or not any(fetch.use.window.plan.is_exact for fetch in self._fetches):
            return True
        return self._whole_under_way() < _LARGE_BESIDE_EXACT

    def _whole_under_way(self) -> int:
        """Return how many large pieces of whole files are on their way; exact bytes may be large, too."""
        return sum(
            fetch.nbytes > _SMALL_BYTES and not fetch.use.window.plan.is_exact for fetch in self._fetches
        )

    # ---- looking

    async def _look(self, walk: Walk) -> None:
        """Go on to the first piece that is not here."""
        while True:
            await self._take_turns()
            if not self._is_live(walk):
                self._leave(walk)  # forgotten while it was looked at
                return
            if not walk.is_current():
                self._leave(walk)
                walk.use = walk.job.front(is_exact=walk.is_exact)
                if walk.use is None:
                    return
                if walk.use.last < walk.job.step or not await self._enter(walk, walk.use):
                    if walk.rests_until > trio.current_time():
                        walk.use = None
                        return
                    self._pass(walk)
                    continue
            if walk.piece is not None:
                return
            assert walk.use is not None
            walk.piece = await self._first_missing(walk, walk.use)
            if walk.piece is None:
                self._pass(walk)

    async def _take_turns(self) -> None:
        """Let others run now and then: what is looked at may all be answered from memory, and be very much."""
        self._looks += 1
        if self._looks >= _LOOKS_AT_ONCE:
            self._looks = 0
            await trio.lowlevel.checkpoint()

    def _pass(self, walk: Walk) -> None:
        """All of the use is here, or cannot be."""
        if walk.is_current():
            assert walk.use is not None
            walk.use.window.front += 1
        self._leave(walk)

    def _leave(self, walk: Walk) -> None:
        if walk.handle is not None:
            self._cache.close(walk.handle)
        walk.use = walk.handle = walk.piece = None
        walk.pieces.clear()

    async def _enter(self, walk: Walk, use: Use) -> bool:
        """Find the object of a use; False if there is nothing to fetch of it."""
        try:
            found = await self._find(use.path)
        except NotFound as exc:
            self._skip(walk.job, use.path, exc)
            return False
        except FusecacheError as exc:
            log.debug("a hinted file is not found now path=%s error=%s", use.path, exc)
            walk.rests_until = trio.current_time() + _LOOK_SECONDS
            return False
        if found is None or not walk.is_current():
            return False
        object_id, size = found
        if use.start >= size:
            return False
        try:
            walk.handle = self._cache.open(object_id, size)
        except ValueError:
            return False  # an open file of that version has another size: it is the one to be believed
        walk.pieces.extend(split_by_chunk(Extent(use.start, min(size, use.start + use.length))))
        return True

    async def _find(self, path: str) -> tuple[ObjectId, int] | None:
        """Return the version and the size of a file; None if the bucket has nothing of it. Raises NotFound."""
        folder, _, name = path.rpartition("/")
        now = trio.current_time()
        parent, until = self._directories.get(folder, (None, -math.inf))
        if parent is None or until <= now or self._tree.nodes.get(parent.number) is not parent:
            parent = await self._resolve(folder)
            while len(self._directories) >= _DIRECTORIES:
                del self._directories[next(iter(self._directories))]
            self._directories[folder] = parent, now + _DIRECTORY_SECONDS
        if parent.kind is not Kind.DIRECTORY:
            raise NotFound(f"{path}: {folder} is no directory")
        child = parent.children.get(name)
        if child is None:
            # However old the listing: a wrong guess is refused by the bucket, and costs one request.
            row = self._names.listed(parent, name)
            if row is not None:
                return (ObjectId(self._tree.key_of_path(path), row.etag), row.size) if row.size else None
            child = await self._resolve(path)
        if child.kind is Kind.DIRECTORY:
            raise NotFound(f"{path}: it is a directory")
        if child.generation is not None or child.object is None or not child.object.size:
            return None  # it is here as it was written, or empty, or a link
        return child.object.object_id, child.object.size

    async def _first_missing(self, walk: Walk, use: Use) -> Piece | None:
        """Return the first piece of a use that is not here, None if there is none; those before it are forgotten."""
        handle = walk.handle
        assert handle is not None
        stop = min(handle.size, use.start + use.length)
        extent = Extent(use.start, stop)
        if walk.pieces and walk.is_exact and is_worth_it(extent):
            missing = 0
            for index, first, last in list(walk.pieces):
                await self._take_turns()
                missing |= await self._cache.housekeeping.missing(
                    handle.entry, index, mask_of_bytes(first, last)
                )
            if walk.handle is not handle or not missing:
                return None
            if self._cache.snippets.find(handle.object_id, extent) is not None:
                return None
            if self._cache.snippets.fits(extent):
                walk.pieces.clear()
                return Piece(0, 0, extent.size, extent)
        while walk.pieces and walk.handle is handle:
            await self._take_turns()
            if walk.handle is not handle:
                break
            index, first, last = walk.pieces[0]
            missing = await self._cache.housekeeping.missing(handle.entry, index, mask_of_bytes(first, last))
            if walk.handle is not handle:
                break
            walk.pieces.popleft()
            if missing:
                size = min(CHUNK_BYTES, handle.size - index * CHUNK_BYTES)
                return Piece(index, missing, mask_bytes(missing, size), extent)
        return None

    def _skip(self, job: Job, path: str, error: Exception) -> None:
        """Count a file that hints name for nothing; say so once a job."""
        job.skipped += 1
        if not job.is_told:
            job.is_told = True
            log.info(
                "hints name what cannot be fetched: skipped job=%s path=%s error=%s", job.name, path, error
            )

    # ---- fetching

    def _start(self, walk: Walk, use: Use, piece: Piece) -> None:
        job = walk.job
        assert walk.handle is not None
        assert self._nursery is not None
        walk.piece = None
        handle = self._cache.open(walk.handle.object_id, walk.handle.size)
        if not self._fetches:
            self._rate.reset(trio.current_time(), self._fetched_bytes)
        is_urgent = walk.is_exact and use.begins_its_plan
        deadline = trio.current_time() + job.seconds_until(use.first)
        fetch = _Fetch(use, deadline, piece.nbytes, is_urgent)
        self._fetches.add(fetch)
        self._count(piece, 1)
        job.note_fetched(use, piece.nbytes)
        depth = int(max(0.0, fetch.deadline) * 10)  # tenths of a second of the loop's clock
        if piece.mask:
            bring = self._bring_granules(handle, piece, depth)
        else:
            snippet = self._cache.snippets.begin(handle.object_id, handle.size, piece.extent, depth)
            bring = self._bring_exactly(job, use.last, snippet, fetch)
        self._nursery.start_soon(self._fetch, job, use, handle, piece, fetch, bring, name="hinted-fetch")

    async def _fetch(
        self,
        job: Job,
        use: Use,
        handle: ReadHandle,
        piece: Piece,
        fetch: _Fetch,
        bring: Callable[[], Awaitable[None]],
    ) -> None:
        try:
            await bring()
            self._fetched_bytes += piece.nbytes
            job.late += job.step > use.first
        except NoSpace as exc:
            log.debug("what hints brought was not kept path=%s error=%s", use.path, exc)
        except RemoteError as exc:
            self._skip(job, use.path, exc)
        finally:
            self._fetches.discard(fetch)
            self._count(piece, -1)
            self._rate.note(trio.current_time(), self._fetched_bytes)
            self._cache.close(handle)
            self._woken.set()

    def _bring_granules(self, handle: ReadHandle, piece: Piece, depth: int) -> Callable[[], Awaitable[None]]:
        fill = self._cache.housekeeping.fill
        return partial(fill, handle.entry, piece.index, mask=piece.mask, depth=depth, attempts=1)

    def _bring_exactly(
        self, job: Job, last: int, snippet: Snippet, fetch: _Fetch
    ) -> Callable[[], Awaitable[None]]:
        async def bring() -> None:
            await self._cache.snippets.fetch(snippet)
            self._keep(job, last, snippet)
            if fetch.is_urgent:
                self._unread.append((snippet, trio.current_time() + _HOLD_SECONDS))

        return bring

    def _count(self, piece: Piece, change: int) -> None:
        if piece.nbytes <= _SMALL_BYTES:
            self._small += change
        else:
            self._large += change


def _begins(walk: Walk) -> bool:
    """Say whether a walk stands at what its job begins with."""
    return walk.is_exact and walk.use is not None and walk.use.begins_its_plan


def _front(walk: Walk) -> Front:
    """Return a walk's piece as policy sees it; exact bytes take no room on the disk."""
    assert walk.piece is not None
    assert walk.use is not None
    nbytes = walk.piece.nbytes if walk.piece.mask else 0
    return Front(walk.job.seconds_until(walk.use.first), nbytes, walk.job.ahead_bytes)
