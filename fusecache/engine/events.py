"""The wiring of the engine: which part hears of which event of another part.

A room defines what it emits as a listener (`QueueListener`, `PublishListener`, …), a class whose methods do nothing. A
constructor receives one. The classes here implement these listeners: each method passes the event on.

Invariant: no event is emitted before `assembly.py` has set all parts of `EventTargets`.
"""

from fusecache.engine.admin.inspector import InspectorListener
from fusecache.engine.admin.pinning import PinnedObjects
from fusecache.engine.namespace.lookup import Lookup
from fusecache.engine.namespace.nodes import FileVersion, Node, QueuedChange
from fusecache.engine.namespace.tree import TreeListener
from fusecache.engine.namespace_ops.listener import NamespaceListener
from fusecache.engine.prefetch.sibling_readahead import SiblingReadahead
from fusecache.engine.publish.multipart_uploader import MultipartUploader, UploadListener
from fusecache.engine.publish.preparer import Preparer
from fusecache.engine.publish.publishers import Publishers
from fusecache.engine.publish.rejections import PublishListener
from fusecache.engine.recovery.quarantine import Quarantine
from fusecache.engine.runtime.by_bucket import ByBucket
from fusecache.engine.runtime.metadata_client import MetadataClient, MetadataListener
from fusecache.engine.write.listener import WriteListener
from fusecache.engine.write.open_file_snapshots import OpenFileSnapshots
from fusecache.engine.writeback.conflict_log import ConflictLog
from fusecache.engine.writeback.queue import QueueListener
from fusecache.index.journal import Change
from fusecache.model.errors import FusecacheError
from fusecache.model.records import FileRecord


class KernelListener:
    """Hears what the kernel must forget, and what becomes of inodes. Each method does nothing unless overridden."""

    def on_name_lost(self, parent: Node, name: str) -> None:
        """A name no longer means the inode that the kernel knows."""

    def on_moved(self, node: Node) -> None:
        """An inode got another name, or lost its name."""

    def on_content_changed(self, node: Node) -> None:
        """A file has another version here, or the bucket shows another one under its name."""

    def on_dropped(self, node: Node) -> None:
        """The kernel does not know an inode any more."""

    async def on_evicted(self, inodes: list[int]) -> None:
        """A user evicts these files: the kernel shall drop its cached pages of them."""


class EventTargets:
    """The parts that hear of events. The assembly sets each as soon as it is built."""

    conflict_log: ConflictLog
    lookup: Lookup
    metadata_clients: ByBucket[MetadataClient]
    pinned: PinnedObjects
    preparers: ByBucket[Preparer]
    publisher: Publishers
    quarantine: Quarantine
    sibling_readahead: SiblingReadahead
    snapshots: OpenFileSnapshots
    uploaders: ByBucket[MultipartUploader]

    def __init__(self, kernel: KernelListener) -> None:
        self.kernel = kernel


class _Events:
    def __init__(self, targets: EventTargets) -> None:
        self._targets = targets


class MetadataEvents(MetadataListener):
    """LIST and HEAD requests to a bucket -> lookups that wait, uploads that back off."""

    def __init__(self, targets: EventTargets, bucket: str) -> None:
        self._targets = targets
        self._bucket = bucket

    def on_unresponsive(self) -> None:
        """Lookups that wait are answered from older rows."""
        self._targets.lookup.on_unresponsive()

    def on_granted(self) -> None:
        """Uploads that failed for the refused keys are retried at once."""
        self._targets.publisher.of(self._bucket).end_pauses()
        self._targets.uploaders.of(self._bucket).end_pauses()


class TreeEvents(_Events, TreeListener):
    """Nodes -> listings, the kernel."""

    def on_listing_lost(self, directory: Node) -> None:
        """The rows of the listing are discarded."""
        self._targets.lookup.on_listing_lost(directory)

    def on_moved(self, node: Node) -> None:
        """What a successor of this daemon must know of an open file or a directory is kept."""
        self._targets.kernel.on_moved(node)

    def on_content_changed(self, node: Node) -> None:
        """What a successor must know of an open file is kept."""
        self._targets.kernel.on_content_changed(node)

    def on_dropped(self, node: Node) -> None:
        """A successor need not know of it."""
        self._targets.kernel.on_dropped(node)


class QueueEvents(_Events, QueueListener):
    """The write-back queue -> the publisher."""

    def is_deferred(self, item: QueuedChange) -> bool:
        """The publisher's schedule decides."""
        return self._targets.publisher.is_unscheduled(item)

    def on_added(self, item: QueuedChange) -> None:
        """The publisher schedules the item."""
        self._targets.publisher.on_added(item)

    def on_removed(self, item: QueuedChange) -> None:
        """The publisher forgets the item."""
        self._targets.publisher.on_removed(item)

    def on_change(self) -> None:
        """The publisher looks at the queue again."""
        self._targets.publisher.on_change()

    def on_rebased(self, item: QueuedChange) -> None:
        """The publisher journals the item."""
        self._targets.publisher.on_rebased(item)


class UploadEvents(_Events, UploadListener):
    """Requests for parts -> the publisher, which sends the other requests for the same changes."""

    def on_failing(self, version: FileVersion, error: FusecacheError) -> None:
        """The change counts as failing."""
        self._targets.publisher.on_failing(version, error)

    def on_success(self, version: FileVersion) -> None:
        """The change counts as failing no longer."""
        self._targets.publisher.on_success(version)


class PublishEvents(_Events, PublishListener):
    """Answers of the bucket -> the kernel, the conflicts, the pinned objects, the metadata client."""

    def on_name_lost(self, parent: Node, name: str) -> None:
        """The kernel forgets the name."""
        self._targets.kernel.on_name_lost(parent, name)

    def on_conflict(self, key: str, kept_as: str, size: int, error: str, number: int) -> None:
        """The conflict is recorded, for `status` and `recover`."""
        self._targets.conflict_log.record(key, kept_as, size, error, number)

    def on_published(self, key: str) -> None:
        """A recorded conflict of the key is settled."""
        self._targets.conflict_log.published(key)

    def on_gone(self, key: str, etag: str | None) -> None:
        """If the version is pinned, its blocks need not stay."""
        self._targets.pinned.on_gone(key, etag)

    def on_accepted(self, key: str) -> None:
        """The bucket's access keys are not refused, or no longer."""
        self._targets.metadata_clients.of(key).on_write_accepted()


class NamespaceEvents(_Events, NamespaceListener):
    """Removed and renamed files -> the conflicts whose copies they may be."""

    def on_removed(self, key: str) -> None:
        """If it was a copy, its conflict is dealt with."""
        self._targets.conflict_log.removed(key)

    def on_moved(self, before: str, now: str) -> None:
        """A conflict follows its copy, or is dealt with."""
        self._targets.conflict_log.moved(before, now)


class InspectorEvents(_Events, InspectorListener):
    """Commands -> the kernel."""

    async def on_evicted(self, inodes: list[int]) -> None:
        """The kernel drops its cached pages."""
        await self._targets.kernel.on_evicted(inodes)


class WriteEvents(_Events, WriteListener):
    """Reads, writes and closes -> the publisher, the uploads, the quarantine, read-ahead, the kernel."""

    def on_read(self, node: Node, pid: int) -> None:
        """The file that the process reads next is guessed, unless a hint covers this one."""
        self._targets.sibling_readahead.on_read(node, pid)

    def on_dirty(self) -> None:
        """The file is watched, and published when it stays open for long."""
        self._targets.snapshots.on_dirty()

    def on_part_ready(self, version: FileVersion) -> None:
        """The part is uploaded."""
        self._targets.uploaders.of(version.record.key).on_growth(version)

    def on_sealed(self) -> None:
        """The publisher looks at the queue again."""
        self._targets.publisher.wake()

    def on_upload_obsolete(self, version: FileVersion) -> None:
        """The upload is aborted, and the content is prepared again when it is due."""
        self._targets.preparers.of(version.record.key).restart(version)

    def on_dropped(self, version: FileVersion) -> None:
        """The upload is aborted, the staging file deleted, its space released."""
        self._targets.preparers.of(version.record.key).dropped(version)

    def on_quarantined(self, record: FileRecord) -> None:
        """`recover` lists the content."""
        self._targets.quarantine.on_quarantined(record)

    async def on_space_short(self, key: str) -> bool:
        """Unfinished content gives way to newer content of its name."""
        return await self._targets.quarantine.make_space(key)

    def on_name_lost(self, parent: Node, name: str) -> None:
        """The kernel forgets the name."""
        self._targets.kernel.on_name_lost(parent, name)

    def on_resolved(self, version: FileVersion) -> list[Change]:
        """Commit markers that were held for it are queued."""
        return self._targets.publisher.on_resolved(version)

    def on_returned(self, version: FileVersion) -> list[Change]:
        """It is queued, if it is a held commit marker that nothing blocks now."""
        return self._targets.publisher.on_returned(version)
