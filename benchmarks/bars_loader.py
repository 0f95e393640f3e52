"""The bars of the loader: which figure must be how good, beside what was measured. Pure.

Our figure is that of `fusecache`, the plain DataLoader; `fusecache-loader` has no bars.
"""

from collections.abc import Mapping

from benchmarks.bars import US, Bar, Judge, bars_of, ratio
from benchmarks.results import Results


def loader_bars(results: Results) -> list[Bar]:
    """Return every bar of the cases that were measured."""
    return bars_of(results, JUDGES)


def _at_most(figure: str, limit: float, what: str, unit: str, scale: float = 1.0) -> Judge:
    def bars(results: Results, case: str, origin: str) -> list[Bar]:
        value = results.median(case, US, figure)
        return [Bar(case, what, None if value is None else value * scale, limit, at_least=False, unit=unit)]

    return bars


def _cpu(limit: float, samples_per_second: float | None = None) -> Judge:
    def bars(results: Results, case: str, origin: str) -> list[Bar]:
        found = [
            Bar(case, "CPU µs a sample", results.median(case, US, "cpu_us"), limit, at_least=False, unit="µs")
        ]
        if samples_per_second is not None:
            rate = results.median(case, US, "samples_per_second")
            found.append(Bar(case, "samples a second", rate, samples_per_second, at_least=True, unit="/s"))
        return found

    return bars


def _times_raw(limit: float) -> Judge:
    """Return a judge by whom our CPU must be no more than `limit` times that of reading as many bytes.

    Ours includes torch's DataLoader, which `raw` does without: `raw-dataloader` shows its part.
    """

    def bars(results: Results, case: str, origin: str) -> list[Bar]:
        ours, raw = (results.median(case, name, "cpu_us") for name in (US, "raw"))
        return [Bar(case, "CPU a sample / raw", ratio(ours, raw), limit, at_least=False)]

    return bars


def _less_than_peer(peer: str, title: str, limit: float) -> Judge:
    """Return a judge by whom the CPU of a peer must be at least `limit` times ours."""

    def bars(results: Results, case: str, origin: str) -> list[Bar]:
        theirs, ours = (results.median(case, name, "cpu_us") for name in (peer, US))
        return [Bar(case, f"CPU a sample of {title} / ours", ratio(theirs, ours), limit, at_least=True)]

    return bars


def _mount_costs_little(results: Results, case: str, origin: str) -> list[Bar]:
    ours, local = (results.median(name, US, "cpu_us") for name in (case, f"tokens-local {origin}"))
    return [Bar(case, "CPU a sample, on a mount / on a local disk", ratio(ours, local), 1.1, at_least=False)]


def _cold(results: Results, case: str, origin: str) -> list[Bar]:
    whole = results.median(case, "whole", "seconds")
    waited = ratio(results.median(case, US, "waited_seconds"), whole)
    # Whole shards follow behind the first batch: they are not begun before it is read, or count.
    first = results.median(case, US, "first_bytes_share")
    return [
        Bar(case, "seconds waited for data / download of the whole shards", waited, 0.1, at_least=False),
        Bar(case, "bytes fetched until the first batch / its bytes", first, 3.0, at_least=False),
    ]


def _steady(results: Results, case: str, origin: str) -> list[Bar]:
    return [
        Bar(case, "bytes fetched / ideal", results.median(case, US, "of_ideal"), 1.05, at_least=False)
    ]  # fmt: skip


def _several(*judges: Judge) -> Judge:
    return lambda results, case, origin: [bar for judge in judges for bar in judge(results, case, origin)]


_TOKENS_AGAINST_OTHERS = _several(
    _times_raw(1.3),
    _less_than_peer("streaming", "StreamingDataset", 10.0),
    _less_than_peer("litdata", "LitData", 2.0),
)
JUDGES: Mapping[str, Judge] = {
    "tokens-local": _several(_cpu(3.0, 300_000), _TOKENS_AGAINST_OTHERS),
    "tokens-32": _several(_cpu(3.0), _TOKENS_AGAINST_OTHERS),
    "tokens": _several(_cpu(6.0, 120_000), _mount_costs_little),
    "blobs-local": _several(_cpu(10.0), _times_raw(1.25)),
    "cold-start": _cold,
    "steady-50": _steady,
    "ranks-50": _steady,
    "order-py1e": _several(
        _at_most("seconds", 2.0, "CPU seconds", "s"), _at_most("memory_bytes", 150, "memory", "MB", 1e-6)
    ),
    "order-native": _several(
        _at_most("batch_seconds", 10, "first batch of an epoch", "ms", 1e3),
        _at_most("memory_bytes", 100, "memory", "MB", 1e-6),
    ),
    "index": _several(
        _at_most("seconds", 2.0, "CPU seconds to open", "s"),
        _at_most("memory_bytes", 200, "memory of the process", "MB", 1e-6),
    ),
    "import": _at_most("seconds", 0.3, "seconds to import", "s"),
}
