"""A time limit for a blocking request that has only its own, longer timeout."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from fusecache.model.errors import Unavailable

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return a blocking call's result. Raises its error, or Unavailable if it has none in time; it then goes on."""
    results: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def run() -> None:
        try:
            value = call()
        except Exception as exc:  # noqa: BLE001  # raised by the caller
            failure = exc

            def raise_failure() -> T:
                raise failure

            results.put(raise_failure)
        else:
            results.put(lambda: value)

    # No thread of a pool: the interpreter does not wait for a daemon thread.
    Thread(target=run, name="limited request", daemon=True).start()
    try:
        outcome = results.get(timeout=seconds)
    except Empty:
        raise Unavailable(f"the bucket has not answered for {seconds:g} s") from None
    return outcome()
