"""Writes down what an unfinished local conversion reads and how it writes, so that nothing else continues it.

A resumed conversion skips as many samples as its shards have. With other files, or in another order, it would skip the
wrong ones. The size of the file that it goes on with may change, because a bad row is mended before.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusecache.disk.beneath import replace_text
from loader.clusters.conversion import described
from loader.errors import WriterError
from loader.mds.index import INDEX_NAME
from loader.writing.parallel_writer import OneFileSource, files_of
from loader.writing.resume_scan import left_over_shards
from loader.writing.shard_packer import packer_of

RECORD_NAME = "_inputs.json"


def conversion_of(
    sources: Sequence[OneFileSource], columns: Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of a conversion. Raises WriterError for columns or options that cannot work."""
    return {
        **described(sources),
        "columns": dict(columns),
        "options": {**packer_of(columns, options).settings, "align": options.get("align", 1)},
        "sizes": [_size(source) for source in sources],
    }


def _size(source: OneFileSource) -> int | None:
    """Return the size of a source's file. None if it cannot be read, which reading names, or if its files are many."""
    try:
        return os.path.getsize(source.path) if files_of(source) == [source.path] else None
    except OSError:
        return None


def check_inputs(root: Path, conversion: Mapping[str, Any]) -> None:
    """Raise WriterError if the conversion in root began with other inputs, or in another order, or otherwise.

    Without a record, as an earlier version leaves it, nothing is known and nothing is refused.
    """
    before = _read(root)
    if any(before[name] != conversion[name] for name in ("files", "kind") if before):
        raise WriterError(
            f"{root} holds a conversion of other files or options, or in another order: name its files in their order, "
            f"or choose another directory. If the same files only moved, remove {root / RECORD_NAME}"
        )
    for name in ("columns", "options"):
        if before and before[name] != conversion[name]:
            raise WriterError(
                f"{root} holds a conversion with other {name}, {json.dumps(before[name])}: continue with these, choose "
                f"another directory, or remove it and begin again"
            )


def check_sizes(root: Path, conversion: Mapping[str, Any], done: Iterable[int]) -> None:
    """Raise WriterError if a file whose samples are all in shards, by its number, has another size than before."""
    before = _read(root)
    for number in done if before else ():
        if before["sizes"][number] != conversion["sizes"][number]:
            raise WriterError(
                f"{root} holds the samples of {conversion['files'][number]}, which changed since: restore the file, "
                f"choose another directory, or remove {root} and begin again"
            )


def check_processes(root: Path, processes: int) -> None:
    """Raise WriterError if a directory has shards of a conversion by one process, and these are several, or reverse."""
    if not root.is_dir() or (root / INDEX_NAME).exists():
        return
    if processes > 1 and left_over_shards(root):
        begun, right = "one process", "--processes 1"
    elif processes == 1 and any(root.glob("[0-9][0-9][0-9][0-9][0-9]*/shard.*")):
        begun, right = "several processes", "--processes 2 or more"
    else:
        return
    raise WriterError(
        f"{root} holds a conversion by {begun}: continue it with {right} and --resume, choose another directory, or "
        f"remove it"
    )


def record_inputs(root: Path, conversion: Mapping[str, Any]) -> None:
    """Write the record of a conversion that begins or goes on."""
    root.mkdir(parents=True, exist_ok=True)
    replace_text(f"{os.path.realpath(root)}/{RECORD_NAME}", json.dumps(conversion))


def forget_inputs(root: Path) -> None:
    """Remove the record of a conversion that ended."""
    (root / RECORD_NAME).unlink(missing_ok=True)


def is_begun(root: Path) -> bool:
    """Return whether a directory has anything but a record."""
    return root.is_dir() and any(path.name != RECORD_NAME for path in root.iterdir())


def _read(root: Path) -> dict[str, Any]:
    """Return the record in a directory, {} without one. Raises WriterError if it is damaged."""
    record = root / RECORD_NAME
    try:
        found: dict[str, Any] = json.loads(record.read_bytes())
        _ = [found[name] for name in ("files", "kind", "columns", "options", "sizes")]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise WriterError(f"{record} is damaged: remove it if {root} began with these files") from None
    return found
