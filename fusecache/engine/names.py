"""Names as the bucket shows them, merged with what is only here: lookups, listings, directory reading.

Invariants:
1. A pinned node is the truth about its name; a listing never removes or replaces it.
2. One listing of a directory runs at a time; lookups and readers share it page by page.
3. A failed request is an error, never "no such file".
"""

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from fusecache.engine.groups import one_failure
from fusecache.engine.nodes import DirectoryHandle, Kind, Node
from fusecache.engine.requests import Requests
from fusecache.engine.tree import Tree
from fusecache.index.journal import Journal
from fusecache.index.listings import ListedEntry, Listings
from fusecache.model.errors import FusecacheError, LocalDiskError, NotFound, ObjectMissing
from fusecache.model.metadata import attributes_from_metadata, symlink_target
from fusecache.model.names import unusable_name
from fusecache.model.nouns import ObjectInfo
from fusecache.policy.names import is_immutable

# Zero-byte objects may be symlinks: LIST does not tell, a HEAD does; so many at once.
_HEADS_AT_ONCE = 32
_PAGE = 1000


class _Building:
    """A listing under way. progress: rows up to this sort name are known; page: set at each page and at the end."""

    def __init__(self, generation: int, started: float) -> None:
        self.generation = generation
        self.started = started
        self.progress = ""
        self.pages = 0
        self.hidden = 0
        self.done = False
        self.failure: FusecacheError | None = None
        self.page = trio.Event()

    def announce(self) -> None:
        """Wake those who wait for the next page."""
        self.page.set()
        self.page = trio.Event()


class Names:
    """Looks names up and reads directories."""

    def __init__(
        self, tree: Tree, listings: Listings, requests: Requests, journal: Journal, *, fresh_seconds: float
    ) -> None:
        self._tree = tree
        self._listings = listings
        self._requests = requests
        self._journal = journal
        self._fresh_seconds = fresh_seconds
        self._building: dict[int, _Building] = {}
        requests.on_struggle = self._wake_waiting
        self._nursery: trio.Nursery | None = None
        self.immutable: tuple[str, ...] = ()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the listings until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    # ---- lookup

    async def lookup(self, parent: Node, name: str) -> Node:
        """Return the child of that name as the bucket shows it at most `fresh_seconds` ago. Raises NotFound."""
        child = parent.children.get(name)
        if child is not None and self._is_trusted(child):
            return child
        if child is not None and child.verified == float("-inf"):
            # A request for it has failed: even a fresh listing may show the version that is no longer there.
            started = trio.current_time()
            rows = await self._probe(parent, name)
            self._correct(parent, name, rows)
        else:
            rows, started = await self._rows(parent, name)
        return self._reconcile(parent, name, rows, started)

    def fresh_seconds(self, node: Node) -> float:
        """How long what is known of the node may be believed."""
        if self.immutable and is_immutable(self._tree.path(node), self.immutable):
            return float("inf")
        return self._fresh_seconds

    def _is_trusted(self, child: Node) -> bool:
        return child.pins > 0 or _is_within(self.fresh_seconds(child), child.verified)

    def _is_fresh(self, directory: Node) -> bool:
        return _is_within(self.fresh_seconds(directory), directory.listing.started)

    async def _rows(self, parent: Node, name: str) -> tuple[list[ListedEntry], float]:
        """Return the fresh rows of a name (file, directory, both or none) and the loop time of that view."""
        if not self._is_fresh(parent):
            building = self._start_listing(parent)
            # The first page answers for most directories; a larger one is asked for this name alone.
            while not building.done and (building.pages == 0 or name + "/" <= building.progress):
                if building.pages and name + "/" <= building.progress:
                    return self._known(parent, building.generation, name), building.started
                if self._must_do(parent):
                    break
                await building.page.wait()
            if self._must_do(parent):
                return self._known(parent, parent.listing.generation, name), parent.listing.started
            if building.failure is not None:
                raise building.failure
            if not building.done:
                started = trio.current_time()
                return await self._probe(parent, name), started
        return self._known(parent, parent.listing.generation, name), parent.listing.started

    def _must_do(self, directory: Node) -> bool:
        """Whether an older listing must do: there is one, and the bucket does not answer. Training goes on with it."""
        return self._requests.is_struggling and directory.listing.generation > 0

    def _wake_waiting(self) -> None:
        for building in self._building.values():
            building.announce()

    def _known(self, directory: Node, generation: int, name: str) -> list[ListedEntry]:
        rows = (self._listings.get(directory.number, generation, sort) for sort in (name, name + "/"))
        return [row for row in rows if row is not None]

    def _correct(self, parent: Node, name: str, rows: list[ListedEntry]) -> None:
        """Enter newer rows of a name into what was listed: the node that they make may be forgotten at once."""
        for generation in self._generations(parent):
            for sort_name in (name, name + "/"):
                self._listings.remove(parent.number, generation, sort_name)
            self._listings.put(parent.number, generation, rows)

    async def _probe(self, parent: Node, name: str) -> list[ListedEntry]:
        """Ask for one name: an object of that key, and anything below it."""
        key = self._tree.child_key(parent, name)
        store = self._requests.store
        file_page = await self._requests.ask(store.list_page, key, limit=1)
        below_page = await self._requests.ask(store.list_page, key + "/", limit=1)
        rows: list[ListedEntry] = []
        if file_page.objects and file_page.objects[0].key == key:
            rows.append(_file_row(name, file_page.objects[0]))
        if below_page.objects:
            rows.append(ListedEntry(name, is_directory=True))
        return await self._with_metadata(self._tree.key(parent), rows, {})

    def _reconcile(self, parent: Node, name: str, rows: list[ListedEntry], started: float) -> Node:
        """Make the child what the rows say, unless it is known better here. Raises NotFound."""
        key = self._tree.child_key(parent, name)
        visible = [
            row for row in rows if not self._tree.is_hidden(key + ("/" if row.is_directory else ""), started)
        ]
        # A key that is also a prefix: the directory shows, as what lies in it would be lost otherwise.
        row = next((row for row in visible if row.is_directory), visible[0] if visible else None)
        child = parent.children.get(name)
        if child is not None and (child.pins > 0 or child.verified > started):
            return child
        if child is not None and (row is None or not _is_same(child, row)):
            self._tree.detach(child)
            child = None
        if row is None:
            raise NotFound(f"{key}: no such file or directory in the bucket")
        if child is None:
            if row.is_directory:
                child = self._tree.make(parent, name, Kind.DIRECTORY)
            else:
                child = self.make_file(
                    parent, ObjectInfo(key, row.etag, row.size, row.modified, row.metadata)
                )
        child.verified = max(child.verified, started)
        return child

    def make_file(self, parent: Node, version: ObjectInfo) -> Node:
        """Make the node of an object: a symlink if its metadata say so, else a file."""
        name = version.key[len(self._tree.key(parent)) :]
        attributes = self._journal.attributes(version.key, version.etag)
        if attributes is None and version.metadata is not None:
            owner = self._tree.ownership
            attributes = attributes_from_metadata(version.metadata, owner.uid, owner.gid, version.modified)
        target = symlink_target(version.metadata)
        kind = Kind.SYMLINK if target else Kind.FILE
        return self._tree.make(parent, name, kind, attributes=attributes, version=version, target=target)

    # ---- reading directories

    async def next_entries(self, handle: DirectoryHandle, limit: int) -> list[Node]:
        """Return up to `limit` further children, the bucket's in its order, then those only here; [] at the end."""
        directory = handle.node
        while handle.local_names is None:
            if nodes := await self._next_remote(handle, limit):
                return nodes
        nodes = []
        while handle.local_names and len(nodes) < limit:
            name = handle.local_names.pop(0)
            child = directory.children.get(name)
            if child is not None and self._is_only_here(handle, child):
                nodes.append(child)
        return nodes

    async def is_empty(self, directory: Node) -> bool:
        """Return whether the directory has no entry, here or in the bucket; keys without a name count too."""
        handle = DirectoryHandle(directory)
        return not await self.next_entries(handle, 1) and not directory.listing.hidden

    def is_empty_as_known(self, directory: Node) -> bool:
        """Return whether nothing is known to be in the directory; asks nobody."""
        if any(child.pins > 0 for child in directory.children.values()):
            return False
        listing = directory.listing
        prefix = self._tree.key(directory)
        return all(
            self._tree.is_hidden(prefix + row.sort_name, listing.started)
            for row in self._listings.iterate(directory.number, listing.generation)
        )

    async def _next_remote(self, handle: DirectoryHandle, limit: int) -> list[Node]:
        """Return the next nodes that rows show; sets `local_names` at the end of the rows."""
        directory = handle.node
        while True:
            building = self._listing_of(handle)
            started = building.started if building is not None else directory.listing.started
            rows = self._listings.scan(directory.number, handle.generation, handle.after, limit)
            if building is not None:
                rows = [row for row in rows if row.sort_name <= building.progress]
            if rows:
                handle.after = rows[-1].sort_name
                nodes = self._visible(directory, handle.generation, rows, started)
                if nodes:
                    return nodes
            elif building is None:
                # Names that no row shows: made here, or published since the listing began.
                handle.local_names = sorted(directory.children)
                return []
            else:
                await building.page.wait()
                if building.failure is not None:
                    raise building.failure

    def _listing_of(self, handle: DirectoryHandle) -> _Building | None:
        """Return the listing under way that the handle reads, None if it reads a complete one; begins it if needed."""
        directory = handle.node
        building = self._building.get(directory.number)
        if self._must_do(directory):
            building, handle.generation = None, directory.listing.generation
        elif handle.generation == 0 and building is None and self._is_fresh(directory):
            handle.generation = directory.listing.generation
        elif handle.generation == 0:
            building = self._start_listing(directory)
            handle.generation = building.generation
        elif building is None and handle.generation > directory.listing.generation:
            building = self._start_listing(directory)  # ours failed while nobody waited for it
            handle.generation = building.generation
        elif building is None or building.generation != handle.generation:
            # Complete by now, or a newer one took its place.
            building, handle.generation = None, directory.listing.generation
        return building

    def _visible(
        self, directory: Node, generation: int, rows: list[ListedEntry], started: float
    ) -> list[Node]:
        nodes = []
        for row in rows:
            if not row.is_directory and self._listings.get(directory.number, generation, row.name + "/"):
                continue  # its directory shows instead
            try:
                nodes.append(self._reconcile(directory, row.name, [row], started))
            except NotFound:
                continue
        return nodes

    def _is_only_here(self, handle: DirectoryHandle, child: Node) -> bool:
        """Return whether the rows that were read did not show the child, though it is there."""
        directory = handle.node
        started = directory.listing.started
        key = self._tree.child_key(directory, child.name)
        shown = [
            row
            for row in self._known(directory, handle.generation, child.name)
            if not self._tree.is_hidden(key + ("/" if row.is_directory else ""), started)
        ]
        return not shown and (child.pins > 0 or child.verified > started)

    # ---- what this node's own changes make known

    def note_made(self, directory: Node) -> None:
        """A directory that was made here just now is known to be empty."""
        listing = directory.listing
        listing.generation, listing.started = listing.generation + 1, trio.current_time()

    def note_published(self, node: Node) -> None:
        """The bucket shows the node now: enter it, and the directories above it, into what is known."""
        step = node
        while step.parent is not None:
            parent = step.parent
            if step.kind is Kind.DIRECTORY:
                row = ListedEntry(step.name, is_directory=True)
            elif step.object is not None:
                row = _file_row(step.name, step.object)
            else:
                return
            with _or_listed_again(parent):
                for generation in self._generations(parent):
                    self._listings.put(parent.number, generation, [row])
            step = parent

    def note_gone(self, parent: Node, sort_name: str) -> None:
        """The bucket no longer shows this name."""
        with _or_listed_again(parent):
            for generation in self._generations(parent):
                self._listings.remove(parent.number, generation, sort_name)

    def _generations(self, directory: Node) -> list[int]:
        generations = [directory.listing.generation] if directory.listing.generation else []
        building = self._building.get(directory.number)
        return [*generations, building.generation] if building is not None else generations

    # ---- listing

    def _start_listing(self, directory: Node) -> _Building:
        building = self._building.get(directory.number)
        if building is None:
            building = _Building(directory.listing.generation + 1, trio.current_time())
            self._building[directory.number] = building
            if self._nursery is None:
                raise RuntimeError("names are not running")
            self._nursery.start_soon(
                self._list, directory, building, name=f"list {self._tree.path(directory)}"
            )
        return building

    async def _list(self, directory: Node, building: _Building) -> None:
        directory.handles += 1  # keeps the node, and its rows, while they are made
        try:
            await self._list_pages(directory, building)
            listing = directory.listing
            if listing.generation:
                self._listings.drop(directory.number, listing.generation)
            listing.generation, listing.started = building.generation, building.started
            listing.hidden = building.hidden
        except FusecacheError as exc:
            building.failure = exc
            self._listings.drop(directory.number, building.generation)
        finally:
            directory.handles -= 1
            building.done = True
            del self._building[directory.number]
            building.page.set()

    async def _list_pages(self, directory: Node, building: _Building) -> None:
        prefix = self._tree.key(directory)
        token: str | None = None
        while True:
            page = await self._requests.ask(
                self._requests.store.list_page, prefix, delimiter="/", token=token, limit=_PAGE
            )
            rows: list[ListedEntry] = []
            for info in page.objects:
                name = info.key[len(prefix) :]
                if not name:
                    directory.has_marker = True
                elif unusable_name(name) is None:
                    rows.append(_file_row(name, info))
                else:
                    building.hidden += 1
            for common in page.prefixes:
                name = common[len(prefix) : -1]
                if unusable_name(name) is None:
                    rows.append(ListedEntry(name, is_directory=True))
                else:
                    building.hidden += 1
            known = {}
            if directory.listing.generation:
                empty = [row for row in rows if not row.is_directory and row.size == 0]
                known = {
                    row.name: self._listings.get(directory.number, directory.listing.generation, row.name)
                    for row in empty
                }
            rows = await self._with_metadata(prefix, rows, known)
            self._listings.put(directory.number, building.generation, rows)
            last = max((info.key[len(prefix) :] for info in page.objects), default="")
            building.progress = max([building.progress, last, *(p[len(prefix) :] for p in page.prefixes)])
            building.pages += 1
            building.announce()
            token = page.next_token
            if token is None:
                return

    async def _with_metadata(
        self, prefix: str, rows: list[ListedEntry], known: dict[str, ListedEntry | None]
    ) -> list[ListedEntry]:
        """Return the rows, those of zero-byte objects with metadata: from a known row of the same age, or a HEAD."""
        limiter = trio.CapacityLimiter(_HEADS_AT_ONCE)
        full = dict(enumerate(rows))

        async def head(index: int, row: ListedEntry) -> None:
            async with limiter:
                try:
                    info = await self._requests.ask(self._requests.store.head, prefix + row.name)
                    full[index] = _file_row(row.name, info)
                except ObjectMissing:
                    del full[index]

        with one_failure():
            async with trio.open_nursery() as nursery:
                for index, row in enumerate(rows):
                    if row.is_directory or row.size or row.metadata is not None:
                        continue
                    old = known.get(row.name)
                    if old is not None and (old.etag, old.modified) == (row.etag, row.modified):
                        full[index] = old
                    else:
                        nursery.start_soon(head, index, row, name=f"head {prefix}{row.name}")
        return [full[index] for index in sorted(full)]


def _is_within(seconds: float, moment: float) -> bool:
    """Return whether a moment of the loop's time is at most `seconds` (inf: any) ago; -inf was never."""
    return moment > float("-inf") and trio.current_time() - moment <= seconds


@contextmanager
def _or_listed_again(directory: Node) -> Iterator[None]:
    """Where the disk does not take a row, the directory counts as not listed."""
    try:
        yield
    except LocalDiskError:
        directory.listing.started = float("-inf")


def _file_row(name: str, info: ObjectInfo) -> ListedEntry:
    return ListedEntry(
        name,
        is_directory=False,
        size=info.size,
        etag=info.etag,
        modified=info.modified,
        metadata=info.metadata,
    )


def _is_same(child: Node, row: ListedEntry) -> bool:
    if row.is_directory:
        return child.kind is Kind.DIRECTORY
    if child.kind is Kind.DIRECTORY or child.object is None:
        return False
    if child.kind is Kind.SYMLINK:
        return symlink_target(row.metadata) == child.target
    return child.object.etag == row.etag and not symlink_target(row.metadata)
