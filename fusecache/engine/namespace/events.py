"""What parts of the engine tell each other. A part emits an event, and does not know who hears of it."""

from fusecache.engine.cache.block_cache import ReadHandle
from fusecache.engine.namespace.nodes import FileVersion, Node, QueuedChange
from fusecache.model.errors import FusecacheError
from fusecache.model.records import FileRecord


class Events:
    """Each method does nothing unless overridden. `engine/events.py` passes each event on to who needs it.

    All but the coroutines are called in the middle of a change, before the caller's next checkpoint.
    """

    # ---- nodes

    def on_listing_lost(self, directory: Node) -> None:
        """The node of a listed directory was dropped: nothing refers to its listing any more."""

    # The next two come before the change's rows are submitted to the journal.

    def on_node_moved(self, node: Node) -> None:
        """A node got another name, or lost its name."""

    def on_content_changed(self, node: Node) -> None:
        """A file has another version here, or the bucket shows another one under its name."""

    def on_node_dropped(self, node: Node) -> None:
        """A node left memory: the kernel does not know its number."""

    def on_name_lost(self, parent: Node, name: str) -> None:
        """The name no longer means the inode that the kernel knows."""

    async def on_evicted(self, inodes: list[int]) -> None:
        """A user evicts these files: no copy of their bytes shall stay in memory either."""

    # ---- names that programs here change

    def on_key_removed(self, key: str) -> None:
        """A program here removed `key`, or replaced it by a rename."""

    def on_key_moved(self, before: str, now: str) -> None:
        """A program here renamed `before` to `now`."""

    # ---- reads and writes of programs

    def on_read(self, node: Node, pid: int) -> None:
        """A process begins to read a published file at its first byte. pid: its thread, 0 if unknown."""

    def on_file_read(
        self, node: Node, handle: ReadHandle, offset: int, nbytes: int, data: bytes | memoryview = b""
    ) -> None:
        """A program reads bytes of a published file. data: those at its start, once they are there."""

    def on_dirty(self) -> None:
        """A file has changes that no durable close covers."""

    def on_part_ready(self, version: FileVersion) -> None:
        """A file that is being written has grown by another part that may be uploaded."""

    def on_sealed(self) -> None:
        """Content was closed or sealed: the queue has more to publish."""

    # ---- content that the bucket does not get as it is

    def on_upload_obsolete(self, version: FileVersion) -> None:
        """Parts that were sent of this content are of no use: its key changed, or it must not be published as it is."""

    def on_version_dropped(self, version: FileVersion) -> None:
        """Content is no longer needed. The caller journals that in this step."""

    def on_quarantined(self, record: FileRecord) -> None:
        """Content was quarantined; its bytes still count as staging space."""

    async def on_space_short(self, key: str) -> bool:
        """A write to a key finds no space: return whether some was freed, so that it may try again."""
        return False

    # ---- the queue

    def is_deferred(self, item: QueuedChange) -> bool:
        """Return whether an item is not published for now."""
        return False

    def on_queued(self, item: QueuedChange) -> None:
        """An item was queued."""

    def on_unqueued(self, item: QueuedChange) -> None:
        """An item left the queue."""

    def on_rebased(self, item: QueuedChange) -> None:
        """An item inherited the base ETag of one that was dropped."""

    # ---- answers of the bucket

    def on_failing(self, version: FileVersion, error: FusecacheError) -> None:
        """A request for a file version failed in a way that may pass."""

    def on_success(self, version: FileVersion) -> None:
        """The bucket accepted a request for a file version."""

    def on_conflict(self, key: str, kept_as: str, size: int, error: str, number: int) -> None:
        """Another client changed the key first. kept_as: the key of our version, "" if the change was dropped.

        number: the one in the copy's name, 0 if it has none.
        """

    def on_published(self, key: str) -> None:
        """The bucket accepted a change of the key."""

    def on_gone(self, key: str, etag: str | None) -> None:
        """The bucket no longer shows this version."""

    def on_accepted(self) -> None:
        """The bucket accepted a publishing request."""

    def on_unresponsive(self) -> None:
        """A LIST or HEAD got no answer in time, or the keys are refused for everything."""

    def on_granted(self) -> None:
        """Refused keys are accepted again: everything else that backs off may retry now.

        Not called after an outage: a bucket that comes back is busy enough.
        """
