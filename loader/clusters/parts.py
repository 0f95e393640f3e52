"""What a worker of a cluster does: it writes one part of a dataset, into a folder that no other attempt uses.

Ray Data or Spark runs one task for each part.
"""

import os
import pickle
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from loader.base.optional_imports import optional_module
from loader.base.paths import is_url, mounted_path
from loader.errors import ArgumentError, LoaderError
from loader.writing.parallel_writer import Source, write_part


@dataclass(frozen=True, slots=True)
class PartTask:
    """One part to write. name: begins the names of its folders. sources: its files, in the order of the samples."""

    number: int
    name: str
    root: str
    columns: Mapping[str, str]
    sources: tuple[Source, ...]
    options: Mapping[str, Any]


class Attempt(NamedTuple):
    """What one attempt to write a part achieved. problem: why no other attempt can succeed, or ""."""

    number: int
    folder: str
    samples: int
    problem: str


Run = Callable[[Sequence[PartTask]], Iterable[Attempt]]


def write_attempt(task: PartTask) -> Attempt:
    """Write a part into a new folder, and sync it.

    The attempt is complete once the folder has index.json. An error of the input is returned, because an engine
    repeats a task that raises. Any other error is raised, such as one of a mount: another node may not have it.
    """
    name = f"{task.name}-{uuid.uuid4().hex[:12]}"
    folder: Path | None = None
    try:
        folder = local_folder(task.root) / name
        samples = write_part(folder, task.columns, task.sources, resume=False, options=task.options)
        for path in folder.iterdir():
            sync(path)
    except LoaderError as problem:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if _is_of_the_system(problem):
            raise
        return Attempt(task.number, "", 0, str(problem))
    return Attempt(task.number, name, samples, "")


def _is_of_the_system(problem: BaseException | None) -> bool:
    """Return whether the operating system reported an error. Without an errno, a library reports damaged content."""
    while problem is not None:
        if isinstance(problem, OSError) and problem.errno is not None:
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def local_folder(out: str) -> Path:
    """Return where this node has the output: a URL is looked for among its mounts. Raises ArgumentError."""
    if not is_url(out):
        return Path(out)
    path = mounted_path(out)
    if path is None:
        raise ArgumentError(
            f"{out}: no mount of the node {socket.gethostname()} shows it: run `fusecache mount` on every node"
        )
    return Path(path)


def sync(path: Path) -> None:
    """Return when the file is on the disk; on a mount with `fsync = "remote"`, when the bucket has it."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


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
