"""The staging space of files that are being written: admits, reserves and releases it, and records every ENOSPC.

Invariant: before a write gets ENOSPC, the space of unfinished content that newer content of its name replaced is free.

Back-pressure: delays closes while staging is nearly full, so that writers slow down to the bucket's pace.

Without it writers would run into ENOSPC. Only a close waits: the kernel holds no lock during a close, but it does
during a write.

Invariant: a close waits before it acknowledges anything. While it waits, its file holds no other change back, and its
sequence in the publish order is taken when the wait is over.

Remembers for an hour which writes failed with ENOSPC: the program got the error, `status` also shows it to you.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileHandle, FileVersion, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.procfs import KILL_LOOK_SECONDS, KillDetector
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.errors import NoSpace, TooLarge
from fusecache.model.objects import MIB
from fusecache.policy.backoff import STANDSTILL_SECONDS, ProgressTimeout
from fusecache.policy.writeback.multipart import OBJECT_BYTES_MAX
from fusecache.remote.store import Store

log = logging.getLogger(__name__)

# Each waiter is one of the 16 384 requests that a mount takes at once, and readers need some of these.
_WAITERS_MAX = 1024
# How many waiting closes `facts` names.
_NAMED_MAX = 50


@dataclass(frozen=True, eq=False, slots=True)
class _Waiter:
    """One close that waits. since: loop time."""

    handle: FileHandle
    since: float


class Backpressure:
    """Delays closes while staging is above its high-water mark and uploads make progress."""

    def __init__(self, cache: BlockCache, queue: WritebackQueue, store: Store) -> None:
        self._cache = cache
        self._queue = queue
        self._store = store
        self._watch = KillDetector()
        self._is_ending = False
        self._waiting: list[_Waiter] = []

    def end_waiting(self) -> None:
        """Let every close go on, now and from now on: the mount is about to end."""
        self._is_ending = True
        self._cache.announce_staging()

    def facts(self, path_of: Callable[[Node], str]) -> dict[str, Any]:
        """Return the closes that wait, longest first, and the high-water mark in bytes, as plain values."""
        now = trio.current_time()
        return {
            "files": len(self._waiting),
            "named": [
                {
                    "path": path_of(waiter.handle.node),
                    "process": waiter.handle.process,
                    "seconds": round(now - waiter.since, 1),
                }
                for waiter in self._waiting[:_NAMED_MAX]
            ],
            "high_water_bytes": self._cache.high_water_bytes(),
        }

    async def wait_for_space(self, handle: FileHandle) -> None:
        """Return when staging is below its high-water mark, or waiting is of no use.

        It is of no use in these cases:
        - No file is queued for upload, or no upload made progress for `STANDSTILL_SECONDS`.
        - The mount ends, or the writer is being killed.
        - `_WAITERS_MAX` other closes wait already.
        """
        if not self._is_high() or len(self._waiting) >= _WAITERS_MAX:
            return
        timeout = ProgressTimeout(trio.current_time())
        waiter = _Waiter(handle, trio.current_time())
        self._waiting.append(waiter)
        try:
            while self._is_high():
                now = trio.current_time()
                timeout.on_progress(self._store.statistics().bytes_written, now)
                if timeout.is_over(now):
                    log.warning(
                        "close goes on with staging nearly full no_upload_seconds=%.0f", STANDSTILL_SECONDS
                    )
                    return
                if handle.process and self._watch.is_dying(handle.process, now):
                    return
                with trio.move_on_after(KILL_LOOK_SECONDS):
                    await self._cache.staging_released()
        finally:
            self._waiting.remove(waiter)

    def _is_high(self) -> bool:
        # With no file queued, waiting frees no space.
        is_of_use = bool(self._queue.contents) and not self._is_ending
        return is_of_use and self._cache.is_staging_high()


# By then a program that got ENOSPC has long ended, or tried again.
REMEMBERED_SECONDS = 3600.0
# Paths remembered at most; the oldest event is dropped first.
_PATHS_MAX = 1000


@dataclass(frozen=True, slots=True)
class EnospcEvent:
    """One file that got ENOSPC. size: the size that it was to reach, 0 if unknown; moment: loop time."""

    path: str
    size: int
    moment: float
    cause: str


class EnospcLog:
    """The newest ENOSPC event of each path. Paths are below the mountpoint."""

    def __init__(self) -> None:
        # In the order of the events, the newest last.
        self._files: dict[str, EnospcEvent] = {}

    def record(self, path: str, size: int, error: Exception) -> None:
        """Record an ENOSPC event. If a file had one before, the larger size counts."""
        before = self._files.pop(path, None)
        size = max(size, before.size if before is not None else 0)
        self._files[path] = EnospcEvent(path, size, trio.current_time(), str(error))
        if len(self._files) > _PATHS_MAX:
            del self._files[next(iter(self._files))]

    def on_closed(self, path: str, size: int) -> None:
        """A file was closed, so it had room: forget its event, and those of files that are no larger."""
        if self._files:
            self._files = {
                each.path: each for each in self._files.values() if each.path != path and each.size > size
            }

    def at(self, path: str = "") -> list[EnospcEvent]:
        """Return the events at or below a path, the newest first."""
        since = trio.current_time() - REMEMBERED_SECONDS
        self._files = {each.path: each for each in self._files.values() if each.moment >= since}
        below = f"{path}/" if path else ""
        found = [each for each in self._files.values() if each.path == path or each.path.startswith(below)]
        return found[::-1]

    def facts(self, path: str = "") -> dict[str, Any]:
        """Return how many files at or below a path got ENOSPC, and the newest event, as plain values."""
        found = self.at(path)
        if not found:
            return {"files": 0}
        last = found[0]
        return {
            "files": len(found),
            "path": last.path,
            "bytes": last.size,
            "seconds": round(trio.current_time() - last.moment, 1),
            "cause": last.cause,
        }


# Space is reserved in steps, so that not every 4 KiB write goes to the ledger. A small file reserves small steps, as
# many small files may be open at once.
_RESERVE_STEPS = (64 * 1024, 16 * MIB)
# With less space than this a new file gets ENOSPC at once, before any byte of it is accepted.
_HEADROOM_BYTES = MIB
_FULL = (
    "the cache's disk limit is reached by files that the bucket does not have yet; "
    "wait for uploads (`fusecache status`) or mount with a larger --cache-size"
)


class StagingSpace:
    """Reserves space in the cache directory for file versions."""

    def __init__(self, tree: Tree, cache: BlockCache, events: Events) -> None:
        self._tree = tree
        self._cache = cache
        self._events = events
        self.enospc_log = EnospcLog()

    async def check_headroom(self, node: Node, path_of: Callable[[], str]) -> None:
        """Raise NoSpace if nothing can be written at all to a file, or below a directory.

        path_of: as for `recording_enospc`.
        """
        key = self._key(node)
        with self.recording_enospc(path_of, 0):
            await self.check_admitted(_HEADROOM_BYTES, node, path_of)
            if not self._cache.reserve_staging_nowait(_HEADROOM_BYTES):
                try:
                    await self._reserve(_HEADROOM_BYTES, key)
                except NoSpace as exc:
                    raise NoSpace(_FULL) from exc
        self._cache.release_staging(_HEADROOM_BYTES)

    @contextmanager
    def recording_enospc(self, path_of: Callable[[], str], size: int) -> Iterator[None]:
        """Record a NoSpace that the body raises. path_of: returns the file's path for `status`; "" records nothing."""
        try:
            yield
        except NoSpace as exc:
            if path := path_of():
                self.enospc_log.record(path, size, exc)
            raise

    async def check_admitted(self, nbytes: int, node: Node, path_of: Callable[[], str]) -> None:
        """Raise NoSpace if `nbytes` may not be begun: the rest is for writes that the kernel has accepted already.

        path_of: returns the path of the file, which may not exist yet.
        """
        while nbytes > self._cache.writable_bytes():
            if not await self._events.on_space_short(self._tree.key_of_path(path_of())):
                raise NoSpace(_FULL)

    async def _reserve(self, nbytes: int, key: str) -> None:
        while True:
            try:
                return await self._cache.reserve_staging(nbytes)
            except NoSpace:
                if not await self._events.on_space_short(key):
                    raise

    def check_size(self, node: Node, size: int) -> None:
        """Raise TooLarge if no object may be of that size."""
        if size > OBJECT_BYTES_MAX:
            raise TooLarge(
                f"{self._tree.path(node)}: larger than the largest object, {OBJECT_BYTES_MAX} bytes; split the file"
            )

    async def reserve(self, node: Node, version: FileVersion, size: int) -> None:
        """Reserve space, so that the version may grow to `size`. Raises NoSpace, TooLarge."""
        self.check_size(node, size)
        key = version.record.key
        need = size - version.reserved
        smallest, largest = _RESERVE_STEPS
        step = max(need, min(max(version.size, smallest), largest))
        if self._cache.reserve_staging_nowait(step):
            version.reserved += step
            return
        async with version.growth:  # two writers must not both reserve the same growth
            need = size - version.reserved
            if need <= 0:
                return
            await self._reserve(need, key)
            if version.is_mutable:
                version.reserved += need
            else:
                self._cache.release_staging(need)  # closed, published or removed while this waited

    def _key(self, node: Node) -> str:
        if node.version is not None:
            return node.version.record.key
        return self._tree.key(node) if self._tree.is_linked(node) else ""

    def trim(self, version: FileVersion) -> None:
        """Release the space that is reserved beyond the version's size, as nothing is written for now."""
        if version.reserved > version.size:
            self._cache.release_staging(version.reserved - version.size)
            version.reserved = version.size

    def release(self, version: FileVersion) -> None:
        """Release all space of a version, whose file is about to be deleted."""
        self._cache.release_staging(version.reserved)
        version.reserved = 0
