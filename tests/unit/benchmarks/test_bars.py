"""The bars say met, missed or not measured, of medians over rounds."""

from collections.abc import Mapping

from benchmarks.bars import Bar
from benchmarks.bars_read import read_bars
from benchmarks.report import table
from benchmarks.results import Results, Row


def results(*rows: tuple[str, str, Mapping[str, float]]) -> Results:
    """Return results of rows (case, competitor, figures), all of one round."""
    return Results(Row(1, case, competitor, figures) for case, competitor, figures in rows)


def bar(measured: Results, case: str, what: str) -> Bar:
    """Return the one bar of a case whose text holds `what`."""
    (found,) = [each for each in read_bars(measured) if each.case == case and what in each.what]
    return found


def test_a_cold_read_is_compared_with_the_best_mounted_peer() -> None:
    measured = results(
        ("cold A", "fusecache", {"rate": 500e6}),
        ("cold A", "rclone", {"rate": 100e6}),
        ("cold A", "s3fs", {"rate": 300e6}),
    )
    found = bar(measured, "cold A", "best mounted peer")
    assert found.figure is not None
    assert round(found.figure, 3) == 1.667
    assert found.verdict == "missed"


def test_figures_are_medians_over_the_rounds() -> None:
    measured = Results(
        Row(number, "cold B", name, {"rate": rate})
        for name, rates in (("fusecache", (9.0, 460.0, 900.0)), ("raw", (1000.0, 1.0, 2000.0)))
        for number, rate in enumerate(rates, 1)
    )
    found = bar(measured, "cold B", "raw boto3")
    assert found.figure == 0.46
    assert found.verdict == "met"


def test_the_share_of_the_raw_limit_depends_on_the_origin() -> None:
    rows = [
        (f"cold {origin}", name, {"rate": rate})
        for origin in "ABC"
        for name, rate in (("fusecache", 40.0), ("raw", 100.0))
    ]
    measured = results(*rows)
    verdicts = [bar(measured, f"cold {origin}", "raw boto3").verdict for origin in "ABC"]
    assert verdicts == ["met", "missed", "missed"]


def test_a_bar_without_its_peer_is_not_met() -> None:
    measured = results(("cold A", "fusecache", {"rate": 1.0}))
    measured.add(Row(1, "cold A", "crt", error="crashed"))
    assert bar(measured, "cold A", "CRT").verdict == "not measured"


def test_a_failed_peer_leaves_the_comparison_with_the_others() -> None:
    measured = results(("cold A", "fusecache", {"rate": 6.0}), ("cold A", "rclone", {"rate": 2.0}))
    measured.add(Row(1, "cold A", "s3fs", error="did not mount"))
    assert bar(measured, "cold A", "best mounted peer").verdict == "met"
    assert "failed" in table(measured, read_bars(measured))


def test_a_figure_at_its_limit_meets_it() -> None:
    measured = results(("find B", "fusecache", {"seconds": 3.0}))
    assert bar(measured, "find B", "seconds").verdict == "met"
    slower = results(("find B", "fusecache", {"seconds": 3.01}))
    assert bar(slower, "find B", "seconds").verdict == "missed"


def test_unequal_shares_are_missed_even_if_the_whole_is_fast() -> None:
    measured = results(
        ("cold B", "fusecache", {"rate": 100.0}),
        ("streams B", "fusecache", {"rate": 200.0, "unevenness": 0.3}),
    )
    assert bar(measured, "streams B", "one stream").verdict == "met"
    assert bar(measured, "streams B", "share").verdict == "missed"


def test_memory_is_the_highest_of_every_case() -> None:
    measured = results(
        ("ls B", "fusecache", {"seconds": 0.1, "memory_bytes": 100e6}),
        ("find B", "fusecache", {"seconds": 0.1, "memory_bytes": 769e6}),
        ("find B", "rclone", {"seconds": 0.1, "memory_bytes": 5e9}),
    )
    found = bar(measured, "memory", "RssAnon")
    assert (found.figure, found.verdict) == (769.0, "missed")


def test_cases_that_were_not_run_have_no_bars() -> None:
    measured = results(("ls B", "fusecache", {"seconds": 0.1, "memory_bytes": 1e6}))
    assert {each.case for each in read_bars(measured)} == {"ls B", "memory"}
    assert read_bars(Results()) == []


def test_a_peer_cut_off_is_shown_with_its_limit() -> None:
    measured = results(("find B", "fusecache", {"seconds": 1.0}))
    measured.add(Row(1, "find B", "rclone", error="> 60 s", limit_seconds=60.0))
    assert "> 60 s" in table(measured, read_bars(measured))


def test_what_a_request_costs_is_compared_between_few_and_many_threads() -> None:
    measured = results(
        ("requests8 B", "fusecache", {"cpu_us": 2000.0}), ("requests64 B", "fusecache", {"cpu_us": 2600.0})
    )
    found = bar(measured, "requests64 B", "64 threads / 8")
    assert (found.figure, found.verdict) == (1.3, "missed")
