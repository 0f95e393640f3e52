"""Reads directories: first the bucket's names in its order, page by page as they are listed, then local-only names.

Invariant: a reader never waits for a whole listing, only for the page with its next names.
"""

from contextlib import suppress
from dataclasses import dataclass

from fusecache.engine.namespace.lister import Lister, ListingRun
from fusecache.engine.namespace.listing_refresher import ListingRefresher
from fusecache.engine.namespace.nodes import DirectoryHandle, Kind, Node, Shown
from fusecache.engine.namespace.reconciler import Reconciler
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace.ttl import AttributeTtl
from fusecache.engine.runtime.by_bucket import ByBucket
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.index.listings import Listings
from fusecache.index.rows import ListedEntry
from fusecache.model.errors import ListingLost, NotFound
from fusecache.model.predecessor import KeptReading, ReadPlace

# For a process that reads one directory after the other: listings started ahead of it, and rows searched for them.
_DIRECTORIES_AHEAD = 8
_ROWS_AHEAD = 64
# The disk may lose rows once; from then on they are in memory, where many directories may compete for the space.
_RESTARTS_MAX = 8
# No sort name of the bucket comes behind it. Those of names that exist only here begin so.
_BEHIND_ALL = "\U0010ffff"


def resumed(node: Node, process: int, reading: KeptReading, position: int) -> DirectoryHandle | None:
    """Return a handle that goes on where a predecessor had returned so many names; None if that is not known."""
    for place in reading.places:
        if place.position == position:
            return DirectoryHandle(
                node,
                process,
                after=min(place.after, _BEHIND_ALL),
                local_after=place.after.removeprefix(_BEHIND_ALL) if place.after > _BEHIND_ALL else "",
                unpaired_files=list(place.early_files),
                unpublished=set(reading.unpublished),
                position=position,
                place=place,
            )
    return None


def place_behind(handle: DirectoryHandle, sort_name: str) -> ReadPlace:
    """Return the place behind the entry of that sort name, which is returned now."""
    before = () if handle.place is None else handle.place.early_files
    early = tuple([name for name in before if name + "/" > sort_name]) if before else ()
    early_files = early if sort_name[-1] == "/" else (*early, sort_name)
    return ReadPlace(handle.position + 1, sort_name, early_files)


def go_back(handle: DirectoryHandle, position: int) -> bool:
    """Return the last reply's entries from a position on again; return False if it does not have that position.

    The kernel does so if a program's buffer had no space for all of them.
    """
    steps = handle.position - position
    if not 0 < steps <= len(handle.returned):
        return False
    handle.place = handle.returned[-steps][2]
    handle.queue.extendleft((shown, sort_name) for shown, sort_name, _ in reversed(handle.returned[-steps:]))
    handle.position = position
    return True


@dataclass(eq=False, repr=False)
class DirectoryReader:
    """Returns the entries of directories."""

    _tree: Tree
    _lister: Lister
    _listings: Listings
    _clients: ByBucket[MetadataClient]
    _reconciler: Reconciler
    _refresher: ListingRefresher
    _ttl: AttributeTtl

    async def next_entries(self, handle: DirectoryHandle, limit: int) -> list[Shown]:
        """Return up to `limit` further names, the bucket's in its order, then local-only ones; [] at the end."""
        directory = handle.node
        if handle.epoch == 0 and not handle.after:
            self._prefetch_listings(handle)
            if directory.local_refs:
                handle.unpublished = {name for name, child in directory.children.items() if child.local_refs}
        while handle.local_names is None:
            with self._refresher.waiting():
                shown = await self._next_remote(handle, limit)
            if shown:
                return shown
        nodes: list[Shown] = []
        while handle.local_names and len(nodes) < limit:
            name = handle.local_names.pop(0)
            child = directory.children.get(name)
            # A name published during the read has a row now, perhaps before the position that the reader had reached.
            if name in handle.unpublished:
                child = child or self._published_since(handle, name)
            elif child is not None and not self._is_only_here(handle, child):
                continue
            if child is not None:
                nodes.append(child)
        handle.sort_names = [_BEHIND_ALL + each.name for each in nodes]
        return nodes

    def current(self, directory: Node, shown: Shown) -> Shown | None:
        """Return what that name shows now, some time after `next_entries` returned it; None: nothing."""
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
        """Return whether the directory has no entry, here or in the bucket. Keys unusable as names count as entries."""
        handle = DirectoryHandle(directory)
        return not await self.next_entries(handle, 1) and not directory.listing.hidden

    async def _next_remote(self, handle: DirectoryHandle, limit: int) -> list[Shown]:
        """Return the next names from rows; sets `local_names` when the rows are exhausted."""
        directory = handle.node
        client = self._clients.of(self._tree.top(directory))
        while True:
            run = self._listing_of(handle)
            try:
                rows = self._listings.scan(directory.number, handle.epoch, handle.after, limit)
                if run is not None:
                    rows = [row for row in rows if row.sort_name <= run.progress]
                shown = self._visible(handle, rows, run) if rows else []
            except ListingLost:
                while run is not None and not run.done:
                    await client.wait_for(run)  # it fails at its next page
                self._restart(handle)
                continue
            if rows:
                handle.after = rows[-1].sort_name
                if shown:
                    return shown
            elif run is None:
                # Names without a row: created here, or published since the listing began.
                names = {*directory.children, *handle.unpublished}
                handle.local_names = sorted(name for name in names if name > handle.local_after)
                return []
            else:
                await client.wait_for(run)
                if isinstance(run.failure, ListingLost):
                    self._restart(handle)
                elif run.failure is not None and not self._lister.must_serve_stale(directory):
                    raise run.failure

    def _restart(self, handle: DirectoryHandle) -> None:
        """The rows are gone: go on behind the last name with another listing. Raises ListingLost if that goes on."""
        handle.restarts += 1
        if handle.restarts > _RESTARTS_MAX:
            raise ListingLost(
                f"{self._tree.path(handle.node)}: its listing was lost {_RESTARTS_MAX} times in one readdir; "
                f"the cache disk fails, replace it"
            )
        handle.epoch = 0

    def _listing_of(self, handle: DirectoryHandle) -> ListingRun | None:
        """Return the listing in progress that the handle reads, started if needed; None if it reads a complete one."""
        directory = handle.node
        run = self._lister.current_run(directory)
        if self._lister.must_serve_stale(directory):
            run, handle.epoch = None, directory.listing.epoch
        elif handle.epoch == 0 and run is None and self._ttl.is_listing_fresh(directory):
            handle.epoch = directory.listing.epoch
        elif handle.epoch == 0 or (run is None and handle.epoch > directory.listing.epoch):
            run = self._lister.start(directory)  # or ours failed while no reader waited
            handle.epoch = run.epoch
        elif run is None or run.epoch != handle.epoch:
            # It has completed, or a newer listing has replaced it.
            run, handle.epoch = None, directory.listing.epoch
        if run is not None:
            run.is_wanted = True
        return run

    def _visible(
        self, handle: DirectoryHandle, rows: list[ListedEntry], run: ListingRun | None
    ) -> list[Shown]:
        """Return what rows show: nodes where they exist, else the names as listed."""
        directory = handle.node
        page_times = run.page_times if run is not None else directory.listing.page_times
        view = self._reconciler.defaults_below(directory)
        children, nodes, hides_keys = directory.children, self._tree.nodes, self._tree.hides_keys
        page_end, seen = "", float("-inf")
        shown: list[Shown] = []
        handle.sort_names = sort_names = []
        for row in rows:
            name = row.name
            if row.is_directory and name in handle.unpaired_files:
                handle.unpaired_files.remove(name)
                continue
            if not row.is_directory and self._is_behind_directory(handle, name, run):
                continue  # the directory of that name shows instead
            handle.unpublished.discard(name)
            if name > page_end:
                page_end, seen = page_times.page_of(row.sort_name)
            is_hidden = hides_keys and self._tree.is_hidden(view.prefix + row.sort_name, seen)
            if row.number and name not in children and row.number not in nodes and not is_hidden:
                shown.append(self._reconciler.listed(view, row, seen))
                sort_names.append(row.sort_name)
                continue
            try:
                shown.append(self._reconciler.reconcile(directory, name, [row], seen))
            except NotFound:
                continue
            sort_names.append(row.sort_name)
        return shown

    def _is_behind_directory(self, handle: DirectoryHandle, name: str, run: ListingRun | None) -> bool:
        """Return whether a directory has the file's name. Where that is unknown yet, record that the file was shown."""
        below = name + "/"
        if run is not None and below > run.progress:
            # Each kept name is a prefix of the next, so there are at most as many as the last one has characters.
            handle.unpaired_files = [early for early in handle.unpaired_files if early + "/" > name]
            handle.unpaired_files.append(name)
            return False
        directory = handle.node
        if not (run or directory.listing).has_directories:
            return False
        return self._listings.get(directory.number, handle.epoch, below) is not None

    def _is_only_here(self, handle: DirectoryHandle, child: Node) -> bool:
        """Return whether the child exists although the rows that were read did not show it."""
        directory = handle.node
        seen = directory.listing.page_times.of(child.name)
        if not child.local_refs and child.verified <= seen:
            return False
        key = self._tree.child_key(directory, child.name)
        try:
            rows = self._listings.named(directory.number, handle.epoch, child.name)
        except ListingLost:
            return child.object is None  # the bucket has no row of it
        return all(self._tree.is_hidden(key + ("/" if row.is_directory else ""), seen) for row in rows)

    def _published_since(self, handle: DirectoryHandle, name: str) -> Node | None:
        """Return the node of a name that was published and then dropped from memory, or None."""
        directory = handle.node
        listing = directory.listing
        for epoch in {handle.epoch, listing.epoch}:
            with suppress(NotFound, ListingLost):
                rows = self._listings.named(directory.number, epoch, name)
                if rows:
                    return self._reconciler.reconcile(directory, name, rows, listing.page_times.of(name))
        return None

    def _prefetch_listings(self, handle: DirectoryHandle) -> None:
        """Start listings of the next directories for a process that reads them in order, as `find` does."""
        directory = handle.node
        parent = directory.parent
        directory.listing.reader, directory.listing.last_read = handle.process, ""
        if parent is None or not handle.process:
            return
        # Only for a process that read the parent and then each child from the first on. Others may read neighbours by
        # chance, and want the state of that later moment.
        listing = parent.listing
        if listing.reader != handle.process:
            return
        if not self._follows(parent, listing.last_read, directory.name):
            listing.reader = 0
            return
        listing.last_read = directory.name
        client = self._clients.of(self._tree.top(parent))
        by_epoch = self._lister.page_times_by_epoch(parent)
        ahead = 0
        for row in self._lister.rows_after(parent, directory.name + "/", _ROWS_AHEAD):
            if not row.is_directory or ahead == _DIRECTORIES_AHEAD or client.is_unresponsive:
                continue
            ahead += 1
            try:
                child = self._reconciler.reconcile(
                    parent, row.name, [row], next(iter(by_epoch.values())).of(row.sort_name)
                )
            except NotFound:
                continue
            if (
                child.kind is Kind.DIRECTORY
                and not child.local_refs
                and not self._ttl.is_listing_fresh(child)
            ):
                self._lister.start(child, ahead=True)

    def _follows(self, parent: Node, before: str, name: str) -> bool:
        rows = self._lister.rows_after(parent, before and before + "/", _ROWS_AHEAD)
        return next((row.name for row in rows if row.is_directory), None) == name
