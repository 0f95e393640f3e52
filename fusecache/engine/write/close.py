"""The close protocol: what close(2), fsync(2) and the release of a file handle do with what was written.

A close is acknowledged once its journal row is on the disk; the last writer's release seals the version. How a version
gets from one state to the next is in `version_states.py`. Not the upload: the publisher uploads what is closed here.

Invariants:
1. `flush` acknowledges content only when its journal row is synced: after a crash of the daemon the next mount finds
   it. After a power cut the bytes must match the row's checksum, too; only `fsync` syncs them.
2. A version whose write failed, or whose writer was killed, is never published.
"""

from dataclasses import dataclass, replace

import trio

from fusecache.engine.namespace.nodes import FileHandle, FileVersion, Node, attributes_of
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.procfs import is_being_killed
from fusecache.engine.runtime.supervisor import unwrap_single_error
from fusecache.engine.write.disposal import LocalOnly, VersionDisposal
from fusecache.engine.write.staging_space import Backpressure, StagingSpace
from fusecache.engine.write.version_states import VersionStates
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.model.errors import FusecacheError, InternalError
from fusecache.model.records import FileState


@dataclass(eq=False, repr=False)
class CloseProtocol:
    """Makes written content durable on this node, and queues it for the bucket."""

    _journal: JournalWriter
    _queue: WritebackQueue
    _offload: Offload
    _states: VersionStates
    _disposal: VersionDisposal
    _local_only: LocalOnly
    _space: StagingSpace
    _backpressure: Backpressure

    async def flush(self, handle: FileHandle) -> None:
        """Handle one close(2): make what was written durable on this node. Raises the file's first stored error."""
        if not handle.writable:
            return
        handle.is_flushed = True
        node = handle.node
        _raise_failure(node)
        version = node.version
        if version is None:
            return
        is_closed = not version.close_state.changed_since_flush
        # The acknowledged close may be a forked child's. This one has a place of its own in the order.
        is_again = version.state is FileState.FLUSHED and (
            version.close_state.flushed_by is handle or not is_killed(handle)
        )
        if not version.is_mutable or (is_closed and not is_again):
            await self._journal.wait_committed()  # the row of another close may be on its way to the disk
        elif self._local_only.covers(node) or await self._may_journal_close(handle, version):
            version.close_state.flushed_by = handle
            await self._states.journal_close(node, version)

    async def fsync(self, handle: FileHandle) -> None:
        """Handle fsync(2): return when data and journal row are on the disk. Raises the file's first stored error."""
        version = handle.node.version
        _raise_failure(handle.node)
        if version is None:
            await self._journal.wait_committed()  # its mode and times, which only this node has
            return
        if version.is_mutable:
            version.record = replace(version.record, size=version.size, attributes=attributes_of(handle.node))
        ticket = self._journal.submit(*self._states.row_of(version))
        try:
            with version.use.reading():
                await self._sync(version)
        except Exception as exc:
            # The kernel reports a failed sync only once, and later reads may return other bytes than were written.
            # After an unexpected exception it may have failed, too.
            if version.is_mutable:
                error = exc if isinstance(exc, FusecacheError) else InternalError(f"fsync failed: {exc!r}")
                self._states.fail(version, error)
            raise
        await ticket.wait()

    async def end_writing(self, handle: FileHandle, version: FileVersion) -> None:
        """Seal the version as its last writer is gone, or quarantine it."""
        node = handle.node
        error = node.write_error
        if error is not None:
            self._states.forget_write_error(node)
            self._states.fail(version, error)  # bytes that a program wrote are missing in it
        if version.state is FileState.FAILED:
            self._disposal.quarantine(node, version)
        elif self._local_only.covers(node):
            if version.state is not FileState.LOCAL or version.close_state.changed_since_flush:
                await self._states.journal_close(node, version)
            self._space.trim(version)
        elif _is_unfinished_at_end(version, handle):
            self._disposal.quarantine(node, version)
        else:
            if version.state is FileState.OPEN:
                await self._states.journal_late_pages(node, version)
            self._states.seal_closed(node, version)

    def end_replaced(self, handle: FileHandle, version: FileVersion) -> None:
        """Handle the release of a handle of an unlinked file: what is not queued ends with the last handle."""
        if handle.node.handles == 0 and version not in self._queue:
            self._disposal.end_unlinked(version)

    # ---- inside

    async def _may_journal_close(self, handle: FileHandle, version: FileVersion) -> bool:
        """Wait for staging space; return whether the close is still to be journaled after that."""
        if not version.use.writers:
            self._space.trim(version)
        await self._backpressure.wait_for_space(handle)
        _raise_failure(handle.node)  # while it waited, a write through another handle may have failed
        if handle.node.version is not version or not version.is_mutable:
            return False  # published as a snapshot, or removed, while it waited
        return not _check_killed_writer(version, handle)

    async def _sync(self, version: FileVersion) -> None:
        """Sync the bytes to the disk, and compute their checksums concurrently, so that a close finds them verified."""
        file, sums, size = version.file, version.checksums, version.size
        if (
            version.use.writers
            or not version.is_mutable
            or not sums.may_take(size, version.upload.written_bytes)
        ):
            await self._offload.disk(file.sync)
            return
        with sums.taking(size) as extent:

            async def sum_up() -> None:
                start, stop = extent
                sums.put(extent, size, await self._offload.disk(file.checksums, start, stop - start))

            with unwrap_single_error():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sum_up, name=f"checksums {version.record.key}")
                    await self._offload.disk(file.sync)


def _raise_failure(node: Node) -> None:
    """Raise the error for which the node's content is not published. An upload that is retried is not one."""
    if node.write_error is not None:
        raise node.write_error
    version = node.version
    if version is None or version.error is None:
        return
    if version.state in {FileState.FAILED, FileState.REJECTED}:
        raise version.error


def _check_killed_writer(version: FileVersion, handle: FileHandle) -> bool:
    """Return whether the process that wrote through a handle is being killed, and record that in the version."""
    if is_killed(handle):
        version.close_state.killed_writer = handle
    elif version.close_state.killed_writer is not handle:
        version.close_state.killed_writer = None
    # Else it stays recorded: a child that outlived the killed process closes the same open file.
    return version.close_state.killed_writer is not None


def _is_unfinished_at_end(version: FileVersion, handle: FileHandle) -> bool:
    """Return whether a version must not be published although its last writer is gone."""
    if version.close_state.killed_writer is not None:
        return True
    if version.close_state.covers_all:
        return False  # a close acknowledged exactly these bytes
    # Late pages of a mapping, whose process may have been killed; or nothing was ever written, and nothing closed.
    return is_killed(handle) or not (version.close_state.changes or version.sequence)


def is_killed(handle: FileHandle) -> bool:
    """Return whether the process that opened a file for writing is being killed by a signal."""
    return is_being_killed(handle.process or handle.pid)
