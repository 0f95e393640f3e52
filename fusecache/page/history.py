"""The rates of the last hour, one sample every 10 s: what the curves of the page show.

A sample is the growth of counters of a status between two moments: nothing is counted for the page alone. The ring is
bounded: SAMPLES small tuples, some 100 KB. A daemon that starts again begins with none.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fusecache.model.status_text import rates_between

STEP_SECONDS = 10.0
HOUR_SECONDS = 3600.0
SAMPLES = int(HOUR_SECONDS / STEP_SECONDS)
# Statuses come every few seconds, a little early or late.
_TOLERANCE_SECONDS = 1.0
# What of a status `rates_between` looks at.
_COUNTED = (
    "uptime_seconds",
    "pid",
    "cache",
    "received_bytes",
    "requests",
    "upload_bytes_per_second",
    "rates",
)


class Sample(NamedTuple):
    """Rates a second up to a moment. uptime: of the daemon then, in seconds. dollars: a day; None if unknown."""

    uptime: float
    memory_bytes: float
    disk_bytes: float
    peer_bytes: float
    bucket_bytes: float
    sent_bytes: float
    fetched_bytes: float
    requests: float
    dollars: float | None


class RateHistory:
    """A ring of samples."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._before: dict[str, Any] | None = None

    def record(self, status: Mapping[str, Any]) -> None:
        """Add a sample, if the last one is old enough. Call it every few seconds."""
        before, uptime = self._before, status["uptime_seconds"]
        if before is not None and uptime < before["uptime_seconds"] + STEP_SECONDS - _TOLERANCE_SECONDS:
            return
        self._before = {name: status[name] for name in _COUNTED}
        if before is not None:
            rates = rates_between(status, before)
            values = {
                name: rates[f"{name}_per_second"] for name in Sample._fields if f"{name}_per_second" in rates
            }
            self._samples.append(Sample(uptime=uptime, dollars=status["costs"]["dollars_per_day"], **values))

    def samples(self) -> Sequence[Sample]:
        """Return the samples, the oldest first."""
        return tuple(self._samples)
