"""Warm-ups: fetch files and directories into the disk cache before a job reads them.

A warm-up lists its paths twice: first to check that they fit into the cache, then to fetch them. So it keeps no list
in memory, however many objects there are. Its requests yield to the requests of readers.

Invariants:
1. Memory is bounded: by the pieces in flight and, while it runs, one number per fetched file.
2. Content that is not in the bucket yet is skipped, as it is local anyway; so are keys that no path can name.
"""

import enum
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.engine.runtime.supervisor import TaskNursery, unwrap_single_error
from fusecache.model.errors import FusecacheError, InternalError, NoSpace, NotPermitted
from fusecache.model.format_text import size_text
from fusecache.model.names import unusable_name
from fusecache.model.objects import MIB, ObjectInfo
from fusecache.policy.cache.granules import CHUNK_BYTES, PAGE_BYTES

# Pieces fetched at a time: as many as a node's connections. Large pieces are also bounded by the buffer pool.
_PIECES_AT_ONCE = 32
# A piece up to this size counts as small: 32 of them are 32 MiB.
_SMALL_BYTES = MIB
# Warm-ups at a time, however many programs start one: each holds a task per piece in flight.
_JOBS_AT_ONCE = 8
_JOBS_REMEMBERED = 8
# Failures listed in an answer; the rest is only counted.
FAILURES_NAMED = 50


class WarmupState(enum.Enum):
    """The phase of a warm-up."""

    COUNTING = "counting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(eq=False, slots=True)
class Warmup:
    """One warm-up. Totals are final once `counted` is set, at `began`; message: why it failed as a whole."""

    paths: tuple[str, ...]
    state: WarmupState = WarmupState.COUNTING
    files_total: int = 0
    bytes_total: int = 0
    files_done: int = 0
    bytes_done: int = 0
    files_failed: int = 0
    failures: list[str] = field(default_factory=list)
    message: str = ""
    began: float = math.inf
    counted: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def as_dict(self) -> dict[str, Any]:
        """Return its paths, state and progress as plain values of bounded size."""
        return {
            "paths": [path or "." for path in self.paths[:FAILURES_NAMED]],
            "state": self.state.value,
            "files_total": self.files_total,
            "files_done": self.files_done,
            "files_failed": self.files_failed,
            "bytes_total": self.bytes_total,
            "bytes_done": self.bytes_done,
            "seconds": round(max(0.0, trio.current_time() - self.began), 1),
            "failures": list(self.failures),
            "message": self.message,
        }

    def record_failure(self, path: str, error: FusecacheError) -> None:
        """Count a file that could not be fetched."""
        self.files_failed += 1
        if len(self.failures) < FAILURES_NAMED:
            self.failures.append(f"{path}: {error}")


@dataclass(eq=False, slots=True)
class _File:
    """A file that is being fetched. left: pieces that are not done yet."""

    path: str
    handle: ReadHandle
    left: int
    error: FusecacheError | None = None


@dataclass(eq=False, repr=False)
class WarmupRunner:
    """Runs warm-ups. `resolve` finds the node of a path, or raises NotFound."""

    _tree: Tree
    _client: MetadataClient
    _cache: BlockCache
    _resolve: Callable[[str], Awaitable[Node]]
    _tasks: TaskNursery

    def __post_init__(self) -> None:
        self._jobs: deque[Warmup] = deque(maxlen=_JOBS_REMEMBERED)
        self._pieces = trio.CapacityLimiter(_PIECES_AT_ONCE)
        self._large = trio.CapacityLimiter(self._cache.maintenance.large_at_once)

    def jobs(self) -> list[Warmup]:
        """Return running warm-ups and the last few that ended, oldest first."""
        return list(self._jobs)

    def start(self, paths: Sequence[str]) -> Warmup:
        """Start a warm-up of files and directories. Raises NotPermitted if too many are running."""
        if sum(not job.ended.is_set() for job in self._jobs) >= _JOBS_AT_ONCE:
            raise NotPermitted(f"{_JOBS_AT_ONCE} warm-ups are running: wait for one to end, then try again")
        job = Warmup(_outermost(paths))
        # Forget one that ended. Fewer are running than are remembered, so there is one.
        ended = [each for each in self._jobs if each.ended.is_set()]
        if len(self._jobs) == _JOBS_REMEMBERED and ended:
            self._jobs.remove(ended[0])
        self._jobs.append(job)
        self._tasks.start_soon("warm-up", self._run, job, on_failed=partial(_on_failed, job))
        return job

    async def _run(self, job: Warmup) -> None:
        try:
            with job.scope, unwrap_single_error():
                await self._warm(job)
            if job.scope.cancelled_caught:
                job.state = WarmupState.FAILED if job.message else WarmupState.STOPPED
            else:
                job.state = WarmupState.FAILED if job.files_failed else WarmupState.DONE
        except FusecacheError as exc:
            job.state, job.message = WarmupState.FAILED, str(exc)
        finally:
            job.counted.set()
            job.ended.set()

    async def _warm(self, job: Warmup) -> None:
        # Keep keys, not nodes: the tree forgets nodes without a reference.
        targets = [self._target(path, await self._resolve(path)) for path in job.paths]
        disk_bytes = 0
        async for info in self._objects(targets):
            job.files_total += 1
            job.bytes_total += info.size
            disk_bytes += -(-info.size // PAGE_BYTES) * PAGE_BYTES
        self._check_space(disk_bytes)
        job.state, job.began = WarmupState.RUNNING, trio.current_time()
        job.counted.set()
        with self._cache.maintenance.protect_warmed() as warmed:
            async with trio.open_nursery() as nursery:
                async for info in self._objects(targets):
                    await self._start_file(job, info, warmed, nursery)

    def _check_space(self, nbytes: int) -> None:
        statistics, available = self._cache.statistics(), self._cache.maintenance.free_space_bytes()
        if nbytes > available:
            limit, pending = size_text(statistics.limit_bytes), size_text(statistics.staging_bytes)
            raise NoSpace(
                f"the cache is too small: this warm-up needs {size_text(nbytes)}, available are {size_text(available)} "
                f"(limit {limit}, less files not uploaded yet {pending}, less space that the disk itself lacks); "
                "warm less, or mount with a larger --cache-size"
            )

    # ---- listing

    def _target(self, path: str, node: Node) -> ObjectInfo | str | None:
        """Return the object of a file, the prefix of a directory, or None if there is nothing to fetch."""
        if node.kind is Kind.DIRECTORY:
            key = self._tree.key_of_path(path)
            return key + "/" if path else key
        is_here = node.kind is not Kind.FILE or node.version is not None
        return None if is_here or node.object is None or not node.object.size else node.object

    async def _objects(self, targets: Sequence[ObjectInfo | str | None]) -> AsyncIterator[ObjectInfo]:
        """Yield the objects of files, and of all files below directories, as LIST returns them now."""
        for target in targets:
            if not isinstance(target, str):
                if target is not None:
                    yield target
                continue
            async with aclosing(self._client.list_all(target)) as listed:
                async for info in listed:
                    if self._is_wanted(info):
                        yield info

    def _is_wanted(self, info: ObjectInfo) -> bool:
        """Return whether a listed object is a file of the mount without local content."""
        if not info.size or any(unusable_name(part) for part in self._tree.relative(info.key).split("/")):
            return False
        if self._tree.is_hidden(info.key, trio.current_time()):
            return False
        node = self._tree.find(info.key)
        return node is None or (node.kind is Kind.FILE and node.version is None)

    # ---- fetching

    async def _start_file(
        self, job: Warmup, info: ObjectInfo, warmed: set[int], nursery: trio.Nursery
    ) -> None:
        """Start a task for each piece of a file, as slots become free."""
        handle = self._cache.open(info.object_id, info.size)
        handle.entry.warming += 1
        pieces = -(-info.size // CHUNK_BYTES)
        file = _File(self._tree.relative(info.key), handle, pieces)
        started = 0
        try:
            for index in range(pieces):
                await self._pieces.acquire_on_behalf_of((file, index))
                started += 1
                nursery.start_soon(self._fill, job, file, index, warmed, name="warm-piece")
        finally:
            self._end_pieces(job, file, pieces - started, warmed)

    async def _fill(self, job: Warmup, file: _File, index: int, warmed: set[int]) -> None:
        """Fetch one piece, then free its slot."""
        size = min(CHUNK_BYTES, file.handle.size - index * CHUNK_BYTES)
        try:
            async with self._large if size > _SMALL_BYTES else nullcontext():
                await self._cache.maintenance.fill(file.handle.entry, index)
            job.bytes_done += size
        except NoSpace as exc:
            # The next piece would not fit either: stop the whole warm-up.
            file.error = exc
            job.message = f"{file.path}: {exc}"
            job.scope.cancel()
        except FusecacheError as exc:
            file.error = exc
        except Exception as exc:  # noqa: BLE001  # recorded, and this file's error
            file.error = self._tasks.supervisor.record("warm-up", exc, file.path)
        finally:
            self._pieces.release_on_behalf_of((file, index))
            self._end_pieces(job, file, 1, warmed)

    def _end_pieces(self, job: Warmup, file: _File, count: int, warmed: set[int]) -> None:
        """`count` pieces of a file are done, or will not be started."""
        file.left -= count
        if file.left or not count:
            return
        entry = file.handle.entry
        entry.warming -= 1
        if entry.number is not None:
            warmed.add(entry.number)
        self._cache.close(file.handle)
        if file.error is not None:
            job.record_failure(file.path, file.error)
        elif not job.scope.cancel_called:
            job.files_done += 1


def _on_failed(job: Warmup, error: InternalError) -> None:
    job.state, job.message = WarmupState.FAILED, str(error)


def _outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths that lie neither at nor below another one."""
    all_of_them = set(paths)

    def is_below_another(path: str) -> bool:
        above = path
        while above:
            above = above.rpartition("/")[0]
            if above in all_of_them:
                return True
        return False

    return tuple(path for path in sorted(all_of_them) if not is_below_another(path))
