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

from fusecache.engine.namespace.list_page import Page, fetch_page, lacks_metadata, with_metadata
from fusecache.engine.namespace.nodes import CHUNK, LAST_NAME, LISTED_NUMBERS, Marks, Node, in_use
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.exception_groups import one_failure
from fusecache.engine.runtime.metadata_client import Asked, Requests
from fusecache.index.listings import Listings
from fusecache.index.rows import ListedEntry
from fusecache.model.errors import FusecacheError, LocalDiskError

# A directory in which others' changes have taken so many chunks of numbers is listed whole again, which frees them.
_CHUNKS_SPENT = 256


@dataclass(eq=False, slots=True)
class Building(Asked):
    """A listing under way. progress: rows up to this sort name are known; marks: when their pages were asked for.

    has_more: it takes more than one page. is_wanted: somebody reads it; one that was begun ahead of a reader ends
    after its first page while nobody does. published: rows behind `progress` that this node has put into the bucket
    since. chunks: of inode numbers that were taken for it; used: those that its rows are of.
    """

    generation: int = 0
    started: float = 0.0
    is_wanted: bool = True
    progress: str = ""
    pages: int = 0
    hidden: int = 0
    has_directories: bool = False
    has_more: bool = False
    is_given_up: bool = False
    marks: Marks = field(default_factory=Marks)
    published: dict[str, tuple[ListedEntry, float]] = field(default_factory=dict)
    chunks: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Renewal(Asked):
    """The names of a listed directory behind `start`, one page of them, that are asked for again at loop time `asked`.

    newer: what became known since of single names; None: gone.
    """

    start: str = ""
    asked: float = 0.0
    newer: dict[str, ListedEntry | None] = field(default_factory=dict)


class _Chunk(NamedTuple):
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
        self, tree: Tree, listings: Listings, requests: Requests, *, ahead_seconds: float, has_metadata: bool
    ) -> None:
        self._tree = tree
        self._listings = listings
        self._requests = requests
        self._ahead_seconds = ahead_seconds
        self._has_metadata = has_metadata
        self._building: dict[int, Building] = {}
        self._renewals: dict[tuple[int, str], Renewal] = {}
        self._chunks: dict[int, _Chunk] = {}
        self._next_chunk = LISTED_NUMBERS // CHUNK
        self._generation = 0
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
                directory, generation = self._garbage[0]
                try:
                    has_more = await self._requests.rows(self._listings.drop, directory, generation)
                except LocalDiskError:
                    has_more = False  # what a full disk keeps there is never looked at again
                if not has_more:
                    self._garbage.popleft()

    # ---- looking

    def building(self, directory: Node) -> Building | None:
        """Return the directory's listing under way, or None."""
        return self._building.get(directory.number)

    def under_way(self) -> Iterable[Asked]:
        """Return all listings, and renewals of parts, that are under way."""
        return [*self._building.values(), *self._renewals.values()]

    def marks(self, directory: Node) -> Mapping[int, Marks]:
        """Return the generations of which there are rows, the complete one first, and when they were listed."""
        found: dict[int, Marks] = {}
        if directory.is_listed:
            found[directory.listing.generation] = directory.listing.marks
        building = self._building.get(directory.number)
        if building is not None:
            found[building.generation] = building.marks
        return found

    def must_do(self, directory: Node) -> bool:
        """Whether an older listing must do: there is one, and the bucket does not answer. Training goes on with it."""
        return self._requests.is_struggling and directory.is_listed

    def rows_after(self, directory: Node, sort_name: str, limit: int) -> list[ListedEntry]:
        """Return rows behind a sort name as some listing shows them, however old it is; asks nobody."""
        if directory.is_listed:
            return self._listings.scan(directory.number, directory.listing.generation, sort_name, limit)
        building = self._building.get(directory.number)
        if building is None:
            return []
        rows = self._listings.scan(directory.number, building.generation, sort_name, limit)
        return [row for row in rows if row.sort_name <= building.progress]

    def place_of(self, number: int) -> tuple[Node | None, str, str]:
        """Return where the row of an inode's number is, if anywhere: a directory, the first and the last sort name."""
        chunk = self._chunks.get(number // CHUNK)
        if chunk is None:
            return None, "", ""
        return self._tree.nodes.get(chunk.directory), chunk.first, chunk.last

    def new_number(self, directory: Node) -> int:
        """Return an inode number for a single row of the directory."""
        listing = directory.listing
        if not listing.open_numbers:
            chunk = self._new_chunk(directory, "", LAST_NAME)
            listing.chunks.add(chunk)
            listing.open_numbers = range(chunk * CHUNK, (chunk + 1) * CHUNK)
        number = listing.open_numbers[0]
        listing.open_numbers = listing.open_numbers[1:]
        return number

    # ---- what this node's own changes make known

    def note_empty(self, directory: Node) -> None:
        """A directory that was made here just now is known to be empty."""
        listing = directory.listing
        self._generation += 1
        listing.generation, listing.finished = self._generation, trio.current_time()
        listing.marks = Marks([LAST_NAME], [listing.finished])
        listing.has_directories = False

    def note_published(self, directory: Node, row: ListedEntry) -> None:
        """The bucket shows a name now that a listing under way may have passed, or not."""
        self.note_newer(directory, [], [row])
        building = self._building.get(directory.number)
        if building is None:
            return
        if row.sort_name <= building.progress:
            self._put(directory, building, row)
        else:
            building.published[row.sort_name] = row, trio.current_time()

    def note_gone(self, directory: Node, sort_name: str) -> None:
        """The bucket no longer shows a name."""
        for renewal in self._renewals_of(directory, sort_name):
            renewal.newer[sort_name] = None
        building = self._building.get(directory.number)
        if building is not None:
            building.published.pop(sort_name, None)

    def note_newer(self, directory: Node, gone: Iterable[ListedEntry], rows: Iterable[ListedEntry]) -> None:
        """The complete listing has other rows of a name now, which a renewal under way may not know."""
        for row in gone:
            for renewal in self._renewals_of(directory, row.sort_name):
                renewal.newer[row.sort_name] = None
        for row in rows:
            for renewal in self._renewals_of(directory, row.sort_name):
                renewal.newer[row.sort_name] = row

    def _renewals_of(self, directory: Node, sort_name: str) -> list[Renewal]:
        return [
            renewal
            for (number, start), renewal in self._renewals.items()
            if number == directory.number and start < sort_name
        ]

    # ---- a part again

    def renew(self, directory: Node, start: str) -> Renewal:
        """Return the renewal under way of the part of a listed directory behind `start`, begun now if there is none.

        It is one request, and what it answers is entered into the complete listing.
        """
        renewal = self._renewals.get((directory.number, start))
        if renewal is None:
            if self._nursery is None:
                raise RuntimeError("names are not running")
            renewal = self._renewals[directory.number, start] = Renewal(
                start=start, asked=trio.current_time()
            )
            self._nursery.start_soon(
                self._renew, directory, renewal, name=f"list again {self._tree.path(directory)}"
            )
        return renewal

    async def _renew(self, directory: Node, renewal: Renewal) -> None:
        is_known = directory.lookups > 0
        with in_use(directory):
            try:
                prefix = self._tree.key(directory)
                page = await self._requests.ask(
                    fetch_page, self._requests.store, prefix, None, renewal.asked, renewal.start
                )
                await self._enter_again(directory, prefix, renewal, page)
            except FusecacheError as exc:
                renewal.failure = exc
            finally:
                del self._renewals[directory.number, renewal.start]
                renewal.end()
        if is_known:
            self._tree.forget(directory.number, 0)

    async def _enter_again(self, directory: Node, prefix: str, renewal: Renewal, page: Page) -> None:
        listing, number = directory.listing, directory.number
        generation = listing.generation
        if not generation:
            return
        start, end = renewal.start, page.end
        rows = await self._completed(directory, prefix, page.rows, renewal)
        # From here on nothing is awaited, as in `_store`.
        if listing.generation != generation or self._tree.key(directory) != prefix:
            return  # listed whole, or renamed, meanwhile
        chunk = self._new_chunk(directory, start, end)
        try:
            numbers = self._listings.replace(number, generation, start, end, rows, chunk * CHUNK)
        except LocalDiskError:
            listing.expire()
            raise
        if any(each // CHUNK == chunk for each in numbers):
            listing.chunks.add(chunk)
        else:
            del self._chunks[chunk]
        for sort_name, row in renewal.newer.items():
            if row is not None:
                self._listings.put(number, generation, [row])
            else:
                self._listings.remove(number, generation, sort_name)
        directory.has_marker |= page.has_marker
        listing.has_directories |= any(row.is_directory for row in rows)
        listing.marks.renew(start, end, renewal.asked)
        if not start and end == LAST_NAME:
            listing.finished, listing.hidden = renewal.asked, page.hidden
        if len(listing.chunks) > _CHUNKS_SPENT + len(listing.marks.ends):
            self.start(directory)

    # ---- listing

    def start(self, directory: Node, *, ahead: bool = False) -> Building:
        """Return the directory's listing under way, begun now if there is none; ahead: of any reader."""
        building = self._building.get(directory.number)
        if building is None:
            if self._nursery is None:
                raise RuntimeError("names are not running")
            self._generation += 1
            building = Building(generation=self._generation, started=trio.current_time(), is_wanted=not ahead)
            self._building[directory.number] = building
            self._nursery.start_soon(
                self._list, directory, building, name=f"list {self._tree.path(directory)}"
            )
        return building

    async def _list(self, directory: Node, building: Building) -> None:
        # Keeps the node, and its rows, while they are made.
        directory.handles += 1
        is_known, is_ahead = directory.lookups > 0, not building.is_wanted
        directory.listing.probes, directory.listing.probed = 0, ""
        try:
            prefix = self._tree.key(directory)
            await self._list_pages(directory, prefix, building)
            if building.is_given_up:
                self._forget_rows(directory, building)
            else:
                self._complete(directory, building)
                if self._tree.key(directory) != prefix:
                    directory.listing.expire()  # renamed meanwhile
        except FusecacheError as exc:
            building.failure = exc
            self._forget_rows(directory, building)
        finally:
            del self._building[directory.number]
            building.end()
            if is_ahead:
                await trio.sleep(self._ahead_seconds)
            directory.handles -= 1
            if is_known or is_ahead:
                self._tree.forget(directory.number, 0)

    def _complete(self, directory: Node, building: Building) -> None:
        listing = directory.listing
        if listing.generation:
            self._discard(directory.number, listing.generation)
        chunks = set(building.used)
        if listing.open_numbers:
            chunks.add(listing.open_numbers.start // CHUNK)
        for chunk in (listing.chunks | building.chunks) - chunks:
            self._chunks.pop(chunk, None)
        now = trio.current_time()
        listing.generation, listing.marks, listing.chunks = building.generation, building.marks, chunks
        listing.finished, listing.seconds = now, now - building.started
        listing.hidden, listing.has_directories = building.hidden, building.has_directories

    def _forget_rows(self, directory: Node, building: Building) -> None:
        for chunk in building.chunks - directory.listing.chunks:
            self._chunks.pop(chunk, None)
        self._discard(directory.number, building.generation)

    def _lose(self, directory: Node) -> None:
        """Nobody knows the directory any more."""
        for chunk in directory.listing.chunks:
            self._chunks.pop(chunk, None)
        self._discard(directory.number, directory.listing.generation)

    def _discard(self, directory: int, generation: int) -> None:
        self._garbage.append((directory, generation))
        self._has_garbage.set()

    async def _list_pages(self, directory: Node, prefix: str, building: Building) -> None:
        # Of no length: one page is fetched while one is stored.
        send, receive = trio.open_memory_channel[Page](0)
        with one_failure():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._fetch, prefix, building, send, name=f"pages {prefix}")
                async with receive:
                    async for page in receive:
                        await self._store(directory, prefix, building, page)

    async def _fetch(self, prefix: str, building: Building, send: "trio.MemorySendChannel[Page]") -> None:
        token: str | None = None
        async with send:
            while True:
                asked = trio.current_time()
                page = await self._requests.ask(fetch_page, self._requests.store, prefix, token, asked)
                token = page.token
                if token is not None and not building.is_wanted:
                    building.is_given_up = True
                    return
                await send.send(page)
                if token is None:
                    return

    async def _store(self, directory: Node, prefix: str, building: Building, page: Page) -> None:
        number = directory.number
        directory.has_marker |= page.has_marker
        rows = await self._completed(directory, prefix, page.rows, building)
        if rows:
            chunk = self._new_chunk(directory, rows[0].sort_name, rows[-1].sort_name)
            building.chunks.add(chunk)
            numbers = await self._requests.rows(
                self._listings.put_page,
                number, building.generation, rows, directory.listing.generation, chunk * CHUNK,
            )  # fmt: skip
            building.used |= {each // CHUNK for each in numbers}
        # From here on nothing is awaited: what is published meanwhile falls on one side of `progress` or the other.
        building.hidden += page.hidden
        building.has_directories |= any(row.is_directory for row in rows)
        building.progress = max(building.progress, page.end)
        building.marks.add(building.progress, page.asked)
        building.pages += 1
        building.has_more |= page.token is not None
        for sort_name in [each for each in building.published if each <= building.progress]:
            row, moment = building.published.pop(sort_name)
            # A page that was asked for before may show what it replaced.
            if moment >= page.asked or self._listings.get(number, building.generation, sort_name) is None:
                self._put(directory, building, row)
        building.announce()

    async def _completed(
        self, directory: Node, prefix: str, rows: list[ListedEntry], asked: Asked
    ) -> list[ListedEntry]:
        """Return a page's rows with what is known of those that lack metadata, or is asked now.

        A bucket that answers one HEAD after the other is not silent: each answer is announced, as that to the LIST is.
        """
        asked.announce()
        known: dict[str, ListedEntry | None] = {}
        if directory.is_listed:
            number, generation = directory.number, directory.listing.generation
            known = {
                row.name: self._listings.get(number, generation, row.name)
                for row in rows
                if lacks_metadata(row, of_all=self._has_metadata)
            }
        return await with_metadata(
            self._requests, prefix, rows, known, of_all=self._has_metadata, on_answer=asked.announce
        )

    def _put(self, directory: Node, building: Building, row: ListedEntry) -> None:
        self._listings.put(directory.number, building.generation, [row])
        building.used.add(row.number // CHUNK)
        building.has_directories |= row.is_directory

    def _new_chunk(self, directory: Node, first: str, last: str) -> int:
        chunk = self._next_chunk
        self._next_chunk += 1
        self._chunks[chunk] = _Chunk(directory.number, first, last)
        return chunk
