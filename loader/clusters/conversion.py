"""Converts files on a cluster: deals them to parts, has the parts written, and merges them.

Invariants: 1. A part has the same files in each run. 2. index.json of the dataset names one complete attempt of each
part. 3. _SUCCESS is written last.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from fusecache.disk.beneath import open_beneath, replace_text
from loader.base.paths import is_url
from loader.clusters.parts import PartTask, Run, local_folder, ray_engine, spark_engine, sync
from loader.errors import ArgumentError, LoaderError, NoSampleError, NotEmptyError, WriterError, cause_text
from loader.mds.index import INDEX_NAME, read_index
from loader.waiting import wait_for
from loader.writing.merge import merge
from loader.writing.parallel_writer import OneFileSource
from loader.writing.resume_scan import make_directory
from loader.writing.shard_packer import PackOptions, ShardPacker, schema_of

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
