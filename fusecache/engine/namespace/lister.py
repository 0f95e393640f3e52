"""Lists directories in the background, page by page, while names are already read from what is there.

Also gives inode numbers to names that have no node: the rows hold them, and a relisting hands on those of versions that
stayed. They come in chunks, each for one stretch of one directory, so that a number leads back to its row with nothing
in memory but a few words a page.

Invariants:
1. One listing of a directory runs at a time. A part of it may be listed again beside it.
2. Rows up to `Building.progress` are there; pages are fetched one ahead of those that are stored, no more.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from fusecache.engine.namespace.list_page import ListPageRows, fetch_page, lacks_metadata, with_metadata
from fusecache.engine.namespace.nodes import INODE_RANGE, LAST_NAME, LISTED_NUMBERS, Node, PageTimes, in_use
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.engine.runtime.metadata_client import MetadataClient, SharedRequest
from fusecache.index.listings import Listings
from fusecache.index.rows import ListedEntry
from fusecache.model.errors import FusecacheError, LocalDiskError

# A directory in which others' changes have taken so many chunks of numbers is listed whole again, which frees them.
_INODE_RANGES_USED = 256


@dataclass(eq=False, slots=True)
class ListingRun(SharedRequest):
    """A listing under way. progress: rows up to this sort name are known; marks: when their pages were asked for.

    has_more: it takes more than one page. is_wanted: somebody reads it; one that was begun ahead of a reader ends
    after its first page while nobody does. published: rows behind `progress` that this node has put into the bucket
    since. chunks: of inode numbers that were taken for it; used: those that its rows are of.
    """

    epoch: int = 0
    started: float = 0.0
    is_wanted: bool = True
    progress: str = ""
    pages: int = 0
    hidden: int = 0
    has_directories: bool = False
    has_more: bool = False
    is_given_up: bool = False
    page_times: PageTimes = field(default_factory=PageTimes)
    published: dict[str, tuple[ListedEntry, float]] = field(default_factory=dict)
    inode_ranges: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class PageRefresh(SharedRequest):
    """The names of a listed directory behind `start`, one page of them, that are asked for again at loop time `asked`.

    newer: what became known since of single names; None: gone.
    """

    start: str = ""
    asked: float = 0.0
    newer: dict[str, ListedEntry | None] = field(default_factory=dict)


class _InodeRange(NamedTuple):
    """Where the names of a chunk of inode numbers are: sort names from `first` to `last` of a directory."""

    directory: int
    first: str
    last: str


class Lister:
    """The listings of all directories: those under way, and what is left of those that are complete.

    ahead_seconds: how long one that was begun ahead is kept for who may come. has_metadata: every row has the metadata
    of its object, not only those of no bytes.
    """

    def __init__(
        self,
        tree: Tree,
        listings: Listings,
        metadata_client: MetadataClient,
        *,
        ahead_seconds: float,
        has_metadata: bool,
    ) -> None:
        self._tree = tree
        self._listings = listings
        self._metadata_client = metadata_client
        self._ahead_seconds = ahead_seconds
        self._has_metadata = has_metadata
        self._runs: dict[int, ListingRun] = {}
        self._refreshes: dict[tuple[int, str], PageRefresh] = {}
        self._inode_ranges: dict[int, _InodeRange] = {}
        self._next_inode_range = LISTED_NUMBERS // INODE_RANGE
        self._epoch = 0
        self._garbage: deque[tuple[int, int]] = deque()
        self._has_garbage = trio.Event()
        self._nursery: trio.Nursery | None = None
        tree.on_listing_lost = self._lose

    async def run(self, nursery: trio.Nursery) -> None:
        """Own the listings' tasks, and remove the rows that nobody reads any more, until cancelled."""
        self._nursery = nursery
        while True:
            await self._has_garbage.wait()
            self._has_garbage = trio.Event()
            while self._garbage:
                directory, version = self._garbage[0]
                try:
                    has_more = await self._metadata_client.rows(self._listings.drop, directory, version)
                except LocalDiskError:
                    has_more = False  # what a full disk keeps there is never looked at again
                if not has_more:
                    self._garbage.popleft()

    # ---- looking

    def current_run(self, directory: Node) -> ListingRun | None:
        """Return the directory's listing under way, or None."""
        return self._runs.get(directory.number)

    def under_way(self) -> Iterable[SharedRequest]:
        """Return all listings, and renewals of parts, that are under way."""
        return [*self._runs.values(), *self._refreshes.values()]

    def marks(self, directory: Node) -> Mapping[int, PageTimes]:
        """Return the generations of which there are rows, the complete one first, and when they were listed."""
        found: dict[int, PageTimes] = {}
        if directory.is_listed:
            found[directory.listing.epoch] = directory.listing.page_times
        run = self._runs.get(directory.number)
        if run is not None:
            found[run.epoch] = run.page_times
        return found

    def must_serve_stale(self, directory: Node) -> bool:
        """Whether an older listing must do: there is one, and the bucket does not answer. Training goes on with it."""
        return self._metadata_client.is_unresponsive and directory.is_listed

    def rows_after(self, directory: Node, sort_name: str, limit: int) -> list[ListedEntry]:
        """Return rows behind a sort name as some listing shows them, however old it is; asks nobody."""
        if directory.is_listed:
            return self._listings.scan(directory.number, directory.listing.epoch, sort_name, limit)
        run = self._runs.get(directory.number)
        if run is None:
            return []
        rows = self._listings.scan(directory.number, run.epoch, sort_name, limit)
        return [row for row in rows if row.sort_name <= run.progress]

    def row_position(self, number: int) -> tuple[Node | None, str, str]:
        """Return where the row of an inode's number is, if anywhere: a directory, the first and the last sort name."""
        chunk = self._inode_ranges.get(number // INODE_RANGE)
        if chunk is None:
            return None, "", ""
        return self._tree.nodes.get(chunk.directory), chunk.first, chunk.last

    def new_number(self, directory: Node) -> int:
        """Return an inode number for a single row of the directory."""
        listing = directory.listing
        if not listing.open_numbers:
            chunk = self._new_inode_range(directory, "", LAST_NAME)
            listing.chunks.add(chunk)
            listing.open_numbers = range(chunk * INODE_RANGE, (chunk + 1) * INODE_RANGE)
        number = listing.open_numbers[0]
        listing.open_numbers = listing.open_numbers[1:]
        return number

    # ---- what this node's own changes make known

    def on_empty(self, directory: Node) -> None:
        """A directory that was made here just now is known to be empty."""
        listing = directory.listing
        self._epoch += 1
        listing.epoch, listing.finished = self._epoch, trio.current_time()
        listing.page_times = PageTimes([LAST_NAME], [listing.finished])
        listing.has_directories = False

    def on_published(self, directory: Node, row: ListedEntry) -> None:
        """The bucket shows a name now that a listing under way may have passed, or not."""
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
        """The complete listing has other rows of a name now, which a renewal under way may not know."""
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

    # ---- a part again

    def refresh_pages(self, directory: Node, start: str) -> PageRefresh:
        """Return the renewal under way of the part of a listed directory behind `start`, begun now if there is none.

        It is one request, and what it answers is entered into the complete listing.
        """
        refresh = self._refreshes.get((directory.number, start))
        if refresh is None:
            if self._nursery is None:
                raise RuntimeError("names are not running")
            refresh = self._refreshes[directory.number, start] = PageRefresh(
                start=start, asked=trio.current_time()
            )
            self._nursery.start_soon(
                self._refresh_page, directory, refresh, name=f"list again {self._tree.path(directory)}"
            )
        return refresh

    async def _refresh_page(self, directory: Node, refresh: PageRefresh) -> None:
        is_known = directory.lookups > 0
        with in_use(directory):
            try:
                prefix = self._tree.key(directory)
                page = await self._metadata_client.call(
                    fetch_page, self._metadata_client.store, prefix, None, refresh.asked, refresh.start
                )
                await self._reenter(directory, prefix, refresh, page)
            except FusecacheError as exc:
                refresh.failure = exc
            finally:
                del self._refreshes[directory.number, refresh.start]
                refresh.end()
        if is_known:
            self._tree.forget(directory.number, 0)

    async def _reenter(self, directory: Node, prefix: str, refresh: PageRefresh, page: ListPageRows) -> None:
        listing, number = directory.listing, directory.number
        version = listing.epoch
        if not version:
            return
        start, end = refresh.start, page.end
        rows = await self._completed(directory, prefix, page.rows, refresh)
        # From here on nothing is awaited, as in `_store`.
        if listing.epoch != version or self._tree.key(directory) != prefix:
            return  # listed whole, or renamed, meanwhile
        chunk = self._new_inode_range(directory, start, end)
        try:
            numbers = self._listings.replace(number, version, start, end, rows, chunk * INODE_RANGE)
        except LocalDiskError:
            listing.expire()
            raise
        if any(each // INODE_RANGE == chunk for each in numbers):
            listing.chunks.add(chunk)
        else:
            del self._inode_ranges[chunk]
        for sort_name, row in refresh.newer.items():
            if row is not None:
                self._listings.put(number, version, [row])
            else:
                self._listings.remove(number, version, sort_name)
        directory.has_marker |= page.has_marker
        listing.has_directories |= any(row.is_directory for row in rows)
        listing.page_times.renew(start, end, refresh.asked)
        if not start and end == LAST_NAME:
            listing.finished, listing.hidden = refresh.asked, page.hidden
        if len(listing.chunks) > _INODE_RANGES_USED + len(listing.page_times.ends):
            self.start(directory)

    # ---- listing

    def start(self, directory: Node, *, ahead: bool = False) -> ListingRun:
        """Return the directory's listing under way, begun now if there is none; ahead: of any reader."""
        run = self._runs.get(directory.number)
        if run is None:
            if self._nursery is None:
                raise RuntimeError("names are not running")
            self._epoch += 1
            run = ListingRun(epoch=self._epoch, started=trio.current_time(), is_wanted=not ahead)
            self._runs[directory.number] = run
            self._nursery.start_soon(self._list, directory, run, name=f"list {self._tree.path(directory)}")
        return run

    async def _list(self, directory: Node, run: ListingRun) -> None:
        # Keeps the node, and its rows, while they are made.
        directory.handles += 1
        is_known, is_ahead = directory.lookups > 0, not run.is_wanted
        directory.listing.probes, directory.listing.probed = 0, ""
        try:
            prefix = self._tree.key(directory)
            await self._list_pages(directory, prefix, run)
            if run.is_given_up:
                self._forget_rows(directory, run)
            else:
                self._complete(directory, run)
                if self._tree.key(directory) != prefix:
                    directory.listing.expire()  # renamed meanwhile
        except FusecacheError as exc:
            run.failure = exc
            self._forget_rows(directory, run)
        finally:
            del self._runs[directory.number]
            run.end()
            if is_ahead:
                await trio.sleep(self._ahead_seconds)
            directory.handles -= 1
            if is_known or is_ahead:
                self._tree.forget(directory.number, 0)

    def _complete(self, directory: Node, run: ListingRun) -> None:
        listing = directory.listing
        if listing.epoch:
            self._discard(directory.number, listing.epoch)
        chunks = set(run.used)
        if listing.open_numbers:
            chunks.add(listing.open_numbers.start // INODE_RANGE)
        for chunk in (listing.chunks | run.inode_ranges) - chunks:
            self._inode_ranges.pop(chunk, None)
        now = trio.current_time()
        listing.epoch, listing.page_times, listing.chunks = run.epoch, run.page_times, chunks
        listing.finished, listing.seconds = now, now - run.started
        listing.hidden, listing.has_directories = run.hidden, run.has_directories

    def _forget_rows(self, directory: Node, run: ListingRun) -> None:
        for chunk in run.inode_ranges - directory.listing.chunks:
            self._inode_ranges.pop(chunk, None)
        self._discard(directory.number, run.epoch)

    def _lose(self, directory: Node) -> None:
        """Nobody knows the directory any more."""
        for chunk in directory.listing.chunks:
            self._inode_ranges.pop(chunk, None)
        self._discard(directory.number, directory.listing.epoch)

    def _discard(self, directory: int, version: int) -> None:
        self._garbage.append((directory, version))
        self._has_garbage.set()

    async def _list_pages(self, directory: Node, prefix: str, run: ListingRun) -> None:
        # Of no length: one page is fetched while one is stored.
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
        async with send:
            while True:
                asked = trio.current_time()
                page = await self._metadata_client.call(
                    fetch_page, self._metadata_client.store, prefix, token, asked
                )
                token = page.token
                if token is not None and not run.is_wanted:
                    run.is_given_up = True
                    return
                await send.send(page)
                if token is None:
                    return

    async def _store(self, directory: Node, prefix: str, run: ListingRun, page: ListPageRows) -> None:
        number = directory.number
        directory.has_marker |= page.has_marker
        rows = await self._completed(directory, prefix, page.rows, run)
        if rows:
            chunk = self._new_inode_range(directory, rows[0].sort_name, rows[-1].sort_name)
            run.inode_ranges.add(chunk)
            numbers = await self._metadata_client.rows(
                self._listings.put_page,
                number, run.epoch, rows, directory.listing.epoch, chunk * INODE_RANGE,
            )  # fmt: skip
            run.used |= {each // INODE_RANGE for each in numbers}
        # From here on nothing is awaited: what is published meanwhile falls on one side of `progress` or the other.
        run.hidden += page.hidden
        run.has_directories |= any(row.is_directory for row in rows)
        run.progress = max(run.progress, page.end)
        run.page_times.add(run.progress, page.asked)
        run.pages += 1
        run.has_more |= page.token is not None
        for sort_name in [each for each in run.published if each <= run.progress]:
            row, moment = run.published.pop(sort_name)
            # A page that was asked for before may show what it replaced.
            if moment >= page.asked or self._listings.get(number, run.epoch, sort_name) is None:
                self._put(directory, run, row)
        run.announce()

    async def _completed(
        self, directory: Node, prefix: str, rows: list[ListedEntry], asked: SharedRequest
    ) -> list[ListedEntry]:
        """Return a page's rows with what is known of those that lack metadata, or is asked now.

        A bucket that answers one HEAD after the other is not silent: each answer is announced, as that to the LIST is.
        """
        asked.announce()
        known: dict[str, ListedEntry | None] = {}
        if directory.is_listed:
            number, version = directory.number, directory.listing.epoch
            known = {
                row.name: self._listings.get(number, version, row.name)
                for row in rows
                if lacks_metadata(row, of_all=self._has_metadata)
            }
        return await with_metadata(
            self._metadata_client, prefix, rows, known, of_all=self._has_metadata, on_answer=asked.announce
        )

    def _put(self, directory: Node, run: ListingRun, row: ListedEntry) -> None:
        self._listings.put(directory.number, run.epoch, [row])
        run.used.add(row.number // INODE_RANGE)
        run.has_directories |= row.is_directory

    def _new_inode_range(self, directory: Node, first: str, last: str) -> int:
        chunk = self._next_inode_range
        self._next_inode_range += 1
        self._inode_ranges[chunk] = _InodeRange(directory.number, first, last)
        return chunk
