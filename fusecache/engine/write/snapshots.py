"""Snapshots of open files: seals what a file holds now, so that it is published without a close.

`open_file_snapshots.py` takes them at intervals, and a remote fsync at once.
"""

from dataclasses import dataclass

from fusecache.engine.namespace.nodes import FileVersion, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.local_only import LocalOnly
from fusecache.engine.write.version_states import VersionStates
from fusecache.model.states import FileState
from fusecache.policy.name_patterns import matches_any


@dataclass(eq=False, repr=False)
class Snapshots:
    """Takes snapshots of open files. temp_names: patterns of names under which programs write before they rename."""

    _tree: Tree
    _journal: JournalWriter
    _states: VersionStates
    _local_only: LocalOnly
    _temp_names: tuple[str, ...]

    def has_temporary_name(self, node: Node) -> bool:
        """Return whether the node's name matches `temp_names`: programs write under it, then rename."""
        return matches_any(node.name, self._temp_names)

    async def take(self, node: Node, *, rested_seconds: float) -> FileVersion | None:
        """Seal what an open file holds now, so that it is published; return it, or None if nothing is to be published.

        Nothing is copied here: the version is sealed, and the next writer gets a copy of it. Waits until no write is in
        progress. rested_seconds: how much of its settle delay counts as over.
        """
        version = node.version
        while version is not None and version.use.writers:
            await version.use.wait_written()
            version = node.version
        if version is None or version.state not in {FileState.OPEN, FileState.FLUSHED}:
            return None
        if (
            version.close_state.killed_writer is not None
            or not self._tree.is_linked(node)
            or self._local_only.covers(node)
        ):
            return None
        ticket = self._journal.submit(*self._states.seal_as_closed(node, version))
        version.sealed_at -= rested_seconds
        await ticket.wait()
        return version
