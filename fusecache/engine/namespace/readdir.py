"""Reads directories: the bucket's names and local-only ones, in one order, page by page as they are listed.

Invariants:
1. A reader never waits for a whole listing, only for the page with its next names.
2. Each name has one place in the order: its sort name. A reading only moves forward, so it returns each name once,
   although names are made, removed, published and listed at the same time. Only a file and a directory of the same
   name have two places: `early_files` says whether the first was returned.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from fusecache.engine.namespace.lister import AttributeTtl, Lister, ListingRefresher, ListingRun
from fusecache.engine.namespace.nodes import DirectoryEntry, DirectoryHandle, Kind, Node, Shown
from fusecache.engine.namespace.reconciler import Reconciler
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.index.listings import ListedEntry, Listings
from fusecache.model.errors import ListingLost, NotEmpty, NotFound
from fusecache.model.predecessor import KeptReading, ReadPlace

log = logging.getLogger(__name__)

# For a process that reads one directory after the other: listings started ahead of it, and rows searched for them.
_DIRECTORIES_AHEAD = 8
_ROWS_AHEAD = 64
# The disk may lose rows once; from then on they are in memory, where many directories may compete for the space.
_RESTARTS_MAX = 8
# Each fetch looks at all children of the directory, so a directory with many has fewer and larger fetches.
_FETCHES = 4


def resumed(node: Node, process: int, reading: KeptReading, position: int) -> DirectoryHandle | None:
    """Return a handle that goes on where a predecessor had returned so many names; None if that is not known."""
    for place in reading.places:
        if place.position == position:
            return DirectoryHandle(
                node,
                process,
                after=place.after,
                early_files=place.early_files,
                position=position,
                place=place,
            )
    return None


def place_behind(handle: DirectoryHandle, sort_name: str) -> ReadPlace:
    """Return the place behind the entry of that sort name, which is returned now."""
    early_files = () if handle.place is None else handle.place.early_files
    return ReadPlace(handle.position + 1, sort_name, _early_files(early_files, sort_name))


def _early_files(before: tuple[str, ...], sort_name: str) -> tuple[str, ...]:
    """Return the files whose names were returned and whose directories sort behind a sort name, returned last.

    Each is a prefix of the next, so there are at most as many as the last one has characters.
    """
    early = tuple([name for name in before if name + "/" > sort_name]) if before else ()
    return early if sort_name[-1] == "/" else (*early, sort_name)


def go_back(handle: DirectoryHandle, position: int) -> bool:
    """Return the last reply's entries from a position on again; return False if it does not have that position.

    The kernel does so if a program's buffer had no space for all of them.
    """
    steps = handle.position - position
    if not 0 < steps <= len(handle.returned):
        return False
    handle.place = handle.returned[-steps][2]
    handle.queue.extendleft(
        DirectoryEntry(sort_name, shown) for sort_name, shown, _ in reversed(handle.returned[-steps:])
    )
    handle.position = position
    return True


@dataclass(eq=False, repr=False)
class DirectoryReader:
    """Returns the entries of directories."""

    _tree: Tree
    _lister: Lister
    _listings: Listings
    _client: MetadataClient
    _reconciler: Reconciler
    _refresher: ListingRefresher
    _ttl: AttributeTtl

    async def next_entries(self, handle: DirectoryHandle, limit: int) -> list[DirectoryEntry]:
        """Return about `limit` further names, in the bucket's order; [] at the end."""
        directory = handle.node
        if handle.epoch == 0 and not handle.after:
            self._prefetch_listings(handle)
        client = self._client
        with self._refresher.waiting():
            while not handle.is_at_end:
                run = self._listing_of(handle)
                try:
                    entries = self._known_entries(handle, run, limit)
                except ListingLost:
                    while run is not None and not run.done:
                        await client.wait_for(run)  # it fails at its next page
                    self._restart(handle)
                    continue
                if entries:
                    return entries
                if run is not None and run.progress <= handle.after:
                    await client.wait_for(run)
                    if isinstance(run.failure, ListingLost):
                        self._restart(handle)
                    elif run.failure is not None and not self._lister.must_serve_stale(directory):
                        raise run.failure
        return []

    def current(self, directory: Node, entry: DirectoryEntry) -> Shown | None:
        """Return what an entry's name shows now, some time after `next_entries` returned it; None: nothing."""
        sort_name, shown = entry
        name = sort_name.removesuffix("/")
        child = directory.children.get(name)
        if child is not None:
            return child
        if isinstance(shown, Node):
            return self._recalled(directory, name)
        if self._tree.hides_keys and self._tree.is_hidden(self._tree.key(directory) + sort_name, shown.seen):
            return None
        return shown

    def _recalled(self, directory: Node, name: str) -> Node | None:
        """Return the node, made again from its row, of a name that may only have been dropped from memory."""
        for epoch, page_times in self._lister.page_times_by_epoch(directory).items():
            with suppress(NotFound, ListingLost):
                rows = self._listings.named(directory.number, epoch, name)
                if rows:
                    return self._reconciler.reconcile(directory, name, rows, page_times.of(name))
        return None

    async def check_empty(self, directory: Node) -> None:
        """Raise NotEmpty if the directory has an entry, here or in the bucket. Objects without a name count."""
        text = f"{self._tree.path(directory)}: is not empty"
        if await self.next_entries(DirectoryHandle(directory), 1):
            raise NotEmpty(text)
        if hidden := directory.listing.hidden:
            text += f": no name shows {hidden} of its objects; `fusecache check` lists them, delete them in the bucket"
            log.warning("%s", text)
            raise NotEmpty(text)

    def _known_entries(
        self, handle: DirectoryHandle, run: ListingRun | None, limit: int
    ) -> list[DirectoryEntry]:
        """Return the next names that are known already; move the handle behind them. Raises ListingLost.

        No await in here: a name that is published leaves the children, and has a row then. One of both must be seen.
        """
        directory = handle.node
        limit = max(limit, len(directory.children) // _FETCHES)
        rows = self._listings.scan(directory.number, handle.epoch, handle.after, limit)
        # Rows are known up to this sort name; None: all are.
        end: str | None = None
        if run is not None:
            rows = [row for row in rows if row.sort_name <= run.progress]
            end = run.progress
        if len(rows) == limit:
            end = rows[-1].sort_name
        names: dict[str, ListedEntry | None] = {row.sort_name: row for row in rows}
        if directory.children:
            here = [
                sort_name
                for child in directory.children.values()
                if (sort_name := _sort_name(child)) > handle.after and (end is None or sort_name <= end)
            ]
            names = {sort_name: names.get(sort_name) for sort_name in sorted({*names, *here})[:limit]}
            if len(names) == limit:
                end = next(reversed(names))
        entries = self._visible(handle, names, run) if names else []
        if end is None:
            handle.is_at_end = True
        elif end > handle.after:
            handle.after = end
        return entries

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
        self, handle: DirectoryHandle, names: Mapping[str, ListedEntry | None], run: ListingRun | None
    ) -> list[DirectoryEntry]:
        """Return what sort names show, of which some have a row: nodes where they exist, else the names as listed."""
        directory = handle.node
        page_times = run.page_times if run is not None else directory.listing.page_times
        view = self._reconciler.defaults_below(directory)
        children, nodes, hides_keys = directory.children, self._tree.nodes, self._tree.hides_keys
        page_end, seen = "", float("-inf")
        entries: list[DirectoryEntry] = []
        shown: Shown
        for sort_name, row in names.items():
            is_directory = sort_name[-1] == "/"
            name = sort_name[:-1] if is_directory else sort_name
            if is_directory and name in handle.early_files:
                continue
            if sort_name > page_end:
                page_end, seen = page_times.page_of(sort_name)
            child = children.get(name)
            if child is not None and (child.local_refs > 0 or child.verified > seen):
                if (child.kind is Kind.DIRECTORY) != is_directory:
                    continue  # its place is another one
                shown = child
            elif row is None or (not is_directory and self._is_behind_directory(handle, name, run)):
                continue  # the name is gone, or the directory of that name shows instead
            elif (
                row.number
                and child is None
                and row.number not in nodes
                and not (hides_keys and self._tree.is_hidden(view.prefix + sort_name, seen))
            ):
                shown = self._reconciler.listed(view, row, seen)
            else:
                try:
                    shown = self._reconciler.reconcile(directory, name, [row], seen)
                except NotFound:
                    continue
            entries.append(DirectoryEntry(sort_name, shown))
            handle.early_files = _early_files(handle.early_files, sort_name)
        return entries

    def _is_behind_directory(self, handle: DirectoryHandle, name: str, run: ListingRun | None) -> bool:
        """Return whether a directory has the file's name. False if its row is not known yet: the file is shown."""
        directory, below = handle.node, name + "/"
        if run is not None and below > run.progress:
            return False
        if not (run or directory.listing).has_directories:
            return False
        if self._listings.get(directory.number, handle.epoch, below) is None:
            return False
        page_times = run.page_times if run is not None else directory.listing.page_times
        return not self._tree.is_hidden(self._tree.key(directory) + below, page_times.of(below))

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
            if not directory.local_refs:  # else it may have no row
                listing.reader = 0
            return
        listing.last_read = directory.name
        client = self._client
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


def _sort_name(child: Node) -> str:
    return child.name + "/" if child.kind is Kind.DIRECTORY else child.name
