"""Runs the tasks of a conversion with Ray Data: a block and a Ray task for each part."""

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from loader.base.optional_imports import optional_module
from loader.clusters.parts import Attempt, PartTask, Run, write_attempt


def ray_engine() -> Run:
    """Return a function that yields the attempt that wrote each part, in any order. Raises LoaderError without Ray.

    It connects as `ray.init()` does, unless that was called. Ray Data starts the task of a lost worker again, without
    limit.
    """
    data = optional_module("ray.data", why="--engine ray", extra="ray")
    ray = optional_module("ray", why="--engine ray", extra="ray")

    def run(tasks: Sequence[PartTask]) -> Iterator[Attempt]:
        connects = not ray.is_initialized()
        if connects:
            ray.init()
        try:
            rows = [{"task": pickle.dumps(task)} for task in tasks]
            for row in data.from_items(rows, override_num_blocks=len(rows)).map(_row).iter_rows():
                yield Attempt(**row)
        finally:
            if connects:
                ray.shutdown()

    return run


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return write_attempt(pickle.loads(row["task"]))._asdict()
