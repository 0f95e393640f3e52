"""A timeout that counts only the time without progress. Pure."""

# An fsync that waits for the bucket, and a close that waits for disk space, fail after this long without progress.
STANDSTILL_SECONDS = 300.0


class ProgressTimeout:
    """Records progress; expires after `seconds` without any. Times are those of any one clock."""

    def __init__(self, now: float, seconds: float = STANDSTILL_SECONDS) -> None:
        self._seconds = seconds
        self._since = now
        self._mark: object = None

    def on_progress(self, mark: object, now: float) -> None:
        """Report the current state: there was progress if the mark differs from the last one."""
        if mark != self._mark:
            self._mark = mark
            self._since = now

    def is_over(self, now: float) -> bool:
        """Return whether there was no progress for too long."""
        return now - self._since >= self._seconds
