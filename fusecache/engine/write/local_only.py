"""Local-only content, which is never published: files whose path matches the option `local_only`, and special files.

Not their state changes: `version_states.py` makes them.
"""

from collections.abc import Iterator

from fusecache.engine.namespace.nodes import FileVersion, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.model.errors import AcrossDevices
from fusecache.model.special_files import is_special
from fusecache.policy.name_patterns import is_at_or_below_any


class LocalOnly:
    """Decides which files are local-only, and holds the set of their closed versions."""

    def __init__(self, tree: Tree, patterns: tuple[str, ...]) -> None:
        self._tree = tree
        self._patterns = patterns
        self._versions: set[FileVersion] = set()

    def __contains__(self, version: FileVersion) -> bool:
        return version in self._versions

    def __iter__(self) -> Iterator[FileVersion]:
        return iter(self._versions)

    def add(self, version: FileVersion) -> None:
        """A version was closed under a local-only path."""
        self._versions.add(version)

    def discard(self, version: FileVersion) -> None:
        """A version ended, or has another path."""
        self._versions.discard(version)

    def covers(self, node: Node) -> bool:
        """Return whether the node's content is never published."""
        if is_special(node.mode):
            return True
        return bool(self._patterns) and is_at_or_below_any(self._patterns, self._tree.path(node))

    def check_stays_published(self, key_before: str, key_now: str) -> None:
        """Raise AcrossDevices (EXDEV) for a rename from a published to a local-only path.

        It would take the file out of the bucket. `mv` reacts to EXDEV by copying and removing.
        """
        if self._patterns:
            before, now = self._tree.relative(key_before), self._tree.relative(key_now)
            if is_at_or_below_any(self._patterns, now) and not is_at_or_below_any(self._patterns, before):
                raise AcrossDevices(
                    f"{now}: a local_only path is never uploaded; copy {before} and remove it"
                )
