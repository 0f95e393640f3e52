"""A time limit for a blocking request that has only its own, longer timeout."""

from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NoReturn, TypeVar

from fusecache.model.errors import Unavailable

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return a blocking call's result. Raises its error.

    Raises Unavailable if the call is not done in time. Its thread then goes on, and its result is dropped.
    """
    results: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def run() -> None:
        try:
            value = call()
        except Exception as exc:  # noqa: BLE001  # raised by the caller
            results.put(partial(_raise, exc))
        else:
            results.put(lambda: value)

    # No thread of a pool: the interpreter does not wait for a daemon thread.
    Thread(target=run, name="limited request", daemon=True).start()
    try:
        return results.get(timeout=seconds)()
    except Empty:
        raise Unavailable(f"the bucket has not answered for {seconds:g} s") from None


def _raise(failure: Exception) -> NoReturn:
    """Raise it, and keep no reference: its traceback has this frame, and would live with it until a collection."""
    try:
        raise failure
    finally:
        del failure
