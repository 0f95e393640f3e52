"""Lists directories that are in use again before what is known of them is too old to be believed.

The unit is a page of LIST: the whole of a small directory, or the part of a large one in which names are looked up, as
where files are added in the order of their names. It costs one request, as a question for a single name does, and while
it is in use nobody who looks a name up waits for any.

Invariant: what is believed is as old as ever at most: only the time at which the bucket is asked is another.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from fusecache.engine.namespace.lister import Lister
from fusecache.engine.namespace.nodes import AccessHeat, Node, in_use
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace.ttl import AttributeTtl
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.policy.name_patterns import (
    HEAT_OF_A_PAGE,
    IN_USE_SECONDS,
    LISTS_PER_SECOND,
    decayed_heat,
    is_in_use,
    relist_after_seconds,
)

# Parts that are kept fresh at the same time: they cost some 1.25 LISTs a second each.
PARTS_KEPT = 32
# Parts of one directory of which it is known how they are used.
_USES_KEPT = 32
# A younger listing may have been made for a single burst of lookups.
_YOUNG_SHARE = 0.4


class ListingRefresher:
    """Watches lookups, and keeps fresh what they ask.

    waited_seconds: what all who asked for names have waited.
    """

    def __init__(
        self, tree: Tree, lister: Lister, metadata_client: MetadataClient, ttl: AttributeTtl
    ) -> None:
        self._tree = tree
        self._lister = lister
        self._metadata_client = metadata_client
        self._ttl = ttl
        self.waited_seconds = 0.0
        self._kept: set[tuple[int, str]] = set()
        # What the last page took, as a guess at the next one's time where none was measured.
        self._list_seconds = 0.1
        # What everybody waited for names lately, older waits counted less; as of when.
        self._waited = 0.0
        self._waited_at = float("-inf")
        self._nursery: trio.Nursery | None = None

    def run(self, nursery: trio.Nursery) -> None:
        """Own the tasks from now on."""
        self._nursery = nursery

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what somebody waits for a name or a listing."""
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
        """A name is looked up in a directory; return whether there are so many lookups near it that its page pays."""
        if not directory.is_listed:
            return False
        now, listing = trio.current_time(), directory.listing
        start = listing.page_times.start_of(name)
        before = listing.uses.pop(start, None)
        if before is None and start:
            # Who adds files in the order of their names comes from the part before.
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
        if self._nursery is None:
            raise RuntimeError("names are not running")
        self._kept.add(part)
        self._nursery.start_soon(
            self._keep_fresh, directory, start, name=f"keep fresh {self._tree.path(directory)}"
        )

    async def _keep_fresh(self, directory: Node, start: str) -> None:
        is_known = directory.lookups > 0
        listing = directory.listing
        seconds = max(self._list_seconds, listing.seconds / max(1, len(listing.page_times.times)))
        began = float("-inf")
        with in_use(directory):
            try:
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
        if is_known:
            self._tree.forget(directory.number, 0)

    def _is_wanted(self, directory: Node, start: str) -> bool:
        use = directory.listing.uses.get(start)
        if use is None or trio.current_time() - use.moment > IN_USE_SECONDS:
            return False
        return (
            directory.is_listed
            and self._tree.is_linked(directory)
            and not self._metadata_client.is_unresponsive
        )

    async def _relist(self, directory: Node, start: str) -> bool:
        """List a part again, unless that is under way; return whether it succeeded."""
        run = self._lister.current_run(directory)
        asked = run if run is not None and not start else self._lister.refresh_pages(directory, start)
        while not asked.done:
            await asked.wait()
        return asked.failure is None
