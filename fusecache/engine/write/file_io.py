"""Reads and writes file content: handles, reads, writes, truncates.

Not the close, which is in `close.py`, and not the upload, which the publisher does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileHandle, FileVersion, Kind, Node, directory_row
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.procfs import thread_group
from fusecache.engine.write.close import CloseProtocol, is_killed
from fusecache.engine.write.disposal import LocalOnly, VersionDisposal
from fusecache.engine.write.file_content import FileReader, StagingWriter, VersionFactory
from fusecache.engine.write.staging_space import StagingSpace
from fusecache.engine.write.version_states import VersionStates
from fusecache.index.journal import PutAttributes
from fusecache.model.errors import FusecacheError, NoSpace
from fusecache.model.records import FileState, PosixAttributes

# The kernel sends RELEASE when close(2) returns, and does not wait for the answer. So it may arrive after the next OPEN
# of the file, which waits this long for it. After that the file counts as still open: the close was a forked child's.
_RELEASE_SECONDS = 2.0


@dataclass(eq=False, repr=False)
class FileIO:
    """Opens, reads and writes the content of file nodes."""

    _tree: Tree
    _journal: JournalWriter
    _versions: VersionFactory
    _reader: FileReader
    _writer: StagingWriter
    _space: StagingSpace
    _states: VersionStates
    _close_protocol: CloseProtocol
    _disposal: VersionDisposal
    _local_only: LocalOnly
    _events: Events
    # Those of files that are open for writing, until what they wrote is queued.
    writing: set[FileHandle] = field(init=False, default_factory=set)

    # ---- handles

    def open(self, node: Node, *, writable: bool, pid: int, appends: bool = False) -> FileHandle:
        """Open a file node. appends: with O_APPEND, for writing."""
        if writable:
            self._journal.check_writable()
        process = thread_group(pid) if writable and pid else 0
        return self.adopt(node, FileHandle(node, writable, pid, process, writable and appends))

    def adopt(self, node: Node, handle: FileHandle) -> FileHandle:
        """Count a handle as open: a new one, or one of a daemon whose mount outlived it. Returns it."""
        node.handles += 1
        if handle.writable:
            node.writers += 1
            node.appenders += handle.appends
            self.writing.add(handle)
            # A file that is being written keeps its name, even if other clients empty the directory around it.
            self._tree.hold_local(node)
        return handle

    async def wait_release(self, node: Node) -> None:
        """Wait for the RELEASE of a close that has returned: what is written next must not revoke that close."""
        version = node.version
        if (
            version is None
            or version.close_state.changed_since_flush
            or version.close_state.flushed_by is None
        ):
            return
        if version.state is FileState.FLUSHED:
            with trio.move_on_after(_RELEASE_SECONDS):
                await version.close_state.flushed_by.released.wait()

    async def release(self, handle: FileHandle) -> None:
        """Close a handle. The last writer's release seals what was flushed."""
        try:
            await self._release(handle)
        finally:
            self.writing.discard(handle)
            handle.released.set()

    async def _release(self, handle: FileHandle) -> None:
        node = handle.node
        self._reader.close(handle)
        node.handles -= 1
        if handle.writable:
            node.writers -= 1
            node.appenders -= handle.appends
            self._tree.release_local(node)
        version = node.version
        if version is None or version.in_flight:
            pass
        elif not self._tree.is_linked(node):
            self._close_protocol.end_replaced(handle, version)
        elif handle.writable and node.writers == 0 and version.is_mutable:
            await self._close_protocol.end_writing(handle, version)
        if node.writers == 0 and node.write_error is not None:
            self._tree.set_write_error(node, None)
            self._disposal.renew(node)
        self._tree.forget(node.number, 0)

    # ---- reading

    def announce_read(self, handle: FileHandle) -> None:
        """A program reads a file, but not through here."""
        self._events.on_read(handle.node, handle.pid)

    async def read(self, handle: FileHandle, offset: int, size: int) -> bytes | memoryview:
        """Return bytes [offset, offset + size), as `FileReader.read` does."""
        return await self._reader.read(handle, offset, size)

    async def must_fetch(self, handle: FileHandle, offset: int, size: int) -> bool:
        """Return whether the bucket has to send some of these bytes before they can be read."""
        return await self._reader.must_fetch(handle, offset, size)

    # ---- writing

    async def check_space(self, node: Node, path_of: Callable[[], str] = lambda: "") -> None:
        """Raise NoSpace if nothing can be written at all; called before a file is created or opened for writing.

        node: the file's, or its directory's. path_of: returns the file's path for `status`; "" records nothing.
        """
        self._journal.check_writable()
        await self._space.check_headroom(node, path_of)

    def create(self, node: Node) -> None:
        """Give a new file its first, empty version."""
        self._versions.create(node)

    async def write(self, handle: FileHandle, offset: int, data: bytes) -> int:
        """Write into the staging file; return the count. Raises NoSpace, TooLarge, LocalDiskError."""
        node = handle.node
        stop = offset + len(data)
        try:
            version = await self._writable_to(node, stop)
        except NoSpace as exc:
            self._space.enospc_log.record(self._tree.path(node), stop, exc)
            raise
        if handle.is_flushed and is_killed(handle):
            # Late pages of a mapping. Only a RELEASE follows them, and the process may be gone by then: check now.
            version.close_state.killed_writer = handle
        try:
            with version.use.writing():
                version.on_changed(offset, stop)  # before and after the write: a part may be read during it
                await self._writer.write(version.file, offset, data)
                has_grown = version.on_written(offset, stop)
        except FusecacheError as exc:
            self._states.fail(version, exc)
            if isinstance(exc, NoSpace):
                self._space.enospc_log.record(self._tree.path(node), stop, exc)
            raise
        if has_grown and not self._local_only.covers(node):
            self._events.on_part_ready(version)
        await self._states.mark_changed(version)  # another process may have closed the file during the write
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
                    version = await self._versions.make_mutable(node, keep_bytes=None)
                except FusecacheError as exc:
                    self._tree.set_write_error(node, exc)
                    raise
            try:
                if version.state is FileState.FAILED and version.error is not None:
                    raise version.error
                if stop > version.reserved:
                    await self._space.reserve(node, version, stop)
                await self._states.mark_changed(version)
            except FusecacheError as exc:
                if version.is_mutable:
                    self._states.fail(version, exc)
                else:  # published as a snapshot in the meantime: that is whole without these bytes
                    self._tree.set_write_error(node, exc)
                raise
            if version.is_mutable and stop <= version.reserved:
                return version
            # Else it was closed, or published as a snapshot, in the meantime: these bytes go to a newer version.

    async def truncate(self, node: Node, size: int) -> None:
        """Cut the file, or extend it with zeros. Raises NoSpace before anything is changed, TooLarge."""
        self._space.check_size(node, size)
        if size > node.size:
            path_of = partial(self._tree.path, node)
            with self._space.recording_enospc(path_of, size):
                await self._space.check_admitted(size - node.size, node, path_of)
        version = node.version
        is_new_start = size == 0 and version is not None and version.state is FileState.FAILED
        if version is None or not version.is_mutable or is_new_start:
            version = await self._versions.make_mutable(node, keep_bytes=size)
        while True:
            if size > version.reserved:
                await self._space.reserve(node, version, size)
            await self._states.mark_changed(version)
            if version.is_mutable and size <= version.reserved:
                break
            version = await self._versions.make_mutable(node, keep_bytes=size)
        version.file.truncate(size)
        version.on_changed(min(size, version.size), max(size, version.size))
        version.size = size
        if node.writers == 0:
            # truncate(2) without an open file: no flush and no release will follow.
            await self._states.journal_close(node, version)
            self._states.seal_closed(node, version)

    def set_attributes(
        self, node: Node, attributes: PosixAttributes, *, sets_time: bool | None = None
    ) -> None:
        """Change mode, owner and times. They are published with the next content; until then this node keeps them.

        Of a directory it keeps mode and owner. sets_time: True if a program set the time, False if the kernel tells
        the one of a write, None if it stays.
        """
        node.mode, node.uid, node.gid = attributes.mode, attributes.uid, attributes.gid
        node.mtime_ns = attributes.mtime_ns
        version = node.version
        if version is not None:
            self._states.set_attributes(version, attributes, sets_time=sets_time)
        elif node.object is not None:
            self._journal.submit(PutAttributes(node.object.key, node.object.etag, attributes))
        elif node.kind is Kind.DIRECTORY and node is not self._tree.root and self._tree.is_linked(node):
            default = self._tree.default_attributes(Kind.DIRECTORY, 0.0)
            self._journal.submit(directory_row(self._tree.key(node), attributes, default))
