"""Lists directories in the background, page by page, while names are already read from what is there.

Also gives inode numbers to names that have no node: the rows hold them, and a relisting hands on those of versions that
stayed. They come in chunks, each for one stretch of one directory, so that a number leads back to its row with nothing
in memory but a few words a page.

Invariants:
1. One listing of a directory runs at a time.
2. Rows up to `Building.progress` are there; pages are fetched one ahead of those that are stored, no more.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from fusecache.engine.groups import one_failure
from fusecache.engine.nodes import CHUNK, LISTED_NUMBERS, Marks, Node
from fusecache.engine.requests import Asked, Requests
from fusecache.engine.tree import Tree
from fusecache.index.listings import ListedEntry, Listings
from fusecache.model.errors import FusecacheError, LocalDiskError, ObjectMissing
from fusecache.model.names import unusable_name
from fusecache.model.nouns import ObjectInfo
from fusecache.remote.store import Store

# Zero-byte objects may be symlinks: LIST does not tell, a HEAD does; so many at once.
_HEADS_AT_ONCE = 32
_PAGE = 1000
_LAST_NAME = "\U0010ffff"


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
    published: dict[str, ListedEntry] = field(default_factory=dict)
    chunks: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)


class _Page(NamedTuple):
    """One page of LIST as rows. end: the last sort name in it, hidden ones included; token: of the next page."""

    asked: float
    rows: list[ListedEntry]
    hidden: int
    has_marker: bool
    end: str
    token: str | None


class _Chunk(NamedTuple):
    """Where the names of a chunk of inode numbers are: sort names from `first` to `last` of a directory."""

    directory: int
    first: str
    last: str


class Lister:
    """The listings of all directories: those under way, and what is left of those that are complete.

    ahead_seconds: how long one that was begun ahead is kept for who may come.
    """

    def __init__(self, tree: Tree, listings: Listings, requests: Requests, *, ahead_seconds: float) -> None:
        self._tree = tree
        self._listings = listings
        self._requests = requests
        self._ahead_seconds = ahead_seconds
        self._building: dict[int, Building] = {}
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

    def buildings(self) -> Iterable[Building]:
        """Return all listings under way."""
        return list(self._building.values())

    def marks(self, directory: Node) -> Mapping[int, Marks]:
        """Return the generations of which there are rows, the complete one first, and when they were listed."""
        found: dict[int, Marks] = {}
        if directory.is_listed:
            found[directory.listing.generation] = directory.listing.marks
        building = self._building.get(directory.number)
        if building is not None:
            found[building.generation] = building.marks
        return found

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
            chunk = self._new_chunk(directory, "", _LAST_NAME)
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
        listing.marks = Marks([_LAST_NAME], [listing.finished])
        listing.has_directories = False

    def note_published(self, directory: Node, row: ListedEntry) -> None:
        """The bucket shows a name now that a listing under way may have passed, or not."""
        building = self._building.get(directory.number)
        if building is None:
            return
        if row.sort_name <= building.progress:
            self._put(directory, building, row)
        else:
            building.published[row.sort_name] = row

    def note_gone(self, directory: Node, sort_name: str) -> None:
        """The bucket no longer shows a name."""
        building = self._building.get(directory.number)
        if building is not None:
            building.published.pop(sort_name, None)

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
        # Names behind the last page, published until this moment: after its last page was stored a listing still ends.
        for row in building.published.values():
            self._put(directory, building, row)
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
        send, receive = trio.open_memory_channel[_Page](0)
        with one_failure():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._fetch, prefix, building, send, name=f"pages {prefix}")
                async with receive:
                    async for page in receive:
                        await self._store(directory, prefix, building, page)

    async def _fetch(self, prefix: str, building: Building, send: "trio.MemorySendChannel[_Page]") -> None:
        token: str | None = None
        async with send:
            while True:
                asked = trio.current_time()
                page = await self._requests.ask(_fetch_page, self._requests.store, prefix, token, asked)
                await send.send(page)
                token = page.token
                if token is None:
                    return
                if not building.is_wanted:
                    building.is_given_up = True
                    return

    async def _store(self, directory: Node, prefix: str, building: Building, page: _Page) -> None:
        rows, number = page.rows, directory.number
        directory.has_marker |= page.has_marker
        known = {}
        if directory.is_listed:
            generation = directory.listing.generation
            empty = [row.name for row in rows if not row.is_directory and row.size == 0]
            known = {name: self._listings.get(number, generation, name) for name in empty}
        rows = await with_metadata(self._requests, prefix, rows, known)
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
            row = building.published.pop(sort_name)
            if self._listings.get(number, building.generation, sort_name) is None:
                self._put(directory, building, row)
        building.announce()

    def _put(self, directory: Node, building: Building, row: ListedEntry) -> None:
        self._listings.put(directory.number, building.generation, [row])
        building.used.add(row.number // CHUNK)
        building.has_directories |= row.is_directory

    def _new_chunk(self, directory: Node, first: str, last: str) -> int:
        chunk = self._next_chunk
        self._next_chunk += 1
        self._chunks[chunk] = _Chunk(directory.number, first, last)
        return chunk


def file_row(name: str, info: ObjectInfo) -> ListedEntry:
    """Return the row of an object."""
    return ListedEntry(name, False, info.size, info.etag, info.modified, info.metadata)  # noqa: FBT003 (a million times)


async def with_metadata(
    requests: Requests, prefix: str, rows: list[ListedEntry], known: Mapping[str, ListedEntry | None]
) -> list[ListedEntry]:
    """Return the rows, those of zero-byte objects with metadata: from a known row of the same age, or a HEAD."""
    empty = [
        index
        for index, row in enumerate(rows)
        if not row.size and not row.is_directory and row.metadata is None
    ]
    if not empty:
        return rows
    limiter = trio.CapacityLimiter(_HEADS_AT_ONCE)
    full = dict(enumerate(rows))

    async def head(index: int, row: ListedEntry) -> None:
        async with limiter:
            try:
                info = await requests.ask(requests.store.head, prefix + row.name)
                full[index] = file_row(row.name, info)
            except ObjectMissing:
                del full[index]

    with one_failure():
        async with trio.open_nursery() as nursery:
            for index in empty:
                row = rows[index]
                old = known.get(row.name)
                if old is not None and (old.etag, old.modified) == (row.etag, row.modified):
                    full[index] = old
                else:
                    nursery.start_soon(head, index, row, name=f"head {prefix}{row.name}")
    return [full[index] for index in sorted(full)]


def _fetch_page(store: Store, prefix: str, token: str | None, asked: float) -> _Page:
    """Ask for a page and make rows of it (in a thread)."""
    page = store.list_page(prefix, delimiter="/", token=token, limit=_PAGE)
    start = len(prefix)
    rows: list[ListedEntry] = []
    hidden, has_marker, end = 0, False, ""
    for info in page.objects:
        name = info.key[start:]
        if not name:
            has_marker = True
        elif unusable_name(name) is None:
            rows.append(file_row(name, info))
        else:
            hidden += 1
    for common in page.prefixes:
        name = common[start:-1]
        if unusable_name(name) is None:
            rows.append(ListedEntry(name, True))  # noqa: FBT003 (perhaps a million times)
        else:
            hidden += 1
    for last in (*(info.key for info in page.objects[-1:]), *page.prefixes[-1:]):
        end = max(end, last[start:])
    rows.sort(key=_sort_name)
    return _Page(asked, rows, hidden, has_marker, end, page.next_token)


def _sort_name(row: ListedEntry) -> str:
    return row.name + "/" if row.is_directory else row.name
