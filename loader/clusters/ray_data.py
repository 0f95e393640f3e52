"""Runs the tasks of a conversion with Ray Data: a block and a Ray task for each part."""

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from loader.base.optional_imports import optional_module
from loader.clusters.parts import Attempt, PartTask, write_attempt

# Ray starts a task of a lost worker again, and these too: a full disk or a lost mount may be one node's.
_TASK_OPTIONS: dict[str, Any] = {"max_retries": 3, "retry_exceptions": [OSError]}


def run_on_ray(tasks: Sequence[PartTask]) -> Iterator[Attempt]:
    """Yield the attempt that wrote each part, in any order. Connects as `ray.init()` does, unless that was called."""
    data = optional_module("ray.data", why="--engine ray", package="'fusecache[ray]'")
    ray = optional_module("ray", why="--engine ray", package="'fusecache[ray]'")
    connects = not ray.is_initialized()
    if connects:
        ray.init(log_to_driver=False, logging_level="error")
    try:
        data.DataContext.get_current().enable_progress_bars = False
        rows = data.from_items(
            [{"task": pickle.dumps(task)} for task in tasks], override_num_blocks=len(tasks)
        )
        for row in rows.map(_row, **_TASK_OPTIONS).iter_rows():
            yield Attempt(**row)
    finally:
        if connects:
            ray.shutdown()


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return write_attempt(pickle.loads(row["task"]))._asdict()
