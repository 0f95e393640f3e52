"""Reads and writes the content of files, and begins new versions of it.

Reads come from the staging file where there is local content, else from the cache. Writes go to the staging file, which
first gets a copy of what the file held before.

Invariant: a sealed version never changes. A writer that comes later gets a new version.
"""

import time
import uuid
from dataclasses import dataclass

import trio

from fusecache.disk.staging import StagingDirectory, StagingFile
from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileHandle, FileVersion, Node, Operation, attributes_of
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.procfs import ends_with_caller
from fusecache.engine.write.disposal import VersionDisposal, named_row
from fusecache.engine.write.staging_space import StagingSpace
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, PutFile
from fusecache.model.errors import NotFound, ObjectChanged, ObjectMissing
from fusecache.model.objects import MIB, ObjectInfo
from fusecache.model.records import FileRecord, FileState
from fusecache.policy.writeback.inline_write_gate import InlineWriteGate

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
            reader = self._reader(handle, remote)
            if offset:
                self._events.on_file_read(node, reader, offset, size)
            data = await self._cache.read(reader, offset, size)
            if not offset:  # now its first bytes are known
                self._events.on_file_read(node, reader, offset, size, data)
            return data
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
        if reader.entry.is_loading:
            return False  # all of it is on its way
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
                    while item in self._queue:
                        await self._queue.wait_changed()

    async def _read_staged(self, version: FileVersion, offset: int, size: int) -> bytes:
        size = min(size, version.size - offset)
        if size <= 0:
            return b""
        data = version.file.read_nowait(offset, size)
        if data is not None:
            return data
        with version.use.reading():
            return await self._offload.disk(version.file.read, offset, size)


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


@dataclass(eq=False, repr=False)
class VersionFactory:
    """Makes the versions that programs write into."""

    _tree: Tree
    _journal: JournalWriter
    _queue: WritebackQueue
    _staging: StagingDirectory
    _space: StagingSpace
    _writer: StagingWriter
    _disposal: VersionDisposal
    _boot_id: str

    def create(self, node: Node) -> None:
        """Give a new file its first, empty version."""
        version = self._make(node)
        self._tree.set_version(node, version)
        self._journal.submit_lazily(PutFile(version.record))

    async def make_mutable(self, node: Node, keep_bytes: int | None) -> FileVersion:
        """Return a version that may be changed in place, with the first `keep_bytes` of the content (None: all).

        Raises Interrupted, and has changed nothing, if the caller of `called_by` is killed while content is fetched.
        """
        self._journal.check_writable()
        async with node.lock:
            old = node.version
            failed = old is not None and old.state is FileState.FAILED
            if old is not None and old.is_mutable and not (failed and keep_bytes == 0):
                return old
            keep = node.size if keep_bytes is None else min(keep_bytes, node.size)
            version = self._make(node)
            try:
                if keep:
                    async with ends_with_caller():
                        await self._fill(node, version, old, keep)
                    version.size = keep
                if not self._tree.is_linked(node) and not node.handles:
                    raise NotFound(f"{node.name}: was removed while it was opened for writing")
            except BaseException:
                self._abandon(version)
                raise
            dropped: list[Change] = []
            if old is not None and failed:
                dropped = self._disposal.drop(old)
            elif (
                old is not None
                and old.state is not FileState.DROPPED
                and not self._tree.is_linked(node)
                and not old.in_flight
                and old not in self._queue
            ):
                self._disposal.end_unlinked(old)
            if old is not None and old.state is FileState.REJECTED:
                version.replaces = old
            self._tree.set_version(node, version)
            # Without a writer the caller journals its close itself. Until then this content means nothing.
            rows = named_row(version, self._tree, self._queue) if node.writers else []
            self._journal.submit(*dropped, *rows)
            return version

    def _make(self, node: Node) -> FileVersion:
        number = self._journal.next_number()
        if node.version is not None:
            carries = node.version.record.carries
        else:
            # Of a version published from here it may be known that it carries nothing.
            carries = "" if node.object is None or node.object.carried == {} else node.object.key
        record = FileRecord(
            generation=number,
            state=FileState.OPEN,
            key=self._tree.key(node) if self._tree.is_linked(node) else "",
            size=0,
            sequence=0,
            uuid=str(uuid.uuid4()),
            boot_id=self._boot_id,
            attributes=attributes_of(node),
            carries=carries,
        )
        version = FileVersion(record, self._staging.create(number), node, size=0)
        self._tree.hold_local(node)
        return version

    async def _fill(self, node: Node, version: FileVersion, old: FileVersion | None, size: int) -> None:
        """Copy the first `size` bytes of the current content into a new version."""
        if old is None:
            await self._space.reserve(node, version, size)
            await self._writer.copy_object(node, version.file, size)
            return
        with old.use.reading():  # keeps its bytes: it may be published while this waits for space
            await self._space.reserve(node, version, size)
            await self._writer.copy_version(old, version.file, size)

    def _abandon(self, version: FileVersion) -> None:
        version.transition_to(FileState.DROPPED)
        if version.node is not None:
            self._tree.release_local(version.node)
        self._space.release(version)
        version.file.delete()
