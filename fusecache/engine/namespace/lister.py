"""Lists directories in the background, page by page; readers use the pages that have arrived.

The lister also assigns inode numbers to names without a node. The rows hold the numbers, and a new listing keeps the
number of each version that did not change. Numbers come in inode ranges, each for one stretch of one directory. So a
number leads back to its row, at a memory cost of a few words per page.

Invariants:
1. One full listing of a directory runs at a time. Single pages of it may be refreshed concurrently.
2. Rows up to `ListingRun.progress` are stored. At most one page is fetched ahead of the stored ones.

One page of LIST as rows: names that are usable on the mount, plus the metadata that only a HEAD returns.

The TTL of what the bucket showed: how old an answer may be and still count as fresh.

Refreshes the listings of directories in use before their TTL runs out.

The unit is one page of LIST: a whole small directory, or the part of a large one in which names are looked up. In a
large directory that is where files are added in name order. A refresh costs one request, as much as a request for one
name. While refreshes run ahead, lookups in that page do not wait for the bucket.

Invariant: the maximum age of what is served stays the TTL. Only the time of the requests changes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import trio

from fusecache.engine.namespace.nodes import (
    INODE_RANGE,
    LAST_NAME,
    LISTED_NUMBERS,
    AccessHeat,
    Kind,
    Node,
    PageTimes,
)
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.metadata_client import MetadataClient, SharedRequest
from fusecache.engine.runtime.supervisor import TaskNursery, unwrap_single_error
from fusecache.index.listings import ListedEntry, Listings
from fusecache.model.errors import (
    AccessDenied,
    FusecacheError,
    InternalError,
    ListingLost,
    LocalDiskError,
    ObjectMissing,
    Refused,
)
from fusecache.model.names import unusable_name
from fusecache.model.objects import SYMLINK_TARGET, Extent, ObjectInfo, has_target_in_body
from fusecache.policy.listing_refresh import (
    HEAT_OF_A_PAGE,
    IN_USE_SECONDS,
    LISTS_PER_SECOND,
    decayed_heat,
    is_in_use,
    relist_after_seconds,
)
from fusecache.policy.name_patterns import is_immutable
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


class AttributeTtl:
    """Decides whether something is fresh enough to be used without a request.

    seconds: the TTL of mutable paths. immutable: patterns of paths that never change.
    """

    def __init__(self, tree: Tree, seconds: float) -> None:
        self._tree = tree
        self._seconds = seconds
        self.immutable: tuple[str, ...] = ()

    def seconds(self, node: Node) -> float:
        """The TTL of a node; inf if its path is immutable."""
        if self.immutable and is_immutable(self._tree.path(node), self.immutable):
            return float("inf")
        return self._seconds

    def seconds_below(self, directory: Node, name: str) -> float:
        """The TTL of a child by name; inf if its path is immutable."""
        if self.immutable:
            path = f"{self._tree.path(directory)}/{name}".removeprefix("./")
            if is_immutable(path, self.immutable):
                return float("inf")
        return self._seconds

    def is_node_fresh(self, child: Node) -> bool:
        """Return whether a node is within its TTL, or authoritative because of unpublished changes."""
        return child.local_refs > 0 or is_within(self.seconds(child), child.verified)

    def is_listing_fresh(self, directory: Node) -> bool:
        """Return whether the last complete listing of a directory is within its TTL."""
        return is_within(self.seconds(directory), directory.listing.finished)


def is_within(seconds: float, moment: float) -> bool:
    """Return whether loop time `moment` is at most `seconds` ago (inf: any time); -inf means never."""
    return moment > float("-inf") and trio.current_time() - moment <= seconds


# A directory whose rows fitted neither on the disk nor in memory is not listed again for this long.
_REFUSED_SECONDS = 60.0
# A directory with this many more inode ranges than pages, taken by refreshes, is listed in full, which frees them.
_INODE_RANGES_USED = 256


@dataclass(eq=False, slots=True)
class ListingRun(SharedRequest):
    """A full listing in progress. progress: rows up to this sort name are known; page_times: when pages were requested.

    has_more: it has more than one page. is_wanted: a reader uses it; a listing begun ahead of readers ends after its
    first page unless it becomes wanted. published: rows after `progress` that this node has published since the start,
    with the loop time. inode_ranges: all ranges taken for it; used: ranges that its rows belong to.
    """

    epoch: int = 0
    started: float = 0.0
    is_wanted: bool = True
    progress: str = ""
    pages: int = 0
    hidden: int = 0
    has_directories: bool = False
    has_more: bool = False
    is_abandoned: bool = False
    page_times: PageTimes = field(default_factory=PageTimes)
    published: dict[str, tuple[ListedEntry, float]] = field(default_factory=dict)
    inode_ranges: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class PageRefresh(SharedRequest):
    """One page of a listed directory, the names after `start`, requested again at loop time `asked`.

    newer: changes to single names that became known since; None: the name is gone.
    """

    start: str = ""
    asked: float = 0.0
    newer: dict[str, ListedEntry | None] = field(default_factory=dict)


class _InodeRange(NamedTuple):
    """The location of one range of inode numbers: sort names `first` to `last` of a directory."""

    directory: int
    first: str
    last: str


@dataclass(eq=False, repr=False)
class Lister:
    """The listings of all directories, in progress and complete.

    ahead_seconds: how long a listing begun ahead of readers is kept for them. has_metadata: every row has its object's
    metadata, not only the zero-byte ones.
    """

    _tree: Tree
    _listings: Listings
    _client: MetadataClient
    _tasks: TaskNursery
    ahead_seconds: float = field(kw_only=True)
    has_metadata: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        # Keys that no path can name, by the directory: as it was listed last, also if its rows are gone since.
        self._hidden: dict[str, int] = {}
        self._runs: dict[int, ListingRun] = {}
        self._refreshes: dict[tuple[int, str], PageRefresh] = {}
        self._inode_ranges: dict[int, _InodeRange] = {}
        self._next_inode_range = (LISTED_NUMBERS + self._tree.numbers_used) // INODE_RANGE
        self._epoch = 0
        self._garbage: deque[tuple[int, int]] = deque()
        self._has_garbage = trio.Event()
        self._on_hidden: Callable[[Node], None] = lambda _: None
        self._listings.watch_lost(self._on_rows_lost)

    async def delete_discarded(self) -> None:
        """Delete discarded rows until cancelled."""
        while True:
            while self._garbage:
                directory, epoch = self._garbage[0]
                if not await self._client.rows(self._listings.drop, directory, epoch):
                    self._garbage.popleft()
            self._has_garbage = trio.Event()
            await self._has_garbage.wait()

    # ---- queries

    def current_run(self, directory: Node) -> ListingRun | None:
        """Return the directory's listing in progress, or None."""
        return self._runs.get(directory.number)

    def under_way(self) -> Iterable[SharedRequest]:
        """Return all full listings and page refreshes in progress."""
        return [*self._runs.values(), *self._refreshes.values()]

    def page_times_by_epoch(self, directory: Node) -> Mapping[int, PageTimes]:
        """Return the page times of each listing epoch that has rows, the complete listing first."""
        found: dict[int, PageTimes] = {}
        if directory.is_listed:
            found[directory.listing.epoch] = directory.listing.page_times
        run = self._runs.get(directory.number)
        if run is not None:
            found[run.epoch] = run.page_times
        return found

    def must_serve_stale(self, directory: Node) -> bool:
        """Whether to serve the old listing: there is one, and the bucket does not answer. Training then continues."""
        return directory.is_listed and self._client.is_unresponsive

    def rows_after(self, directory: Node, sort_name: str, limit: int) -> list[ListedEntry]:
        """Return rows after a sort name from any listing, however old. Sends no request."""
        try:
            if directory.is_listed:
                return self._listings.scan(directory.number, directory.listing.epoch, sort_name, limit)
            run = self._runs.get(directory.number)
            if run is None:
                return []
            rows = self._listings.scan(directory.number, run.epoch, sort_name, limit)
        except ListingLost:
            return []
        return [row for row in rows if row.sort_name <= run.progress]

    def row_position(self, number: int) -> tuple[Node | None, str, str]:
        """Return where the row of an inode number is: directory (None: nowhere), first and last sort name."""
        inode_range = self._inode_ranges.get(number // INODE_RANGE)
        if inode_range is None:
            return None, "", ""
        return self._tree.nodes.get(inode_range.directory), inode_range.first, inode_range.last

    def new_number(self, directory: Node) -> int:
        """Return an inode number for one row of the directory."""
        listing = directory.listing
        if not listing.free_numbers:
            inode_range = self._new_inode_range(directory, "", LAST_NAME)
            listing.inode_ranges.add(inode_range)
            listing.free_numbers = range(inode_range * INODE_RANGE, (inode_range + 1) * INODE_RANGE)
        number = listing.free_numbers[0]
        listing.free_numbers = listing.free_numbers[1:]
        return number

    # ---- files and directories of one name

    def watch_hidden(self, call: Callable[[Node], None]) -> None:
        """Have `call` called for a file published here if the first answer with it has a directory of its name."""
        self._on_hidden = call

    def note_hidden(self, directory: Node, rows: Sequence[ListedEntry], asked: float, epoch: int = 0) -> None:
        """Tell of files published here that directories hide. Until a listing has one, its time is this node's.

        epoch: of the listing that has the rows before these.
        """
        for row in rows if directory.children else ():
            child = directory.children.get(row.name) if row.is_directory else None
            if child is None or child.kind is Kind.DIRECTORY or child.local_refs or child.verified > asked:
                continue
            ours = child.object
            if ours is None or self._tree.is_hidden(ours.key + "/", asked):
                continue
            file = next((each for each in rows if each.sort_name == row.name), None)
            if file is None and epoch:
                file = self._listings.get(directory.number, epoch, row.name)
            if file is not None and file.etag == ours.etag and file.modified != ours.modified:
                self._on_hidden(child)

    # ---- changes by this node

    def on_empty(self, directory: Node) -> None:
        """This node has just created the directory, so it is known to be empty."""
        listing = directory.listing
        self._epoch += 1
        listing.epoch, listing.finished = self._epoch, trio.current_time()
        listing.page_times = PageTimes([LAST_NAME], [listing.finished])
        listing.has_directories = False

    def on_published(self, directory: Node, row: ListedEntry) -> None:
        """The bucket now shows a name. A listing in progress may or may not have passed it."""
        self.on_newer(directory, [], [row])
        run = self._runs.get(directory.number)
        if run is None:
            return
        if row.sort_name <= run.progress:
            self._put(directory, run, row)
        else:
            run.published[row.sort_name] = row, trio.current_time()

    def on_gone(self, directory: Node, sort_name: str) -> None:
        """The bucket no longer shows a name."""
        for refresh in self._refreshes_of(directory, sort_name):
            refresh.newer[sort_name] = None
        run = self._runs.get(directory.number)
        if run is not None:
            run.published.pop(sort_name, None)

    def on_newer(self, directory: Node, gone: Iterable[ListedEntry], rows: Iterable[ListedEntry]) -> None:
        """The complete listing now has other rows for a name, which a page refresh in progress may not know."""
        for row in gone:
            for refresh in self._refreshes_of(directory, row.sort_name):
                refresh.newer[row.sort_name] = None
        for row in rows:
            for refresh in self._refreshes_of(directory, row.sort_name):
                refresh.newer[row.sort_name] = row

    def _refreshes_of(self, directory: Node, sort_name: str) -> list[PageRefresh]:
        return [
            refresh
            for (number, start), refresh in self._refreshes.items()
            if number == directory.number and start < sort_name
        ]

    # ---- page refresh

    def refresh_pages(self, directory: Node, start: str) -> PageRefresh:
        """Return the refresh of the page after `start`, started now if none is in progress.

        It is one request, and its answer replaces that part of the complete listing.
        """
        refresh = self._refreshes.get((directory.number, start))
        if refresh is None:
            refresh = self._refreshes[directory.number, start] = PageRefresh(
                start=start, asked=trio.current_time()
            )
            about, on_failed = self._tree.path(directory), partial(self._on_page_failed, directory, refresh)
            self._tasks.start_soon(
                "list-page", self._refresh_page, directory, refresh, about=about, on_failed=on_failed
            )
        return refresh

    def _on_page_failed(self, directory: Node, refresh: PageRefresh, error: InternalError) -> None:
        directory.listing.expire()  # its rows may be older now, and newer changes of this node missing
        refresh.fail(error)

    async def _refresh_page(self, directory: Node, refresh: PageRefresh) -> None:
        with self._tree.keep(directory):
            try:
                prefix = self._tree.key(directory)
                client = self._client
                page = await client.call(fetch_page, client.store, prefix, None, refresh.asked, refresh.start)
                await self._replace_page(directory, prefix, refresh, page)
            except FusecacheError as exc:
                refresh.failure = exc
            finally:
                del self._refreshes[directory.number, refresh.start]
                refresh.end()

    async def _replace_page(
        self, directory: Node, prefix: str, refresh: PageRefresh, page: ListPageRows
    ) -> None:
        listing, number = directory.listing, directory.number
        epoch = listing.epoch
        if not epoch:
            return
        start, end = refresh.start, page.end
        rows = await self._completed(directory, prefix, page.rows, refresh)
        # No await from here on, as in `_store`.
        if listing.epoch != epoch or self._tree.key(directory) != prefix:
            return  # a full listing or a rename came first
        inode_range = self._new_inode_range(directory, start, end)
        try:
            numbers = self._listings.replace(number, epoch, start, end, rows, inode_range * INODE_RANGE)
        except LocalDiskError:
            del self._inode_ranges[inode_range]
            raise
        if any(each // INODE_RANGE == inode_range for each in numbers):
            listing.inode_ranges.add(inode_range)
        else:
            del self._inode_ranges[inode_range]
        for sort_name, row in refresh.newer.items():
            if row is not None:
                self._listings.put(number, epoch, [row])
            else:
                self._listings.remove(number, epoch, sort_name)
        directory.has_marker |= page.has_marker
        listing.has_directories |= any(row.is_directory for row in rows)
        listing.page_times.renew(start, end, refresh.asked)
        self.note_hidden(directory, rows, refresh.asked, epoch)
        if not start and end == LAST_NAME:
            listing.finished = refresh.asked
            self._count_hidden(directory, page.hidden)
        if len(listing.inode_ranges) > _INODE_RANGES_USED + len(listing.page_times.ends):
            self.start(directory)

    # ---- full listing

    def start(self, directory: Node, *, ahead: bool = False) -> ListingRun:
        """Return the directory's listing in progress, started now if there is none. ahead: no reader waits for it."""
        run = self._runs.get(directory.number)
        if run is None:
            self._epoch += 1
            run = ListingRun(epoch=self._epoch, started=trio.current_time(), is_wanted=not ahead)
            self._runs[directory.number] = run
            about, on_failed = self._tree.path(directory), partial(self._on_failed, directory, run)
            self._tasks.start_soon("list", self._list, directory, run, about=about, on_failed=on_failed)
        return run

    def _on_failed(self, directory: Node, run: ListingRun, error: InternalError) -> None:
        run.fail(error)
        if directory.listing.epoch != run.epoch:
            self._forget_rows(directory, run)

    async def _list(self, directory: Node, run: ListingRun) -> None:
        is_ahead = not run.is_wanted
        # Keeps the node and its rows in memory while the rows are written.
        with self._tree.keep(directory, is_ahead=is_ahead):
            await self._list_kept(directory, run)
            if is_ahead:
                await trio.sleep(self.ahead_seconds)

    async def _list_kept(self, directory: Node, run: ListingRun) -> None:
        directory.listing.probes, directory.listing.probed = 0, ""
        listing = directory.listing
        try:
            if listing.refusal is not None and run.started < listing.refused_until:
                raise listing.refusal
            prefix = self._tree.key(directory)
            await self._list_pages(directory, prefix, run)
            if run.is_abandoned:
                self._forget_rows(directory, run)
            else:
                self._complete(directory, run)
                if self._tree.key(directory) != prefix:
                    directory.listing.expire()  # renamed during the listing
        except FusecacheError as exc:
            run.failure = exc
            if isinstance(exc, LocalDiskError) and not isinstance(exc, ListingLost):
                if exc is not listing.refusal:
                    listing.refused_until = trio.current_time() + _REFUSED_SECONDS
                listing.refusal = exc
            self._forget_rows(directory, run)
        finally:
            del self._runs[directory.number]
            run.end()

    def _complete(self, directory: Node, run: ListingRun) -> None:
        listing = directory.listing
        if listing.epoch:
            self._discard(directory.number, listing.epoch)
        kept_ranges = set(run.used)
        if listing.free_numbers:
            kept_ranges.add(listing.free_numbers.start // INODE_RANGE)
        for inode_range in (listing.inode_ranges | run.inode_ranges) - kept_ranges:
            self._inode_ranges.pop(inode_range, None)
        now = trio.current_time()
        listing.epoch, listing.page_times, listing.inode_ranges = run.epoch, run.page_times, kept_ranges
        listing.finished, listing.seconds = now, now - run.started
        listing.has_directories = run.has_directories
        self._count_hidden(directory, run.hidden)

    @property
    def hidden_keys(self) -> int:
        """How many keys of the directories listed so far no path can name."""
        return sum(self._hidden.values())

    def _count_hidden(self, directory: Node, keys: int) -> None:
        directory.listing.hidden = keys
        if not self._tree.is_linked(directory):
            return
        key = self._tree.key(directory)
        if keys:
            self._hidden[key] = keys
        else:
            self._hidden.pop(key, None)

    def _forget_rows(self, directory: Node, run: ListingRun) -> None:
        for inode_range in run.inode_ranges - directory.listing.inode_ranges:
            self._inode_ranges.pop(inode_range, None)
        self._discard(directory.number, run.epoch)

    def on_listing_lost(self, directory: Node) -> None:
        """The directory's node was dropped: discard its rows."""
        for inode_range in directory.listing.inode_ranges:
            self._inode_ranges.pop(inode_range, None)
        self._discard(directory.number, directory.listing.epoch)

    def _on_rows_lost(self, number: int, epoch: int) -> None:
        """Rows of a listing are gone: its directory counts as not listed."""
        run, directory = self._runs.get(number), self._tree.nodes.get(number)
        if run is not None and run.epoch == epoch:
            run.progress = ""  # no name is covered; the next page fails
        elif directory is not None and directory.is_listed and directory.listing.epoch == epoch:
            self.on_listing_lost(directory)
            directory.listing.on_lost()

    def _discard(self, directory: int, epoch: int) -> None:
        self._garbage.append((directory, epoch))
        self._has_garbage.set()

    async def _list_pages(self, directory: Node, prefix: str, run: ListingRun) -> None:
        # Capacity 0: one page is fetched while the previous one is stored.
        send, receive = trio.open_memory_channel[ListPageRows](0)
        with unwrap_single_error():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._fetch, prefix, run, send, name=f"pages {prefix}")
                async with receive:
                    async for page in receive:
                        await self._store(directory, prefix, run, page)

    async def _fetch(
        self, prefix: str, run: ListingRun, send: "trio.MemorySendChannel[ListPageRows]"
    ) -> None:
        token: str | None = None
        client = self._client
        async with send:
            while True:
                asked = trio.current_time()
                page = await client.call(fetch_page, client.store, prefix, token, asked)
                token = page.token
                if token is not None and not run.is_wanted:
                    run.is_abandoned = True
                    return
                await send.send(page)
                if token is None:
                    return

    async def _store(self, directory: Node, prefix: str, run: ListingRun, page: ListPageRows) -> None:
        number = directory.number
        directory.has_marker |= page.has_marker
        rows = await self._completed(directory, prefix, page.rows, run)
        if rows:
            inode_range = self._new_inode_range(directory, rows[0].sort_name, rows[-1].sort_name)
            run.inode_ranges.add(inode_range)
            numbers = await self._client.rows(
                self._listings.put_page,
                number, run.epoch, rows, directory.listing.epoch, inode_range * INODE_RANGE,
            )  # fmt: skip
            run.used |= {each // INODE_RANGE for each in numbers}
        # No await from here on: a name published concurrently falls on one side of `progress` or the other.
        run.hidden += page.hidden
        run.has_directories |= any(row.is_directory for row in rows)
        run.progress = max(run.progress, page.end)
        run.page_times.add(run.progress, page.asked)
        run.pages += 1
        run.has_more |= page.token is not None
        for sort_name in [each for each in run.published if each <= run.progress]:
            row, moment = run.published.pop(sort_name)
            # A page requested before the publish may show the replaced version.
            if moment >= page.asked or self._listings.get(number, run.epoch, sort_name) is None:
                self._put(directory, run, row)
        self.note_hidden(directory, rows, page.asked, run.epoch)
        run.announce()

    async def _completed(
        self, directory: Node, prefix: str, rows: list[ListedEntry], asked: SharedRequest
    ) -> list[ListedEntry]:
        """Return a page's rows, with metadata for the rows that lack it, from the old listing or from a HEAD.

        Each HEAD's answer is announced like the LIST's: a bucket that answers HEADs one by one is not unresponsive.
        """
        asked.announce()
        known: dict[str, ListedEntry | None] = {}
        if directory.is_listed:
            number, epoch = directory.number, directory.listing.epoch
            with suppress(ListingLost):
                known = {
                    row.name: self._listings.get(number, epoch, row.name)
                    for row in rows
                    if lacks_metadata(row, of_all=self.has_metadata)
                }
        return await with_metadata(
            self._client, prefix, rows, known, of_all=self.has_metadata, on_answer=asked.announce
        )

    def _put(self, directory: Node, run: ListingRun, row: ListedEntry) -> None:
        self._listings.put(directory.number, run.epoch, [row])
        run.used.add(row.number // INODE_RANGE)
        run.has_directories |= row.is_directory

    def _new_inode_range(self, directory: Node, first: str, last: str) -> int:
        inode_range = self._next_inode_range
        self._next_inode_range += 1
        self._inode_ranges[inode_range] = _InodeRange(directory.number, first, last)
        return inode_range


# Pages kept fresh concurrently. At the default TTL of 1 s each costs about 1.25 LISTs a second.
PARTS_KEPT = 32
# Pages of one directory whose access frequency is recorded.
_USES_KEPT = 32
# A page younger than this share of its TTL is not kept fresh: it may have been listed for a single burst of lookups.
_YOUNG_SHARE = 0.4


@dataclass(eq=False, repr=False)
class ListingRefresher:
    """Watches lookups and keeps the pages in use fresh.

    waited_seconds: total time that callers have waited for names.
    """

    _tree: Tree
    _lister: Lister
    _client: MetadataClient
    _ttl: AttributeTtl
    _tasks: TaskNursery
    waited_seconds: float = field(init=False, default=0.0)
    _kept: set[tuple[int, str]] = field(init=False, default_factory=set)
    # Duration of the last refresh: the estimate for a page that was never measured.
    _list_seconds: float = field(init=False, default=0.1)
    # Recent waits of all callers, decayed, as of `_waited_at`.
    _waited: float = field(init=False, default=0.0)
    _waited_at: float = field(init=False, default=float("-inf"))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that a caller waits for a name or a listing."""
        began = trio.current_time()
        try:
            yield
        finally:
            seconds = trio.current_time() - began
            self.waited_seconds += seconds
            if seconds:
                self._record_wait(seconds)

    def _record_wait(self, seconds: float) -> None:
        now = trio.current_time()
        self._waited = decayed_heat(self._waited, now - self._waited_at) + seconds
        self._waited_at = now

    def on_lookup(self, directory: Node, name: str) -> bool:
        """Record a lookup; return whether lookups near it are so frequent that refreshing their page is cheaper."""
        if not directory.is_listed:
            return False
        now, listing = trio.current_time(), directory.listing
        start = listing.page_times.start_of(name)
        before = listing.uses.pop(start, None)
        if before is None and start:
            # A writer that adds files in name order comes from the previous page.
            before = listing.uses.get(listing.page_times.start_of(start))
        idle = now - before.moment if before is not None else float("inf")
        heat = 1 + (decayed_heat(before.heat, idle) if before is not None else 0.0)
        listing.uses[start] = AccessHeat(now, heat)
        if len(listing.uses) > _USES_KEPT:
            del listing.uses[next(iter(listing.uses))]
        is_hot = heat >= HEAT_OF_A_PAGE
        fresh = self._ttl.seconds(directory)
        if (is_hot or len(listing.page_times.times) == 1) and now - listing.page_times.of(
            name
        ) >= fresh * _YOUNG_SHARE:
            share = decayed_heat(self._waited, now - self._waited_at) / IN_USE_SECONDS
            if is_in_use(idle, fresh, share):
                self._keep(directory, start)
        return is_hot

    def _keep(self, directory: Node, start: str) -> None:
        part = directory.number, start
        if part in self._kept or len(self._kept) >= PARTS_KEPT:
            return
        self._kept.add(part)
        self._tasks.start_soon(
            "keep-fresh", self._keep_fresh, directory, start, about=self._tree.path(directory)
        )

    async def _keep_fresh(self, directory: Node, start: str) -> None:
        with self._tree.keep(directory):
            try:
                listing = directory.listing
                seconds = max(self._list_seconds, listing.seconds / max(1, len(listing.page_times.times)))
                began = float("-inf")
                while self._is_wanted(directory, start):
                    pause = relist_after_seconds(self._ttl.seconds(directory), seconds)
                    due = max(listing.page_times.behind(start) + pause, began + 1 / LISTS_PER_SECOND)
                    if due == float("inf"):
                        break
                    if due > trio.current_time():
                        await trio.sleep_until(due)
                        continue
                    began = trio.current_time()
                    if not await self._relist(directory, start):
                        break
                    seconds = self._list_seconds = trio.current_time() - began
            finally:
                self._kept.discard((directory.number, start))

    def _is_wanted(self, directory: Node, start: str) -> bool:
        use = directory.listing.uses.get(start)
        if use is None or trio.current_time() - use.moment > IN_USE_SECONDS:
            return False
        return directory.is_listed and self._tree.is_linked(directory) and not self._client.is_unresponsive

    async def _relist(self, directory: Node, start: str) -> bool:
        """Refresh a page, or join the request in progress; return whether it succeeded."""
        run = self._lister.current_run(directory)
        asked = run if run is not None and not start else self._lister.refresh_pages(directory, start)
        while not asked.done:
            await asked.wait()
        return asked.failure is None
