"""Reads file content: from the staging file where there is local content, else from the cache."""

import trio

from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileHandle, FileVersion, Node, Operation
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.errors import ObjectChanged, ObjectMissing
from fusecache.model.objects import ObjectInfo

# A reader waits at most this long for an object that is being renamed in the bucket.
_MOVE_SECONDS = 60.0


class FileReader:
    """Serves the reads of open files."""

    def __init__(self, cache: BlockCache, queue: WritebackQueue, offload: Offload, events: Events) -> None:
        self._cache = cache
        self._queue = queue
        self._offload = offload
        self._events = events

    async def read(self, handle: FileHandle, offset: int, size: int) -> bytes | memoryview:
        """Return bytes [offset, offset + size), fewer only at the end of the file.

        A memoryview is valid until the caller's next checkpoint. Raises ObjectChanged if the version that
        this handle reads is no longer in the bucket, and other model errors.
        """
        node = handle.node
        if node.version is not None:
            return await self._read_staged(node.version, offset, size)
        remote = node.object
        if remote is None or remote.size == 0:
            return b""
        if offset == 0 and handle.reader is None:
            self._events.on_read(node, handle.pid)
        try:
            return await self._cache.read(self._reader(handle, remote), offset, size)
        except (ObjectChanged, ObjectMissing):
            # During the wait our own publisher may have given the node another object, or another key.
            await self.wait_moved(node)
            if node.version is None and node.object is remote:
                node.verified = float("-inf")
                raise
            return await self.read(handle, offset, size)

    async def must_fetch(self, handle: FileHandle, offset: int, size: int) -> bool:
        """Return whether the bucket has to send some of these bytes before they can be read."""
        remote = handle.node.object
        if handle.node.version is not None or remote is None or offset >= remote.size:
            return False
        reader = self._reader(handle, remote)
        return not await self._cache.is_whole(reader, offset, min(offset + size, remote.size))

    def _reader(self, handle: FileHandle, remote: ObjectInfo) -> ReadHandle:
        """Return the reads of a handle from the version that the bucket shows."""
        if handle.reader is None or handle.reader_version is not remote:
            if handle.reader is not None:
                self._cache.close(handle.reader)
            handle.reader = self._cache.open(remote.object_id, remote.size)
            handle.reader_version = remote
        return handle.reader

    def close(self, handle: FileHandle) -> None:
        """End the reads of a handle."""
        if handle.reader is not None:
            self._cache.close(handle.reader)
            handle.reader = None

    async def wait_moved(self, node: Node) -> None:
        """If the node's object is being renamed in the bucket, wait until that is done. The node may have no name."""
        key = "" if node.object is None else node.object.key
        for item in self._queue.for_key(key):
            if isinstance(item, Operation) and item.record.key == key and item.in_flight:
                with trio.move_on_after(_MOVE_SECONDS):
                    await self._queue.wait_gone(item)

    async def _read_staged(self, version: FileVersion, offset: int, size: int) -> bytes:
        size = min(size, version.size - offset)
        if size <= 0:
            return b""
        data = version.file.read_nowait(offset, size)
        if data is not None:
            return data
        with version.use.reading():
            return await self._offload.disk(version.file.read, offset, size)
