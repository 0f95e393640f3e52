"""Puts bytes into staging files: what a program writes, and a copy of what a file held before it is changed."""

import time

from fusecache.disk.staging import StagingFile
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import FileVersion, Node
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.write.file_reader import FileReader
from fusecache.model.errors import ObjectChanged, ObjectMissing
from fusecache.model.objects import MIB, ObjectInfo
from fusecache.policy.writeback.inline_write_gate import InlineWriteGate

_COPY_BYTES = MIB


class StagingWriter:
    """Writes into staging files. The caller has reserved the space."""

    def __init__(self, cache: BlockCache, reader: FileReader, offload: Offload) -> None:
        self._cache = cache
        self._reader = reader
        self._offload = offload
        self._inline_gate = InlineWriteGate()

    async def write(self, file: StagingFile, offset: int, data: bytes | memoryview) -> None:
        """Write: on the loop while the disk takes it at memory speed, else in a thread."""
        if self._inline_gate.is_quick():
            began = time.perf_counter()
            file.write(offset, data)
            self._inline_gate.record(time.perf_counter() - began)
        else:
            # A memoryview is valid only until this checkpoint.
            await self._offload.disk(file.write, offset, bytes(data))

    async def copy_version(self, old: FileVersion, file: StagingFile, size: int) -> None:
        """Copy the first `size` bytes of another version, whose file the caller keeps in use."""
        await self._offload.disk(file.copy_from, old.file, size)

    async def copy_object(self, node: Node, file: StagingFile, size: int) -> None:
        """Fetch the first `size` bytes of the published object, as a part of it is about to be changed."""
        while (remote := node.object) is not None:
            try:
                await self._copy_from_cache(remote, file, size)
            except (ObjectChanged, ObjectMissing):
                # Our own publisher may have renamed the object in the meantime: then read it again from its new key.
                await self._reader.wait_moved(node)
                if node.object is None or node.object.key == remote.key or node.object.size != remote.size:
                    node.verified = float("-inf")
                    raise
            else:
                return

    async def _copy_from_cache(self, remote: ObjectInfo, file: StagingFile, size: int) -> None:
        reader = self._cache.open(remote.object_id, remote.size)
        try:
            offset = 0
            while offset < size:
                data = await self._cache.read(reader, offset, min(_COPY_BYTES, size - offset))
                length = len(data)
                await self.write(file, offset, data)
                offset += length
        finally:
            self._cache.close(reader)
