"""Refreshes the listings of directories in use before their TTL runs out.

The unit is one page of LIST: a whole small directory, or the part of a large one in which names are looked up. In a
large directory that is where files are added in name order. A refresh costs one request, as much as a request for one
name. While refreshes run ahead, lookups in that page do not wait for the bucket.

Invariant: the maximum age of what is served stays the TTL. Only the time of the requests changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from fusecache.engine.namespace.lister import Lister
from fusecache.engine.namespace.listing_state import AccessHeat
from fusecache.engine.namespace.nodes import Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace.ttl import AttributeTtl
from fusecache.engine.runtime.by_bucket import ByBucket
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.policy.listing_refresh import (
    HEAT_OF_A_PAGE,
    IN_USE_SECONDS,
    LISTS_PER_SECOND,
    decayed_heat,
    is_in_use,
    relist_after_seconds,
)

# Pages kept fresh concurrently. At the default TTL of 1 s each costs about 1.25 LISTs a second.
PARTS_KEPT = 32
# Pages of one directory whose access frequency is recorded.
_USES_KEPT = 32
# A page younger than this share of its TTL is not kept fresh: it may have been listed for a single burst of lookups.
_YOUNG_SHARE = 0.4


@dataclass(eq=False, repr=False)
class ListingRefresher:
    """Watches lookups and keeps the pages in use fresh.

    waited_seconds: total time that callers have waited for names.
    """

    _tree: Tree
    _lister: Lister
    _clients: ByBucket[MetadataClient]
    _ttl: AttributeTtl
    _tasks: TaskNursery
    waited_seconds: float = field(init=False, default=0.0)
    _kept: set[tuple[int, str]] = field(init=False, default_factory=set)
    # Duration of the last refresh: the estimate for a page that was never measured.
    _list_seconds: float = field(init=False, default=0.1)
    # Recent waits of all callers, decayed, as of `_waited_at`.
    _waited: float = field(init=False, default=0.0)
    _waited_at: float = field(init=False, default=float("-inf"))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that a caller waits for a name or a listing."""
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
        """Record a lookup; return whether lookups near it are so frequent that refreshing their page is cheaper."""
        if not directory.is_listed:
            return False
        now, listing = trio.current_time(), directory.listing
        start = listing.page_times.start_of(name)
        before = listing.uses.pop(start, None)
        if before is None and start:
            # A writer that adds files in name order comes from the previous page.
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
        self._kept.add(part)
        self._tasks.start_soon(
            "keep-fresh", self._keep_fresh, directory, start, about=self._tree.path(directory)
        )

    async def _keep_fresh(self, directory: Node, start: str) -> None:
        with self._tree.keep(directory):
            try:
                listing = directory.listing
                seconds = max(self._list_seconds, listing.seconds / max(1, len(listing.page_times.times)))
                began = float("-inf")
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

    def _is_wanted(self, directory: Node, start: str) -> bool:
        use = directory.listing.uses.get(start)
        if use is None or trio.current_time() - use.moment > IN_USE_SECONDS:
            return False
        return (
            directory.is_listed
            and self._tree.is_linked(directory)
            and not self._clients.of(self._tree.top(directory)).is_unresponsive
        )

    async def _relist(self, directory: Node, start: str) -> bool:
        """Refresh a page, or join the request in progress; return whether it succeeded."""
        run = self._lister.current_run(directory)
        asked = run if run is not None and not start else self._lister.refresh_pages(directory, start)
        while not asked.done:
            await asked.wait()
        return asked.failure is None
