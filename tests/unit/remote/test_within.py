"""A time limit for a blocking call."""

import gc
import weakref
from contextlib import suppress
from threading import Event, Thread, current_thread

import pytest

from fusecache.model.errors import Unavailable
from fusecache.remote.endpoint_group import within


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


def test_a_wait_ends_in_time() -> None:
    may_end = Event()
    with pytest.raises(Unavailable, match=r"has not answered for 0\.01 s"):
        within(0.01, lambda: may_end.wait(10))
    may_end.set()
