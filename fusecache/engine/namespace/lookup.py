"""Looks names up: what the bucket shows, merged with the unpublished changes of this node.

Invariants:
1. A lookup never waits for a whole listing, only for the page that answers it.
2. A failed request is an error, never "no such file".

Names of a mount that started without its bucket: the objects that the disk cache holds, and their directories.

Not a listing: a name that is absent here may exist in the bucket.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import trio

from fusecache.engine.namespace.lister import (
    AttributeTtl,
    Lister,
    ListingRefresher,
    ListingRun,
    file_row,
    is_within,
    with_metadata,
)
from fusecache.engine.namespace.nodes import LISTED_NUMBERS, Kind, Node, PageTimes, in_use
from fusecache.engine.namespace.readdir import DirectoryReader
from fusecache.engine.namespace.reconciler import Reconciler
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.metadata_client import MetadataClient, SharedRequest
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.index.cache_index import ObjectRow
from fusecache.index.journal import Journal
from fusecache.index.listings import ListedEntry, Listings
from fusecache.model.errors import FusecacheError, ListingLost, LocalDiskError, NotFound
from fusecache.model.objects import ObjectInfo, symlink_target
from fusecache.policy.listing_refresh import is_listing_cheaper


class CachedNames:
    """The newest cached version of each key, as rows. seen: loop time that they count as seen at."""

    def __init__(self, objects: Mapping[str, ObjectRow] = {}, seen: float = float("-inf")) -> None:
        self.seen = seen
        self._objects = objects
        self._directories: set[str] = set()
        for key in objects:
            while (slash := key.rfind("/")) >= 0 and key[:slash] not in self._directories:
                key = key[:slash]
                self._directories.add(key)

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: str) -> bool:
        return key in self._objects or key in self._directories

    def rows(self, key: str, name: str) -> list[ListedEntry]:
        """Return the rows of a key: a file, a directory, both or none. The cache does not know when a file changed."""
        rows = []
        if (found := self._objects.get(key)) is not None:
            rows.append(ListedEntry(name, is_directory=False, size=found.size, etag=found.object_id.etag))
        if key in self._directories:
            rows.append(ListedEntry(name, is_directory=True))
        return rows


# Probes repeated for a name that this node keeps publishing while it is probed; after these the last answer counts.
_MAX_PROBES = 2


@dataclass(eq=False, slots=True)
class NameProbe(SharedRequest):
    """A request for one name. asked: loop time; rows: the answer, empty if nothing has that name.

    is_superseded: this node has published a change of the name since, so the answer may show either state.
    """

    asked: float = 0.0
    is_superseded: bool = False
    rows: list[ListedEntry] = field(default_factory=list)


class Lookup:
    """Looks names up. `reader` reads directories; `ttl` says how long their answers stay fresh.

    lister: has the listings. reconciler: makes nodes of their rows.

    cached_names: names known from the disk cache, while the mount has not reached the bucket yet; else none.
    """

    def __init__(
        self,
        tree: Tree,
        listings: Listings,
        client: MetadataClient,
        journal: Journal,
        tasks: TaskNursery,
        *,
        fresh_seconds: float,
        posix_metadata: bool,
    ) -> None:
        """posix_metadata: read the metadata of every object, with one HEAD per version."""
        self._tasks = tasks
        self.posix_metadata = posix_metadata
        self._tree = tree
        self._listings = listings
        self._client = client
        self.ttl = freshness = AttributeTtl(tree, fresh_seconds)
        self.lister = lister = Lister(
            tree,
            listings,
            client,
            tasks,
            ahead_seconds=max(10.0, fresh_seconds),
            has_metadata=posix_metadata,
        )
        self._refresher = refresher = ListingRefresher(tree, lister, client, freshness, tasks)
        self.reconciler = reconciler = Reconciler(tree, lister, listings, journal)
        self.reader = DirectoryReader(tree, lister, listings, client, reconciler, refresher, freshness)
        self.cached_names = CachedNames()
        self._probes: dict[tuple[int, str], NameProbe] = {}

    @property
    def waited_seconds(self) -> float:
        """Total time that callers have waited for names. A listing without waiting callers does not count."""
        return self._refresher.waited_seconds

    def start(self) -> None:
        """Start the services of listings."""
        self._tasks.keep({"discarded-rows": self.lister.delete_discarded})

    # ---- lookup

    async def lookup(self, parent: Node, name: str) -> Node:
        """Return the child with that name as the bucket showed it at most `fresh_seconds` ago. Raises NotFound."""
        child = parent.children.get(name)
        if child is not None and self.ttl.is_node_fresh(child):
            return child
        with self._refresher.waiting():
            if child is not None and child.verified == float("-inf"):
                # A request for this node has failed: even a fresh listing may show the version that is gone.
                rows, seen = await self._probed(parent, name, must_answer=True)
            else:
                try:
                    rows, seen = await self._rows(parent, name)
                except LocalDiskError:  # no listing can be kept, or its rows are gone
                    rows, seen = await self._probed(parent, name, must_answer=False)
        node = self.reconciler.reconcile(parent, name, rows, seen)
        self.reconciler.evict_idle_nodes()
        return node

    def lookup_cached(self, parent: Node, name: str) -> Node | None:
        """Return a file from an older listing, if fresher facts would cost a request of their own; None otherwise.

        Sends no request. With pyfuse3 the kernel looks up the names of one directory one after the other, as libfuse
        3.14 does not ask for parallel lookups; the own session does. If each waited for the bucket, many readers of a
        large directory would be as slow as one. The caller asks `ttl.is_node_fresh` whether the node must be looked up
        again before open or getattr.
        """
        child = parent.children.get(name)
        if child is not None and (
            child.handles or child.verified == float("-inf") or self.ttl.is_node_fresh(child)
        ):
            return None
        page_times = self.lister.page_times_by_epoch(parent)
        epoch = max(self._covering(parent, name), default=0)
        # With one page, one refresh serves all lookups at the cost of one probe, so there is no need for old rows.
        if epoch == 0 or len(page_times[epoch].times) < 2:
            return None
        try:
            rows = self._listings.named(parent.number, epoch, name)
            if len(rows) != 1 or rows[0].is_directory or symlink_target(rows[0].metadata):
                return None
            node = self.reconciler.reconcile(parent, name, rows, page_times[epoch].of(name))
        except (NotFound, ListingLost):
            return None
        self.reconciler.evict_idle_nodes()
        return node

    def node_by_inode(self, number: int) -> Node | None:
        """Return the node of an inode number, re-instantiated from its listing row if needed; None if unknown."""
        node = self._tree.nodes.get(number)
        if node is None and number >= LISTED_NUMBERS:
            node = self.reconciler.recalled(number)
            self.reconciler.evict_idle_nodes()
        if node is not None and not node.lookups:
            node.lookups = 1
        return node

    async def _rows(self, parent: Node, name: str) -> tuple[list[ListedEntry], float]:
        """Return the fresh rows of a name (file, directory, both or none) and the loop time at which they were seen."""
        began = trio.current_time()
        known = self._fresh_rows(parent, name, began)
        is_hot = self._refresher.on_lookup(parent, name)
        if known is not None:
            return known
        if self._must_serve_stale(parent, name):
            if not self._probes:
                self._start_probe(parent, name)  # detects that the bucket answers again
            return self._last_rows(parent, name)
        run = self._cheaper_listing(parent)
        if run is not None:
            # The first page answers for most directories. In a larger one this name is then probed alone.
            run.is_wanted = True
            await self._wait(run, parent, name, lambda: run.pages > 0)
            known = self._answer(parent, name, began)
        if known is None and is_hot and parent.is_listed:
            # Frequent lookups nearby: one page refresh answers for the neighbours too.
            await self._wait(
                self.lister.refresh_pages(parent, parent.listing.page_times.start_of(name)), parent, name
            )
            known = self._answer(parent, name, began)
        return known or await self._probed(parent, name, must_answer=False)

    def _cheaper_listing(self, parent: Node) -> ListingRun | None:
        """Return the listing in progress, started now if it is cheaper than probes; None if there is none."""
        listing = parent.listing
        idle_seconds = trio.current_time() - listing.finished
        if self.lister.current_run(parent) is None and is_listing_cheaper(
            listing.probes, len(listing.page_times.times), listing.seconds, idle_seconds
        ):
            self.lister.start(parent)
        return self.lister.current_run(parent)

    async def _wait(
        self, asked: SharedRequest, parent: Node, name: str, is_enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until the request ends, `is_enough`, or stale data must be served. Raises the request's failure."""
        while not asked.done and not is_enough():
            await self._client.wait_for(asked)
            if self._must_serve_stale(parent, name):
                return
        if asked.failure is not None:
            raise asked.failure

    def _answer(self, parent: Node, name: str, began: float) -> tuple[list[ListedEntry], float] | None:
        if self._must_serve_stale(parent, name):
            return self._last_rows(parent, name)
        return self._fresh_rows(parent, name, began)

    def _fresh_rows(self, parent: Node, name: str, began: float) -> tuple[list[ListedEntry], float] | None:
        """Return a name's rows from a listing that is within its TTL, or was requested after loop time `began`."""
        below = name + "/"
        run = self.lister.current_run(parent)
        for epoch, page_times in reversed(list(self.lister.page_times_by_epoch(parent).items())):
            if run is not None and epoch == run.epoch and below > run.progress:
                continue
            rows = self._listings.named(parent.number, epoch, name)
            seen = min(page_times.of(name), page_times.of(below))
            if seen >= began or self._is_fresh_child(parent, name, rows, seen):
                return rows, seen
        return None

    def _is_fresh_child(self, parent: Node, name: str, rows: list[ListedEntry], seen: float) -> bool:
        seconds = self.ttl.seconds(parent)
        return is_within(self.ttl.seconds_below(parent, name) if rows else seconds, seen)

    def _last_rows(self, parent: Node, name: str) -> tuple[list[ListedEntry], float]:
        listing = parent.listing
        if len(self.cached_names) and not parent.is_listed:
            return self.cached_names.rows(self._tree.child_key(parent, name), name), self.cached_names.seen
        return self._listings.named(parent.number, listing.epoch, name), listing.page_times.of(name)

    def _must_serve_stale(self, parent: Node, name: str) -> bool:
        """Whether to serve the last known state, a listing or the name's node, as the bucket does not answer."""
        child = parent.children.get(name)
        is_known = child is not None and child.verified > float("-inf")
        is_known |= len(self.cached_names) > 0 and self._tree.child_key(parent, name) in self.cached_names
        return self.lister.must_serve_stale(parent) or (is_known and self._client.is_unresponsive)

    def on_unresponsive(self) -> None:
        """The bucket does not answer: have waiting callers look whether older rows serve them."""
        for waited in (*self.lister.under_way(), *self._probes.values()):
            waited.announce()

    def cached_row(self, directory: Node, name: str) -> ListedEntry | None:
        """Return a file's row from any listing, however old. Sends no request."""
        epoch = max(self._covering(directory, name), default=0)
        with suppress(ListingLost):
            rows = self._listings.named(directory.number, epoch, name) if epoch else []
            return next((row for row in rows if not row.is_directory), None)
        return None

    async def _probed(self, parent: Node, name: str, *, must_answer: bool) -> tuple[list[ListedEntry], float]:
        """Probe one name. While the bucket does not answer, an older listing is served, unless it `must_answer`."""
        probe, again = self._start_probe(parent, name), _MAX_PROBES
        while not probe.done:
            if not must_answer and self._must_serve_stale(parent, name):
                return self._last_rows(parent, name)
            await self._client.wait_for(probe)
            if probe.done and probe.is_superseded and probe.failure is None and again:
                probe, again = self._start_probe(parent, name), again - 1
        if probe.failure is not None:
            raise probe.failure
        return probe.rows, probe.asked

    def _start_probe(self, parent: Node, name: str) -> NameProbe:
        probe = self._probes.get((parent.number, name))
        if probe is None:
            key = self._tree.child_key(parent, name)
            probe = self._probes[parent.number, name] = NameProbe(asked=trio.current_time())
            self._tasks.start_soon(
                "probe", self._probe, parent, key, name, probe, about=key, on_failed=probe.fail
            )
            listing = parent.listing
            if name != listing.probed:
                listing.probed, listing.probes = name, listing.probes + 1
        return probe

    async def _probe(self, parent: Node, key: str, name: str, probe: NameProbe) -> None:
        with in_use(parent):
            try:
                known = self._known_version(parent, key, name)
                await _probe_name(self._client, key, name, probe, known, of_all=self.posix_metadata)
                if probe.failure is None and not probe.is_superseded:
                    with _expire_on_disk_error(parent):
                        self._correct(parent, name, probe)
            finally:
                del self._probes[parent.number, name]
                probe.end()

    def _known_version(self, parent: Node, key: str, name: str) -> ListedEntry | None:
        """Return what any listing or node knows of a name, so that an unchanged version needs no HEAD.

        A zero-byte object counts as unknown: one stored again within the same second may be a symlink now.
        """
        if not self.posix_metadata:
            return None
        with suppress(ListingLost):
            for epoch in self._covering(parent, name):
                for row in self._listings.named(parent.number, epoch, name):
                    if row.metadata is not None and row.size:
                        return row
        child = parent.children.get(name)
        version = child.object if child is not None else None
        is_known = version is not None and version.key == key and version.size
        return file_row(name, version) if version is not None and is_known else None

    def _correct(self, parent: Node, name: str, probe: NameProbe) -> None:
        """Write a probe's newer rows into the listings, as the node made from them may be forgotten at once."""
        epochs = self._covering(parent, name)
        for epoch in epochs:
            old = self._listings.named(parent.number, epoch, name)
            if [row._replace(number=0) for row in old] != probe.rows:
                for row in old:
                    self._listings.remove(parent.number, epoch, row.sort_name)
                numbered = [row._replace(number=self.lister.new_number(parent)) for row in probe.rows]
                self._listings.put(parent.number, epoch, numbered)
                if epoch == parent.listing.epoch:
                    self.lister.on_newer(parent, old, numbered)
                parent.listing.has_directories |= any(row.is_directory for row in numbered)
        self.lister.note_hidden(parent, probe.rows, probe.asked)
        # Read back: the rows now have the inode numbers that the listing gives this version.
        for epoch in epochs:
            probe.rows = self._listings.named(parent.number, epoch, name)

    def _supersede(self, parent: Node, name: str) -> None:
        probe = self._probes.get((parent.number, name))
        if probe is not None:
            probe.is_superseded = True

    def _covering(self, parent: Node, name: str) -> list[int]:
        """Return the listing epochs that would show the name. A listing in progress counts only up to its progress."""
        run = self.lister.current_run(parent)
        return [
            epoch
            for epoch in self.lister.page_times_by_epoch(parent)
            if run is None or epoch != run.epoch or name + "/" <= run.progress
        ]

    # ---- what is known

    def listed(self, parent: Node, name: str) -> tuple[list[ListedEntry], float]:
        """Return what the newest listing has of a name, without what this node removed, and when that was.

        Sends no request.
        """
        epoch, prefix = max(self._covering(parent, name), default=0), self._tree.key(parent)
        with suppress(ListingLost):
            rows = self._listings.named(parent.number, epoch, name) if epoch else []
            times = self.lister.page_times_by_epoch(parent).get(epoch, PageTimes())
            seen = min(times.of(name), times.of(name + "/"))
            return [row for row in rows if not self._tree.is_hidden(prefix + row.sort_name, seen)], seen
        return [], float("-inf")

    async def behind_directory(self, parent: Node, name: str) -> ListedEntry | None:
        """Return the object with the name of a directory, which shows instead; None if there is none."""
        if parent.is_listed:
            row, seen = self.cached_row(parent, name), parent.listing.page_times.of(name)
        else:
            rows, seen = await self._probed(parent, name, must_answer=True)
            row = next((row for row in rows if not row.is_directory), None)
        is_hidden = row is not None and self._tree.is_hidden(self._tree.child_key(parent, name), seen)
        return None if is_hidden else row

    async def look_into(self, directory: Node) -> None:
        """Find out what a directory holds, and whether it has a marker, unless the bucket does not answer."""
        client = self._client
        if directory.is_listed or directory.has_marker or client.is_unresponsive:
            return
        run = self.lister.start(directory)
        while not run.done and not run.has_more and not client.is_unresponsive:
            await client.wait_for(run)

    def is_empty_as_known(self, directory: Node) -> bool:
        """Return whether nothing is known to be in the directory. Sends no request."""
        if self.lister.current_run(directory) is not None and not directory.is_listed:
            return False  # if it were a single page, the listing would be complete by now
        prefix, listing = self._tree.key(directory), directory.listing
        try:
            are_hidden = all(
                self._tree.is_hidden(prefix + row.sort_name, listing.page_times.of(row.sort_name))
                for row in self._listings.iterate(directory.number, listing.epoch, batch=10)
            )
        except ListingLost:
            return False
        return are_hidden and not any(child.local_refs > 0 for child in directory.children.values())

    # ---- changes by this node

    def on_created(self, directory: Node) -> None:
        """This node has just created the directory, so it is known to be empty."""
        self.lister.on_empty(directory)
        self._refresher.on_lookup(directory, "")

    def on_published(self, node: Node) -> None:
        """The bucket now shows the node: record it, and the directories above it, in the listings."""
        step = node
        while step.parent is not None:
            parent = step.parent
            if step.kind is Kind.DIRECTORY:
                row = ListedEntry(step.name, is_directory=True)
            elif step.object is not None:
                row = file_row(step.name, step.object)
            else:
                return
            if self._tree.hides_keys:
                self._tree.on_shown(self._tree.key(step))
            with _expire_on_disk_error(parent):
                self._record(parent, step.number, row)
            step = parent

    def on_removed(self, version: ObjectInfo) -> None:
        """The bucket shows an object that a local file has replaced. It shows again if that replacement fails."""
        parent, name = self._parent_of(version.key)
        if parent is None or self._tree.is_hidden(version.key, self._tree.now()):
            return
        if self._tree.hides_keys:
            self._tree.on_shown(version.key)
        with _expire_on_disk_error(parent):
            self._record(parent, 0, file_row(name, version))

    def on_unknown(self, key: str) -> tuple[Node | None, str]:
        """Expire what is known of a key. Return its directory (None: not in memory) and its name."""
        parent, name = self._parent_of(key)
        if parent is not None:
            parent.listing.expire()
        return parent, name

    def _parent_of(self, key: str) -> tuple[Node | None, str]:
        """Return the directory of a key (None: not in memory) and the name in it."""
        folder, slash, name = key.rstrip("/").rpartition("/")
        parent = self._tree.find(folder + slash)
        if parent is None or self._tree.key(parent) != folder + slash:
            return None, name
        return parent, name

    def _record(self, parent: Node, number: int, row: ListedEntry) -> None:
        """Record a row. number: the inode number that the kernel knows it by; 0: the kernel does not know it."""
        known = None
        listing = parent.listing
        if listing.epoch and row.is_directory:
            known = self._listings.get(parent.number, listing.epoch, row.sort_name)
        if known is None and (listing.epoch or not row.is_directory):  # else nothing has changed
            self._supersede(parent, row.name)
        directory, first, last = self.lister.row_position(number)
        if directory is parent and first <= row.sort_name <= last:
            row = row._replace(number=number)  # the kernel keeps its inode
        elif known is not None:
            row = row._replace(number=known.number)
        else:
            row = row._replace(number=self.lister.new_number(parent))
        if listing.epoch and known != row:
            self._listings.put(parent.number, listing.epoch, [row])
        listing.has_directories |= row.is_directory
        self.lister.on_published(parent, row)

    def on_gone(self, parent: Node, sort_name: str) -> None:
        """The bucket no longer shows this name, or soon will not."""
        self._supersede(parent, sort_name.rstrip("/"))
        with _expire_on_disk_error(parent):
            for epoch in self.lister.page_times_by_epoch(parent):
                self._listings.remove(parent.number, epoch, sort_name)
            self.lister.on_gone(parent, sort_name)


async def _probe_name(
    metadata_client: MetadataClient,
    key: str,
    name: str,
    probe: NameProbe,
    known: ListedEntry | None,
    *,
    of_all: bool,
) -> None:
    """Fill in the probe's rows, or its failure. Usually one LIST, plus a HEAD where `with_metadata` needs one.

    The whole probe fails once the bucket has not answered any request for its `patience_seconds`.
    """
    try:
        with metadata_client.deadline():
            rows = await _rows_of(metadata_client, key, name)
            prefix = key.removesuffix(name)
            probe.rows = await with_metadata(metadata_client, prefix, rows, {name: known}, of_all=of_all)
    except FusecacheError as exc:
        probe.failure = exc


async def _rows_of(metadata_client: MetadataClient, key: str, name: str) -> list[ListedEntry]:
    store, below = metadata_client.store, key + "/"
    page = await metadata_client.call(store.list_page, key, delimiter="/", limit=2)
    rows = [file_row(name, info) for info in page.objects if info.key == key]
    is_directory = below in page.prefixes
    last = max((*(info.key for info in page.objects), *page.prefixes), default="")
    if not is_directory and page.next_token is not None and last < below:
        # Names that sort in between, such as `name-1` and `name.txt`, have filled the page.
        is_directory = bool((await metadata_client.call(store.list_page, below, limit=1)).objects)
    if is_directory:
        rows.append(ListedEntry(name, is_directory=True))
    return rows


@contextmanager
def _expire_on_disk_error(directory: Node) -> Iterator[None]:
    """If the disk rejects or lost a row, or a bug leaves one out, mark the directory's listing as stale."""
    try:
        yield
    except LocalDiskError:
        directory.listing.expire()
    except Exception:
        directory.listing.expire()
        raise
