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
        ("order-machine A", "seconds", 15.0, 15.1),
        ("order-machine A", "memory_bytes", 100e6, 101e6),
        ("order-native A", "batch_seconds", 0.010, 0.011),
        ("index A", "seconds", 2.0, 2.1),
        ("import A", "seconds", 0.3, 0.31),
    ],
)
def test_a_figure_meets_its_bar_or_misses_it(case: str, figure: str, good: float, bad: float) -> None:
    for value, verdict in ((good, "met"), (bad, "missed")):
        bars = loader_bars(results((case, "fusecache", {figure: value})))
        assert [each.verdict for each in bars if each.figure is not None] == [verdict]


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
    names = {"order": ("order-py1e", "order-machine", "order-native")}
    for case in CASES:
        for kind in names.get(case.name, (case.name,)):
            assert kind in SHOWN
    assert "2.5 µs" in table(results(("tokens A", "fusecache", {"cpu_us": 2.5})), [])
