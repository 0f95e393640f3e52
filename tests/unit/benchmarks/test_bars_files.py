"""The bar of hints for plain files compares seconds waited, with hints and without, of one run."""

import pytest

from benchmarks.file_hints import CASES, file_hint_bars
from benchmarks.report import SHOWN, table
from benchmarks.results import Results, Row


def results(*waited: tuple[str, float]) -> Results:
    """Return one round's seconds waited, by competitor."""
    return Results(Row(1, "tars-epoch B", name, {"waited_seconds": seconds}) for name, seconds in waited)


@pytest.mark.parametrize(("seconds", "verdict"), [(1.0, "met"), (1.01, "missed")])
def test_a_tenth_of_the_wait_without_hints_is_the_limit(seconds: float, verdict: str) -> None:
    (bar,) = file_hint_bars(results(("fusecache", seconds), ("no-hints", 10.0)))
    assert bar.verdict == verdict


def test_what_was_not_measured_is_not_met() -> None:
    (bar,) = file_hint_bars(results(("fusecache", 1.0)))
    assert bar.verdict == "not measured"


def test_each_case_has_a_row() -> None:
    assert {case.name for case in CASES} <= set(SHOWN)
    assert "waited for batches of tars" in table(results(("fusecache", 1.0)), [])
