"""Refuses new names below directories that never change, which the option `immutable` names.

A program that makes files beside its data set would otherwise publish them into it: StreamingDataset decompresses zstd
shards next to them, for example.
"""

import logging

from fusecache.engine.namespace.nodes import Node
from fusecache.engine.namespace.tree import Tree
from fusecache.model.errors import ReadOnly

log = logging.getLogger(__name__)


class ImmutableDirectories:
    """The patterns of `immutable` that end in '/'. Others are of files, which must be made before they never change."""

    def __init__(self, tree: Tree, patterns: tuple[str, ...]) -> None:
        self._tree = tree
        self._directories = tuple(pattern for pattern in patterns if pattern.endswith("/"))
        self._logged: set[str] = set()

    def check_new(self, parent: Node, name: str) -> None:
        """Raise ReadOnly (EROFS) if a new name would lie in an immutable directory; the log says so once for each."""
        if not self._directories:
            return
        path = self._tree.relative(self._tree.key(parent)) + name
        for directory in self._directories:
            if path.startswith(directory):
                text = f"{path}: not created, as {directory} is immutable"
                if directory not in self._logged:
                    self._logged.add(directory)
                    log.warning(
                        "%s; write elsewhere (StreamingDataset: local=, on a local disk), or mount without this "
                        "--immutable to change the data set. The next refusals below it are not logged.",
                        text,
                    )
                raise ReadOnly(text)
