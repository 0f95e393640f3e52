"""The bars of the loader say met, missed or not measured, of medians over rounds."""

from collections.abc import Mapping

import pytest

from benchmarks.bars import Bar
from benchmarks.bars_loader import loader_bars
from benchmarks.loader import CASES
from benchmarks.report import SHOWN, table
from benchmarks.results import Results, Row


def results(*rows: tuple[str, str, Mapping[str, float]]) -> Results:
    """Return results of rows (case, competitor, figures), all of one round."""
    return Results(Row(1, case, competitor, figures) for case, competitor, figures in rows)


def bar(measured: Results, what: str) -> Bar:
    """Return the one bar whose text holds `what`."""
    (found,) = [each for each in loader_bars(measured) if what in each.what]
    return found


@pytest.mark.parametrize(
    ("case", "figure", "good", "bad"),
    [
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
        bars = loader_bars(results((case, "fusecache", {figure: value})))
        assert [each.verdict for each in bars if each.figure is not None] == [verdict]


@pytest.mark.parametrize(
    ("case", "competitor", "what", "good", "bad"),
    [
        ("tokens-local A", "raw", "/ raw", 2 / 1.3, 1.53),
        ("tokens-32 A", "raw", "/ raw", 2 / 1.3, 1.53),
        ("blobs-local A", "raw", "/ raw", 1.6, 1.59),
        ("tokens-local A", "streaming", "StreamingDataset", 20.0, 19.9),
        ("tokens-32 A", "streaming", "StreamingDataset", 20.0, 19.9),
        ("tokens-local A", "litdata", "LitData", 4.0, 3.9),
        ("tokens-32 A", "litdata", "LitData", 4.0, 3.9),
    ],
)
def test_our_cpu_is_compared_with_that_of_others_in_the_same_run(
    case: str, competitor: str, what: str, good: float, bad: float
) -> None:
    for theirs, verdict in ((good, "met"), (bad, "missed")):
        measured = results((case, "fusecache", {"cpu_us": 2.0}), (case, competitor, {"cpu_us": theirs}))
        assert bar(measured, what).verdict == verdict


def test_a_sample_on_a_mount_costs_hardly_more_cpu_than_on_a_local_disk() -> None:
    for mounted, verdict in ((2.2, "met"), (2.3, "missed")):
        measured = results(
            ("tokens A", "fusecache", {"cpu_us": mounted}), ("tokens-local A", "fusecache", {"cpu_us": 2.0})
        )
        assert bar(measured, "on a local disk").verdict == verdict


def test_the_bars_are_those_of_the_plain_dataloader() -> None:
    measured = results(
        ("tokens-32 A", "fusecache-loader", {"cpu_us": 1.0}), ("tokens-32 A", "raw", {"cpu_us": 1.0})
    )
    assert {each.verdict for each in loader_bars(measured)} == {"not measured"}


def test_rates_are_to_be_at_least_their_bars() -> None:
    for rate, verdict in ((300_000.0, "met"), (299_999.0, "missed")):
        measured = results(("tokens-local A", "fusecache", {"cpu_us": 1.0, "samples_per_second": rate}))
        assert bar(measured, "samples a second").verdict == verdict


def test_waiting_on_a_cold_start_is_compared_with_downloading_the_same_shards_whole() -> None:
    measured = results(
        ("cold-start B", "fusecache", {"waited_seconds": 0.9, "first_bytes_share": 2.0}),
        ("cold-start B", "no-hints", {"waited_seconds": 9.0, "first_bytes_share": 40.0}),
        ("cold-start B", "whole", {"seconds": 10.0}),
    )
    assert bar(measured, "seconds waited").figure == pytest.approx(0.09)
    assert bar(measured, "bytes fetched").figure == 2.0


def test_what_was_not_measured_says_so() -> None:
    measured = results(("cold-start B", "fusecache", {"waited_seconds": 0.9}))
    assert [each.verdict for each in loader_bars(measured)] == ["not measured", "not measured"]


def test_every_case_has_a_row_in_the_table() -> None:
    names = {"order": ("order-py1e", "order-native")}
    for case in CASES:
        for kind in names.get(case.name, (case.name,)):
            assert kind in SHOWN
    assert "2.5 µs" in table(results(("tokens A", "fusecache", {"cpu_us": 2.5})), [])


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
