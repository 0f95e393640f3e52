"""Names as the bucket shows them, merged with what is only here: lookups and directory reading.

Invariants:
1. A pinned node is the truth about its name; a listing never removes or replaces it.
2. Nobody waits for a whole listing, only for the page that answers him.
3. A failed request is an error, never "no such file".
4. A name that was only listed has no node: its inode number is found again in the listing's row.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import trio

from fusecache.engine.listing import Building, Lister, file_row
from fusecache.engine.nodes import LISTED_NUMBERS, DirectoryHandle, Kind, Listed, Node, Shown, in_use
from fusecache.engine.probing import Probe, ask_for_name
from fusecache.engine.requests import Requests
from fusecache.engine.tree import Tree
from fusecache.index.journal import Journal
from fusecache.index.listings import ListedEntry, Listings
from fusecache.model.errors import LocalDiskError, NotFound
from fusecache.model.metadata import attributes_from_metadata, symlink_target
from fusecache.model.nouns import ObjectInfo
from fusecache.model.records import PosixAttributes
from fusecache.policy.names import is_immutable, listing_pays

# Nodes that the kernel knows and nobody uses: beyond so many (of about 1 KB each) the longest unused make room.
NODES_KEPT = 50_000
_NODES_LOOKED_AT = 16
# Directories that are listed before somebody who walks from one to the next comes to them, and the rows that are
# searched for them.
_DIRECTORIES_AHEAD = 8
_ROWS_AHEAD = 64


class _View(NamedTuple):
    """What all names of a directory have in common. file, directory: attributes, but for the time of files."""

    prefix: str
    file: PosixAttributes
    directory: PosixAttributes
    has_attributes: bool


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
        self._lister = Lister(tree, listings, requests, ahead_seconds=max(10.0, fresh_seconds))
        self._probes: dict[tuple[int, str], Probe] = {}
        requests.on_struggle = self._wake_waiting
        self._nursery: trio.Nursery | None = None
        self.immutable: tuple[str, ...] = ()
        # Summed over all who asked; a listing that nobody waits for does not count.
        self.waited_seconds = 0.0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the listings until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._lister.run, nursery, name="rows nobody reads")
            await trio.lowlevel.checkpoint()
            task_status.started()
            await trio.sleep_forever()

    # ---- lookup

    async def lookup(self, parent: Node, name: str) -> Node:
        """Return the child of that name as the bucket shows it at most `fresh_seconds` ago. Raises NotFound."""
        child = parent.children.get(name)
        if child is not None and self.is_trusted(child):
            return child
        with self._waiting():
            if child is not None and child.verified == float("-inf"):
                # A request for it has failed: even a fresh listing may show the version that is no longer there.
                rows, seen = await self._probed(parent, name, must_answer=True)
            else:
                rows, seen = await self._rows(parent, name)
        node = self._reconcile(parent, name, rows, seen)
        self._make_room()
        return node

    def glance(self, parent: Node, name: str) -> Node | None:
        """Return a file as an older listing shows it, where only a request of its own would tell more; None elsewhere.

        Asks nobody. The kernel looks the names of one directory up one after the other (libfuse 3.14 does not tell it
        that they may overlap): if each of them waited for the bucket, many readers of a large directory were as slow
        as one. `is_trusted` says whether the node must be looked up again before it is opened or shown.
        """
        child = parent.children.get(name)
        if child is not None and (child.handles or child.verified == float("-inf") or self.is_trusted(child)):
            return None
        marks = self._lister.marks(parent)
        generation = max(self._covering(parent, name), default=0)
        # One page is listed again for all who ask, at the cost of one of them.
        if generation == 0 or len(marks[generation].times) < 2:
            return None
        rows = self._known(parent, generation, name)
        if len(rows) != 1 or rows[0].is_directory or symlink_target(rows[0].metadata):
            return None
        try:
            node = self._reconcile(parent, name, rows, marks[generation].of(name))
        except NotFound:
            return None
        self._make_room()
        return node

    def recall(self, number: int) -> Node | None:
        """Return the node of an inode that the kernel knows, made again from a listing's row if need be, or None."""
        node = self._tree.nodes.get(number)
        if node is None and number >= LISTED_NUMBERS:
            node = self._recalled(number)
            self._make_room()
        if node is not None and not node.lookups:
            node.lookups = 1
        return node

    def fresh_seconds(self, node: Node) -> float:
        """How long what is known of the node may be believed."""
        if self.immutable and is_immutable(self._tree.path(node), self.immutable):
            return float("inf")
        return self._fresh_seconds

    def fresh_seconds_below(self, directory: Node, name: str) -> float:
        """How long what is known of a child may be believed."""
        if self.immutable:
            path = f"{self._tree.path(directory)}/{name}".removeprefix("./")
            if is_immutable(path, self.immutable):
                return float("inf")
        return self._fresh_seconds

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count what somebody waits for a name or a listing."""
        began = trio.current_time()
        try:
            yield
        finally:
            self.waited_seconds += trio.current_time() - began

    def is_trusted(self, child: Node) -> bool:
        """Return whether what is known of a node is recent enough, or better than what the bucket shows."""
        return child.pins > 0 or _is_within(self.fresh_seconds(child), child.verified)

    def _is_fresh(self, directory: Node) -> bool:
        return _is_within(self.fresh_seconds(directory), directory.listing.finished)

    async def _rows(self, parent: Node, name: str) -> tuple[list[ListedEntry], float]:
        """Return the fresh rows of a name (file, directory, both or none) and the loop time of that view."""
        began = trio.current_time()
        known = self._fresh_rows(parent, name, began)
        if known is not None:
            return known
        if self._must_do(parent):
            if not self._probes:
                self._start_probe(parent, name)  # shows when the bucket answers again
            return self._last_rows(parent, name)
        listing = parent.listing
        idle_seconds = trio.current_time() - listing.finished
        if self._lister.building(parent) is None and listing_pays(
            listing.probes, len(listing.marks.times), listing.seconds, idle_seconds
        ):
            self._lister.start(parent)
        building = self._lister.building(parent)
        if building is not None:
            # The first page answers for most directories; in a larger one this name alone is asked for.
            building.is_wanted = True
            while building.pages == 0 and not building.done:
                await building.wait()
                if self._must_do(parent):
                    return self._last_rows(parent, name)
            if building.failure is not None:
                raise building.failure
            known = self._fresh_rows(parent, name, began)
            if known is not None:
                return known
        return await self._probed(parent, name, must_answer=False)

    def _fresh_rows(self, parent: Node, name: str, began: float) -> tuple[list[ListedEntry], float] | None:
        """Return what a listing says of a name, if it asked a moment ago, or since the loop time `began`."""
        below = name + "/"
        building = self._lister.building(parent)
        for generation, marks in reversed(list(self._lister.marks(parent).items())):
            if building is not None and generation == building.generation and below > building.progress:
                continue
            rows = self._known(parent, generation, name)
            seen = min(marks.of(name), marks.of(below))
            if seen >= began or self._is_fresh_child(parent, name, rows, seen):
                return rows, seen
        return None

    def _is_fresh_child(self, parent: Node, name: str, rows: list[ListedEntry], seen: float) -> bool:
        seconds = self.fresh_seconds(parent)
        return _is_within(self.fresh_seconds_below(parent, name) if rows else seconds, seen)

    def _last_rows(self, parent: Node, name: str) -> tuple[list[ListedEntry], float]:
        listing = parent.listing
        return self._known(parent, listing.generation, name), listing.marks.of(name)

    def _must_do(self, directory: Node) -> bool:
        """Whether an older listing must do: there is one, and the bucket does not answer. Training goes on with it."""
        return self._requests.is_struggling and directory.is_listed

    def _wake_waiting(self) -> None:
        for waited in (*self._lister.buildings(), *self._probes.values()):
            waited.announce()

    def _known(self, directory: Node, generation: int, name: str) -> list[ListedEntry]:
        rows = (self._listings.get(directory.number, generation, sort) for sort in (name, name + "/"))
        return [row for row in rows if row is not None]

    def rows_after(self, directory: Node, sort_name: str, limit: int) -> list[ListedEntry]:
        """Return rows behind a sort name as some listing shows them, however old it is; asks nobody."""
        building = self._lister.building(directory)
        if directory.is_listed:
            return self._listings.scan(directory.number, directory.listing.generation, sort_name, limit)
        if building is None:
            return []
        rows = self._listings.scan(directory.number, building.generation, sort_name, limit)
        return [row for row in rows if row.sort_name <= building.progress]

    async def _probed(self, parent: Node, name: str, *, must_answer: bool) -> tuple[list[ListedEntry], float]:
        """Ask the bucket for one name; an older listing will do while it does not answer, unless it `must_answer`."""
        probe = self._start_probe(parent, name)
        while not probe.done:
            if not must_answer and self._must_do(parent):
                return self._last_rows(parent, name)
            await probe.wait()
        if probe.failure is not None:
            raise probe.failure
        return probe.rows, probe.asked

    def _start_probe(self, parent: Node, name: str) -> Probe:
        probe = self._probes.get((parent.number, name))
        if probe is None:
            if self._nursery is None:
                raise RuntimeError("names are not running")
            key = self._tree.child_key(parent, name)
            probe = self._probes[parent.number, name] = Probe(asked=trio.current_time())
            self._nursery.start_soon(self._probe, parent, key, name, probe, name=f"probe {key}")
            listing = parent.listing
            if name != listing.probed:
                listing.probed, listing.probes = name, listing.probes + 1
        return probe

    async def _probe(self, parent: Node, key: str, name: str, probe: Probe) -> None:
        with in_use(parent):
            await ask_for_name(self._requests, key, name, probe)
            if probe.failure is None:
                self._correct(parent, name, probe)
            del self._probes[parent.number, name]
            probe.end()

    def _correct(self, parent: Node, name: str, probe: Probe) -> None:
        """Enter newer rows of a name into what was listed: the node that they make may be forgotten at once."""
        generations = self._covering(parent, name)
        for generation in generations:
            old = self._known(parent, generation, name)
            if [row._replace(number=0) for row in old] != probe.rows:
                with _or_listed_again(parent):
                    for row in old:
                        self._listings.remove(parent.number, generation, row.sort_name)
                    numbered = [row._replace(number=self._lister.new_number(parent)) for row in probe.rows]
                    self._listings.put(parent.number, generation, numbered)
                    parent.listing.has_directories |= any(row.is_directory for row in numbered)
        # With the inode's number that a listing gives this version.
        for generation in generations:
            probe.rows = self._known(parent, generation, name)

    def _covering(self, parent: Node, name: str) -> list[int]:
        """Return the generations that show the name if it is there: a listing under way only up to its progress."""
        building = self._lister.building(parent)
        return [
            generation
            for generation in self._lister.marks(parent)
            if building is None or generation != building.generation or name + "/" <= building.progress
        ]

    # ---- from rows to nodes

    def _reconcile(self, parent: Node, name: str, rows: list[ListedEntry], seen: float) -> Node:
        """Make the child what the rows say, unless it is known better here. Raises NotFound."""
        key = self._tree.child_key(parent, name)
        visible = [
            row for row in rows if not self._tree.is_hidden(key + ("/" if row.is_directory else ""), seen)
        ]
        # A key that is also a prefix: the directory shows, as what lies in it would be lost otherwise.
        row = next((row for row in visible if row.is_directory), visible[0] if visible else None)
        child = parent.children.get(name)
        if child is not None and (child.pins > 0 or child.verified > seen):
            return child
        if child is not None and (row is None or not _is_same(child, row)):
            self._tree.detach(child)
            child = None
        if row is None:
            raise NotFound(f"{key}: no such file or directory in the bucket")
        if child is None:
            if row.is_directory:
                attributes = self._directory_attributes()
                child = self._tree.make(
                    parent, name, Kind.DIRECTORY, attributes=attributes, number=row.number
                )
            else:
                version = ObjectInfo(key, row.etag, row.size, row.modified, row.metadata)
                child = self.make_file(parent, version, row.number)
        child.verified = max(child.verified, seen)
        return child

    def make_file(self, parent: Node, version: ObjectInfo, number: int = 0) -> Node:
        """Make the node of an object: a symlink if its metadata say so, else a file."""
        name = version.key[len(self._tree.key(parent)) :]
        attributes = self._journal.attributes(version.key, version.etag)
        if attributes is None and version.metadata is not None:
            owner = self._tree.ownership
            attributes = attributes_from_metadata(version.metadata, owner.uid, owner.gid, version.modified)
        target = symlink_target(version.metadata)
        kind = Kind.SYMLINK if target else Kind.FILE
        return self._tree.make(
            parent, name, kind, attributes=attributes, version=version, target=target, number=number
        )

    def _directory_attributes(self) -> PosixAttributes:
        # The bucket knows no time of a directory; one that stays the same will do.
        return self._tree.default_attributes(Kind.DIRECTORY, self._tree.root.mtime_ns / 1e9)

    def _recalled(self, number: int) -> Node | None:
        """Make the node of an inode that only a row tells of; None if no row does any more."""
        directory, first, last = self._lister.place_of(number)
        if directory is None or not self._tree.is_linked(directory):
            return None
        marks = self._lister.marks(directory)
        for generation, marked in reversed(list(marks.items())):
            row = self._listings.find_number(directory.number, generation, number, first, last)
            if row is not None:
                try:
                    node = self._reconcile(directory, row.name, [row], marked.of(row.sort_name))
                except NotFound:
                    return None
                return node if node.number == number else None
        return None

    def _make_room(self) -> None:
        """Drop nodes that nobody uses and that can be made again, the longest unused first."""
        if len(self._tree.nodes) <= NODES_KEPT:
            return
        for node in self._tree.oldest(_NODES_LOOKED_AT):
            if self._can_be_recalled(node):
                self._tree.park(node)

    def _can_be_recalled(self, node: Node) -> bool:
        parent = node.parent
        if node.number < LISTED_NUMBERS or node.kind is Kind.DIRECTORY or parent is None:
            return False
        if node.handles or node.pins or node.generation is not None or node.writers:
            return False
        directory, first, last = self._lister.place_of(node.number)
        if directory is not parent or not first <= node.name <= last or not self._tree.is_linked(parent):
            return False
        row = (
            self._listings.get(parent.number, parent.listing.generation, node.name)
            if parent.is_listed
            else None
        )
        return row is not None and row.number == node.number and _is_same(node, row)

    # ---- reading directories

    async def next_entries(self, handle: DirectoryHandle, limit: int) -> list[Shown]:
        """Return up to `limit` further names, the bucket's in its order, then those only here; [] at the end."""
        directory = handle.node
        if handle.generation == 0:
            self._walk_ahead(handle)
            if directory.pins:
                handle.pinned = {name for name, child in directory.children.items() if child.pins}
        while handle.local_names is None:
            with self._waiting():
                shown = await self._next_remote(handle, limit)
            if shown:
                return shown
        nodes: list[Shown] = []
        while handle.local_names and len(nodes) < limit:
            name = handle.local_names.pop(0)
            child = directory.children.get(name)
            # What was published meanwhile has a row now, perhaps behind the place that the reader had reached.
            if name in handle.pinned:
                child = child or self._published_since(handle, name)
            elif child is not None and not self._is_only_here(handle, child):
                continue
            if child is not None:
                nodes.append(child)
        return nodes

    def _published_since(self, handle: DirectoryHandle, name: str) -> Node | None:
        """Return what a name stands for whose node nobody needed any more once it was published."""
        directory = handle.node
        listing = directory.listing
        for generation in {handle.generation, listing.generation}:
            rows = self._known(directory, generation, name)
            if rows:
                with suppress(NotFound):
                    return self._reconcile(directory, name, rows, listing.marks.of(name))
        return None

    def current(self, directory: Node, shown: Shown) -> Shown | None:
        """Return what shows under that name now, some time after `next_entries` gave it; None: nothing."""
        child = directory.children.get(shown.name)
        if child is not None:
            return child
        if isinstance(shown, Node):
            return None
        if self._tree.hides_keys:
            key = self._tree.key(directory) + shown.name + ("/" if shown.kind is Kind.DIRECTORY else "")
            return None if self._tree.is_hidden(key, shown.seen) else shown
        return shown

    async def is_empty(self, directory: Node) -> bool:
        """Return whether the directory has no entry, here or in the bucket; keys without a name count too."""
        handle = DirectoryHandle(directory)
        return not await self.next_entries(handle, 1) and not directory.listing.hidden

    async def look_into(self, directory: Node) -> None:
        """Have something to say of what a directory holds, and whether it has a marker, unless the bucket is silent."""
        if directory.is_listed or directory.has_marker or self._requests.is_struggling:
            return
        building = self._lister.start(directory)
        while not building.done and not building.has_more and not self._requests.is_struggling:
            await building.wait()

    def is_empty_as_known(self, directory: Node) -> bool:
        """Return whether nothing is known to be in the directory; asks nobody."""
        if any(child.pins > 0 for child in directory.children.values()):
            return False
        prefix = self._tree.key(directory)
        if self._lister.building(directory) is not None and not directory.is_listed:
            return False  # of one page it would be complete
        listing = directory.listing
        return all(
            self._tree.is_hidden(prefix + row.sort_name, listing.marks.of(row.sort_name))
            for row in self._listings.iterate(directory.number, listing.generation)
        )

    async def _next_remote(self, handle: DirectoryHandle, limit: int) -> list[Shown]:
        """Return the next names that rows show; sets `local_names` at the end of the rows."""
        directory = handle.node
        while True:
            building = self._listing_of(handle)
            rows = self._listings.scan(directory.number, handle.generation, handle.after, limit)
            if building is not None:
                rows = [row for row in rows if row.sort_name <= building.progress]
            if rows:
                handle.after = rows[-1].sort_name
                shown = self._visible(handle, rows, building)
                if shown:
                    return shown
            elif building is None:
                # Names that no row shows: made here, or published since the listing began.
                handle.local_names = sorted({*directory.children, *handle.pinned})
                return []
            else:
                await building.wait()
                if building.failure is not None and not self._must_do(directory):
                    raise building.failure

    def _listing_of(self, handle: DirectoryHandle) -> Building | None:
        """Return the listing under way that the handle reads, None if it reads a complete one; begins it if needed."""
        directory = handle.node
        building = self._lister.building(directory)
        if self._must_do(directory):
            building, handle.generation = None, directory.listing.generation
        elif handle.generation == 0 and building is None and self._is_fresh(directory):
            handle.generation = directory.listing.generation
        elif handle.generation == 0 or (
            building is None and handle.generation > directory.listing.generation
        ):
            building = self._lister.start(directory)  # or ours failed while nobody waited for it
            handle.generation = building.generation
        elif building is None or building.generation != handle.generation:
            # Complete by now, or a newer one took its place.
            building, handle.generation = None, directory.listing.generation
        if building is not None:
            building.is_wanted = True
        return building

    def _visible(
        self, handle: DirectoryHandle, rows: list[ListedEntry], building: Building | None
    ) -> list[Shown]:
        """Return what rows show: nodes where there are any, else the names as they are listed."""
        directory = handle.node
        marks = building.marks if building is not None else directory.listing.marks
        view = _View(
            self._tree.key(directory),
            self._tree.default_attributes(Kind.FILE, 0.0),
            self._directory_attributes(),
            has_attributes=self._journal.has_attributes,
        )
        children, nodes, hides_keys = directory.children, self._tree.nodes, self._tree.hides_keys
        page_end, seen = "", float("-inf")
        shown: list[Shown] = []
        for row in rows:
            name = row.name
            if row.is_directory and name in handle.early:
                handle.early.remove(name)
                continue
            if not row.is_directory and self._is_behind_directory(handle, name, building):
                continue  # its directory shows instead
            handle.pinned.discard(name)
            if name > page_end:
                page_end, seen = marks.page_of(row.sort_name)
            is_hidden = hides_keys and self._tree.is_hidden(view.prefix + row.sort_name, seen)
            if row.number and name not in children and row.number not in nodes and not is_hidden:
                shown.append(self._listed(view, row, seen))
                continue
            try:
                shown.append(self._reconcile(directory, name, [row], seen))
            except NotFound:
                continue
        return shown

    def _is_behind_directory(self, handle: DirectoryHandle, name: str, building: Building | None) -> bool:
        """Return whether a directory has the file's name; where that is not known yet, note that the file was shown."""
        below = name + "/"
        if building is not None and below > building.progress:
            # Of names that all begin alike: at most as many as the last one has characters.
            handle.early = [early for early in handle.early if early + "/" > name]
            handle.early.append(name)
            return False
        directory = handle.node
        if not (building or directory.listing).has_directories:
            return False
        return self._listings.get(directory.number, handle.generation, below) is not None

    def _listed(self, view: "_View", row: ListedEntry, seen: float) -> Listed:
        own: PosixAttributes | None = None
        if row.is_directory:
            kind, target, own = Kind.DIRECTORY, "", view.directory
        else:
            target = symlink_target(row.metadata) if row.metadata else ""
            kind = Kind.SYMLINK if target else Kind.FILE
            if view.has_attributes:
                own = self._journal.attributes(view.prefix + row.name, row.etag)
            if own is None and row.metadata is not None:
                owner = self._tree.ownership
                own = attributes_from_metadata(row.metadata, owner.uid, owner.gid, row.modified)
                if own is None and target:
                    own = self._tree.default_attributes(kind, row.modified)
        mtime_ns = int(row.modified * 1e9) if own is None else own.mtime_ns
        own = own or view.file
        size = len(target.encode()) if target else row.size
        return Listed(row.number, kind, row.name, own.mode, own.uid, own.gid, mtime_ns, size, target, seen)

    def _is_only_here(self, handle: DirectoryHandle, child: Node) -> bool:
        """Return whether the rows that were read did not show the child, though it is there."""
        directory = handle.node
        seen = directory.listing.marks.of(child.name)
        if not child.pins and child.verified <= seen:
            return False
        key = self._tree.child_key(directory, child.name)
        shown = [
            row
            for row in self._known(directory, handle.generation, child.name)
            if not self._tree.is_hidden(key + ("/" if row.is_directory else ""), seen)
        ]
        return not shown

    def _walk_ahead(self, handle: DirectoryHandle) -> None:
        """List the next directories for somebody who reads one after the other, as `find` does."""
        directory = handle.node
        parent = directory.parent
        directory.listing.walker, directory.listing.walked = handle.process, ""
        if parent is None or not handle.process:
            return
        # From the parent through all its children from the first on: others may come upon neighbours by chance, and
        # want what is there then.
        listing = parent.listing
        if listing.walker != handle.process:
            return
        if not self._follows(parent, listing.walked, directory.name):
            listing.walker = 0
            return
        listing.walked = directory.name
        marks = self._lister.marks(parent)
        ahead = 0
        for row in self.rows_after(parent, directory.name + "/", _ROWS_AHEAD):
            if not row.is_directory or ahead == _DIRECTORIES_AHEAD or self._requests.is_struggling:
                continue
            ahead += 1
            try:
                child = self._reconcile(parent, row.name, [row], next(iter(marks.values())).of(row.sort_name))
            except NotFound:
                continue
            if child.kind is Kind.DIRECTORY and not child.pins and not self._is_fresh(child):
                self._lister.start(child, ahead=True)

    def _follows(self, parent: Node, before: str, name: str) -> bool:
        rows = self.rows_after(parent, before and before + "/", _ROWS_AHEAD)
        return next((row.name for row in rows if row.is_directory), None) == name

    # ---- what this node's own changes make known

    def note_made(self, directory: Node) -> None:
        """A directory that was made here just now is known to be empty."""
        self._lister.note_empty(directory)

    def note_published(self, node: Node) -> None:
        """The bucket shows the node now: enter it, and the directories above it, into what is known."""
        step = node
        while step.parent is not None:
            parent = step.parent
            if step.kind is Kind.DIRECTORY:
                row = ListedEntry(step.name, is_directory=True)
            elif step.object is not None:
                row = file_row(step.name, step.object)
            else:
                return
            self._tree.note_shown(self._tree.key(step))
            with _or_listed_again(parent):
                self._enter(parent, step, row)
            step = parent

    def _enter(self, parent: Node, node: Node, row: ListedEntry) -> None:
        known = None
        listing = parent.listing
        if listing.generation:
            known = self._listings.get(parent.number, listing.generation, row.sort_name)
        directory, first, last = self._lister.place_of(node.number)
        if directory is parent and first <= row.sort_name <= last:
            row = row._replace(number=node.number)  # the kernel goes on with its inode
        elif known is not None and known.etag == row.etag:
            row = row._replace(number=known.number)
        else:
            row = row._replace(number=self._lister.new_number(parent))
        if listing.generation and known != row:
            self._listings.put(parent.number, listing.generation, [row])
        listing.has_directories |= row.is_directory
        self._lister.note_published(parent, row)

    def note_gone(self, parent: Node, sort_name: str) -> None:
        """The bucket no longer shows this name."""
        with _or_listed_again(parent):
            for generation in self._lister.marks(parent):
                self._listings.remove(parent.number, generation, sort_name)
            self._lister.note_gone(parent, sort_name)


def _is_within(seconds: float, moment: float) -> bool:
    """Return whether a moment of the loop's time is at most `seconds` (inf: any) ago; -inf was never."""
    return moment > float("-inf") and trio.current_time() - moment <= seconds


@contextmanager
def _or_listed_again(directory: Node) -> Iterator[None]:
    """Where the disk does not take a row, the directory counts as not listed."""
    try:
        yield
    except LocalDiskError:
        directory.listing.expire()


def _is_same(child: Node, row: ListedEntry) -> bool:
    if row.is_directory:
        return child.kind is Kind.DIRECTORY
    if child.kind is Kind.DIRECTORY or child.object is None:
        return False
    if child.kind is Kind.SYMLINK:
        return symlink_target(row.metadata) == child.target
    return child.object.etag == row.etag and not symlink_target(row.metadata)
