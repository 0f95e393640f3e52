"""Builds the parts of the engine, from the bottom up: storage, names, write-back, services.

Each function gives constructors what they work with. Who hears of what is in `events.py`. Nothing runs yet:
`file_system.py` starts the parts.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fusecache.disk.native import dirty_limit_bytes
from fusecache.disk.staging import StagingDirectory
from fusecache.engine.admin.inspector import Inspector
from fusecache.engine.admin.pinning import PinnedObjects
from fusecache.engine.admin.served_objects import ServedObjects
from fusecache.engine.admin.upload_survey import UploadAdmin
from fusecache.engine.admin.warmup import WarmupRunner
from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
from fusecache.engine.durability.recent_rates import RecentRates
from fusecache.engine.durability.remote_fsync import RemoteFsync
from fusecache.engine.durability.status import QueueStatus
from fusecache.engine.durability.sync import Drain, Sync
from fusecache.engine.events import EngineEvents
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.paths import Paths, Symlinks
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace_ops.operations import ImmutableDirectories, NamespaceOps
from fusecache.engine.options import EngineOptions
from fusecache.engine.prefetch.hint_service import HintService
from fusecache.engine.prefetch.kernel_pages import KernelPages
from fusecache.engine.prefetch.model_loads import ModelLoads
from fusecache.engine.prefetch.sibling_readahead import SiblingReadahead
from fusecache.engine.publish.bucket_writer import BucketWriter
from fusecache.engine.publish.multipart_uploader import MultipartUploader
from fusecache.engine.publish.preparer import Preparer
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.publish.rejections import Rejections
from fusecache.engine.publish.results import PublishResults
from fusecache.engine.publish.retirement import Retirement
from fusecache.engine.publish.schedule import PublishRequests, PublishSchedule
from fusecache.engine.recovery.journal_replay import JournalReplay
from fusecache.engine.recovery.quarantine import Quarantine
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor, TaskNursery
from fusecache.engine.write.parts import WriteOptions, WriteParts, build_write_parts
from fusecache.engine.write.snapshots import OpenFileSnapshots
from fusecache.engine.write.staging_space import Backpressure
from fusecache.engine.writeback.conflict_log import ConflictLog
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.cache_index import read_boot_id
from fusecache.index.journal import Journal
from fusecache.index.listings import Listings
from fusecache.policy.name_patterns import PinnedKeys, SymlinkRule
from fusecache.remote.store import Store, primary_of


class Tasks:
    """The tasks of a mount. names: of the lookup; clients: of the parts that look names up, so they end first."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.names = TaskNursery(supervisor)
        self.clients = TaskNursery(supervisor)


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """The bucket, and what the mount has open in the cache directory. opened: closes that."""

    opened: ExitStack
    store: Store
    offload: Offload
    cache: BlockCache
    journal_rows: Journal
    journal: JournalWriter
    staging: StagingDirectory
    listings: Listings
    empty_file: Path
    boot_id: str


@dataclass(frozen=True, eq=False, slots=True)
class Names:
    """What names mean here and in the bucket, and which changes of them the bucket does not have yet."""

    tree: Tree
    queue: WritebackQueue
    client: MetadataClient
    lookup: Lookup
    paths: Paths
    symlinks: Symlinks
    hints: HintService


@dataclass(frozen=True, eq=False, slots=True)
class WriteBack:
    """Local changes, and how they get into the bucket."""

    write: WriteParts
    backpressure: Backpressure
    snapshots: OpenFileSnapshots
    uploader: MultipartUploader
    preparer: Preparer
    publisher: Publisher
    namespace_ops: NamespaceOps
    remote_fsync: RemoteFsync
    conflict_log: ConflictLog


@dataclass(frozen=True, eq=False, slots=True)
class Services:
    """What commands ask for, and what keeps the mount in order."""

    warmup: WarmupRunner
    inspector: Inspector
    uploads: UploadAdmin
    served: ServedObjects
    pinned: PinnedObjects
    status: QueueStatus
    rates: RecentRates
    sync: Sync
    drain: Drain
    quarantine: Quarantine
    replay: JournalReplay


def open_storage(
    store: Store, offload: Offload, options: EngineOptions, pinned: PinnedKeys, supervisor: Supervisor
) -> Storage:
    """Open the cache directory (blocking). On an error, all opened so far is closed."""
    boot_id, directory = read_boot_id(), options.directory
    with ExitStack() as opened:
        cache_options = CacheOptions(
            directory=directory / "cache",
            limit_bytes=options.cache_bytes,
            buffer_bytes=options.buffer_bytes,
            are_buffers_shared=options.are_buffers_shared,
            carry=options.carry,
            write_reserve_bytes=2 * dirty_limit_bytes(),
            download_rate=options.download_rate,
            patience_seconds=options.patience_seconds,
        )
        cache = BlockCache(store, offload, cache_options, supervisor, pinned or None, options.peers)
        opened.callback(cache.abandon)
        rows = opened.enter_context(Journal(directory / "journal"))
        staging = StagingDirectory(directory)
        opened.callback(staging.close)
        listings = Listings(directory / "names")
        opened.callback(listings.close)
        empty_file = directory / "empty"
        journal = JournalWriter(rows, offload, supervisor, highest_in_use=staging.highest_number())
        return Storage(
            opened.pop_all(), store, offload, cache, rows, journal, staging, listings, empty_file, boot_id
        )


def build_names(storage: Storage, options: EngineOptions, events: EngineEvents, tasks: Tasks) -> Names:
    """Build the tree, the queue and the lookup."""
    cache, access = storage.cache, options.access
    tree = Tree(
        options.prefix,
        options.ownership,
        events,
        options.predecessor,
        lambda key: storage.journal_rows.attributes(key, ""),
    )
    queue = WritebackQueue(events, options.prefix, options.order_last)

    client = events.client = MetadataClient(
        storage.store,
        storage.offload,
        cache.request_limit,
        on_unresponsive=events.on_unresponsive,
        on_granted=events.on_granted,
        prefix=options.prefix,
        writes_by_other_keys=access.writes_by_other_keys,
        health=access.health,
    )
    lookup = events.lookup = Lookup(
        tree,
        storage.listings,
        client,
        storage.journal_rows,
        tasks.names,
        fresh_seconds=options.fresh_seconds,
        posix_metadata=options.posix_metadata,
    )
    lookup.ttl.immutable = options.immutable
    paths = Paths(tree, lookup, client)
    hints = HintService(tree, lookup, cache, storage.offload, paths.resolve, tasks.clients)
    return Names(tree, queue, client, lookup, paths, Symlinks(tree, SymlinkRule(options.symlinks)), hints)


def build_write_back(
    storage: Storage, names: Names, options: EngineOptions, events: EngineEvents, tasks: TaskNursery
) -> WriteBack:
    """Build what carries a change from a program's call to the bucket."""
    tree, queue, lookup = names.tree, names.queue, names.lookup
    store, offload, cache, journal = storage.store, storage.offload, storage.cache, storage.journal
    backpressure = Backpressure(cache, queue, store)
    write = build_write_parts(
        tree,
        cache,
        storage.staging,
        journal,
        queue,
        offload,
        backpressure,
        events,
        WriteOptions(options.local_only, options.temp_names),
        storage.boot_id,
    )
    events.sibling_readahead = SiblingReadahead(tree, lookup, cache, names.hints)
    events.model_loads = ModelLoads(
        lookup,
        cache,
        offload,
        names.hints,
        tasks,
        KernelPages(tree),
        patterns=options.whole_files,
    )
    uploader = events.uploader = MultipartUploader(
        store, journal, offload, cache, write.states, write.snapshots, events, tasks
    )
    preparer = events.preparer = Preparer(uploader, cache, journal, offload, tasks)
    schedule = events.schedule = PublishSchedule(
        queue,
        settle_seconds=options.settle_seconds,
        temp_names=options.temp_names,
        delete_delay=options.delete_delay,
    )
    retirement = Retirement(tree, cache, journal, offload, tasks)
    rejections = Rejections(tree, lookup, write, queue, journal, preparer, events)
    publisher = events.publisher = Publisher(
        queue,
        journal,
        schedule,
        preparer,
        PublishRequests(
            BucketWriter(primary_of(store), str(storage.empty_file)), offload, cache.request_limit, events
        ),
        PublishResults(tree, lookup, write, queue, journal, retirement, rejections, events),
        tasks,
        last_wins=options.last_wins,
    )
    remote_fsync = RemoteFsync(
        tree,
        write,
        queue,
        publisher,
        journal,
        store,
        is_remote=options.fsync_is_remote,
        settle_seconds=options.settle_seconds,
    )
    snapshots = events.snapshots = OpenFileSnapshots(
        tree, write.states, write.snapshots, queue, cache, snapshot_seconds=options.snapshot_seconds
    )
    namespace_ops = NamespaceOps(
        tree,
        lookup,
        write,
        queue,
        journal,
        names.client,
        events,
        ImmutableDirectories(tree, options.immutable),
    )
    conflict_log = events.conflict_log = ConflictLog(journal)
    return WriteBack(
        write,
        backpressure,
        snapshots,
        uploader,
        preparer,
        publisher,
        namespace_ops,
        remote_fsync,
        conflict_log,
    )


def build_services(
    storage: Storage,
    names: Names,
    write_back: WriteBack,
    options: EngineOptions,
    pinned: PinnedKeys,
    events: EngineEvents,
    tasks: TaskNursery,
) -> Services:
    """Build what answers commands and queries."""
    tree, queue, resolve = names.tree, names.queue, names.paths.resolve
    cache, client = storage.cache, names.client
    publisher, write, conflict_log = write_back.publisher, write_back.write, write_back.conflict_log
    pinned_objects = events.pinned = PinnedObjects(cache, client, pinned, tasks)
    status = QueueStatus(
        tree,
        queue,
        write,
        publisher,
        conflict_log,
        names.paths.lookup_path,
        names.symlinks,
        client,
        keys_from=options.access.keys_from,
    )
    quarantine = events.quarantine = Quarantine(
        tree,
        names.lookup,
        write_back.namespace_ops,
        write,
        events,
        queue,
        storage.journal,
        publisher,
        conflict_log,
        storage.staging,
        cache,
        storage.offload,
        storage.boot_id,
        resolve,
    )
    sync = Sync(tree, queue, publisher, status)
    drain = Drain(
        queue,
        publisher,
        sync,
        status.pending,
        options.directory,
        tasks.supervisor,
        stall_seconds=options.drain_seconds,
    )
    return Services(
        WarmupRunner(tree, client, cache, resolve, tasks),
        Inspector(tree, client, cache, names.symlinks, resolve, events),
        UploadAdmin(tree, client, storage.journal_rows),
        ServedObjects(tree, client, names.paths, cache),
        pinned_objects,
        status,
        RecentRates(tree, cache, storage.store, options.prices),
        sync,
        drain,
        quarantine,
        JournalReplay(
            storage.journal_rows,
            storage.staging,
            storage.boot_id,
            storage.empty_file,
            queue.is_commit_marker,
        ),
    )
