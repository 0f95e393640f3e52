"""What a bar is, and the comparisons that bars are made of. Pure.

A bar compares two figures of the same run wherever it can, so that it holds on any machine.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from benchmarks.results import Results

US = "fusecache"
Judge = Callable[[Results, str, str], list["Bar"]]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what is compared, the figure, its limit. figure or limit None: it was not measured.

    at_least: whether the figure must be no smaller than the limit, else no greater.
    """

    case: str
    what: str
    figure: float | None
    limit: float | None
    at_least: bool
    unit: str = "times"

    @property
    def verdict(self) -> str:
        """`met`, `missed` or `not measured`."""
        if self.figure is None or self.limit is None:
            return "not measured"
        met = self.figure >= self.limit if self.at_least else self.figure <= self.limit
        return "met" if met else "missed"


def bars_of(results: Results, judges: Mapping[str, Judge]) -> list[Bar]:
    """Return every bar of the cases that were measured; judges: by kind of case, asked with (results, case, origin)."""
    found: list[Bar] = []
    for case in results.cases():
        kind, _, origin = case.partition(" ")
        if kind in judges:
            found += judges[kind](results, case, origin)
    return found


def ratio(value: float | None, base: float | None) -> float | None:
    """Return value / base; None if either was not measured."""
    return None if value is None or not base else value / base


def best(results: Results, case: str, names: Iterable[str], figure: str) -> float | None:
    """Return the highest median among competitors."""
    values = [results.median(case, name, figure) for name in names]
    return max((value for value in values if value is not None), default=None)


def against(
    results: Results, case: str, figure: str, others: tuple[str, ...], limit: float, what: str
) -> Bar:
    """Our figure over the best of `others` must be at least `limit`."""
    ours = results.median(case, US, figure)
    return Bar(case, what, ratio(ours, best(results, case, others, figure)), limit, at_least=True)


def seconds_at_most(limit: float) -> Judge:
    """Return a judge by whom our `seconds` must be no more than `limit`."""

    def bars(results: Results, case: str, origin: str) -> list[Bar]:
        return [Bar(case, "seconds", results.median(case, US, "seconds"), limit, at_least=False, unit="s")]

    return bars
