"""fsync in its two modes: `ordered` waits for the node's disk, `remote` also for the bucket.

During an fsync the kernel holds the file's lock and delivers no signal: only the daemon's answer ends the call. So a
remote fsync fails when its process is being killed, when the mount is about to end, and after STANDSTILL_SECONDS
without progress. In all three cases the content stays queued.
"""

import logging
from dataclasses import dataclass, field

import trio

from fusecache.engine.durability.sync import Barrier, latest_version
from fusecache.engine.namespace.nodes import FileHandle, FileVersion, Node, QueuedChange
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.procfs import KILL_LOOK_SECONDS, KillDetector, environment, thread_group
from fusecache.engine.write.parts import WriteParts
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.errors import Interrupted, ObjectChanged, Unavailable
from fusecache.model.records import FileState
from fusecache.policy.backoff import STANDSTILL_SECONDS, ProgressTimeout
from fusecache.remote.store import Store

log = logging.getLogger(__name__)

# Shortest interval between two looks at the barrier, however many changes leave the queue.
_SCAN_SECONDS = 0.1
_PROCESSES_REMEMBERED = 1024


@dataclass(eq=False, slots=True)
class _FsyncWait:
    """One remote fsync.

    content: the version that must be in the bucket (None: none). So must every change in `folder` with a sequence
    below `last`.
    """

    path: str
    key: str
    folder: str
    content: FileVersion | None
    last: int
    process: int

    def is_after(self, item: QueuedChange) -> bool:
        """Return whether a change lies in the file's directory, or below it, and comes before the file."""
        below = self.folder + "/" if self.folder else ""
        return item.sequence < self.last and any(key.startswith(below) for key in item.changed_keys())


@dataclass(eq=False, repr=False)
class RemoteFsync:
    """Carries out fsync and fdatasync of files."""

    _tree: Tree
    _write: WriteParts
    _queue: WritebackQueue
    _publisher: Publisher
    _journal: JournalWriter
    _store: Store
    is_remote: bool = field(kw_only=True)
    settle_seconds: float = field(kw_only=True)

    def __post_init__(self) -> None:
        self._close_protocol = self._write.close_protocol
        self._snapshots = self._write.snapshots
        self._rejections = self._publisher.rejections
        self._local_only = self._write.local_only
        self._kill_detector = KillDetector()
        self._is_ending = False
        self._checked_processes: dict[int, None] = {}
        self._has_warned = False

    def end_waiting(self) -> None:
        """The mount is about to end: every waiting fsync fails with Unavailable."""
        self._is_ending = True
        self._publisher.wake()

    async def fsync(self, handle: FileHandle) -> None:
        """Return when the bytes are on the disk; in remote mode, when the bucket has them.

        Raises the file's first stored error. In remote mode also ObjectChanged after a conflict, Interrupted for a
        process that is being killed, and Unavailable after STANDSTILL_SECONDS without progress or as the mount ends.
        """
        self._rejections.commit_markers.release()
        await self._close_protocol.fsync(handle)
        node = handle.node
        if not self.is_remote:
            self._warn_if_distributed(handle)
            return
        if not self._tree.is_linked(node) or self._local_only.covers(node):
            return
        await self._until_durable(await self._begin(handle, node))

    # ---- remote

    async def _begin(self, handle: FileHandle, node: Node) -> _FsyncWait:
        key = self._tree.key(node)
        content = self._queued(node, key)
        if node.version is not None and node.version.is_mutable and not self._is_unfinished(node):
            content = await self._snapshots.take(node, rested_seconds=self.settle_seconds) or content
        # Content under an earlier name goes up first, and is renamed then.
        has_name = content is not None and content.record.key == key
        last = content.sequence if content is not None and has_name else self._journal.next_number()
        process = handle.process or (thread_group(handle.pid) if handle.pid else 0)
        return _FsyncWait(self._tree.path(node), key, key.rpartition("/")[0], content, last, process)

    def _is_unfinished(self, node: Node) -> bool:
        """Whether nothing may be published under this name yet: it is temporary, or the file is new and empty."""
        if node.object is not None:
            return False
        return node.size == 0 or self._snapshots.has_temporary_name(node)

    def _queued(self, node: Node, key: str) -> FileVersion | None:
        """Return the newest queued content of the file, under this key or its earlier one, if it may be published."""
        if self._is_unfinished(node):
            return None
        queued = (item for item in reversed(self._queue.for_key(key)) if item.node is node)
        found = next((item for item in queued if isinstance(item, FileVersion)), None)
        if found is None and node.version is not None and node.version in self._queue:
            return node.version
        return found

    async def _until_durable(self, wait: _FsyncWait) -> None:
        earlier = self._earlier(wait)
        conflicts_before = self._rejections.conflicts.copy()
        items = earlier if wait.content is None else [*earlier, wait.content]
        barrier = Barrier(self._queue, self._publisher, items)
        timeout = ProgressTimeout(trio.current_time())
        while True:
            is_over = barrier.is_over()
            if wait.content is not None:
                wait.content = latest_version(wait.content)
            self._check(wait)
            if is_over:
                self._check_earlier(wait, earlier, conflicts_before)
                return
            now = trio.current_time()
            timeout.on_progress(self._progress(wait, len(barrier)), now)
            if timeout.is_over(now):
                raise Unavailable(
                    f"{wait.path}: not in the bucket after {STANDSTILL_SECONDS:.0f} s without progress "
                    f"({self._publisher.failure or 'no answer'}); it is safe on this disk and still queued"
                )
            with trio.move_on_after(KILL_LOOK_SECONDS):
                await self._publisher.wait_progress()
                await trio.sleep(_SCAN_SECONDS)

    def _earlier(self, wait: _FsyncWait) -> list[QueuedChange]:
        """Return earlier changes in the file's directory that must be in the bucket, too; not deferred ones."""
        return [
            item
            for item in self._queue.items()
            if wait.is_after(item)
            and not self._queue.is_temporary(item)
            and not self._publisher.is_deferred(item)
        ]

    def _progress(self, wait: _FsyncWait, left: int) -> object:
        """Return a value that changes with progress: of the whole mount, unless this very file is failing."""
        content = wait.content
        if content is None:
            return left, self._store.statistics().bytes_written
        own = (left, content.upload.sent_bytes, content.record.upload_id, content.state)
        return own if content.error is not None else (own, self._store.statistics().bytes_written)

    def _check(self, wait: _FsyncWait) -> None:
        """Raise if the wait must end before the bucket has the content."""
        content = wait.content
        if content is not None:
            # A conflict under this name, or under one that it got since.
            if content.record.key != wait.key and content.record.key in self._rejections.conflicts.values():
                raise ObjectChanged(
                    f"{wait.path}: another client changed it first; our version is kept as {content.record.key}"
                )
            if content.state is FileState.REJECTED and content.error is not None:
                raise content.error
        self._check_caller(wait)

    def _check_earlier(
        self, wait: _FsyncWait, earlier: list[QueuedChange], conflicts_before: dict[str, str]
    ) -> None:
        """Raise if an earlier change that the file must come after was rejected, or ended in a conflict."""
        items = {latest_version(item) if isinstance(item, FileVersion) else item for item in earlier}
        for rejected in self._rejections.rejected:
            # An operation that was rejected before this fsync began is none of those changes.
            is_before = rejected in items or (isinstance(rejected, FileVersion) and wait.is_after(rejected))
            if rejected.error is not None and is_before:
                raise rejected.error
        new_conflicts = {
            k: copy for k, copy in self._rejections.conflicts.items() if conflicts_before.get(k) != copy
        }
        for key, copy in new_conflicts.items():
            if any(item.changed_keys()[-1] == (copy or key) for item in items):
                raise ObjectChanged(
                    f"{wait.path}: another client changed {key} first, which must be in the bucket before this file; "
                    + (f"our version is kept as {copy}" if copy else "our change was dropped")
                )

    def _check_caller(self, wait: _FsyncWait) -> None:
        if self._is_ending:
            raise Unavailable(
                f"{wait.path}: the mount ends; it is safe on this disk, and uploaded now or by the next mount"
            )
        if wait.process and self._kill_detector.is_dying(wait.process, trio.current_time()):
            raise Interrupted(f"{wait.path}: its process is being killed")

    # ---- ordered

    def _warn_if_distributed(self, handle: FileHandle) -> None:
        """Warn once if a job of several nodes uses ordered fsync, which guarantees other nodes nothing."""
        process = handle.process
        if self._has_warned or not process or process in self._checked_processes:
            return
        if len(self._checked_processes) >= _PROCESSES_REMEMBERED:
            self._checked_processes.pop(next(iter(self._checked_processes)))
        self._checked_processes[process] = None
        variables = environment(process)
        world, local = variables.get("WORLD_SIZE", ""), variables.get("LOCAL_WORLD_SIZE", "")
        if world.isdigit() and local.isdigit() and int(world) > int(local):
            self._has_warned = True
            log.warning(
                "fsync does not wait for the bucket, but a job of several nodes writes here (WORLD_SIZE=%s, "
                "LOCAL_WORLD_SIZE=%s): if one rank writes a commit marker after the others called fsync, as in DCP and "
                "Megatron, mount with --fsync remote on every node",
                world, local,
            )  # fmt: skip
