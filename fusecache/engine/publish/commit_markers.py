"""Holds a commit marker (`order_last`: `_SUCCESS`, `latest`, …) while the bucket rejects an older file below it.

The order among accepted changes is not its business: `policy/writeback/publish_order.py` has that.

Invariants:
1. A marker is held while a change below its directory is rejected that was queued before it.
2. It is queued again within a second after there is none, behind all that was queued by then.
3. While it is held, no later removal below its directory is sent: the bucket's older marker may name that object.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

import trio

from fusecache.engine.namespace.nodes import FileVersion, Operation, QueuedChange
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.publish.bucket_writer import CREATES
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.version_states import VersionStates
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.errors import Refused
from fusecache.model.names import parent_prefix
from fusecache.model.records import FileState, Reason

# Nothing tells of the end of a rejected change. To look costs the product of held markers and rejected changes.
_CHECK_SECONDS = 1.0


class CommitMarkers:
    """Decides which markers are held, and until when."""

    def __init__(
        self,
        tree: Tree,
        queue: WritebackQueue,
        states: VersionStates,
        journal: JournalWriter,
        rejected: Callable[[], list[QueuedChange]],
    ) -> None:
        """rejected: the changes that the bucket has rejected by now."""
        self._tree = tree
        self._queue = queue
        self._states = states
        self._journal = journal
        self._rejected = rejected
        self._held: set[FileVersion] = set()
        self._has_news = trio.Event()

    def restore(self, items: list[QueuedChange]) -> None:
        """Go on holding the markers that an earlier daemon held. items: all rejected changes."""
        for each in items:
            if isinstance(each, FileVersion) and each.record.reason is Reason.INCOMPLETE:
                self._hold(each)

    def check(self, version: FileVersion) -> None:
        """Raise Refused for a marker that announces something that the bucket rejected."""
        if not self._queue.is_commit_marker(version.record.key) or version.in_flight or version.is_forced:
            return
        missing = self._missing_for(version)
        if missing is not None:
            self._hold(version)
            version.record = replace(version.record, reason=Reason.INCOMPLETE)
            name, path = (
                self._tree.relative(version.record.key),
                self._tree.relative(missing.changed_keys()[-1]),
            )
            raise Refused(
                f"{name}: held, as the bucket rejected {path}, which must come first ({missing.error}); "
                "write that file again, or remove it, to publish this one"
            )

    async def run(self) -> None:
        """Queue held markers as soon as nothing is missing, until cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news = trio.Event()
            while self._held:
                await trio.sleep(_CHECK_SECONDS)
                self.release()

    def release(self) -> None:
        """Queue the held markers for which nothing is missing now."""
        for each in sorted(self._held, key=_place):
            node = each.node
            if each.state is not FileState.REJECTED:
                self._held.discard(each)
                continue
            has_name = node is not None and node.version is each and self._tree.is_linked(node)
            if node is not None and has_name and self._missing_for(each) is None:
                self._held.discard(each)
                self._journal.submit(*self._states.requeue(node, each))

    def marker_blocking(self, removal: Operation) -> FileVersion | None:
        """Return a held marker that is older than a removal below its directory.

        The bucket shows an older version of that marker, which may name the object to be removed.
        """
        rejected = self._rejected()
        if not rejected or self._queue.for_key(removal.record.key)[-1] is not removal:
            return None
        return next((each for each in rejected if self._is_before(each, removal)), None)

    # ---- inside

    def _hold(self, version: FileVersion) -> None:
        self._held.add(version)
        self._has_news.set()

    def _missing_for(self, version: FileVersion) -> QueuedChange | None:
        """Return an older rejected change below a marker's directory, or None."""
        key, place = version.record.key, _place(version)
        folder = parent_prefix(key)
        for each in self._rejected():
            name = each.changed_keys()[-1]
            brings_name = isinstance(each, FileVersion) or each.record.kind in CREATES
            if brings_name and name != key and name.startswith(folder) and _place(each) < place:
                return each
        return None

    def _is_before(self, rejected: QueuedChange, removal: Operation) -> TypeGuard[FileVersion]:
        if (
            not isinstance(rejected, FileVersion)
            or rejected.record.reason is Reason.NONE
            or rejected.node is None
        ):
            return False
        is_below = removal.record.key.startswith(parent_prefix(rejected.record.key))
        return is_below and _place(rejected) < removal.sequence and self._tree.is_linked(rejected.node)


def _place(item: QueuedChange) -> int:
    """Return the sequence that a change had when the bucket rejected it: later renames change that."""
    return (item.record.refused_at if isinstance(item, FileVersion) else 0) or item.sequence
