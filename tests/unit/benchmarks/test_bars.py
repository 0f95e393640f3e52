"""The bars say met, missed or not measured, of medians over rounds."""

from collections.abc import Callable, Mapping

import pytest

from benchmarks.bars import Bar
from benchmarks.bars_loader import loader_bars
from benchmarks.bars_read import read_bars
from benchmarks.bars_write import write_bars
from benchmarks.file_hints import CASES as FILE_CASES
from benchmarks.file_hints import file_hint_bars
from benchmarks.loader import CASES
from benchmarks.report import NOT_AVAILABLE, SHOWN, table
from benchmarks.results import Results, Row

Measured = tuple[str, str, Mapping[str, float]]
Bars = Callable[[Results], list[Bar]]
US = "fusecache"


def results(*rows: Measured) -> Results:
    """Return results of rows (case, competitor, figures), all of one round."""
    return Results(Row(1, case, competitor, figures) for case, competitor, figures in rows)


def bar(bars: Bars, measured: Results, what: str, case: str = "") -> Bar:
    """Return the one bar, of a case if it is given, whose text holds `what`."""
    (found,) = [each for each in bars(measured) if what in each.what and case in ("", each.case)]
    return found


def both(
    case: str, figure: str, ours: float, theirs: str, other: float, their_figure: str = ""
) -> list[Measured]:
    """Return what we and another one need for a case."""
    return [(case, US, {figure: ours}), (case, theirs, {their_figure or figure: other})]


@pytest.mark.parametrize(
    ("case", "figure", "good", "bad"),
    [
        ("find B", "seconds", 3.0, 3.01),
        ("files D", "files_per_second", 200.0, 199.0),
        ("recover B", "seconds", 2.0, 2.1),
        ("tokens-local A", "cpu_us", 3.0, 3.01),
        ("tokens A", "cpu_us", 6.0, 6.01),
        ("blobs-local A", "cpu_us", 10.0, 10.1),
        ("steady-50 B", "of_ideal", 1.05, 1.06),
        ("ranks-50 B", "of_ideal", 1.05, 1.06),
        ("order-py1e A", "memory_bytes", 150e6, 151e6),
        ("order-native A", "batch_seconds", 0.010, 0.011),
        ("index A", "seconds", 2.0, 2.1),
        ("import A", "seconds", 0.3, 0.31),
    ],
)
def test_a_figure_meets_its_bar_or_misses_it(case: str, figure: str, good: float, bad: float) -> None:
    for value, verdict in ((good, "met"), (bad, "missed")):
        measured = results((case, US, {figure: value}))
        bars = [*read_bars(measured), *write_bars(measured), *loader_bars(measured)]
        assert [each.verdict for each in bars if each.figure is not None and each.case == case] == [verdict]


@pytest.mark.parametrize(
    ("bars", "what", "good", "bad"),
    [
        *(
            (bars, what, both(case, "rate", good, other, 100), both(case, "rate", bad, other, 100))
            for bars, what, case, other, good, bad in (
                (read_bars, "raw boto3", "cold A", "raw", 33, 32),
                (read_bars, "raw boto3", "cold B", "raw", 45, 44),
                (write_bars, "throws away", "write4k A", "discard-fs", 80, 79),
                (write_bars, "undisturbed", "train B", "undisturbed", 70, 69),
            )
        ),
        (
            read_bars,
            "64 threads / 8",
            [("requests8 B", US, {"cpu_us": 2000.0}), ("requests64 B", US, {"cpu_us": 2200.0})],
            [("requests8 B", US, {"cpu_us": 2000.0}), ("requests64 B", US, {"cpu_us": 2600.0})],
        ),
        *(
            (
                write_bars,
                "blocked",
                both(case, "blocked_seconds", 6.0, "local", 3.0, "whole_seconds"),
                both(case, "blocked_seconds", 6.1, "local", 3.0, "whole_seconds"),
            )
            for case in ("torch B", "dcp B", "dcp-async B")
        ),
        *(
            (loader_bars, what, both(case, "cpu_us", 2.0, other, good), both(case, "cpu_us", 2.0, other, bad))
            for case, other, what, good, bad in (
                ("tokens-local A", "raw", "/ raw", 2 / 1.3, 1.53),
                ("tokens-32 A", "raw", "/ raw", 2 / 1.3, 1.53),
                ("blobs-local A", "raw", "/ raw", 1.6, 1.59),
                ("tokens-local A", "streaming", "StreamingDataset", 20.0, 19.9),
                ("tokens-32 A", "streaming", "StreamingDataset", 20.0, 19.9),
                ("tokens-local A", "litdata", "LitData", 4.0, 3.9),
                ("tokens-32 A", "litdata", "LitData", 4.0, 3.9),
            )
        ),
        (
            loader_bars,
            "on a local disk",
            [("tokens A", US, {"cpu_us": 2.2}), ("tokens-local A", US, {"cpu_us": 2.0})],
            [("tokens A", US, {"cpu_us": 2.3}), ("tokens-local A", US, {"cpu_us": 2.0})],
        ),
        (
            loader_bars,
            "samples a second",
            [("tokens-local A", US, {"cpu_us": 1.0, "samples_per_second": 300_000.0})],
            [("tokens-local A", US, {"cpu_us": 1.0, "samples_per_second": 299_999.0})],
        ),
    ],
)
def test_a_comparison_meets_its_bar_or_misses_it(
    bars: Bars, what: str, good: list[Measured], bad: list[Measured]
) -> None:
    assert bar(bars, results(*good), what).verdict == "met"
    assert bar(bars, results(*bad), what).verdict == "missed"


def test_we_are_compared_with_the_best_of_all_peers() -> None:
    measured = results(
        ("write A", US, {"rate": 900.0}),
        ("write A", "rclone", {"rate": 200.0}),
        ("write A", "s3fs-tuned", {"rate": 300.0}),
    )
    found = bar(write_bars, measured, "best mounted peer")
    assert (found.figure, found.verdict) == (3.0, "met")
    measured.add(Row(2, "write A", "s3fs", {"rate": 301.0}))
    assert bar(write_bars, measured, "best mounted peer").verdict == "missed"


def test_figures_are_medians_over_the_rounds() -> None:
    measured = Results(
        Row(number, "cold B", name, {"rate": rate})
        for name, rates in ((US, (9.0, 460.0, 900.0)), ("raw", (1000.0, 1.0, 2000.0)))
        for number, rate in enumerate(rates, 1)
    )
    assert bar(read_bars, measured, "raw boto3").figure == 0.46


def test_a_failed_peer_leaves_the_comparison_with_the_others() -> None:
    measured = results(*both("cold A", "rate", 6.0, "rclone", 2.0))
    measured.add(Row(1, "cold A", "s3fs", error="did not mount"))
    assert bar(read_bars, measured, "best mounted peer").verdict == "met"
    assert "failed" in table(measured, read_bars(measured))


def test_unequal_shares_are_missed_even_if_the_whole_is_fast() -> None:
    measured = results(("cold B", US, {"rate": 100.0}), ("streams B", US, {"rate": 200.0, "unevenness": 0.3}))
    assert bar(read_bars, measured, "one stream").verdict == "met"
    assert bar(read_bars, measured, "share").verdict == "missed"


def test_memory_is_the_highest_of_every_case_of_ours() -> None:
    measured = results(
        ("ls B", US, {"seconds": 0.1, "memory_bytes": 100e6}),
        ("find B", US, {"seconds": 0.1, "memory_bytes": 769e6}),
        ("find B", "rclone", {"seconds": 0.1, "memory_bytes": 5e9}),
    )
    found = bar(read_bars, measured, "RssAnon")
    assert (found.figure, found.verdict) == (769.0, "missed")


def test_settling_counts_from_the_first_write_but_not_from_the_close() -> None:
    ours = {"whole_seconds": 2.9, "after_close_seconds": 3.4, "after_settle_seconds": 2.4}
    measured = results(("durable B", "raw", {"whole_seconds": 2.0}), ("durable B", US, ours))
    found = [bar(write_bars, measured, what) for what in ("close to durable", "first write")]
    assert [(each.figure, each.verdict) for each in found] == [(1.2, "met"), (1.45, "missed")]


def test_cases_that_were_not_run_have_no_bars() -> None:
    measured = results(("ls B", US, {"seconds": 0.1, "memory_bytes": 1e6}))
    assert {each.case for each in read_bars(measured)} == {"ls B", "memory"}
    assert read_bars(Results()) == []
    over_tls = [("write C", US, {"rate": 1.0}), *both("durable C", "whole_seconds", 1.0, "raw", 1.0)]
    assert {each.case for each in write_bars(results(*over_tls))} == {"durable C"}


@pytest.mark.parametrize(
    ("bars", "rows", "failed"),
    [
        (read_bars, [("requests64 B", US, {"cpu_us": 1.0})], None),
        (
            write_bars,
            [("torch B", US, {"blocked_seconds": 1.0})],
            Row(1, "torch B", "local", error="disk full"),
        ),
        (loader_bars, [("cold-start B", US, {"waited_seconds": 0.9})], None),
        # The bars are those of the plain DataLoader.
        (loader_bars, both("tokens-32 A", "cpu_us", 1.0, "raw", 1.0)[1:], None),
        (
            file_hint_bars,
            [("tars-epoch B", name, {"waited_seconds": 1.0}) for name in (US, "no-hints")],
            None,
        ),
    ],
)
def test_what_was_not_measured_says_so(bars: Bars, rows: list[Measured], failed: Row | None) -> None:
    measured = results(*rows)
    if failed is not None:
        measured.add(failed)
    assert {each.verdict for each in bars(measured)} == {"not measured"}


def test_waiting_on_a_cold_start_is_compared_with_downloading_the_same_shards_whole() -> None:
    measured = results(
        ("cold-start B", US, {"waited_seconds": 0.9, "first_bytes_share": 2.0}),
        ("cold-start B", "no-hints", {"waited_seconds": 9.0, "first_bytes_share": 40.0}),
        ("cold-start B", "whole", {"seconds": 10.0}),
    )
    assert bar(loader_bars, measured, "seconds waited").figure == pytest.approx(0.09)
    assert bar(loader_bars, measured, "bytes fetched").figure == 2.0


@pytest.mark.parametrize(("place", "limit"), [(0, 1.0), (1, 1.5)], ids=["hints", "recording"])
def test_hints_for_files_may_wait_a_tenth_of_the_wait_without_and_a_recording_a_little_more(
    place: int, limit: float
) -> None:
    for seconds, verdict in ((limit, "met"), (limit + 0.01, "missed")):
        waited = ((US, seconds + 2), ("replay", seconds + 2), ("no-hints", 12.0), ("cached", 2.0))
        measured = results(*(("tars-epoch B", name, {"waited_seconds": value}) for name, value in waited))
        assert file_hint_bars(measured)[place].verdict == verdict


# ---- the table


def test_every_case_of_the_loader_has_a_row_in_the_table() -> None:
    kinds = {"order": ("order-py1e", "order-native")}
    wanted = {kind for case in CASES for kind in kinds.get(case.name, (case.name,))}
    assert wanted | {case.name for case in FILE_CASES} <= set(SHOWN)


def test_a_row_shows_the_range_of_its_rounds() -> None:
    measured = Results(
        Row(number, case, "streaming", {figure: value})
        for case, figure, values in (
            ("tokens A", "cpu_us", (151.2, 149.0, 160.4)),
            ("import A", "seconds", (0.9, 1.2, 1.0)),
        )
        for number, value in enumerate(values, 1)
    )
    shown = table(measured, [])
    assert "151.2 µs (149.0-160.4)" in shown
    assert "1.0 s (900 ms-1.2 s)" in shown


def test_what_has_no_figure_is_shown_with_the_reason() -> None:
    measured = results(("find B", US, {"seconds": 1.0}), ("dcp B", US, {"blocked_seconds": 1.0}))
    measured.add(Row(1, "find B", "rclone", error="> 60 s", limit_seconds=60.0))
    measured.add(Row(1, "dcp B", "fusecache-remote", error=NOT_AVAILABLE))
    shown = table(measured, [*read_bars(measured), *write_bars(measured)])
    assert "> 60 s" in shown
    assert NOT_AVAILABLE in shown
    assert "failed" not in shown
