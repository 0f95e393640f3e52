"""The engine as a whole: constructs and connects its parts, starts and stops them, and answers queries about them.

`fs/` turns the kernel's requests into calls of `lookup`, `file_io`, `close_protocol` and `namespace_ops`. Nothing here
knows FUSE. Which part hears of what is in `events.py`.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trio

from fusecache.disk.native import dirty_limit_bytes
from fusecache.disk.staging import StagingDirectory
from fusecache.engine.admin.inspector import Inspector
from fusecache.engine.admin.pinning import PinnedObjects
from fusecache.engine.admin.warmup import WarmupRunner
from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
from fusecache.engine.durability.pending import Pending
from fusecache.engine.durability.remote_fsync import RemoteFsync
from fusecache.engine.durability.status import QueueStatus
from fusecache.engine.durability.sync import Durability, Sync
from fusecache.engine.events import Hearers, WriteEvents
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import FileHandle, Kind, Node
from fusecache.engine.namespace.tree import Ownership, Tree
from fusecache.engine.namespace_ops.operations import NamespaceOps
from fusecache.engine.prefetch.hint_service import HintService
from fusecache.engine.prefetch.sibling_readahead import SiblingReadahead
from fusecache.engine.publish.bucket_writer import BucketWriter
from fusecache.engine.publish.multipart_uploader import MultipartUploader
from fusecache.engine.publish.preparer import Preparer
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.recovery.journal_replay import (
    JournalReplay,
    ReplayResult,
    pause_garbage_collection,
    rebuild_tree,
)
from fusecache.engine.recovery.quarantine import Quarantine
from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.metadata_client import SILENT_SECONDS, MetadataClient
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.write.backpressure import Backpressure
from fusecache.engine.write.open_file_snapshots import OpenFileSnapshots
from fusecache.engine.write.parts import WriteOptions, build_write_parts
from fusecache.engine.writeback.conflict_log import ConflictLog
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.cache_index import read_boot_id
from fusecache.index.journal import Journal
from fusecache.index.listings import Listings
from fusecache.model.errors import AccessDenied, CredentialsMissing, NotFound, StateError, Unavailable
from fusecache.model.format_text import count_text, size_text
from fusecache.model.names import unusable_name
from fusecache.remote.store import Store

log = logging.getLogger(__name__)

# If the bucket was unresponsive at the last request, a query waits only this long for a sign that it is back.
_UNRESPONSIVE_WAIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of the engine. prefix: of every key, empty or ending in '/'; sizes in bytes.

    keys_from: where the writer's credentials come from, as for `model/error_text.renewal_text`. writes_by_other_keys:
    the writer's credentials differ from the reader's.
    """

    directory: Path
    prefix: str
    ownership: Ownership
    cache_bytes: int
    buffer_bytes: int
    settle_seconds: float = 1.0
    fresh_seconds: float = 1.0
    immutable: tuple[str, ...] = ()
    posix_metadata: bool = False
    temp_names: tuple[str, ...] = ()
    order_last: tuple[str, ...] = ()
    delete_delay: float = 0.0
    last_wins: bool = False
    fsync_is_remote: bool = False
    snapshot_seconds: float = 60.0
    local_only: tuple[str, ...] = ()
    pin: tuple[str, ...] = ()
    read_only: bool = False
    keys_from: str = ""
    writes_by_other_keys: bool = False


class FileSystem:
    """One mounted bucket. Create it on the loop's thread; `running` is its lifetime."""

    def __init__(self, store: Store, offload: Offload, options: EngineOptions) -> None:
        """Open the cache directory (blocking). Raises StateError, LocalDiskError."""
        boot_id = read_boot_id()
        self.options = options
        # Everything that the mount has open; `running` closes it at its end.
        self._opened = self._open(store, offload)
        self.queue = WritebackQueue(options.prefix, options.order_last)
        self.tree = Tree(options.prefix, options.ownership)
        self._metadata_client = requests = MetadataClient(
            store,
            offload,
            self.cache.limit,
            prefix=options.prefix,
            writes_by_other_keys=options.writes_by_other_keys,
        )
        self.lookup = Lookup(
            self.tree,
            self._listings,
            requests,
            self._journal_rows,
            fresh_seconds=options.fresh_seconds,
            posix_metadata=options.posix_metadata,
        )
        self.lookup.ttl.immutable = options.immutable
        self._backpressure = Backpressure(self.cache, self.queue, store)
        self._hearers = hearers = Hearers()
        write_events = WriteEvents(hearers)
        write = build_write_parts(
            self.tree,
            self.cache,
            self._staging,
            self.journal,
            self.queue,
            offload,
            self._backpressure,
            write_events,
            WriteOptions(options.local_only, options.temp_names),
            boot_id,
        )
        self.file_io, self.close_protocol, self._states = write.file_io, write.close_protocol, write.states
        hearers.sibling_readahead = SiblingReadahead(self.tree, self.lookup, self.cache)
        self._uploader = hearers.uploader = MultipartUploader(
            store, self.tree, self.journal, offload, self.cache, self.queue, options.temp_names
        )
        self._preparer = hearers.preparer = Preparer(self._uploader, self.cache, self.journal, offload)
        self.publisher = hearers.publisher = Publisher(
            self.tree,
            self.lookup,
            write,
            self.queue,
            self.journal,
            self.cache,
            self._preparer,
            BucketWriter(store, str(self._empty_file)),
            offload,
            self.cache.limit,
            settle_seconds=options.settle_seconds,
            temp_names=options.temp_names,
            delete_delay=options.delete_delay,
            last_wins=options.last_wins,
            on_taken=requests.on_write_accepted,
        )
        self._uploader.on_failing = self.publisher.on_failing
        self._uploader.on_success = self.publisher.on_success
        requests.on_granted = self._end_pauses
        self._pinned = PinnedObjects(self.cache, requests, options.pin, self.tree.relative)
        self.publisher.events.on_gone = self._pinned.on_gone
        self._remote_fsync = RemoteFsync(
            self.tree,
            write,
            self.queue,
            self.publisher,
            self.journal,
            store,
            is_remote=options.fsync_is_remote,
            settle_seconds=options.settle_seconds,
        )
        hearers.snapshots = OpenFileSnapshots(
            self.tree,
            write.states,
            write.snapshots,
            self.queue,
            self.cache,
            snapshot_seconds=options.snapshot_seconds,
        )
        self.warmup = WarmupRunner(self.tree, requests, self.cache, self.resolve)
        self.hints = hearers.hints = HintService(self.tree, self.lookup, self.cache, offload, self.resolve)
        self.inspector = Inspector(self.tree, requests, self.cache, self.resolve)
        self._store = store
        self.namespace_ops = NamespaceOps(self.tree, self.lookup, write, self.queue, self.journal, requests)
        self._offload = offload
        self._conflicts = conflicts = ConflictLog(self.journal)
        self.status = QueueStatus(
            self.tree,
            self.queue,
            write,
            self.publisher,
            conflicts,
            store,
            self.lookup_path,
            keys_from=options.keys_from,
        )
        self._sync = Sync(self.tree, self.queue, self.publisher, self.status)
        self.quarantine = hearers.quarantine = Quarantine(
            self.tree,
            self.lookup,
            self.namespace_ops,
            write,
            write_events,
            self.queue,
            self.journal,
            self.publisher,
            conflicts,
            self._staging,
            self.cache,
            offload,
            boot_id,
            self.resolve,
        )
        self._recovery = JournalReplay(
            self._journal_rows, self._staging, boot_id, self.queue.is_commit_marker
        )
        self.replayed = ReplayResult()
        self._started = trio.current_time()

    def _open(self, store: Store, offload: Offload) -> ExitStack:
        """Open the cache directory; return the stack that closes it. On an error, all opened so far is closed."""
        directory = self.options.directory
        with ExitStack() as opened:
            self.cache = BlockCache(
                store,
                offload,
                CacheOptions(
                    directory=directory / "cache",
                    limit_bytes=self.options.cache_bytes,
                    buffer_bytes=self.options.buffer_bytes,
                    write_reserve_bytes=2 * dirty_limit_bytes(),
                ),
            )
            opened.callback(self.cache.abandon)
            self._journal_rows = opened.enter_context(Journal(directory / "journal"))
            self._staging = StagingDirectory(directory)
            opened.callback(self._staging.close)
            self._listings = Listings(directory / "names")
            opened.callback(self._listings.close)
            self._empty_file = directory / "empty"
            self._empty_file.touch()
            self.journal = JournalWriter(
                self._journal_rows, offload, highest_in_use=self._staging.highest_number()
            )
            return opened.pop_all()

    def on_name_lost(self, call: Callable[[Node, str], None]) -> None:
        """Have `call(parent, name)` called when a name no longer means the inode that the kernel knows."""
        self._hearers.lose_name = call
        self.publisher.events.on_name_lost = call

    async def fsync(self, handle: FileHandle) -> None:
        """Carry out fsync(2) as `RemoteFsync.fsync` does."""
        await self._remote_fsync.fsync(handle)

    def end_waiting(self) -> None:
        """The mount is about to end: answer every close and fsync that waits."""
        self._remote_fsync.end_waiting()
        self._backpressure.end_waiting()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Replay the journal, then run all tasks while the body runs. At the end everything is journaled and closed."""
        try:
            with pause_garbage_collection():
                self.replayed = await self._offload.rows(self._recovery.read)
                self.cache.restore_staging(self.replayed.staged_bytes)
                rebuild_tree(self.replayed, self.tree, self.queue, trio.current_time())
            self.publisher.rejected += self.replayed.rejected
            self._states.adopt_local_only(self.replayed.local)
            self.quarantine.restore_rows(self.replayed)
            self._conflicts.restore(self._journal_rows.conflicts())
            self._check_publishable()
            if not self.options.read_only:
                self.publisher.on_start(self.journal.highest)
            # Tasks that look names up end before the lookup itself: else their last requests would get no answer.
            async with trio.open_nursery() as services:
                await services.start(self.journal.run, name="journal")
                await services.start(self.cache.run, name="cache")
                await services.start(self.lookup.run, name="names")
                with unwrap_single_error():
                    async with trio.open_nursery() as clients:
                        await self._start_clients(clients)
                        yield
                        await self.publisher.wait_retired()
                        clients.cancel_scope.cancel()
                services.cancel_scope.cancel()
        finally:
            self._opened.close()

    async def _start_clients(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.warmup.run, name="warm")
        await nursery.start(self.hints.run, name="hints")
        await nursery.start(self._preparer.run, name="prepare")
        for key, upload_id in self.replayed.uploads:
            self._uploader.abort(key, upload_id)
        await nursery.start(self.publisher.run, name="publish")
        await nursery.start(self._hearers.snapshots.run, name="snapshots")
        await nursery.start(self._pinned.run, name="pins")
        await nursery.start(self.status.run, name="status")

    def _check_publishable(self) -> None:
        """Raise StateError if changes are pending and this read-only mount may not upload them."""
        if not self.options.read_only or not len(self.queue):
            return
        pending = self.pending()
        raise StateError(
            f"{self.options.directory} holds {count_text(pending.files, 'change')}, {size_text(pending.bytes)}, "
            f"that the bucket does not have yet, and a read-only mount may not upload them: mount it read-write once "
            f"(`fusecache unmount` waits for the uploads), copy files out with `fusecache recover "
            f"{self.options.directory}`, or mount with another --cache-dir"
        )

    async def try_again(self) -> None:
        """Test whether the bucket accepts the keys, which may be new, and retry everything that waits at once."""
        await self._metadata_client.try_credentials()
        self._end_pauses()

    def _end_pauses(self) -> None:
        self.publisher.end_pauses()
        self._uploader.end_pauses()

    # ---- queries

    async def lookup_path(self, path: str) -> Node:
        """Return the node at a path for a query, which does not wait for an unresponsive bucket.

        Raises NotFound. If only the bucket could tell, raises Unavailable after SILENT_SECONDS, or the error with which
        it rejects the keys.
        """
        timeout = _UNRESPONSIVE_WAIT_SECONDS if self._metadata_client.is_unresponsive else SILENT_SECONDS
        try:
            return await self.resolve(path, timeout_seconds=timeout)
        except (Unavailable, AccessDenied, CredentialsMissing) as exc:
            raise type(exc)(f"{path}: not known locally, and {exc}") from exc

    async def resolve(self, path: str, *, timeout_seconds: float = float("inf")) -> Node:
        """Return the node at a path below the mountpoint ("" is its root).

        Raises NotFound, or Unavailable if the bucket does not answer, or not within the timeout for each name.
        """
        node = self.tree.root
        held: list[Node] = []
        try:
            for part in filter(None, path.split("/")):
                if node.kind is not Kind.DIRECTORY:
                    raise NotFound(f"{path}: no such file or directory")
                # A child that is replaced would take a parent without handles out of memory with it.
                node.handles += 1
                held.append(node)
                if unusable_name(part) is not None:
                    raise NotFound(f"{path!r}: no such file or directory")
                with self._metadata_client.deadline(timeout_seconds):
                    node = await self.lookup.lookup(node, part)
        except NotFound as exc:
            raise NotFound(f"{path}: no such file or directory") from exc
        finally:
            for each in held:
                each.handles -= 1
        return node

    def pending(self) -> Pending:
        """Return what the whole mount has pending, without waiting. For a long queue it may be seconds old."""
        return self.status.pending()

    async def wait_durable(self, path: str, timeout_seconds: float | None) -> Durability:
        """Return once the bucket has everything that was closed at or below a path before the call."""
        return await self._sync.wait_durable(path, timeout_seconds)

    async def path_state(self, path: str) -> str:
        """Return the state of a file or directory as one word. Raises NotFound."""
        return await self.status.path_state(path)

    def statistics(self, pending: Pending | None = None) -> dict[str, Any]:
        """Return all counters as plain values. Lists are cut to the newest NAMED entries, with their full length.

        pending: the pending changes, if the caller has just counted them.
        """
        cache = asdict(self.cache.statistics())
        cache["wait_seconds"]["metadata"] = self.lookup.waited_seconds
        requests = self._store.statistics()
        return {
            "uptime_seconds": round(trio.current_time() - self._started, 1),
            **self.status.statistics(self.pending() if pending is None else pending),
            **self.quarantine.statistics(),
            "inodes": len(self.tree.nodes),
            "cache": cache,
            "requests": {**asdict(requests), "class_a": requests.class_a, "class_b": requests.class_b},
            "warming": [job.as_dict() for job in self.warmup.jobs()],
            "hints": self.hints.statistics(),
            "closes_waiting": self._backpressure.facts(self.tree.path),
            "unanswered_seconds": round(self._metadata_client.unresponsive_seconds, 1),
            "refused_seconds": round(self._metadata_client.refused_seconds, 1),
        }
