"""A job's position in its plans, and the search for the next missing piece.

A cursor walks the extents of a job's plans in the order of their steps. It stops at the first piece that is missing.
Used on the trio loop. Not here: which of the pieces is fetched next, and the fetch (`prefetcher`).

Invariant: a search yields to other tasks after at most _CHECKS_PER_YIELD checks, however many extents need nothing.
"""

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.cache.range_cache import is_worth_it
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.prefetch.plan_index import PlannedRead
from fusecache.engine.prefetch.timeline import Job, Timeline
from fusecache.model.errors import FusecacheError, NotFound
from fusecache.model.objects import Extent, ObjectId
from fusecache.policy.cache.granules import CHUNK_BYTES, mask_bytes, mask_of_bytes, split_by_chunk

log = logging.getLogger(__name__)

# After 32 extents and chunks without a missing piece, some 10 µs each, the loop runs the other tasks.
_CHECKS_PER_YIELD = 32
# Disk space becomes free, and a file may be found again, without an event: a resting cursor retries after 1 s.
REST_SECONDS = 1.0
# A directory is looked up again after 30 s. Its files are checked when they are opened.
_DIRECTORY_SECONDS = 30.0
_DIRECTORIES = 256


@dataclass(frozen=True, slots=True)
class FetchPiece:
    """One unit of prefetch: granules of a chunk, or the exact bytes of an extent (mask 0)."""

    index: int
    mask: int
    nbytes: int
    extent: Extent


@dataclass(eq=False, slots=True)
class PlanCursor:
    """A job's position in its plans, exact ones or others.

    planned: the read at the position; pieces: its chunk ranges that were not checked yet; piece: its first missing
    piece. Before rests_until, there is no disk space for the piece, or the file was not found.
    """

    job: Job
    is_exact: bool
    planned: PlannedRead | None = None
    handle: ReadHandle | None = None
    pieces: deque[tuple[int, int, int]] = field(default_factory=deque)
    piece: FetchPiece | None = None
    rests_until: float = -math.inf

    def is_current(self) -> bool:
        """Return whether its planned read is still the front of a plan of its job."""
        planned = self.planned
        return planned is not None and planned.index in self.job.plans and planned.row == planned.index.front


@dataclass(eq=False, repr=False)
class PieceFinder:
    """Moves cursors to their next missing piece."""

    _timeline: Timeline
    _tree: Tree
    _lookup: Lookup
    _cache: BlockCache
    _resolve: Callable[[str], Awaitable[Node]]
    _directories: dict[str, tuple[Node, float]] = field(init=False, default_factory=dict)
    _checks: int = field(init=False, default=0)

    async def find_next(self, cursor: PlanCursor) -> None:
        """Move the cursor to its next missing piece."""
        while True:
            await self._yield_sometimes()
            if not self.is_live(cursor):
                self.leave(cursor)  # the job was forgotten, or ended, at a checkpoint
                return
            if not cursor.is_current():
                self.leave(cursor)
                cursor.planned = cursor.job.front(is_exact=cursor.is_exact)
                if cursor.planned is None:
                    return
                if cursor.planned.last < cursor.job.step or not await self._enter(cursor, cursor.planned):
                    if cursor.rests_until > trio.current_time():
                        cursor.planned = None
                        return
                    self._advance(cursor)
                    continue
            if cursor.piece is not None:
                return
            assert cursor.planned is not None
            cursor.piece = await self._first_missing(cursor, cursor.planned)
            if cursor.piece is None:
                self._advance(cursor)

    def leave(self, cursor: PlanCursor) -> None:
        """Close the cursor's planned read."""
        if cursor.handle is not None:
            self._cache.close(cursor.handle)
        cursor.planned = cursor.handle = cursor.piece = None
        cursor.pieces.clear()

    def skip(self, job: Job, path: str, error: Exception) -> None:
        """Count a hinted file that cannot be fetched. Logs the first one of a plan."""
        job.skipped += 1
        if not job.skipped_path:
            job.skipped_path = path
            log.info(
                "skipped a hinted file that cannot be fetched job=%s path=%s error=%s", job.name, path, error
            )

    def is_live(self, cursor: PlanCursor) -> bool:
        """Return whether the cursor's job is known, has not ended, and its files are read."""
        job = cursor.job
        return self._timeline.jobs.get(job.name) is job and not job.has_ended and not job.is_astray

    async def _yield_sometimes(self) -> None:
        """Let other tasks run now and then: checks answered from memory never wait, and there may be very many."""
        self._checks += 1
        if self._checks >= _CHECKS_PER_YIELD:
            self._checks = 0
            await trio.lowlevel.checkpoint()

    def _advance(self, cursor: PlanCursor) -> None:
        """All of the planned read is cached, or cannot be: move to the next."""
        if cursor.is_current():
            assert cursor.planned is not None
            cursor.planned.index.front += 1
        self.leave(cursor)

    async def _enter(self, cursor: PlanCursor, planned: PlannedRead) -> bool:
        """Find the object of a planned read; False if it has nothing to fetch."""
        try:
            found = await self._find(planned.path)
        except NotFound as exc:
            self.skip(cursor.job, planned.path, exc)
            return False
        except FusecacheError as exc:
            log.debug("lookup of a hinted file failed, retrying path=%s error=%s", planned.path, exc)
            cursor.rests_until = trio.current_time() + REST_SECONDS
            return False
        if found is None or not cursor.is_current():
            return False
        object_id, size = found
        if planned.start >= size:
            return False
        try:
            cursor.handle = self._cache.open(object_id, size)
        except ValueError:
            return False  # an open file of that version has another size; trust the open file
        cursor.pieces.extend(split_by_chunk(Extent(planned.start, min(size, planned.start + planned.length))))
        return True

    async def _find(self, path: str) -> tuple[ObjectId, int] | None:
        """Return a file's version and size; None if there is nothing to fetch. Raises NotFound."""
        folder, _, name = path.rpartition("/")
        now = trio.current_time()
        parent, until = self._directories.get(folder, (None, -math.inf))
        if parent is None or until <= now or self._tree.nodes.get(parent.number) is not parent:
            parent = await self._resolve(folder)
            while len(self._directories) >= _DIRECTORIES:
                del self._directories[next(iter(self._directories))]
            self._directories[folder] = parent, now + _DIRECTORY_SECONDS
        if parent.kind is not Kind.DIRECTORY:
            raise NotFound(f"{path}: {folder} is not a directory")
        child = parent.children.get(name)
        if child is None:
            # The listing may be old: the bucket refuses a GET of a replaced version, which costs one request.
            row = self._lookup.cached_row(parent, name)
            if row is not None:
                return (ObjectId(self._tree.key_of_path(path), row.etag), row.size) if row.size else None
            child = await self._resolve(path)
        if child.kind is Kind.DIRECTORY:
            raise NotFound(f"{path}: it is a directory")
        if child.version is not None or child.object is None or not child.object.size:
            return None  # it has local content, or is empty, or is a symbolic link
        return child.object.object_id, child.object.size

    async def _first_missing(self, cursor: PlanCursor, planned: PlannedRead) -> FetchPiece | None:
        """Return the first missing piece of a planned read, None if there is none; drops the pieces before it."""
        handle = cursor.handle
        assert handle is not None
        stop = min(handle.size, planned.start + planned.length)
        extent = Extent(planned.start, stop)
        if cursor.pieces and cursor.is_exact and is_worth_it(extent):
            missing = 0
            for index, first, last in list(cursor.pieces):
                await self._yield_sometimes()
                missing |= await self._cache.maintenance.missing(
                    handle.entry, index, mask_of_bytes(first, last)
                )
            if cursor.handle is not handle or not missing:
                return None
            if self._cache.range_cache.find(handle.object_id, extent) is not None:
                return None
            if self._cache.range_cache.fits(extent):
                cursor.pieces.clear()
                return FetchPiece(0, 0, extent.size, extent)
        while cursor.pieces and cursor.handle is handle:
            await self._yield_sometimes()
            if cursor.handle is not handle:
                break
            index, first, last = cursor.pieces[0]
            missing = await self._cache.maintenance.missing(handle.entry, index, mask_of_bytes(first, last))
            if cursor.handle is not handle:
                break
            cursor.pieces.popleft()
            if missing:
                size = min(CHUNK_BYTES, handle.size - index * CHUNK_BYTES)
                return FetchPiece(index, missing, mask_bytes(missing, size), extent)
        return None
