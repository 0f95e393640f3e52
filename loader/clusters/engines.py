"""Runs the tasks of a conversion with Spark or Ray Data: a partition, or a block, and a task for each part."""

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from loader.base.optional_imports import optional_module
from loader.clusters.parts import Attempt, PartTask, Run, write_attempt


def spark_engine() -> Run:
    """Return a function that yields the attempt that wrote each part, once all are written.

    It uses the active session, or makes one. Spark starts a failed or lost task again, `spark.task.maxFailures` times.
    Raises LoaderError without Spark.
    """
    sql = optional_module("pyspark.sql", why="--engine spark", package="pyspark", extra="spark")

    def run(tasks: Sequence[PartTask]) -> Iterator[Attempt]:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else the first python3 of a worker's PATH
        active = sql.SparkSession.getActiveSession()
        session = active or sql.SparkSession.builder.appName("loader.convert").getOrCreate()
        try:
            yield from session.sparkContext.parallelize(tasks, len(tasks)).map(write_attempt).collect()
        finally:
            if active is None:
                session.stop()

    return run


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
