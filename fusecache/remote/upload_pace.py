"""Holds threads that upload back, so that together they keep below a limit of bytes a second. Thread-safe."""

import threading
import time

from fusecache.policy.backoff import Pace


class UploadPace:
    """The limit of all uploads of a mount. Bodies take turns piece by piece, so none of them stands still for long."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        """bytes_per_second: None sets no limit."""
        self._pace = Pace(bytes_per_second)
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """A piece of a body was sent: sleep until another one may be. nbytes: negative if it counts no more."""
        if nbytes > 0:
            with self._lock:
                seconds = self._pace.charge(time.monotonic(), nbytes)
            if seconds > 0:
                time.sleep(seconds)
