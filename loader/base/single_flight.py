"""Runs work once for all threads of a process that ask for it at the same time."""

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SingleFlight(Generic[Result]):
    """Lets one thread do the work for a key; threads that ask concurrently wait for its result or its error.

    It caches nothing after that. Fork-safe: a child never waits for threads of its parent.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[Hashable, Future[Result]] = {}
        self._process = os.getpid()

    def do(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, called here or by the thread that already works on this key."""
        if self._process != os.getpid():
            self._reset()  # a thread of the parent may hold the lock
        with self._lock:
            coming = self._coming.get(key)
            if coming is None:
                mine = self._coming[key] = Future()
        if coming is not None:
            try:
                return coming.result()
            finally:
                del coming  # the error's traceback refers to this frame: a cycle that would keep files open
        try:
            result = work()
        except BaseException as problem:
            self._coming.pop(key, None)
            mine.set_exception(problem)
            del mine  # as above
            raise
        self._coming.pop(key, None)
        mine.set_result(result)
        return result
