"""Reads and writes file content: handles, reads, writes, truncates, and the versions that writing makes.

Not the close, which is in `close.py`, and not the upload, which the publisher does.

Invariant: a sealed version never changes. A writer that comes later gets a new version.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import trio

from fusecache.disk.staging import StagingDirectory, StagingFile
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import (
    FileHandle,
    FileVersion,
    Node,
    Operation,
    attributes_of,
    reading,
    writing,
)
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.procfs import thread_group
from fusecache.engine.write.close import CloseProtocol, is_killed
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, PutAttributes, PutFile
from fusecache.model.errors import FusecacheError, NoSpace, NotFound, ObjectChanged, ObjectMissing, TooLarge
from fusecache.model.objects import MIB, ObjectInfo
from fusecache.model.records import FileRecord, PosixAttributes
from fusecache.model.states import FileState
from fusecache.policy.writeback.inline_write_gate import InlineWriteGate
from fusecache.policy.writeback.multipart import OBJECT_BYTES_MAX

# Space is reserved in steps, so that not every 4 KiB write goes to the ledger. A small file reserves small steps, as
# many small files may be open at once.
_RESERVE_STEPS = (64 * 1024, 16 * MIB)
_COPY_BYTES = MIB
# With less space than this a new file gets ENOSPC at once, before any byte of it is accepted.
_HEADROOM_BYTES = MIB
_FULL = (
    "the cache's disk limit is reached by files that the bucket does not have yet; "
    "wait for uploads (`fusecache status`) or mount with a larger --cache-size"
)
# The kernel sends RELEASE when close(2) returns, and does not wait for the answer. So it may arrive after the next OPEN
# of the file, which waits this long for it. After that the file counts as still open: the close was a forked child's.
_RELEASE_SECONDS = 2.0
# A reader waits at most this long for an object that is being renamed in the bucket.
_MOVE_SECONDS = 60.0


class FileIO(CloseProtocol):
    """Reads and writes the content of file nodes."""

    def __init__(
        self,
        tree: Tree,
        cache: BlockCache,
        staging: StagingDirectory,
        journal: JournalWriter,
        queue: WritebackQueue,
        offload: Offload,
        boot_id: str,
    ) -> None:
        super().__init__(tree, cache, staging, journal, queue, offload, boot_id)
        self.on_read: Callable[[Node, int], None] = lambda _node, _pid: None
        self._inline_gate = InlineWriteGate()
        self.on_part_ready: Callable[[FileVersion], None] = lambda _version: None
        # Files that are open for writing.
        self.writing: set[Node] = set()

    # ---- handles

    def open(self, node: Node, *, writable: bool, pid: int, appends: bool = False) -> FileHandle:
        """Open a file node. appends: with O_APPEND, for writing."""
        if writable:
            self._journal.check_writable()
        node.handles += 1
        if writable:
            node.writers += 1
            node.appenders += appends
            self.writing.add(node)
            # A file that is being written keeps its name, even if other clients empty the directory around it.
            self._tree.hold_local(node)
        process = thread_group(pid) if writable and pid else 0
        return FileHandle(node, writable, pid, process, writable and appends)

    async def wait_release(self, node: Node) -> None:
        """Wait for the RELEASE of a close that has returned: what is written next must not revoke that close."""
        version = node.version
        if version is None or version.changed_since_flush or version.flushed_by is None:
            return
        if version.state is FileState.FLUSHED:
            with trio.move_on_after(_RELEASE_SECONDS):
                await version.flushed_by.released.wait()

    async def release(self, handle: FileHandle) -> None:
        """Close a handle. The last writer's release seals what was flushed."""
        try:
            await self._release(handle)
        finally:
            handle.released.set()

    async def _release(self, handle: FileHandle) -> None:
        node = handle.node
        if handle.reader is not None:
            self._cache.close(handle.reader)
            handle.reader = None
        node.handles -= 1
        if handle.writable:
            node.writers -= 1
            node.appenders -= handle.appends
            if node.writers == 0:
                self.writing.discard(node)
            self._tree.release_local(node)
        version = node.version
        if version is None or version.in_flight:
            pass
        elif not self._tree.is_linked(node):
            self._end_replaced(handle, version)
        elif handle.writable and node.writers == 0 and version.is_mutable:
            await self._end_writing(handle, version)
        if node.writers == 0:
            node.write_error = None
        self._tree.forget(node.number, 0)

    # ---- reading

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
        if handle.reader is None or handle.reader_version is not remote:
            if handle.reader is not None:
                self._cache.close(handle.reader)
            elif offset == 0:
                self.on_read(node, handle.pid)
            handle.reader = self._cache.open(remote.object_id, remote.size)
            handle.reader_version = remote
        try:
            return await self._cache.read(handle.reader, offset, size)
        except (ObjectChanged, ObjectMissing):
            # During the wait our own publisher may have given the node another object, or another key.
            await self._wait_moved(node)
            if node.version is None and node.object is remote:
                node.verified = float("-inf")
                raise
            return await self.read(handle, offset, size)

    async def _wait_moved(self, node: Node) -> None:
        """If the node's object is being renamed in the bucket, wait until that is done."""
        if not self._tree.is_linked(node):
            return
        for item in self._queue.for_key(self._tree.key(node)):
            if isinstance(item, Operation) and item.node is node and item.in_flight:
                with trio.move_on_after(_MOVE_SECONDS):
                    await self._queue.wait_gone(item)

    async def _read_staged(self, version: FileVersion, offset: int, size: int) -> bytes:
        size = min(size, version.size - offset)
        if size <= 0:
            return b""
        data = version.file.read_nowait(offset, size)
        if data is not None:
            return data
        with reading(version):
            return await self._offload.disk(version.file.read, offset, size)

    # ---- writing

    async def check_space(self, path_of: Callable[[], str] = lambda: "") -> None:
        """Raise NoSpace if nothing can be written at all; called before a file is created or opened for writing.

        path_of: returns the file's path for `status`; "" records nothing.
        """
        self._journal.check_writable()
        with self._record_enospc(path_of, 0):
            self._check_admitted(_HEADROOM_BYTES)
            if not self._cache.reserve_staging_nowait(_HEADROOM_BYTES):
                try:
                    await self._cache.reserve_staging(_HEADROOM_BYTES)
                except NoSpace as exc:
                    raise NoSpace(_FULL) from exc
        self._cache.release_staging(_HEADROOM_BYTES)

    @contextmanager
    def _record_enospc(self, path_of: Callable[[], str], size: int) -> Iterator[None]:
        try:
            yield
        except NoSpace as exc:
            if path := path_of():
                self.enospc_log.record(path, size, exc)
            raise

    def _check_admitted(self, nbytes: int) -> None:
        """Raise NoSpace if `nbytes` may not be begun: the rest is for writes that the kernel has accepted already."""
        if nbytes > self._cache.writable_bytes():
            raise NoSpace(_FULL)

    def create(self, node: Node) -> None:
        """Give a new file its first, empty version."""
        version = self._new_version(node)
        self._journal.submit_lazily(PutFile(version.record))

    async def write(self, handle: FileHandle, offset: int, data: bytes) -> int:
        """Write into the staging file; return the count. Raises NoSpace, TooLarge, LocalDiskError."""
        node = handle.node
        stop = offset + len(data)
        try:
            version = await self._writable_to(node, stop)
        except NoSpace as exc:
            self.enospc_log.record(self._tree.path(node), stop, exc)
            raise
        if handle.is_flushed and is_killed(handle):
            # Late pages of a mapping. Only a RELEASE follows them, and the process may be gone by then: check now.
            version.killed_writer = handle
        try:
            with writing(version):
                version.on_changed(offset, stop)  # before and after the write: a part may be read during it
                await self._write_staging(version.file, offset, data)
                has_grown = version.on_written(offset, stop)
        except FusecacheError as exc:
            self._fail(version, exc)
            if isinstance(exc, NoSpace):
                self.enospc_log.record(self._tree.path(node), stop, exc)
            raise
        if has_grown and not self.is_local(node):
            self.on_part_ready(version)
        await self._on_change(version)  # another process may have closed the file during the write
        return len(data)

    async def _writable_to(self, node: Node, stop: int) -> FileVersion:
        """Return a version that may be written up to `stop` until the caller's next checkpoint, marked as changed.

        A failure here loses the bytes that were to be written, so nothing written after them may be published.
        """
        while True:
            if node.write_error is not None:
                raise node.write_error
            version = node.version
            if version is None or not version.is_mutable:
                try:
                    version = await self._make_mutable(node, keep_bytes=None)
                except FusecacheError as exc:
                    node.write_error = exc
                    raise
            try:
                if version.state is FileState.FAILED and version.error is not None:
                    raise version.error
                if stop > version.reserved:
                    await self._reserve(node, version, stop)
                await self._on_change(version)
            except FusecacheError as exc:
                if version.is_mutable:
                    self._fail(version, exc)
                else:  # published as a snapshot in the meantime: that is whole without these bytes
                    node.write_error = exc
                raise
            if version.is_mutable and stop <= version.reserved:
                return version
            # Else it was closed, or published as a snapshot, in the meantime: these bytes go to a newer version.

    async def truncate(self, node: Node, size: int) -> None:
        """Cut the file, or extend it with zeros. Raises NoSpace before anything is changed, TooLarge."""
        self._check_size(node, size)
        if size > node.size:
            with self._record_enospc(lambda: self._tree.path(node), size):
                self._check_admitted(size - node.size)
        version = node.version
        is_new_start = size == 0 and version is not None and version.state is FileState.FAILED
        if version is None or not version.is_mutable or is_new_start:
            version = await self._make_mutable(node, keep_bytes=size)
        while True:
            if size > version.reserved:
                await self._reserve(node, version, size)
            await self._on_change(version)
            if version.is_mutable and size <= version.reserved:
                break
            version = await self._make_mutable(node, keep_bytes=size)
        version.file.truncate(size)
        version.on_changed(min(size, version.size), max(size, version.size))
        version.size = size
        if node.writers == 0:
            # truncate(2) without an open file: no flush and no release will follow.
            await self._journal_close(node, version)
            self._seal_closed(node, version)

    def set_attributes(self, node: Node, attributes: PosixAttributes) -> None:
        """Change mode, owner and times. They are published with the next content; until then this node keeps them."""
        node.mode, node.uid, node.gid = attributes.mode, attributes.uid, attributes.gid
        node.mtime_ns = attributes.mtime_ns
        version = node.version
        if version is not None:
            version.record = replace(version.record, attributes=attributes)
            is_acknowledged = not (version.is_mutable and version.changed_since_flush)
            # The kernel sets the mtime of written content just before it sends the close, whose row has it too: that
            # row need not be synced by itself.
            submit = self._journal.submit if is_acknowledged else self._journal.submit_lazily
            submit(*self._row(version))
        elif node.object is not None:
            self._journal.submit(PutAttributes(node.object.key, node.object.etag, attributes))

    # ---- inside

    def _new_version(self, node: Node) -> FileVersion:
        number = self._journal.next_number()
        record = FileRecord(
            generation=number,
            state=FileState.OPEN,
            key=self._tree.key(node) if self._tree.is_linked(node) else "",
            size=0,
            sequence=0,
            uuid=str(uuid.uuid4()),
            boot_id=self._boot_id,
            attributes=attributes_of(node),
        )
        version = FileVersion(record, self._staging.create(number), node, size=0)
        node.version = version
        self._tree.hold_local(node)
        return version

    async def _make_mutable(self, node: Node, keep_bytes: int | None) -> FileVersion:
        """Return a version that may be changed in place, with the first `keep_bytes` of the content (None: all)."""
        self._journal.check_writable()
        async with node.lock:
            old = node.version
            failed = old is not None and old.state is FileState.FAILED
            if old is not None and old.is_mutable and not (failed and keep_bytes == 0):
                return old
            keep = node.size if keep_bytes is None else min(keep_bytes, node.size)
            version = self._new_version(node)
            try:
                # Until the bytes are copied, readers see the old version.
                node.version = old
                if keep:
                    await self._fill(node, version, old, keep)
                    version.size = keep
                if not self._tree.is_linked(node) and not node.handles:
                    raise NotFound(f"{node.name}: was removed while it was opened for writing")
            except BaseException:
                self._abandon(version)
                raise
            dropped: list[Change] = []
            if old is not None and failed:
                dropped = self.drop(old)
            elif (
                old is not None
                and old.state is not FileState.DROPPED
                and not self._tree.is_linked(node)
                and not old.in_flight
                and old not in self._queue
            ):
                self._dispose_unlinked(old)
            if old is not None and old.state is FileState.REJECTED:
                version.replaces = old
            node.version = version
            self._journal.submit(*dropped, *self._row(version))
            return version

    async def _fill(self, node: Node, version: FileVersion, old: FileVersion | None, size: int) -> None:
        """Copy the first `size` bytes of the current content into a new version."""
        if old is None:
            await self._reserve(node, version, size)
            await self._copy_object(node, version.file, size)
            return
        with reading(old):  # keeps its bytes: it may be published while this waits for space
            await self._reserve(node, version, size)
            await self._offload.disk(version.file.copy_from, old.file, size)

    async def _copy_object(self, node: Node, file: StagingFile, size: int) -> None:
        """Fetch the first `size` bytes of the published object, as a part of it is about to be changed."""
        while (remote := node.object) is not None:
            try:
                await self._copy_from_cache(remote, file, size)
            except (ObjectChanged, ObjectMissing):
                # Our own publisher may have renamed the object in the meantime: then read it again from its new key.
                await self._wait_moved(node)
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
                await self._write_staging(file, offset, data)
                offset += length
        finally:
            self._cache.close(reader)

    async def _write_staging(self, file: StagingFile, offset: int, data: bytes | memoryview) -> None:
        """Write into a staging file: on the loop while the disk takes it at memory speed, else in a thread."""
        if self._inline_gate.is_quick():
            began = time.perf_counter()
            file.write(offset, data)
            self._inline_gate.record(time.perf_counter() - began)
        else:
            # A memoryview is valid only until this checkpoint.
            await self._offload.disk(file.write, offset, bytes(data))

    def _abandon(self, version: FileVersion) -> None:
        version.transition_to(FileState.DROPPED)
        if version.node is not None:
            self._tree.release_local(version.node)
        self._cache.release_staging(version.reserved)
        version.reserved = 0
        version.file.delete()

    def _check_size(self, node: Node, size: int) -> None:
        if size > OBJECT_BYTES_MAX:
            raise TooLarge(
                f"{self._tree.path(node)}: larger than the largest object, {OBJECT_BYTES_MAX} bytes; split the file"
            )

    async def _reserve(self, node: Node, version: FileVersion, size: int) -> None:
        """Reserve staging space, so that the version may grow to `size`."""
        self._check_size(node, size)
        need = size - version.reserved
        smallest, largest = _RESERVE_STEPS
        step = max(need, min(max(version.size, smallest), largest))
        if self._cache.reserve_staging_nowait(step):
            version.reserved += step
            return
        async with version.growth:  # two writers must not both reserve the same growth
            need = size - version.reserved
            if need <= 0:
                return
            await self._cache.reserve_staging(need)
            if version.is_mutable:
                version.reserved += need
            else:
                self._cache.release_staging(need)  # closed, published or removed while this waited
