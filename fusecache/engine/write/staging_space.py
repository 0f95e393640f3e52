"""The staging space of files that are being written: admits, reserves and releases it, and records every ENOSPC.

Invariant: before a write gets ENOSPC, the space of unfinished content that newer content of its name replaced is free.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileVersion, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.write.enospc_log import EnospcLog
from fusecache.model.errors import NoSpace, TooLarge
from fusecache.model.objects import MIB
from fusecache.policy.writeback.multipart import OBJECT_BYTES_MAX

# Space is reserved in steps, so that not every 4 KiB write goes to the ledger. A small file reserves small steps, as
# many small files may be open at once.
_RESERVE_STEPS = (64 * 1024, 16 * MIB)
# With less space than this a new file gets ENOSPC at once, before any byte of it is accepted.
_HEADROOM_BYTES = MIB
_FULL = (
    "the cache's disk limit is reached by files that the bucket does not have yet; "
    "wait for uploads (`fusecache status`) or mount with a larger --cache-size"
)


class StagingSpace:
    """Reserves space in the cache directory for file versions."""

    def __init__(self, tree: Tree, cache: BlockCache, events: Events) -> None:
        self._tree = tree
        self._cache = cache
        self._events = events
        self.enospc_log = EnospcLog()

    async def check_headroom(self, node: Node, path_of: Callable[[], str]) -> None:
        """Raise NoSpace if nothing can be written at all to a file, or below a directory.

        path_of: as for `recording_enospc`.
        """
        key = self._key(node)
        with self.recording_enospc(path_of, 0):
            await self.check_admitted(_HEADROOM_BYTES, node, path_of)
            if not self._cache.reserve_staging_nowait(_HEADROOM_BYTES, key):
                try:
                    await self._reserve(_HEADROOM_BYTES, key)
                except NoSpace as exc:
                    raise NoSpace(_FULL) from exc
        self._cache.release_staging(_HEADROOM_BYTES, key)

    @contextmanager
    def recording_enospc(self, path_of: Callable[[], str], size: int) -> Iterator[None]:
        """Record a NoSpace that the body raises. path_of: returns the file's path for `status`; "" records nothing."""
        try:
            yield
        except NoSpace as exc:
            if path := path_of():
                self.enospc_log.record(path, size, exc)
            raise

    async def check_admitted(self, nbytes: int, node: Node, path_of: Callable[[], str]) -> None:
        """Raise NoSpace if `nbytes` may not be begun: the rest is for writes that the kernel has accepted already.

        path_of: returns the path of the file, which may not exist yet.
        """
        while nbytes > self._cache.writable_bytes(self._key(node)):
            if not await self._events.on_space_short(self._tree.key_of_path(path_of())):
                raise NoSpace(_FULL)

    async def _reserve(self, nbytes: int, key: str) -> None:
        while True:
            try:
                return await self._cache.reserve_staging(nbytes, key)
            except NoSpace:
                if not await self._events.on_space_short(key):
                    raise

    def check_size(self, node: Node, size: int) -> None:
        """Raise TooLarge if no object may be of that size."""
        if size > OBJECT_BYTES_MAX:
            raise TooLarge(
                f"{self._tree.path(node)}: larger than the largest object, {OBJECT_BYTES_MAX} bytes; split the file"
            )

    async def reserve(self, node: Node, version: FileVersion, size: int) -> None:
        """Reserve space, so that the version may grow to `size`. Raises NoSpace, TooLarge."""
        self.check_size(node, size)
        key = version.record.key
        need = size - version.reserved
        smallest, largest = _RESERVE_STEPS
        step = max(need, min(max(version.size, smallest), largest))
        if self._cache.reserve_staging_nowait(step, key):
            version.reserved += step
            return
        async with version.growth:  # two writers must not both reserve the same growth
            need = size - version.reserved
            if need <= 0:
                return
            await self._reserve(need, key)
            if version.is_mutable:
                version.reserved += need
            else:
                self._cache.release_staging(need, key)  # closed, published or removed while this waited

    def _key(self, node: Node) -> str:
        if node.version is not None:
            return node.version.record.key
        return self._tree.key(node) if self._tree.is_linked(node) else ""

    def trim(self, version: FileVersion) -> None:
        """Release the space that is reserved beyond the version's size, as nothing is written for now."""
        if version.reserved > version.size:
            self._cache.release_staging(version.reserved - version.size, version.record.key)
            version.reserved = version.size

    def release(self, version: FileVersion) -> None:
        """Release all space of a version, whose file is about to be deleted."""
        self._cache.release_staging(version.reserved, version.record.key)
        version.reserved = 0
