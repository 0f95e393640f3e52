"""The bars of the read path: which figure must be how good, beside what was measured. Pure.

A bar compares two figures of the same run wherever it can, so that it holds on any machine.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.results import Results

MOUNTED_PEERS = ("rclone", "rclone-tuned", "s3fs")
RCLONES = ("rclone", "rclone-tuned")
US = "fusecache"
MEMORY_BYTES = 768e6
# The raw limit that a mount can reach: without latency the CPU is the bound, with it the connections are.
RAW_SHARE = {"A": 0.33, "B": 0.45, "C": 0.45}
LATENCY_SECONDS = 0.040


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


def read_bars(results: Results) -> list[Bar]:
    """Return every bar of the cases that were measured."""
    found: list[Bar] = []
    for case in results.cases():
        kind, _, origin = case.partition(" ")
        found += BARS.get(kind, _no_bars)(results, case, origin)
    if found:
        found.append(_memory(results))
    return found


def _no_bars(results: Results, case: str, origin: str) -> list[Bar]:
    return []


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _best(results: Results, case: str, names: Iterable[str], figure: str) -> float | None:
    """Return the highest median among competitors."""
    values = [results.median(case, name, figure) for name in names]
    return max((value for value in values if value is not None), default=None)


def _against(
    results: Results, case: str, figure: str, others: tuple[str, ...], limit: float, what: str
) -> Bar:
    """Our figure over the best of `others` must be at least `limit`."""
    ours = results.median(case, US, figure)
    return Bar(case, what, _ratio(ours, _best(results, case, others, figure)), limit, at_least=True)


def _cold(results: Results, case: str, origin: str) -> list[Bar]:
    share = RAW_SHARE[origin]
    ours, theirs = results.median(case, US, "cpu_per_gib"), results.median(case, "rclone", "cpu_per_gib")
    return [
        _against(results, case, "rate", MOUNTED_PEERS, 2.0, "speed / best mounted peer"),
        _against(results, case, "rate", ("crt",), 1.0, "speed / CRT client"),
        _against(results, case, "rate", ("raw",), share, "speed / raw boto3"),
        Bar(case, "CPU of the daemon a GiB; rclone's", ours, theirs, at_least=False, unit="s"),
    ]


def _streams(results: Results, case: str, origin: str) -> list[Bar]:
    single = results.median(f"cold {origin}", US, "rate")
    aggregate = _ratio(results.median(case, US, "rate"), single)
    spread = results.median(case, US, "unevenness")
    return [
        Bar(case, "four streams together / one stream", aggregate, 0.9, at_least=True),
        Bar(case, "farthest share from the mean", spread, 0.25, at_least=False, unit="of it"),
    ]


def _disk(results: Results, case: str, origin: str) -> list[Bar]:
    return [
        _against(results, case, "rate", RCLONES, 3.0, "speed / better rclone"),
        _against(results, case, "rate", ("fio",), 0.7, "speed / fio O_DIRECT"),
    ]


def _pages(results: Results, case: str, origin: str) -> list[Bar]:
    return [
        _against(results, case, "rate", ("empty-fs",), 0.95, "speed / empty pyfuse3 file system"),
        _against(results, case, "rate", RCLONES, 4.0, "speed / better rclone"),
    ]


def _random128k(results: Results, case: str, origin: str) -> list[Bar]:
    base = results.median(case, "first-byte", "mean_seconds")
    mean = _ratio(results.median(case, US, "mean_seconds"), base)
    return [
        Bar(case, "mean latency / origin's first byte", mean, 1.2, at_least=False),
        Bar(case, "bytes fetched / asked", results.median(case, US, "amplification"), 2.0, at_least=False),
    ]


def _random8k(results: Results, case: str, origin: str) -> list[Bar]:
    return [_against(results, case, "reads_per_second", ("raw",), 0.8, "reads/s / raw boto3, 64 threads")]


def _seconds(limit: float) -> Callable[[Results, str, str], list[Bar]]:
    def bars(results: Results, case: str, origin: str) -> list[Bar]:
        return [Bar(case, "seconds", results.median(case, US, "seconds"), limit, at_least=False, unit="s")]

    return bars


def _million_first(results: Results, case: str, origin: str) -> list[Bar]:
    first = results.median(case, US, "first_seconds")
    return [Bar(case, "seconds to the first name", first, 0.5, at_least=False, unit="s")]


def _million_all(results: Results, case: str, origin: str) -> list[Bar]:
    return [_against(results, case, "names_per_second", ("raw",), 0.8, "names/s / raw LIST")]


def _million_open(results: Results, case: str, origin: str) -> list[Bar]:
    opened, lists = results.median(case, US, "open_seconds"), results.median(case, US, "list_names")
    return [
        Bar(case, "seconds to open", opened, 3 * LATENCY_SECONDS, at_least=False, unit="s"),
        Bar(case, "names listed meanwhile", lists, 10, at_least=False, unit=""),
    ]


def _memory(results: Results) -> Bar:
    highest = results.highest(US, "memory_bytes")
    megabytes = None if highest is None else highest / 1e6
    return Bar(
        "memory", "highest RssAnon + RssShmem", megabytes, MEMORY_BYTES / 1e6, at_least=False, unit="MB"
    )


BARS: dict[str, Callable[[Results, str, str], list[Bar]]] = {
    "cold": _cold,
    "streams": _streams,
    "disk": _disk,
    "pages": _pages,
    "random128k": _random128k,
    "random8k": _random8k,
    "ls": _seconds(0.15),
    "find": _seconds(3.0),
    "find-again": _seconds(0.5),
    "small": _seconds(1.5),
    "million-first": _million_first,
    "million-all": _million_all,
    "million-open": _million_open,
}
