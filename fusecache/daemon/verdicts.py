"""Judges the mount's status. Remembers which counters grew lately: an old error is no news."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import trio

from fusecache.model.verdict import RECENT_COUNTS, RECENT_SECONDS, judge

# Counts are remembered at this interval, so RECENT_SECONDS takes a bounded number of them.
_SAMPLE_SECONDS = 5.0


class Verdicts:
    """Adds `verdict` and `reasons` to a status."""

    def __init__(self) -> None:
        # Loop time and counts, the oldest first. All counts begin with 0.
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def judged(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return the status, with its verdict and the reasons in front."""
        counts = _counts(status)
        now = trio.current_time()
        if not self._samples:
            self._samples.append((now, dict.fromkeys(counts, 0)))
        if now >= self._samples[-1][0] + _SAMPLE_SECONDS:
            self._samples.append((now, counts))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RECENT_SECONDS:
            self._samples.popleft()
        before = self._samples[0][1]
        return {**judge(status, {name: counts[name] - before[name] for name in counts}), **status}


def _counts(status: Mapping[str, Any]) -> dict[str, int]:
    tasks = sum(task["failures"] for task in status.get("failed_tasks", {}).values())
    cache = status.get("cache", {})
    return {name: tasks if name == "failed_tasks" else cache.get(name, 0) for name in RECENT_COUNTS}
