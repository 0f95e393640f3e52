"""Histograms of durations: fine enough for percentiles, with fixed bounds for monitoring."""

import math
from dataclasses import dataclass

# Four steps per octave from 1 microsecond on: a percentile is at most 19 % off.
_STEPS_PER_OCTAVE = 4
_BUCKETS = 128
# Octaves whose ends are the bounds: every second one, from 64 microseconds to 67 seconds.
_BOUND_OCTAVES = range(6, 27, 2)
BOUNDS_SECONDS = tuple(2**octave / 1e6 for octave in _BOUND_OCTAVES)


@dataclass(frozen=True, slots=True)
class Latency:
    """Durations so far, in seconds. Half of all, and 99 % of all, did not exceed the percentiles; 0 before the first.

    counts: (bounds + 1,) durations of at most each of BOUNDS_SECONDS; the last counts all. sum_seconds: of all.
    """

    p50_seconds: float
    p99_seconds: float
    sum_seconds: float
    counts: tuple[int, ...]


class LatencyHistogram:
    """A histogram of durations, of bounded size."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._sum = 0.0

    def count(self, seconds: float) -> None:
        """Count one duration."""
        micros = seconds * 1e6
        step = int(math.log2(micros) * _STEPS_PER_OCTAVE) if micros > 1 else 0
        self._counts[min(step, _BUCKETS - 1)] += 1
        self._sum += seconds

    def latency(self) -> Latency:
        """Return all durations counted so far."""
        counts = [sum(self._counts[: octave * _STEPS_PER_OCTAVE]) for octave in _BOUND_OCTAVES]
        return Latency(self._percentile(0.5), self._percentile(0.99), self._sum, (*counts, sum(self._counts)))

    def _percentile(self, share: float) -> float:
        rest = share * sum(self._counts)
        if not rest:
            return 0.0
        step = 0
        while rest > 0 and step < _BUCKETS:
            rest -= self._counts[step]
            step += 1
        return float(2 ** (step / _STEPS_PER_OCTAVE) / 1e6)
