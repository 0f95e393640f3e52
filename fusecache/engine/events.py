"""The wiring of the engine: which part hears of which event of another part."""

import trio

from fusecache.engine.admin.pinning import PinnedObjects
from fusecache.engine.cache.block_cache import ReadHandle
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import FileVersion, Node, QueuedChange
from fusecache.engine.prefetch.model_loads import ModelLoads
from fusecache.engine.prefetch.sibling_readahead import SiblingReadahead
from fusecache.engine.publish.multipart_uploader import MultipartUploader
from fusecache.engine.publish.preparer import Preparer
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.publish.schedule import PublishSchedule
from fusecache.engine.recovery.quarantine import Quarantine
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.engine.write.snapshots import OpenFileSnapshots
from fusecache.engine.writeback.conflict_log import ConflictLog
from fusecache.model.errors import FusecacheError
from fusecache.model.records import FileRecord


class EngineEvents(Events):
    """Passes each event on to the parts that need it. The assembly sets each part as soon as it is built.

    Invariant: no event is emitted before all parts are set.
    """

    conflict_log: ConflictLog
    lookup: Lookup
    client: MetadataClient
    model_loads: ModelLoads
    pinned: PinnedObjects
    preparer: Preparer
    publisher: Publisher
    quarantine: Quarantine
    schedule: PublishSchedule
    sibling_readahead: SiblingReadahead
    snapshots: OpenFileSnapshots
    uploader: MultipartUploader

    def __init__(self, kernel: Events) -> None:
        """kernel: hears what the kernel must forget, and what a successor of this daemon must know of inodes."""
        self.kernel = kernel

    # ---- nodes

    def on_listing_lost(self, directory: Node) -> None:
        """The rows of the listing are discarded."""
        self.lookup.lister.on_listing_lost(directory)

    def on_node_moved(self, node: Node) -> None:
        """What a successor must know of an open file or a directory is kept."""
        self.kernel.on_node_moved(node)

    def on_content_changed(self, node: Node) -> None:
        """What a successor must know of an open file is kept."""
        self.kernel.on_content_changed(node)

    def on_node_dropped(self, node: Node) -> None:
        """A successor need not know of it."""
        self.kernel.on_node_dropped(node)

    def on_name_lost(self, parent: Node, name: str) -> None:
        """The kernel forgets the name."""
        self.kernel.on_name_lost(parent, name)

    async def on_evicted(self, inodes: list[int]) -> None:
        """The kernel drops its cached pages."""
        await self.kernel.on_evicted(inodes)

    # ---- names that programs here change

    def on_key_removed(self, key: str) -> None:
        """If it was a copy, its conflict is dealt with."""
        self.conflict_log.removed(key)

    def on_key_moved(self, before: str, now: str) -> None:
        """A conflict follows its copy, or is dealt with."""
        self.conflict_log.moved(before, now)

    # ---- reads and writes of programs

    def on_read(self, node: Node, pid: int) -> None:
        """The file that the process reads next is guessed, unless a hint covers this one."""
        self.sibling_readahead.on_read(node, pid)

    def on_file_read(
        self, node: Node, handle: ReadHandle, offset: int, nbytes: int, data: bytes | memoryview = b""
    ) -> None:
        """If the file is weights that are being loaded, the rest of it is fetched."""
        self.model_loads.on_file_read(node, handle, offset, nbytes, data)

    def on_dirty(self) -> None:
        """The file is watched, and published when it stays open for long."""
        self.snapshots.on_dirty()

    def on_part_ready(self, version: FileVersion) -> None:
        """The part is uploaded."""
        self.uploader.on_growth(version)

    def on_sealed(self) -> None:
        """The publisher looks at the queue again."""
        self.publisher.wake()

    # ---- content that the bucket does not get as it is

    def on_upload_obsolete(self, version: FileVersion) -> None:
        """The upload is aborted, and the content is prepared again when it is due."""
        self.preparer.restart(version)

    def on_version_dropped(self, version: FileVersion) -> None:
        """The upload is aborted, the staging file deleted, its space released."""
        self.preparer.dropped(version)

    def on_quarantined(self, record: FileRecord) -> None:
        """`recover` lists the content."""
        self.quarantine.on_quarantined(record)

    async def on_space_short(self, key: str) -> bool:
        """Unfinished content gives way to newer content of its name."""
        return await self.quarantine.make_space(key)

    # ---- the queue: the publisher's schedule

    def is_deferred(self, item: QueuedChange) -> bool:
        """The publisher's schedule decides."""
        return self.schedule.is_deferred(item, trio.current_time())

    def on_queued(self, item: QueuedChange) -> None:
        """The publisher schedules the item."""
        self.publisher.on_added(item)

    def on_unqueued(self, item: QueuedChange) -> None:
        """The publisher forgets the item."""
        self.publisher.on_removed(item)

    def on_rebased(self, item: QueuedChange) -> None:
        """The publisher journals the item."""
        self.publisher.rejections.base_etags.on_rebased(item)

    # ---- answers of the bucket

    def on_failing(self, version: FileVersion, error: FusecacheError) -> None:
        """The change counts as failing."""
        self.publisher.on_failing(version, error)

    def on_success(self, version: FileVersion) -> None:
        """The change counts as failing no longer."""
        self.publisher.on_success(version)

    def on_conflict(self, key: str, kept_as: str, size: int, error: str, number: int) -> None:
        """The conflict is recorded, for `status` and `recover`."""
        self.conflict_log.record(key, kept_as, size, error, number)

    def on_published(self, key: str) -> None:
        """A recorded conflict of the key is settled."""
        self.conflict_log.published(key)

    def on_gone(self, key: str, etag: str | None) -> None:
        """If the version is pinned, its blocks need not stay."""
        self.pinned.on_gone(key, etag)

    def on_accepted(self) -> None:
        """The bucket's access keys are not refused, or no longer."""
        self.client.on_write_accepted()

    def on_unresponsive(self) -> None:
        """Lookups that wait are answered from older rows."""
        self.lookup.on_unresponsive()

    def on_granted(self) -> None:
        """Uploads that failed for the refused keys are retried at once."""
        self.publisher.end_pauses()
