"""Lists directories in the background, page by page; readers use the pages that have arrived.

The lister also assigns inode numbers to names without a node. The rows hold the numbers, and a new listing keeps the
number of each version that did not change. Numbers come in inode ranges, each for one stretch of one directory. So a
number leads back to its row, at a memory cost of a few words per page.

Invariants:
1. One full listing of a directory runs at a time. Single pages of it may be refreshed concurrently.
2. Rows up to `ListingRun.progress` are stored. At most one page is fetched ahead of the stored ones.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import trio

from fusecache.engine.namespace.list_page import ListPageRows, fetch_page, lacks_metadata, with_metadata
from fusecache.engine.namespace.listing_state import INODE_RANGE, LAST_NAME, LISTED_NUMBERS, PageTimes
from fusecache.engine.namespace.nodes import Kind, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.by_bucket import ByBucket
from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.engine.runtime.metadata_client import MetadataClient, SharedRequest
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.index.listings import Listings
from fusecache.index.rows import ListedEntry
from fusecache.model.errors import FusecacheError, InternalError, ListingLost, LocalDiskError

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
    _clients: ByBucket[MetadataClient]
    _tasks: TaskNursery
    ahead_seconds: float = field(kw_only=True)
    has_metadata: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        # Keys in listed directories that no path can name.
        self.hidden_keys = 0
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
                if not await self._clients.of("").rows(self._listings.drop, directory, epoch):
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
        return directory.is_listed and self._clients.of(self._tree.top(directory)).is_unresponsive

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
        """See `Lookup.watch_hidden`."""
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
                client = self._clients.of(prefix)
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

    def _count_hidden(self, directory: Node, keys: int) -> None:
        self.hidden_keys += keys - directory.listing.hidden
        directory.listing.hidden = keys

    def _forget_rows(self, directory: Node, run: ListingRun) -> None:
        for inode_range in run.inode_ranges - directory.listing.inode_ranges:
            self._inode_ranges.pop(inode_range, None)
        self._discard(directory.number, run.epoch)

    def on_listing_lost(self, directory: Node) -> None:
        """The directory's node was dropped: discard its rows."""
        for inode_range in directory.listing.inode_ranges:
            self._inode_ranges.pop(inode_range, None)
        self._count_hidden(directory, 0)
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
        client = self._clients.of(prefix)
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
            numbers = await self._clients.of("").rows(
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
            self._clients.of(prefix), prefix, rows, known, of_all=self.has_metadata, on_answer=asked.announce
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
