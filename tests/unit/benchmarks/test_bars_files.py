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
    bar, _ = file_hint_bars(results(("fusecache", seconds + 2.0), ("no-hints", 12.0), ("cached", 2.0)))
    assert bar.verdict == verdict


@pytest.mark.parametrize(("seconds", "verdict"), [(1.5, "met"), (1.51, "missed")])
def test_a_recording_may_wait_a_little_more(seconds: float, verdict: str) -> None:
    _, bar = file_hint_bars(results(("replay", seconds + 2.0), ("no-hints", 12.0), ("cached", 2.0)))
    assert bar.verdict == verdict


def test_what_was_not_measured_is_not_met() -> None:
    bars = file_hint_bars(results(("fusecache", 1.0), ("replay", 1.0), ("no-hints", 10.0)))
    assert [bar.verdict for bar in bars] == ["not measured"] * 2


def test_each_case_has_a_row() -> None:
    assert {case.name for case in CASES} <= set(SHOWN)
    shown = table(results(("fusecache", 1.0), ("replay", 2.0), ("cached", 3.0)), [])
    assert "waited for batches of tars" in shown
    assert all(name in shown for name in ("replay", "cached"))
