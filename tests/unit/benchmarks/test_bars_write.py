"""The bars of the write path say met, missed or not measured, of medians over rounds."""

from collections.abc import Mapping

import pytest

from benchmarks.bars import Bar
from benchmarks.bars_write import write_bars
from benchmarks.report import NOT_AVAILABLE, table
from benchmarks.results import Results, Row


def results(*rows: tuple[str, str, Mapping[str, float]]) -> Results:
    """Return results of rows (case, competitor, figures), all of one round."""
    return Results(Row(1, case, competitor, figures) for case, competitor, figures in rows)


def bar(measured: Results, case: str, what: str) -> Bar:
    """Return the one bar of a case whose text holds `what`."""
    (found,) = [each for each in write_bars(measured) if each.case == case and what in each.what]
    return found


def test_a_write_is_compared_with_the_fastest_of_all_peers() -> None:
    measured = results(
        ("write A", "fusecache", {"rate": 900.0}),
        ("write A", "rclone", {"rate": 200.0}),
        ("write A", "rclone-tuned", {"rate": 250.0}),
        ("write A", "s3fs-tuned", {"rate": 300.0}),
        ("write A", "discard-fs", {"rate": 1000.0}),
    )
    assert bar(measured, "write A", "best mounted peer").figure == 3.0
    assert bar(measured, "write A", "best mounted peer").verdict == "met"
    assert bar(measured, "write A", "throws away").verdict == "met"
    measured.add(Row(2, "write A", "s3fs", {"rate": 301.0}))
    assert bar(measured, "write A", "best mounted peer").verdict == "missed"


def test_small_writes_may_cost_a_fifth_more_than_throwing_the_bytes_away() -> None:
    for rate, verdict in ((80.0, "met"), (79.0, "missed")):
        measured = results(
            ("write4k A", "fusecache", {"rate": rate}), ("write4k A", "discard-fs", {"rate": 100.0})
        )
        assert bar(measured, "write4k A", "throws away").verdict == verdict


@pytest.mark.parametrize("case", ["torch B", "dcp B", "dcp-async B"])
def test_a_trainer_is_blocked_for_twice_the_time_of_a_local_save_at_most(case: str) -> None:
    for seconds, verdict in ((6.0, "met"), (6.1, "missed")):
        measured = results(
            (case, "local", {"blocked_seconds": 0.1, "whole_seconds": 3.0}),
            (case, "fusecache", {"blocked_seconds": seconds, "whole_seconds": 50.0}),
        )
        assert bar(measured, case, "blocked").verdict == verdict


def test_the_mode_that_waits_for_the_bucket_has_no_bar() -> None:
    measured = results(
        ("dcp B", "local", {"blocked_seconds": 1.0, "whole_seconds": 1.0}),
        ("dcp B", "fusecache", {"blocked_seconds": 1.0, "whole_seconds": 1.0}),
        ("dcp B", "fusecache-remote", {"blocked_seconds": 9.0, "whole_seconds": 9.0}),
    )
    assert [each.verdict for each in write_bars(measured)] == ["met"]


def test_settling_counts_from_the_first_write_but_not_from_the_close() -> None:
    measured = results(
        ("durable B", "raw", {"whole_seconds": 2.0}),
        (
            "durable B",
            "fusecache",
            {"whole_seconds": 2.9, "after_close_seconds": 3.4, "after_settle_seconds": 2.4},
        ),
    )
    assert bar(measured, "durable B", "close to durable").figure == 1.2
    assert bar(measured, "durable B", "close to durable").verdict == "met"
    assert bar(measured, "durable B", "first write").figure == 1.45
    assert bar(measured, "durable B", "first write").verdict == "missed"


def test_the_write_over_tls_has_only_the_bars_of_its_upload() -> None:
    measured = results(
        ("write C", "fusecache", {"rate": 1.0}),
        ("durable C", "fusecache", {"whole_seconds": 1.0, "after_settle_seconds": 1.0}),
        ("durable C", "raw", {"whole_seconds": 1.0}),
    )
    assert {each.case for each in write_bars(measured)} == {"durable C"}


def test_files_reading_and_starting_have_a_bar_each() -> None:
    measured = results(
        ("files D", "fusecache", {"files_per_second": 199.0}),
        ("files D", "s3fs", {"files_per_second": 2.0}),
        ("train B", "undisturbed", {"rate": 100.0}),
        ("train B", "fusecache", {"rate": 70.0}),
        ("recover B", "fusecache", {"seconds": 2.1}),
    )
    assert [(each.case, each.verdict) for each in write_bars(measured)] == [
        ("files D", "missed"),
        ("train B", "met"),
        ("recover B", "missed"),
    ]


def test_without_a_local_save_the_bar_is_not_measured() -> None:
    measured = results(("torch B", "fusecache", {"blocked_seconds": 1.0}))
    measured.add(Row(1, "torch B", "local", error="disk full"))
    assert bar(measured, "torch B", "blocked").verdict == "not measured"


def test_an_option_that_the_daemon_lacks_is_shown_as_such() -> None:
    measured = results(("dcp B", "fusecache", {"blocked_seconds": 1.0}))
    measured.add(Row(1, "dcp B", "fusecache-remote", error=NOT_AVAILABLE))
    shown = table(measured, write_bars(measured))
    assert NOT_AVAILABLE in shown
    assert "failed" not in shown
