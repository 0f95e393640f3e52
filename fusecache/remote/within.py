"""A time limit for a blocking request that has only its own, longer timeout."""

from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import NoReturn, TypeVar

from fusecache.model.errors import Unavailable
from fusecache.remote.store import Interruption

T = TypeVar("T")


def within(
    seconds: float | None,
    call: Callable[[], T],
    interruption: Interruption | None = None,
    *,
    discard: Callable[[T], None] = lambda _: None,
) -> T:
    """Return a blocking call's result. Raises its error.

    Raises Unavailable if the call is not done in time, or when it is interrupted. Its thread then goes on, and passes
    what it gets to `discard`.
    """
    is_over = Lock()  # taken by the one that comes first: the call's end, or the end of the wait
    results: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def run() -> None:
        try:
            value = call()
        except Exception as exc:  # noqa: BLE001  # raised by the caller
            results.put(partial(_raise, exc))
        else:
            if is_over.acquire(blocking=False):
                results.put(lambda: value)
            else:
                discard(value)

    # No thread of a pool: the interpreter does not wait for a daemon thread.
    Thread(target=run, name="limited request", daemon=True).start()

    def interrupt() -> None:
        if is_over.acquire(blocking=False):
            results.put(_raise_interrupted)

    with (interruption or Interruption()).by(interrupt):
        try:
            return results.get(timeout=seconds)()
        except Empty:
            if not is_over.acquire(blocking=False):
                return results.get()()  # it came at the last moment
            raise Unavailable(f"the bucket has not answered for {seconds:g} s") from None


def _raise(failure: Exception) -> NoReturn:
    """Raise it, and keep no reference: its traceback has this frame, and would live with it until a collection."""
    try:
        raise failure
    finally:
        del failure


def _raise_interrupted() -> NoReturn:
    raise Unavailable("interrupted by its reader before the bucket answered")
