"""A time limit for a blocking request that has only its own, longer timeout."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NoReturn, TypeVar

from fusecache.model.errors import Unavailable
from fusecache.remote.store import Interruption

T = TypeVar("T")


def within(seconds: float | None, call: Callable[[], T], interruption: Interruption | None = None) -> T:
    """Return a blocking call's result. Raises its error.

    Raises Unavailable if the call is not done in time, or when it is interrupted. Its thread then goes on.
    """
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
        with (interruption or Interruption()).by(lambda: results.put(_raise_interrupted)):
            outcome = results.get(timeout=seconds)
    except Empty:
        raise Unavailable(f"the bucket has not answered for {seconds:g} s") from None
    return outcome()


def _raise_interrupted() -> NoReturn:
    raise Unavailable("interrupted by its reader before the bucket answered")
