"""Repeats requests that fail for a reason that passes by itself."""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from fusecache.model.errors import Unavailable, Untrusted
from fusecache.policy.backoff import backoff_seconds

log = logging.getLogger(__name__)
T = TypeVar("T")
# A bucket that has answered nothing for this long ends a command.
GIVE_UP_SECONDS = 300.0


class Patience:
    """Counts all requests of a command together: one that succeeds shows that the bucket answers. Thread-safe."""

    def __init__(self, seconds: float = GIVE_UP_SECONDS) -> None:
        """seconds: a bucket that has answered nothing for so long ends the command."""
        self._seconds = seconds
        self._last_success = time.monotonic()

    def call(self, request: Callable[[], T]) -> T:
        """Make a request, again and again while that may help. Raises its error."""
        attempt = 0
        while True:
            try:
                answer = request()
            except Untrusted:
                raise
            except Unavailable as exc:
                attempt += 1
                if time.monotonic() - self._last_success > self._seconds:
                    raise
                log.info("retrying attempt=%d error=%s", attempt, exc)
                time.sleep(exc.retry_after_seconds or backoff_seconds(attempt, random.random()))
            else:
                self._last_success = time.monotonic()
                return answer
