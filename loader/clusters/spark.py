"""Runs the tasks of a conversion with Spark: a partition and a Spark task for each part."""

import os
import sys
from collections.abc import Iterator, Sequence

from loader.base.optional_imports import optional_module
from loader.clusters.parts import Attempt, PartTask, write_attempt


def run_on_spark(tasks: Sequence[PartTask]) -> Iterator[Attempt]:
    """Yield the attempt that wrote each part, once all are written. Uses the active session, or makes one.

    Spark starts a failed or lost task again, `spark.task.maxFailures` times.
    """
    os.environ.setdefault(
        "PYSPARK_PYTHON", sys.executable
    )  # else the workers take the first python3 of their PATH
    sql = optional_module("pyspark.sql", why="--engine spark", package="'fusecache[spark]'")
    active = sql.SparkSession.getActiveSession()
    session = active or sql.SparkSession.builder.appName("loader.convert").getOrCreate()
    try:
        rows = session.sparkContext.parallelize(tasks, len(tasks)).map(write_attempt)
        yield from rows.collect()
    finally:
        if active is None:
            session.stop()
