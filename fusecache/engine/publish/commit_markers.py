"""Holds a commit marker (`order_last`: `_SUCCESS`, `latest`, …) while the bucket rejects an older file below it.

The order among accepted changes is not its business: `policy/writeback/publish_order.py` has that.

Invariants:
1. A marker is held while a change below its directory is rejected.
2. It is queued again within a second after there is none, behind all that was queued by then.
3. Until it, or newer content of it, is published or removed, no removal below its directory is sent: the bucket's older
   marker may name that object.
"""

from collections.abc import Callable
from dataclasses import replace

import trio

from fusecache.engine.namespace.nodes import FileVersion, QueuedChange
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.publish.bucket_writer import CREATES
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.version_states import VersionStates
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.errors import Refused
from fusecache.model.names import parent_prefix
from fusecache.model.records import Reason

# Nothing tells of the end of a rejected change. To look costs the product of held markers and rejected changes.
_CHECK_SECONDS = 1.0


class Held(Refused):
    """A commit marker is not sent for now: the bucket has not rejected it."""


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
        self._has_news = trio.Event()

    def restore(self, items: list[QueuedChange]) -> None:
        """Go on holding the markers that an earlier daemon held. items: all rejected changes."""
        for each in [*items, *self._queue.contents, *self._states.dirty_versions()]:
            if isinstance(each, FileVersion) and each.record.reason is not Reason.NONE:
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
            raise Held(
                f"{name}: held, as the bucket rejected {path}, which must come first ({missing.error}); "
                "write that file again, or remove it, to publish this one"
            )

    async def run(self) -> None:
        """Queue held markers as soon as nothing is missing, until cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news = trio.Event()
            while self._queue.held_markers():
                await trio.sleep(_CHECK_SECONDS)
                self.release()

    def release(self) -> None:
        """Queue the held markers for which nothing is missing now."""
        for each in sorted(self._queue.held_markers(), key=lambda held: held.sequence):
            node = each.node
            if node is None or node.version is not each or not self._tree.is_linked(node):
                continue
            if each.record.reason is Reason.INCOMPLETE and self._missing_for(each) is None:
                self._journal.submit(*self._states.requeue(node, each))

    # ---- inside

    def _hold(self, version: FileVersion) -> None:
        self._queue.hold(version)
        self._has_news.set()

    def _missing_for(self, version: FileVersion) -> QueuedChange | None:
        """Return a rejected change below a marker's directory, or None. Of other held markers only older ones count."""
        key = version.record.key
        folder = parent_prefix(key)
        for each in self._rejected():
            name = each.changed_keys()[-1]
            if isinstance(each, FileVersion):
                brings_name = each.record.reason is Reason.NONE or each.sequence < version.sequence
            else:
                brings_name = each.record.kind in CREATES
            if brings_name and name != key and name.startswith(folder):
                return each
        return None
