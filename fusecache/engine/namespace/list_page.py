"""One page of LIST as rows: names that are usable on the mount, plus the metadata that only a HEAD returns."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import trio

from fusecache.engine.namespace.listing_state import LAST_NAME
from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.index.rows import ListedEntry
from fusecache.model.errors import AccessDenied, ObjectMissing, Refused
from fusecache.model.metadata import SYMLINK_TARGET, has_target_in_body
from fusecache.model.names import unusable_name
from fusecache.model.objects import Extent, ObjectInfo
from fusecache.remote.store import Store

PAGE_NAMES = 1000
# LIST does not say whether a zero-byte object is a symlink; a HEAD does. At most this many HEADs run concurrently.
_HEADS_AT_ONCE = 32


class ListPageRows(NamedTuple):
    """One page of LIST as rows. token: of the next page; None on the last page.

    asked: loop time of the request. hidden: how many objects no name shows. has_marker: the directory has a marker
    object. end: the page is complete up to this sort name: its last name, hidden ones included. On the last page it is
    LAST_NAME.
    """

    asked: float
    rows: list[ListedEntry]
    hidden: int
    has_marker: bool
    end: str
    token: str | None


def file_row(name: str, info: ObjectInfo) -> ListedEntry:
    """Return the row of an object."""
    return ListedEntry(name, False, info.size, info.etag, info.modified, info.metadata)  # noqa: FBT003 -- hot path


def lacks_metadata(row: ListedEntry, *, of_all: bool) -> bool:
    """Return whether a row needs a HEAD: a file without metadata, of zero bytes or (of_all) of any size."""
    return (of_all or not row.size) and not row.is_directory and row.metadata is None


async def with_metadata(
    metadata_client: MetadataClient,
    prefix: str,
    rows: list[ListedEntry],
    known: Mapping[str, ListedEntry | None],
    *,
    of_all: bool,
    on_answer: Callable[[], object] = lambda: None,
) -> list[ListedEntry]:
    """Return the rows with metadata filled in, from a known row of the same ETag and time, or from a HEAD.

    If LIST is allowed but HEAD is refused, the row gets empty metadata. For a zero-byte object, which may be a symlink,
    or while all requests are refused, that is an error. on_answer: called after each HEAD.
    """
    wanted = [index for index, row in enumerate(rows) if lacks_metadata(row, of_all=of_all)]
    if not wanted:
        return rows
    limiter = trio.CapacityLimiter(_HEADS_AT_ONCE)
    full = dict(enumerate(rows))

    async def head(index: int, row: ListedEntry) -> None:
        async with limiter:
            try:
                info = await metadata_client.call(metadata_client.store.head, prefix + row.name)
                if has_target_in_body(info):
                    info = await metadata_client.call(_with_target, metadata_client.store, info)
                full[index] = _completed(row, info)
            except ObjectMissing:
                del full[index]
            except (AccessDenied, Refused):
                if not row.size or metadata_client.refused_seconds:
                    raise
                full[index] = row._replace(metadata={})
            on_answer()

    with unwrap_single_error():
        async with trio.open_nursery() as nursery:
            for index in wanted:
                row = rows[index]
                old = known.get(row.name)
                if old is not None and (old.etag, old.modified) == (row.etag, row.modified):
                    full[index] = row._replace(metadata=old.metadata)
                else:
                    nursery.start_soon(head, index, row, name=f"head {prefix}{row.name}")
    return [full[index] for index in sorted(full)]


def _with_target(store: Store, info: ObjectInfo) -> ObjectInfo:
    """Return the facts of a symlink of s3fs with the target in its metadata, as in symlinks made here. Blocking."""
    body = bytearray(info.size)
    store.get_into(info.object_id, Extent(0, info.size), memoryview(body), lambda _: None)
    target = body.decode(errors="replace").strip()
    return replace(info, metadata={**(info.metadata or {}), SYMLINK_TARGET: target})


def _completed(row: ListedEntry, info: ObjectInfo) -> ListedEntry:
    """Return a row with the HEAD's metadata; if ETag and second agree keep LIST's time, as a HEAD has no fractions."""
    if row.etag == info.etag and int(row.modified) == int(info.modified):
        return row._replace(metadata=info.metadata)
    return file_row(row.name, info)


def fetch_page(store: Store, prefix: str, token: str | None, asked: float, after: str = "") -> ListPageRows:
    """Request one page, starting after the sort name `after`, and return it as rows. Blocking: runs in a thread."""
    start_after = prefix + after if after else ""
    page = store.list_page(prefix, delimiter="/", token=token, start_after=start_after, limit=PAGE_NAMES)
    start = len(prefix)
    rows: list[ListedEntry] = []
    hidden, has_marker, end = 0, False, ""
    for info in page.objects:
        name = info.key[start:]
        if not name:
            has_marker = True
            hidden += info.size > 0  # nothing shows its content, and the directory is not removed with it
        elif unusable_name(name) is None:
            rows.append(file_row(name, info))
        else:
            hidden += 1
    for common in page.prefixes:
        name = common[start:-1]
        if unusable_name(name) is None:
            rows.append(ListedEntry(name, True))  # noqa: FBT003 -- hot path: perhaps a million rows
        else:
            hidden += 1
    for last in (*(info.key for info in page.objects[-1:]), *page.prefixes[-1:]):
        end = max(end, last[start:])
    rows.sort(key=_sort_name)
    while rows and rows[0].sort_name <= after:
        del rows[0]  # a subdirectory at or before `after` that also has keys after it
    if page.next_token is None:
        end = LAST_NAME
    return ListPageRows(asked, rows, hidden, has_marker, end, page.next_token)


def _sort_name(row: ListedEntry) -> str:
    return row.name + "/" if row.is_directory else row.name
