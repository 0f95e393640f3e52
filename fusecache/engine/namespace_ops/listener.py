"""What the namespace operations tell other rooms."""


class NamespaceListener:
    """Hears of changes of names by programs here. Each method does nothing unless overridden."""

    def on_removed(self, key: str) -> None:
        """A program here removed `key`, or replaced it by a rename."""

    def on_moved(self, before: str, now: str) -> None:
        """A program here renamed `before` to `now`."""
