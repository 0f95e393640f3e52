"""What LIST said of directories: rows on disk, so that a directory of a million objects costs no memory.

Worth nothing after a restart: the environment is made anew for each mount, and never synced.

A directory is a number chosen by the caller. Its rows are keyed by (directory, generation, sort name), where the sort
name of a subdirectory ends with '/', as in the bucket's own order: so that rows come in the order of the pages, and
"everything up to here is known" is one comparison. A key that is also a prefix has two rows.
"""

import json
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from fusecache.model.errors import LocalDiskError

MAP_BYTES = 64 << 30
_PREFIX = struct.Struct(">QI")


@dataclass(frozen=True, slots=True)
class ListedEntry:
    """One name as LIST shows it. Directories have size 0 and no etag; metadata only if a HEAD was made."""

    name: str
    is_directory: bool
    size: int = 0
    etag: str = ""
    modified: float = 0.0
    metadata: dict[str, str] | None = None

    @property
    def sort_name(self) -> str:
        """The name in the bucket's order."""
        return f"{self.name}/" if self.is_directory else self.name


class Listings:
    """Rows of listings. Calls take microseconds (memory-mapped, unsynced) and stay on the loop's thread."""

    def __init__(self, directory: Path) -> None:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        self._directory = directory
        self._env = _open(
            str(directory),
            # A map that is written through would be a SIGBUS on a full disk.
            map_size=MAP_BYTES,
            subdir=True,
            sync=False,
            metasync=False,
            lock=False,
            writemap=False,
        )

    def close(self) -> None:
        """Close; the rows are worth nothing any more."""
        self._env.close()

    def put(self, directory: int, generation: int, entries: Iterable[ListedEntry]) -> None:
        """Write rows of one page. Raises LocalDiskError if the disk does not take them."""
        with self._writing() as txn:
            for entry in entries:
                row = [entry.size, entry.etag, entry.modified, entry.metadata]
                txn.put(_key(directory, generation, entry.sort_name), json.dumps(row).encode())

    def remove(self, directory: int, generation: int, sort_name: str) -> None:
        """Remove one row. Raises LocalDiskError."""
        with self._writing() as txn:
            txn.delete(_key(directory, generation, sort_name))

    def get(self, directory: int, generation: int, sort_name: str) -> ListedEntry | None:
        """Return one row, or None."""
        with self._env.begin() as txn:
            raw = txn.get(_key(directory, generation, sort_name))
        return _entry(sort_name, raw) if raw else None

    def scan(self, directory: int, generation: int, after: str, limit: int) -> list[ListedEntry]:
        """Return up to `limit` rows behind the sort name `after` ("" for the first), in order."""
        prefix = _PREFIX.pack(directory, generation)
        rows: list[ListedEntry] = []
        with self._env.begin() as txn, txn.cursor() as cursor:
            start = _key(directory, generation, after)
            if not cursor.set_range(start):
                return rows
            for key, raw in cursor.iternext():
                if not key.startswith(prefix) or len(rows) == limit:
                    break
                if after and key == start:
                    continue
                rows.append(_entry(key[_PREFIX.size :].decode(), raw))
        return rows

    def iterate(self, directory: int, generation: int, batch: int = 1000) -> Iterator[ListedEntry]:
        """Yield all rows, reading them in batches, so that rows may change meanwhile."""
        after = ""
        while rows := self.scan(directory, generation, after, batch):
            yield from rows
            after = rows[-1].sort_name

    def drop(self, directory: int, generation: int) -> None:
        """Remove all rows of one generation; those that a full disk keeps there are never looked at again."""
        prefix = _PREFIX.pack(directory, generation)
        with suppress(LocalDiskError), self._writing() as txn, txn.cursor() as cursor:
            found = cursor.set_range(prefix)
            while found and bytes(cursor.key()).startswith(prefix):
                found = cursor.delete()

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as exc:
            raise LocalDiskError(
                f"{self._directory}: listings cannot be kept ({exc}); is the disk full?"
            ) from exc


def _open(path: str, **options: Any) -> lmdb.Environment:
    try:
        return lmdb.open(path, **options)
    except lmdb.Error as exc:
        raise LocalDiskError(f"{path}: cannot be opened ({exc}); is the disk full?") from exc


def _key(directory: int, generation: int, sort_name: str) -> bytes:
    return _PREFIX.pack(directory, generation) + sort_name.encode()


def _entry(sort_name: str, raw: bytes) -> ListedEntry:
    size, etag, modified, metadata = json.loads(raw)
    is_directory = sort_name.endswith("/")
    name = sort_name[:-1] if is_directory else sort_name
    return ListedEntry(name, is_directory, size, etag, modified, metadata)
