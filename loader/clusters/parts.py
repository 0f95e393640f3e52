"""What a worker of a cluster does: it writes one part of a dataset, into a folder that no other attempt uses."""

import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
