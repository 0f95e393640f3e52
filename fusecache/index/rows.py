"""Rows of listings: one name as LIST shows it, and packs of such rows as stored on disk."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

# Cannot occur in a name, nor in JSON text.
_SEPARATOR = "\0"
FIELDS = 6
_UNKNOWN = "", "", "0"


class ListedEntry(NamedTuple):
    """One name as LIST shows it. Directories have size 0 and no etag. metadata is known only after a HEAD.

    number: the inode number shown for it while it has no node; 0: none assigned.
    """

    name: str
    is_directory: bool
    size: int = 0
    etag: str = ""
    modified: float = 0.0
    metadata: dict[str, str] | None = None
    number: int = 0

    @property
    def sort_name(self) -> str:
        """The name as it sorts in the bucket."""
        return f"{self.name}/" if self.is_directory else self.name


class RowPack:
    """The rows of one record, decoded on demand: their fields one after the other, and the list of sort names.

    It is only changed before it is written, as other threads may read it afterwards.
    """

    def __init__(self, raw: bytes) -> None:
        self.fields = raw.decode().split(_SEPARATOR) if raw else []
        self.names = self.fields[::FIELDS]

    def __len__(self) -> int:
        return len(self.names)

    def row(self, index: int) -> ListedEntry:
        """Return the row at an index."""
        name, etag, size, modified, metadata, number = self.fields[index * FIELDS : (index + 1) * FIELDS]
        facts = json.loads(metadata) if metadata else None
        if name[-1] == "/":
            return ListedEntry(name[:-1], True, 0, "", 0.0, facts, int(number))  # noqa: FBT003 -- hot path
        return ListedEntry(name, False, int(size), etag, float(modified), facts, int(number))  # noqa: FBT003 -- hot path

    def rows(self, start: int, stop: int) -> list[ListedEntry]:
        """Return the rows at these indices."""
        return [self.row(index) for index in range(start, min(stop, len(self.names)))]

    def find(self, sort_name: str) -> int | None:
        """Return the index of a row, or None."""
        index = bisect_left(self.names, sort_name)
        return index if index < len(self.names) and self.names[index] == sort_name else None

    def put(self, row: ListedEntry) -> None:
        """Insert or replace a row."""
        sort_name = row.sort_name
        index = bisect_left(self.names, sort_name)
        stop = index + (self.find(sort_name) is not None)
        self.fields[index * FIELDS : stop * FIELDS] = fields_of(row)
        self.names[index:stop] = [sort_name]

    def remove(self, sort_name: str) -> None:
        """Remove a row, which must be there."""
        index = bisect_left(self.names, sort_name)
        del self.fields[index * FIELDS : (index + 1) * FIELDS]
        del self.names[index]


def joined(fields: Sequence[str]) -> bytes:
    """Return the record of a pack's fields."""
    return _SEPARATOR.join(fields).encode()


def fields_of(row: ListedEntry) -> tuple[str, ...]:
    """Return the FIELDS fields of a row."""
    metadata = json.dumps(row.metadata) if row.metadata is not None else ""
    etag = row.etag.replace(_SEPARATOR, "")
    return row.sort_name, etag, str(row.size), repr(row.modified), metadata, str(row.number)


def page_fields(
    rows: Sequence[ListedEntry], known: Mapping[str, tuple[str, str, str]], first_number: int
) -> list[str]:
    """Return the fields of a page's rows. A row keeps the number that the same version has, or gets a new one.

    known: sort name -> (etag, time, number). Built column by column, for speed: listings bring over a thousand rows a
    second.
    """
    fields = [""] * (len(rows) * FIELDS)
    names = [f"{row.name}/" if row.is_directory else row.name for row in rows]
    etags = [row.etag.replace(_SEPARATOR, "") for row in rows]
    numbers = []
    times = [repr(row.modified) for row in rows]
    for number, name, etag, time in zip(count(first_number), names, etags, times, strict=False):
        old_etag, old_time, old_number = known.get(name, _UNKNOWN)
        is_same = old_etag == etag and old_time == time and old_number != "0"
        numbers.append(old_number if is_same else str(number))
    fields[0::FIELDS], fields[1::FIELDS] = names, etags
    fields[2::FIELDS] = [str(row.size) for row in rows]
    fields[3::FIELDS] = times
    fields[4::FIELDS] = ["" if row.metadata is None else json.dumps(row.metadata) for row in rows]
    fields[5::FIELDS] = numbers
    return fields


def numbers_in(fields: Sequence[str]) -> set[int]:
    """Return the inode numbers in a pack's fields."""
    return set(map(int, fields[FIELDS - 1 :: FIELDS]))
