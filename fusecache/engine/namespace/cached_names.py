"""Names of a mount that started without its bucket: the objects that the disk cache holds, and their directories.

Not a listing: a name that is absent here may exist in the bucket.
"""

from collections.abc import Mapping

from fusecache.index.cache_index import ObjectRow
from fusecache.index.rows import ListedEntry


class CachedNames:
    """The newest cached version of each key, as rows. seen: loop time that they count as seen at."""

    def __init__(self, objects: Mapping[str, ObjectRow], seen: float) -> None:
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

    def without(self, prefix: str) -> "CachedNames":
        """Return the same without the keys that begin with a prefix."""
        left = {key: row for key, row in self._objects.items() if not key.startswith(prefix)}
        return CachedNames(left, self.seen if left else float("-inf"))

    def with_names(self, objects: Mapping[str, ObjectRow], seen: float) -> "CachedNames":
        """Return the same with more objects."""
        return CachedNames({**self._objects, **objects}, seen)

    def rows(self, key: str, name: str) -> list[ListedEntry]:
        """Return the rows of a key: a file, a directory, both or none. The cache does not know when a file changed."""
        rows = []
        if (found := self._objects.get(key)) is not None:
            rows.append(ListedEntry(name, is_directory=False, size=found.size, etag=found.object_id.etag))
        if key in self._directories:
            rows.append(ListedEntry(name, is_directory=True))
        return rows
