"""Converts files on a cluster that is already there, Ray or Spark.

Files are dealt to parts. A worker writes one part, into a folder that no other attempt uses, as a task of Ray Data or
Spark (`write_attempt`). Then the parts are merged.

Invariants: 1. A part has the same files in each run. 2. index.json of the dataset names one complete attempt of each
part. 3. _SUCCESS is written last.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from fusecache.disk.beneath import open_beneath, replace_text
from loader.base.packages import optional_module
from loader.base.paths import is_url, mounted_path
from loader.errors import ArgumentError, LoaderError, NoSampleError, NotEmptyError, WriterError, cause_text
from loader.mds.index import INDEX_NAME, read_index
from loader.waiting import wait_for
from loader.writing.merge import merge
from loader.writing.parallel_writer import OneFileSource, Source, write_part
from loader.writing.resume_scan import make_directory
from loader.writing.shard_packer import PackOptions, ShardPacker, schema_of


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


RECORD_NAME = "_conversion.json"
SUCCESS_NAME = "_SUCCESS"
ATTEMPT = re.compile(r"\d{5,}-[0-9a-f]{8}-[0-9a-f]{12}")  # part, its key, attempt
# The last line of a traceback. Java's names begin with a domain; Ray's error only says that a worker had one.
PYTHON_ERROR = re.compile(
    r"(?!(?:java|javax|jdk|org|com|io|scala|py4j|ray)\.)(?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?"
)
# A mount without `fsync = "remote"` may still upload what another node wrote; it gives up after 300 s of standstill.
SHOWN_SECONDS = 300.0

ENGINES: dict[str, Callable[[], Run]] = {"ray": ray_engine, "spark": spark_engine}


def convert_on_cluster(
    engine: str,
    out: str,
    columns: Mapping[str, str],
    sources: Sequence[OneFileSource],
    *,
    resume: bool,
    options: Mapping[str, Any],
) -> int:
    """Write the dataset; return its sample count.

    resume: keep the complete parts of an earlier run with the same arguments, on any engine. options: of MDSWriter.
    Raises WriterError if `out` has anything else, NoSampleError for files without samples, LoaderError if a part
    cannot be written; the complete parts stay.
    """
    run = ENGINES[engine]()
    out = out if is_url(out) else os.path.abspath(out)
    root = local_folder(out)
    if any(sign in str(root) for sign in "*?["):
        raise ArgumentError(
            f"{root}: a cluster cannot write to a path with * ? or [: choose another directory"
        )
    settings = {
        **described(sources),
        "columns": dict(columns),
        "options": dict(options),
    }
    sizes = [_size(each) for each in sources]
    limit = ShardPacker(
        schema_of(columns), PackOptions(**options)
    ).size_limit  # also checks columns and options
    counts, keys = _begin(root, settings, sizes, _file_counts(sizes, limit or 0), resume=resume)
    done = _complete(root, keys)
    tasks = [
        PartTask(
            number, f"{number:05}-{keys[number]}", out, columns, tuple(sources[end - count : end]), options
        )
        for number, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True))
        if number not in done
    ]
    success = root / SUCCESS_NAME
    if not tasks and success.exists():
        return int(read_index(root).samples.sum())
    success.unlink(missing_ok=True)
    if tasks:
        done |= _run_all(engine, run, tasks)
    folders = [done[number] for number in range(len(counts))]
    for folder in folders:
        wait_for(root / folder / INDEX_NAME, timeout=SHOWN_SECONDS)
    samples = sum(int(read_index(root / folder).samples.sum()) for folder in folders)
    if not samples:
        raise NoSampleError(f"the files contain no samples: there is nothing to write to {out}")
    merge(root, folders, replace=True)
    sync(root / INDEX_NAME)
    for path in root.iterdir():  # attempts of lost workers
        if ATTEMPT.fullmatch(path.name) and path.name not in folders:
            shutil.rmtree(path, ignore_errors=True)
    with open(f"{os.path.realpath(root)}/{SUCCESS_NAME}", "w", opener=open_beneath) as file:
        file.write(f"{samples} samples\n")
    sync(success)
    return samples


def described(sources: Sequence[OneFileSource]) -> dict[str, Any]:
    """Return what a conversion reads, as JSON: `files`, in their order, and `kind` with its settings."""
    return {
        "files": [os.path.abspath(each.path) for each in sources],
        "kind": f"{type(sources[0]).__name__} {getattr(sources[0], 'settings', '')}",
    }


def check_no_conversion(root: Path) -> None:
    """Raise WriterError for the output of a cluster, which only a cluster can continue."""
    if (root / RECORD_NAME).exists():
        raise NotEmptyError(
            f"{root} holds the conversion of a cluster: continue it with its engine and --resume, choose another "
            f"directory, or remove it"
        )


def _begin(
    root: Path, settings: dict[str, Any], sizes: list[int], counts: list[int], *, resume: bool
) -> tuple[list[int], list[str]]:
    """Write down what is converted; return the number of sources in each part, and the key of each part.

    Raises WriterError if the folder holds anything else.
    """
    make_directory(root)
    path = root / RECORD_NAME
    settings = json.loads(json.dumps(settings))
    if path.exists():
        before = _read_record(path)
        done = _complete(root, _keys(before["settings"], before["sizes"], before["counts"]))
        differ = [name for name, value in settings.items() if before["settings"][name] != value]
        if differ and done:
            raise WriterError(
                f"{root} holds another conversion, with other {' and '.join(differ)}: choose another directory, or "
                f"remove it"
            )
        if done and not resume:
            raise NotEmptyError(
                f"{root} holds this conversion already: continue it with resume=True (--resume)"
            )
        if done:
            counts = before["counts"]
            ends = list(accumulate(counts))
            for number, folder in done.items():
                part = slice(ends[number] - counts[number], ends[number])
                if before["sizes"][part] != sizes[part]:
                    raise WriterError(f"{root / folder}: its files changed: remove it to convert them again")
    elif any(root.iterdir()):
        raise NotEmptyError(f"{root} is not empty: choose another directory, or remove it")
    record = {"settings": settings, "sizes": sizes, "counts": counts}
    replace_text(f"{os.path.realpath(root)}/{RECORD_NAME}", json.dumps(record))
    return counts, _keys(settings, sizes, counts)


def _read_record(path: Path) -> dict[str, Any]:
    """Return what an earlier run wrote down. Raises WriterError if it is damaged."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        _ = [found["settings"][name] for name in ("files", "kind", "columns", "options")]
        if sum(found["counts"]) != len(found["sizes"]):
            raise ValueError("its counts do not match its sizes")
    except OSError as problem:
        raise WriterError(
            f"{path} cannot be read: {problem.strerror}: check the mount, and try again"
        ) from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise WriterError(
            f"{path} is damaged ({cause_text(problem)}), so it is unknown what its parts have: choose another "
            f"directory, or remove {path.parent}"
        ) from None
    return found


def _keys(settings: Mapping[str, Any], sizes: Sequence[int], counts: Sequence[int]) -> list[str]:
    """Return the key of each part. A worker of an earlier run may still end its part, which had other files then."""
    whole = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return [
        hashlib.sha256(json.dumps([whole, end, sizes[end - count : end]]).encode()).hexdigest()[:8]
        for count, end in zip(counts, accumulate(counts), strict=True)
    ]


def _size(source: OneFileSource) -> int:
    try:
        return os.path.getsize(source.path)
    except OSError as problem:
        raise LoaderError(
            f"{problem.filename} cannot be read: {problem.strerror}: correct its name; all nodes need it at this path"
        ) from None


def _file_counts(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the number of files in each part. Small files share one, so that its shard becomes full."""
    counts: list[int] = []
    space = 0
    for size in sizes:
        if not counts or size > space:
            counts.append(0)
            space = limit
        counts[-1] += 1
        space -= size
    return counts


def _complete(root: Path, keys: Sequence[str]) -> dict[int, str]:
    """Return part -> folder of its complete attempt: the first one by name, if there are several."""
    found: dict[int, str] = {}
    for path in sorted(root.glob(f"*-*-*/{INDEX_NAME}")):
        name = path.parent.name
        if ATTEMPT.fullmatch(name):
            number, key, _ = name.split("-")
            if int(number) < len(keys) and key == keys[int(number)]:
                found.setdefault(int(number), name)
    return found


def _run_all(engine: str, run: Run, tasks: Sequence[PartTask]) -> dict[int, str]:
    found: dict[int, str] = {}
    try:
        for attempt in run(tasks):
            if attempt.problem:
                raise LoaderError(attempt.problem)
            found[attempt.number] = attempt.folder
    except LoaderError:
        raise
    except Exception as problem:  # each engine has its own, with the worker's traceback as text
        raise LoaderError(
            f"a worker failed: {_failure(problem, engine)}; the complete parts stay, continue with --resume"
        ) from problem
    return found


def _failure(problem: Exception, engine: str) -> str:
    """Return what an engine's error says of the worker: its error of Python, which may stand amid Java's stack."""
    lines = [line.strip() for line in str(problem).splitlines()]
    missing = [line for line in lines if line.startswith("ModuleNotFoundError: ")]
    if missing:
        # The loader names its own extra, which the engine's includes, and the worker's interpreter.
        module = ": ".join(missing[-1].split(": ")[:2])
        return f"{module}: install fusecache with its extra `{engine}` on all nodes, for the Python of the workers"
    errors = [line for line in lines if PYTHON_ERROR.fullmatch(line)]
    if errors:
        return errors[-1]
    # Java's stack: "at …", "... 1 more".
    told = [line.lstrip(": ") for line in lines if line and not line.startswith(("at ", "..."))]
    return " ".join(told[:2]) or cause_text(problem)
