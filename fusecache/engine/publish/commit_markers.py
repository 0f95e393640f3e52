"""Holds a commit marker (`order_last`: `_SUCCESS`, `latest`, …) while the bucket rejects a file that it announces.

The order among accepted changes is not its business: `policy/writeback/publish_order.py` has that.

Invariants:
1. A marker is held while a change below its directory, queued since the marker's previous version, is rejected.
2. It is queued again as soon as that change is resolved: published, replaced by published content, or removed.
3. While it is held, no later removal below its directory is sent: the bucket's older marker may name that object.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

from fusecache.engine.namespace.nodes import FileVersion, Operation, QueuedChange
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.publish.bucket_writer import CREATES
from fusecache.engine.write.version_states import VersionStates
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change
from fusecache.model.errors import Refused
from fusecache.model.names import parent_prefix
from fusecache.model.records import FileState, Reason

# Markers whose previous version's sequence is remembered.
_REMEMBERED = 4096
_RESOLVED = frozenset({FileState.STORED, FileState.DROPPED, FileState.ORPHAN})


class CommitMarkers:
    """Decides which markers are held, and until when. Callers journal the returned changes with their own."""

    def __init__(
        self,
        tree: Tree,
        queue: WritebackQueue,
        states: VersionStates,
        rejected: Callable[[], list[QueuedChange]],
    ) -> None:
        """rejected: the changes that the bucket has rejected by now."""
        self._tree = tree
        self._queue = queue
        self._states = states
        self._rejected = rejected
        # Per marker key, the sequence of its last version.
        self._last_sequence: dict[str, int] = {}
        # Held markers, by the rejected change that each waits for.
        self._waiting: dict[QueuedChange, dict[FileVersion, None]] = {}
        # Highest sequence that an earlier daemon queued, and the changes that were rejected by then.
        self._start = 0
        self._known_at_start: set[QueuedChange] = set()

    def restore(self, items: list[QueuedChange]) -> None:
        """Find which rejected change each marker waits for that an earlier daemon held. items: all rejected ones."""
        for each in items:
            if _is_held(each):
                self._wait(each, next((other for other in items if _depends_on(other, each)), None))

    def on_start(self, highest: int) -> list[Change]:
        """Queue markers that an earlier daemon held and that nothing blocks now. highest: its last sequence.

        Changes rejected before this start were reported: they hold no marker that is first closed from now on.
        """
        self._start, self._known_at_start = highest, set(self._rejected())
        changes: list[Change] = []
        for each in self._rejected():
            if _is_held(each) and each.marker.missing is None:
                changes += self._requeue(each)
        return changes

    def check(self, version: FileVersion) -> None:
        """Raise Refused for a marker that announces something that the bucket rejected.

        That is a rejected change below its directory, queued since the marker's previous version.
        """
        key = version.record.key
        if not self._queue.is_commit_marker(key) or version.in_flight or version.marker.is_forced:
            return
        is_first = key not in self._last_sequence and version.sequence > self._start
        known = self._known_at_start if is_first else set[QueuedChange]()
        version.marker.reported_before = self._last_sequence.pop(key, 0)
        self._last_sequence[key] = version.sequence
        if len(self._last_sequence) > _REMEMBERED:
            del self._last_sequence[next(iter(self._last_sequence))]
        rejected = (each for each in self._rejected() if each not in known)
        self._wait(version, next((each for each in rejected if _depends_on(each, version)), None))
        if version.marker.missing is not None:
            missing = version.marker.missing.changed_keys()[-1]
            version.record = replace(version.record, reason=Reason.INCOMPLETE)
            raise Refused(
                f"{self._tree.relative(key)}: held, as the bucket rejected {self._tree.relative(missing)}, which must "
                f"come first ({version.marker.missing.error}); write that file again, or remove it, to publish this one"
            )

    def on_resolved(self, item: QueuedChange) -> list[Change]:
        """A change is rejected no longer: queue the markers held for it, now or once its successor is resolved."""
        changes: list[Change] = []
        successor = item.successor if isinstance(item, FileVersion) else None
        for each in self._waiting.pop(item, ()):
            if each.marker.missing is not item:
                continue
            if successor is not None and successor is not each and successor.state not in _RESOLVED:
                self._wait(each, successor)
            else:
                self._last_sequence[each.record.key] = each.marker.reported_before
                changes += self._requeue(each)
        return changes

    def _wait(self, version: FileVersion, missing: QueuedChange | None) -> None:
        version.marker.missing = missing
        if missing is not None:
            self._waiting.setdefault(missing, {})[version] = None

    def marker_blocking(self, removal: Operation) -> FileVersion | None:
        """Return a held marker that is older than a removal below its directory.

        The bucket shows an older version of that marker, which may name the object to be removed.
        """
        rejected = self._rejected()
        if not rejected or self._queue.for_key(removal.record.key)[-1] is not removal:
            return None
        return next((each for each in rejected if self._is_before(each, removal)), None)

    def _is_before(self, rejected: QueuedChange, removal: Operation) -> TypeGuard[FileVersion]:
        if (
            not isinstance(rejected, FileVersion)
            or rejected.record.reason is Reason.NONE
            or rejected.node is None
        ):
            return False
        sequence = rejected.record.refused_at or rejected.sequence
        is_below = removal.record.key.startswith(parent_prefix(rejected.record.key))
        return is_below and sequence < removal.sequence and self._tree.is_linked(rejected.node)

    def on_returned(self, version: FileVersion) -> list[Change]:
        """A version has its name again, as newer content there failed: queue it if it is a held marker."""
        return self._requeue(version) if _is_held(version) and version.marker.missing is None else []

    def _requeue(self, version: FileVersion) -> list[Change]:
        version.marker.missing, node = None, version.node
        if node is None or not self._tree.is_linked(node) or node.version is not version:
            return []
        if version.state is not FileState.REJECTED:
            return []
        return self._states.requeue(node, version)


def _is_held(item: QueuedChange) -> TypeGuard[FileVersion]:
    return isinstance(item, FileVersion) and item.record.reason is Reason.INCOMPLETE


def _depends_on(rejected: QueuedChange, version: FileVersion) -> bool:
    """Return whether a version of a commit marker announces a change that the bucket rejected."""
    if isinstance(rejected, Operation):
        if rejected.record.kind not in CREATES:
            return False
        sequence = rejected.sequence
    else:
        sequence = rejected.record.refused_at or rejected.sequence
    rejected_key, key = rejected.changed_keys()[-1], version.record.key
    return (
        rejected_key != key
        and rejected_key.startswith(parent_prefix(key))
        and version.marker.reported_before < sequence < version.sequence
    )
