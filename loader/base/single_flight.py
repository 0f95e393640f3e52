"""Work that several threads of a process want at the same time, and one of them does."""

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SingleFlight(Generic[Result]):
    """Has one thread do what several want at the same time; the others wait for its result, or its error.

    Nothing is kept beyond that. Safe for fork: a child does not wait for threads that it does not have.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[Hashable, Future[Result]] = {}
        self._process = os.getpid()

    def do(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, called here or by the thread that is at this key already."""
        if self._process != os.getpid():
            self._forget()  # the lock may be held by a thread that is not here
        with self._lock:
            coming = self._coming.get(key)
            if coming is None:
                mine = self._coming[key] = Future()
        if coming is not None:
            try:
                return coming.result()
            finally:
                del coming  # an error and this frame would keep each other, and open files
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
