"""How long somebody waits for something that may stand still: so long without any progress. Pure."""

# An fsync that waits for the bucket, and a close that waits for room, give up after so long without progress.
STANDSTILL_SECONDS = 300.0


class ProgressTimeout:
    """Notes progress; over when there was none for `seconds`. Times are those of any one clock."""

    def __init__(self, now: float, seconds: float = STANDSTILL_SECONDS) -> None:
        self._seconds = seconds
        self._since = now
        self._mark: object = None

    def on_progress(self, mark: object, now: float) -> None:
        """Tell how far it is: whenever the mark differs from the last one, there was progress."""
        if mark != self._mark:
            self._mark = mark
            self._since = now

    def is_over(self, now: float) -> bool:
        """Return whether nothing moved for too long."""
        return now - self._since >= self._seconds
