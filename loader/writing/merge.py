"""Makes one index over the parts of a dataset that several writers wrote, each into its own folder.

Nothing is copied: the new index names the parts' shards by paths relative to it. The order of the parts is the order
of the samples: folders in natural order (2 before 10), or as listed.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from loader.base.paths import check_is_local, natural_key
from loader.errors import WriterError
from loader.mds.index import INDEX_NAME, read_index
from loader.writing.shard_packer import SHARD_FILE
from loader.writing.writer import write_index

log = logging.getLogger(__name__)


def merge(root: str | Path, parts: Sequence[str | Path] | None = None, *, replace: bool = False) -> int:
    """Write `<root>/index.json` over all datasets in folders below root; return the number of shards.

    parts: folders below root, in the wanted order. None: all folders that have an index.json, in natural order; a
    folder with shards but without index (its writer has not finished) is then an error. A folder whose shards an
    index above it lists already is skipped. replace: overwrite an existing index of root.
    Raises WriterError if there is nothing to merge, a shard is listed twice, a file is missing or has another size
    than its index says, or root has an index; DatasetError for an index that cannot be read. Logs a warning for parts
    with other columns than the first, because a batch cannot mix their samples.
    """
    check_is_local(root)
    top = Path(root)
    if (top / INDEX_NAME).exists() and not replace:
        raise WriterError(f"{top / INDEX_NAME} exists already: pass replace=True (--replace) to overwrite it")
    folders = sorted_folders(top) if parts is None else [_below(top, part) for part in parts]
    shards: list[dict[str, Any]] = []
    owners: dict[str, str] = {}
    for folder in folders:
        entries = list(_entries(top, folder))
        names = [name for name, _ in entries]
        known = [owners[name] for name in names if name in owners]
        if parts is None and len(known) == len(names) and all(_is_above(owner, folder) for owner in known):
            continue  # an index above this folder lists the same shards
        if known:
            twice = next(name for name in names if name in owners)
            raise WriterError(
                f"{twice} is named twice: by {owners[twice]}/{INDEX_NAME} and {folder}/{INDEX_NAME}"
            )
        if shards and entries:
            _warn_of_columns(folder, entries[0][1], next(iter(owners.values())), shards[0])
        for name, entry in entries:
            if name in owners:
                raise WriterError(f"{name} is named twice by {folder}/{INDEX_NAME}")
            owners[name] = folder
            shards.append(entry)
    if not shards:
        raise WriterError(f"there is nothing to merge below {top}: no folder with an {INDEX_NAME} and shards")
    _check_files(top, shards)
    if parts is None:
        _check_unlisted(top, owners)
    write_index(os.path.realpath(top), shards)
    return len(shards)


def sorted_folders(root: Path) -> list[str]:
    """Return the folders below root that have an index, relative to it, in natural order."""
    found = [folder for folder, files in _walk(root) if INDEX_NAME in files and folder != "."]
    return sorted(found, key=natural_key)


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    def fail(problem: OSError) -> None:
        raise WriterError(f"{problem.filename} cannot be listed: {problem.strerror}")

    for directory, _, files in os.walk(root, onerror=fail):
        yield os.path.relpath(directory, root), files


def _below(root: Path, part: str | Path) -> str:
    path = root / part if (root / part).exists() else Path(part)
    if not path.exists():
        raise WriterError(f"there is no folder {root / part}: the parts to merge are folders below {root}")
    inner = os.path.relpath(path, root)
    if inner == "." or inner.split("/")[0] == "..":
        raise WriterError(f"{part} does not lie below {root}: an index names only what is below it")
    return inner


def _entries(root: Path, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a part's shards as the merged index lists them: (path of the stored file, entry)."""
    directory = root / folder
    read_index(directory)  # checks what the code below relies on
    for shard in json.loads((directory / INDEX_NAME).read_bytes())["shards"]:
        entry = dict(shard)
        name = ""
        for which in ("raw_data", "zip_data"):
            if entry.get(which):
                name = str(PurePosixPath(folder) / entry[which]["basename"])
                entry[which] = {**entry[which], "basename": name}
        yield name, entry


def _warn_of_columns(folder: str, entry: dict[str, Any], first: str, first_entry: dict[str, Any]) -> None:
    here, there = _columns(entry), _columns(first_entry)
    differ = sorted(
        f"{name} is {here.get(name, 'missing')}, not {there.get(name, 'missing')}"
        for name in {*here, *there}
        if here.get(name) != there.get(name)
    )
    if differ:
        log.warning(
            "%s has other columns than %s: %s. They are merged, but a batch cannot mix samples of both",
            folder, first, "; ".join(differ),
        )  # fmt: skip


def _columns(entry: dict[str, Any]) -> dict[str, str]:
    return dict(zip(entry["column_names"], entry["column_encodings"], strict=True))


def _is_above(owner: str, folder: str) -> bool:
    return folder.startswith(f"{owner}/")


def _check_files(root: Path, shards: Sequence[dict[str, Any]]) -> None:
    for shard in shards:
        stored = shard.get("zip_data") or shard["raw_data"]
        try:
            found = (root / stored["basename"]).stat().st_size
        except OSError as problem:
            raise WriterError(
                f"{root / stored['basename']} is in an index, but not there: {problem.strerror}"
            ) from None
        if stored.get("bytes") and found != stored["bytes"]:
            raise WriterError(
                f"{root / stored['basename']} has {found} bytes, its index says {stored['bytes']}: a part is damaged"
            )


def _check_unlisted(root: Path, owners: dict[str, str]) -> None:
    """Raise WriterError for a part without an index: its writer has not finished, and a merge would omit it."""
    for folder, files in _walk(root):
        if INDEX_NAME in files and folder != ".":
            continue
        for name in files:
            path = name if folder == "." else f"{folder}/{name}"
            if SHARD_FILE.fullmatch(name) and path not in owners:
                raise WriterError(
                    f"{root / path} is in no index: its writer has not finished. Finish it, remove it, or list "
                    f"the parts to merge"
                )
