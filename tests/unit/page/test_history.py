"""The ring of the last hour's rates."""

from typing import Any

import pytest

from fusecache.page.history import HOUR_SECONDS, SAMPLES, STEP_SECONDS, RateHistory


def status(uptime: float, *, read: int = 0, requests: int = 0, pid: int = 1) -> dict[str, Any]:
    """Return what the history looks at, of a status at this moment."""
    sources = ("memory", "disk", "peer", "bucket", "fetched")
    return {
        "uptime_seconds": uptime,
        "pid": pid,
        "cache": {"bytes_from": {"memory": read, "disk": 2 * read, "peer": 5 * read, "bucket": 3 * read}},
        "received_bytes": 4 * read,
        "requests": {"gets": requests, "lists": requests},
        "upload_bytes_per_second": 5,
        "rates": {f"{name}_bytes_per_second": 0.0 for name in sources} | {"requests_per_second": 0.0},
        "costs": {"dollars_per_day": 0.5},
    }


def test_a_sample_is_what_counters_grew_by_in_a_second() -> None:
    history = RateHistory()
    history.record(status(0))
    history.record(status(STEP_SECONDS, read=1000, requests=20))
    (sample,) = history.samples()
    assert sample[1:5] == (100.0, 200.0, 500.0, 300.0)
    assert (sample.sent_bytes, sample.fetched_bytes, sample.requests, sample.dollars) == (5, 400.0, 4.0, 0.5)


def test_statuses_that_come_more_often_make_no_more_samples() -> None:
    history = RateHistory()
    for second in range(0, 61, 5):
        history.record(status(second))
    assert [each.uptime for each in history.samples()] == [10, 20, 30, 40, 50, 60]


def test_the_ring_is_bounded_and_covers_an_hour() -> None:
    history = RateHistory()
    for index in range(2 * SAMPLES):
        history.record(status(index * STEP_SECONDS))
    first, *_, last = history.samples()
    assert len(history.samples()) == SAMPLES
    assert last.uptime - first.uptime == pytest.approx(HOUR_SECONDS - STEP_SECONDS)
