"""Snapshots of open files: seals what a file holds now, so that it is published without a close.

`OpenFileSnapshots` takes them at intervals, and a remote fsync at once.

Publishes open files at intervals, as if they had been closed, for programs that never close them.

Not every open file: `policy/writeback/snapshots.py` decides which ones, and how often.
"""

import logging
from dataclasses import dataclass, field

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import FileVersion, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.disposal import LocalOnly
from fusecache.engine.write.version_states import VersionStates
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.errors import FusecacheError
from fusecache.model.records import FileState
from fusecache.policy.name_patterns import matches_any
from fusecache.policy.writeback.snapshots import may_be_published_open, snapshot_interval

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Snapshots:
    """Takes snapshots of open files. temp_names: patterns of names under which programs write before they rename."""

    _tree: Tree
    _journal: JournalWriter
    _states: VersionStates
    _local_only: LocalOnly
    _temp_names: tuple[str, ...]

    def has_temporary_name(self, node: Node) -> bool:
        """Return whether the node's name matches `temp_names`: programs write under it, then rename."""
        return matches_any(node.name, self._temp_names)

    async def take(self, node: Node, *, rested_seconds: float) -> FileVersion | None:
        """Seal what an open file holds now, so that it is published; return it, or None if nothing is to be published.

        Nothing is copied here: the version is sealed, and the next writer gets a copy of it. Waits until no write is in
        progress. rested_seconds: how much of its settle delay counts as over.
        """
        version = node.version
        while version is not None and version.use.writers:
            await version.use.wait_written()
            version = node.version
        if version is None or version.state not in {FileState.OPEN, FileState.FLUSHED}:
            return None
        if (
            version.close_state.killed_writer is not None
            or not self._tree.is_linked(node)
            or self._local_only.covers(node)
        ):
            return None
        ticket = self._journal.submit(*self._states.seal_as_closed(node, version))
        version.sealed_at -= rested_seconds
        await ticket.wait()
        return version


# While any open file has changes, all of them are checked this often.
_CHECK_SECONDS = 1.0


@dataclass(eq=False, repr=False)
class OpenFileSnapshots:
    """Watches files that are being written, and publishes each one when it is due."""

    _tree: Tree
    _states: VersionStates
    _snapshots: Snapshots
    _queue: WritebackQueue
    _cache: BlockCache
    snapshot_seconds: float = field(kw_only=True)
    _wake: trio.Event = field(init=False, default_factory=trio.Event)
    # By inode: the last snapshot while it is queued, since when it is being sent, and how long the last one took.
    _queued: dict[int, FileVersion] = field(init=False, default_factory=dict)
    _sent_since: dict[int, float] = field(init=False, default_factory=dict)
    _upload_seconds: dict[int, float] = field(init=False, default_factory=dict)

    def on_dirty(self) -> None:
        """A file has changes that no durable close covers: watch it."""
        self._wake.set()

    async def run(self) -> None:
        """Publish open files that are due, until cancelled."""
        while True:
            self._wake = trio.Event()
            now = trio.current_time()
            self._measure_uploads(now)
            dirty = self._states.dirty_versions()
            for version in dirty:
                await self._snapshot_if_due(version, now)
            if dirty or self._queued:
                await trio.sleep(_CHECK_SECONDS)
            else:
                await self._wake.wait()

    def _measure_uploads(self, now: float) -> None:
        """Record how long sending took for snapshots that left the queue. Time before the first byte does not count."""
        for number, version in list(self._queued.items()):
            if version not in self._queue:
                del self._queued[number]
                self._upload_seconds[number] = now - self._sent_since.pop(number, now)
            elif version.in_flight or version.upload.sent_bytes:
                self._sent_since.setdefault(number, now)
        for number in self._upload_seconds.keys() - self._tree.nodes.keys():
            del self._upload_seconds[number]

    async def _snapshot_if_due(self, version: FileVersion, now: float) -> None:
        node = version.node
        if node is None or node.version is not version or not self._is_due(node, version, now):
            return
        if version.size > self._cache.writable_bytes():
            return  # the next write has to copy it, and that must not end with ENOSPC
        snapshot = None
        try:
            with trio.move_on_after(_CHECK_SECONDS):  # written without a pause: try again at the next check
                snapshot = await self._snapshots.take(node, rested_seconds=0.0)
        except FusecacheError as exc:
            log.warning("open file not published path=%s error=%s", self._tree.path(node), exc)
            return
        if snapshot is not None:
            self._queued[node.number] = snapshot
            log.info(
                "publishing snapshot of open file path=%s bytes=%d", self._tree.path(node), snapshot.size
            )

    def _is_due(self, node: Node, version: FileVersion, now: float) -> bool:
        interval = snapshot_interval(self.snapshot_seconds, self._upload_seconds.get(node.number, 0.0))
        return (
            now >= version.close_state.dirty_since + interval
            and node.number not in self._queued
            and may_be_published_open(version.size, appended=node.appenders > 0)
            and not self._snapshots.has_temporary_name(node)
        )
