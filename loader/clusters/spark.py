"""Runs the tasks of a conversion with Spark: a partition and a Spark task for each part."""

import os
import sys
from collections.abc import Iterator, Sequence

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
