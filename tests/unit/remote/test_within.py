"""A time limit for a blocking call: what comes too late is handed on, not dropped."""

import gc
import weakref
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread, current_thread

import pytest

from fusecache.model.errors import Unavailable
from fusecache.remote.store import Interruption
from fusecache.remote.within import within


def test_a_result_and_an_error_come_back() -> None:
    assert within(10, lambda: "answer") == "answer"
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 // 0)


class Response:
    """What a call works on, such as a response with its connection."""


def test_an_error_keeps_nothing_of_its_call_once_it_is_handled() -> None:
    """Else the connection of a refused request stayed open until the next collection of garbage."""
    seen: list[weakref.ref[Response]] = []
    threads: list[Thread] = []

    def call() -> None:
        response = Response()
        seen.append(weakref.ref(response))
        threads.append(current_thread())
        raise Unavailable("refused")

    gc.disable()
    try:
        with suppress(Unavailable):
            within(10, call)
        threads[0].join()
        assert seen[0]() is None
    finally:
        gc.enable()


def test_a_late_result_is_discarded_by_its_thread() -> None:
    discarded: SimpleQueue[str] = SimpleQueue()
    may_end = Event()

    def call() -> str:
        may_end.wait(10)
        return "late"

    with pytest.raises(Unavailable, match=r"has not answered for 0\.01 s"):
        within(0.01, call, discard=discarded.put)
    may_end.set()
    assert discarded.get(timeout=10) == "late"


def test_an_interruption_ends_the_wait() -> None:
    discarded: SimpleQueue[str] = SimpleQueue()
    interruption, may_end = Interruption(), Event()

    def call() -> str:
        interruption.interrupt()
        may_end.wait(10)
        return "late"

    with pytest.raises(Unavailable, match="interrupted"):
        within(None, call, interruption, discard=discarded.put)
    may_end.set()
    assert discarded.get(timeout=10) == "late"
