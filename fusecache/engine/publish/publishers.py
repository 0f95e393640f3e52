"""The publishers of all buckets of a mount as one: events go to the publisher of the change's bucket.

Each bucket has a publisher with an order, pauses, slots and rejections of its own. So what one bucket does not accept
holds back nothing of another.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from fusecache.engine.namespace.nodes import FileVersion, QueuedChange
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.runtime.by_bucket import ByBucket
from fusecache.index.journal import Change
from fusecache.model.errors import FusecacheError


class Publishers:
    """The publishers of a mount; `of` returns the one of a key's bucket."""

    def __init__(self, publishers: ByBucket[Publisher]) -> None:
        self._publishers = publishers
        self.of = publishers.of
        self._first = next(iter(publishers))

    # ---- status

    @property
    def rejected(self) -> list[QueuedChange]:
        """Changes that a bucket rejected, or whose bytes could not be read, unless removed or replaced since."""
        return [item for each in self._publishers for item in each.rejected]

    @property
    def kept_as(self) -> dict[str, str]:
        """The newest keys in conflict, and where the local version of each is kept; "" if the change was dropped."""
        return {key: copy for each in self._publishers for key, copy in each.kept_as.items()}

    @property
    def failure(self) -> FusecacheError | None:
        """The error that keeps changes from a bucket, if there is one; first the kind that a person can fix."""
        return next(filter(None, (each.failure for each in self._publishers)), None)

    @property
    def last_success(self) -> float:
        """Loop time of the last publishing request that a bucket accepted; -inf: none yet."""
        return max(each.last_success for each in self._publishers)

    def is_temporary(self, item: QueuedChange) -> bool:
        """Whether the change is deferred because of its temporary name."""
        return self._of(item).is_temporary(item)

    def is_unscheduled(self, item: QueuedChange) -> bool:
        """Whether the schedule defers the change: its name is temporary, or it is a deferred removal."""
        return self._of(item).is_unscheduled(item)

    def is_deferred(self, item: QueuedChange) -> bool:
        """Whether the change is a deferred removal, as `Publisher.is_deferred` says."""
        return self._of(item).is_deferred(item)

    def deferred_seconds(self, item: QueuedChange) -> float:
        """For how long at most the change stays a deferred removal; 0: it is none."""
        return self._of(item).deferred_seconds(item)

    async def wait_progress(self) -> None:
        """Return when a change joins or leaves the queue. Raises what keeps the journal from being written."""
        await self._first.wait_progress()

    async def retire(self, stored: Iterable[FileVersion]) -> None:
        """Hand over to the cache what the daemon before published. Returns when that is done."""
        for version in stored:
            self._of(version).retire(version)
        await self.wait_retired()

    async def wait_retired(self) -> None:
        """Return when the staged bytes of every published file were handed over to the cache."""
        for each in self._publishers:
            await each.wait_retired()

    # ---- events

    def start(self) -> None:
        """Start to publish."""
        for each in self._publishers:
            each.start()

    def on_start(self, rejected: Iterable[QueuedChange], highest: int | None) -> None:
        """Take over the changes that were rejected before this start.

        highest: the last sequence of the earlier daemon, whose held commit markers may be due now; None: this mount
        publishes nothing.
        """
        items = list(rejected)
        for each in self._publishers:
            each.rejected = [*each.rejected, *(item for item in items if self._of(item) is each)]
            if highest is not None:
                each.on_start(highest)

    @contextmanager
    def draining(self) -> Iterator[None]:
        """While the body runs, publish without settle delay: the mount is about to end."""
        with ExitStack() as stack:
            for each in self._publishers:
                stack.enter_context(each.draining())
            yield

    def wake(self) -> None:
        """Look at the queue again: there may be more to publish."""
        for each in self._publishers:
            each.wake()

    def on_change(self) -> None:
        """A change joined or left the queue."""
        for each in self._publishers:
            each.on_change()

    def on_added(self, item: QueuedChange) -> None:
        """A change was queued."""
        self._of(item).on_added(item)

    def on_removed(self, item: QueuedChange) -> None:
        """A change left the queue."""
        self._of(item).on_removed(item)

    def on_rebased(self, item: QueuedChange) -> None:
        """A queued change inherited its base ETag."""
        self._of(item).on_rebased(item)

    def on_failing(self, item: QueuedChange, error: FusecacheError) -> None:
        """A request for a part of a change failed in a way that may pass."""
        self._of(item).on_failing(item, error)

    def on_success(self, item: QueuedChange) -> None:
        """The bucket accepted a part of a change."""
        self._of(item).on_success(item)

    def on_resolved(self, version: FileVersion) -> list[Change]:
        """A rejected file is rejected no longer: return the rows of the commit markers that were held for it."""
        return self._of(version).commit_markers.on_resolved(version)

    def on_returned(self, version: FileVersion) -> list[Change]:
        """A version has its name again: return the rows, if it is a held commit marker that is queued now."""
        return self._of(version).commit_markers.on_returned(version)

    def _of(self, item: QueuedChange) -> Publisher:
        return self._publishers.of(item.changed_keys()[0])
