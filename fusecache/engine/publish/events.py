"""What publishing tells other rooms."""

from fusecache.engine.namespace.nodes import Node


class PublishListener:
    """Hears what the bucket accepted and rejected. Each method does nothing unless overridden."""

    def on_name_lost(self, parent: Node, name: str) -> None:
        """The name no longer means the inode that the kernel knows."""

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
