"""Writes a dataset with several processes, each into its own folder, and merges the folders at the end."""

import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

from loader.base.paths import check_is_local
from loader.errors import EncodingError, LoaderError, NoSampleError, WriterError, cause_text
from loader.mds.index import INDEX_NAME, read_index
from loader.writing.merge import merge
from loader.writing.shard_packer import packer_of
from loader.writing.writer import MDSWriter

Source = Callable[[], Iterable[Mapping[str, Any]]]


class OneFileSource(Protocol):
    """A source that reads one file, `path`.

    One whose samples are the lines or rows of its file has `counted`: what they are called.
    """

    @property
    def path(self) -> str: ...

    def __call__(self) -> Iterable[Mapping[str, Any]]: ...


def write_parallel(
    out: str | Path,
    columns: Mapping[str, str],
    sources: Sequence[Source],
    *,
    processes: int,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Write each source's samples into its own folder below out, then one index over all; return the sample count.

    sources: functions that return samples, importable by name (they are sent to other processes). Samples are ordered
    by source, whatever order they are written in. resume: keep finished parts and continue unfinished ones; each
    source must return the same samples again. progress: called with (finished parts, samples in them). options: of
    MDSWriter. The first error of a part ends the call; the parts stay. An error that a source raises gets a note that
    names the part and the number of samples before it. Raises WriterError if `out` has a dataset or, without resume,
    any file; NoSampleError if the sources have no samples.
    """
    check_is_local(out)
    root = Path(out)
    if not sources:
        raise WriterError("there is no source to write")
    for number, source in enumerate(sources):
        _check_can_be_sent(number, source)
    if (root / INDEX_NAME).exists():
        raise WriterError(f"{root} holds a dataset already: choose another directory, or remove it")
    if not resume and root.exists() and any(root.iterdir()):
        raise WriterError(
            f"{root} is not empty: choose another directory, or pass resume=True to continue it"
        )
    folders = part_folders(len(sources))
    for folder in folders if resume else ():
        _check_finished(root / folder, columns, options or {})
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    samples = 0
    with ProcessPoolExecutor(max(1, min(processes, len(sources))), mp_context=context) as pool:
        waiting = [
            pool.submit(
                write_part, root / folder, dict(columns), [source], resume=resume, options=dict(options or {})
            )
            for folder, source in zip(folders, sources, strict=True)
        ]
        try:
            for finished, part in enumerate(as_completed(waiting), start=1):
                samples += part.result()
                if progress is not None:
                    progress(finished, samples)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if samples:
        merge(root, [root / folder for folder in folders])
    else:
        raise NoSampleError(f"the sources contain no samples: there is nothing to write to {root}")
    return samples


def part_folders(count: int) -> list[str]:
    """Return the names of the folders of so many parts."""
    width = max(5, len(str(count - 1)))
    return [f"{number:0{width}}" for number in range(count)]


def _check_finished(directory: Path, columns: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Raise WriterError if a part is finished, and its index names other columns or options."""
    try:
        shards = json.loads((directory / INDEX_NAME).read_bytes())["shards"]
    except (OSError, ValueError, KeyError, TypeError):  # it is unfinished; `write_part` names a damaged one
        return
    settings = packer_of(columns, options).settings
    other = [name for name in settings if any(shard.get(name) != settings[name] for shard in shards)]
    if other:
        raise WriterError(
            f"{directory} was written with other settings than these ({', '.join(other)}): continue with its own, "
            f"choose another directory, or remove it to write it again"
        )


def write_part(
    directory: Path,
    columns: Mapping[str, str],
    sources: Sequence[Source],
    *,
    resume: bool,
    options: Mapping[str, Any],
) -> int:
    """Write one part, in the calling process; return its sample count."""
    if resume and (directory / INDEX_NAME).exists():
        return int(read_index(directory).samples.sum())
    try:
        with MDSWriter(directory, columns, resume=resume, **options) as writer:
            if writer.folder != f"{os.path.realpath(directory.parent)}/{directory.name}":
                raise WriterError("it is a symlink, which is not followed: remove it")
            every = chain.from_iterable(numbered(source, f"{directory}: ") for source in sources)
            writer.skip_written(sample for _, sample in every)
            for where, sample in every:
                write_named(writer, sample, where)
            return writer.samples
    except LoaderError as problem:
        raise type(problem)(f"{directory}: {problem}") from problem


def numbered(source: Source, part: str = "") -> Iterator[tuple[tuple[Source, int], Mapping[str, Any]]]:
    """Yield a source's samples, each with its origin: (the source, its number from 0).

    An error of the source gets a note that names `part`, the source, and how many samples it gave before.
    """
    number = -1
    try:
        for number, sample in enumerate(source()):
            yield (source, number), sample
    except Exception as problem:
        problem.add_note(f"{part}the source {source!r} raised it after its first {number + 1} samples")
        raise


def _check_can_be_sent(number: int, source: Source) -> None:
    try:
        ForkingPickler.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise WriterError(
            f"source {number}, {source!r}, cannot be sent to another process ({cause_text(problem)}): give a function "
            f"of a module, or functools.partial of one"
        ) from problem


def write_named(writer: MDSWriter, sample: Mapping[str, Any], where: tuple[Source, int]) -> None:
    """Write a sample. Raises EncodingError, also naming its source and number, for a value that does not fit."""
    try:
        writer.write(sample)
    except EncodingError as problem:
        source, number = where
        file = f"{source.path}, " if hasattr(source, "path") else ""
        counted = getattr(source, "counted", "")
        place = f"{file}{counted} {number + 1}" if counted else f"{file}sample {number}"
        raise EncodingError(
            f"{place}: {problem}; leave the sample out, or choose another encoding for its column"
        ) from problem
