"""What this room tells others. `engine/events.py` says which part of the engine hears of what."""

from fusecache.engine.namespace.nodes import FileVersion, Node
from fusecache.index.journal import Change
from fusecache.model.records import FileRecord


class WriteListener:
    """Hears what happens to local file content. Each method does nothing unless overridden.

    All but `on_space_short` are called in the middle of a change, before the caller's next checkpoint.
    """

    # ---- reads and writes of programs

    def on_read(self, node: Node, pid: int) -> None:
        """A process begins to read a published file at its first byte. pid: its thread, 0 if unknown."""

    def on_dirty(self) -> None:
        """A file has changes that no durable close covers."""

    def on_part_ready(self, version: FileVersion) -> None:
        """A file that is being written has grown by another part that may be uploaded."""

    def on_sealed(self) -> None:
        """Content was closed or sealed: the queue has more to publish."""

    # ---- content that the bucket does not get as it is

    def on_upload_obsolete(self, version: FileVersion) -> None:
        """Parts that were sent of this content are of no use: its key changed, or it must not be published as it is."""

    def on_dropped(self, version: FileVersion) -> None:
        """Content is no longer needed. The caller journals that in this step."""

    def on_quarantined(self, record: FileRecord) -> None:
        """Content was quarantined; its bytes still count as staging space."""

    async def on_space_short(self, key: str) -> bool:
        """A write to a key finds no space: return whether some was freed, so that it may try again."""
        return False

    def on_name_lost(self, parent: Node, name: str) -> None:
        """The name no longer means the inode that the kernel knows."""

    # ---- content that the bucket rejected. The caller journals the returned rows with its own.

    def on_resolved(self, version: FileVersion) -> list[Change]:
        """Rejected content, or what replaces it, was dropped, quarantined or queued again."""
        return []

    def on_returned(self, version: FileVersion) -> list[Change]:
        """Rejected content has its name again, as what replaced it failed."""
        return []
