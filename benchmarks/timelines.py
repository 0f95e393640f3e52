"""How fast something went within a span of time, out of samples of how far it was. Pure."""

import bisect
from collections.abc import Sequence

from benchmarks.processes import BenchmarkError


def rate_between(samples: Sequence[Sequence[float]], start: float, stop: float) -> float:
    """Return bytes a second within [start, stop] of a timeline.

    samples: [time, bytes so far], as `readers.timeline` returns them. Raises BenchmarkError if the span is empty, or
    not within them.
    """
    if not samples[0][0] <= start < stop <= samples[-1][0]:
        raise BenchmarkError(f"{start} .. {stop} is not within {samples[0][0]} .. {samples[-1][0]}")
    return (_bytes_at(samples, stop) - _bytes_at(samples, start)) / (stop - start)


def _bytes_at(samples: Sequence[Sequence[float]], moment: float) -> float:
    """Return the bytes read until a moment, as if at an even pace between two samples."""
    after = max(1, bisect.bisect_left(samples, moment, key=lambda sample: sample[0]))
    (early, few), (late, many) = samples[after - 1], samples[after]
    return few + (many - few) * (moment - early) / (late - early) if late > early else many
