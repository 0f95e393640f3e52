"""Content of files: reading it, and the generations that writing makes.

Promises of the write path are made here (`flush`) and carried out by the publisher.

Invariants:
1. A sealed generation never changes: a writer that comes later gets a new one.
2. `flush` returns only when the journal's row is synced; what it promised is found again after any crash.
3. A generation whose write failed, or whose writer was killed, is never published.
"""

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from fusecache.disk.staging import StagingDirectory, StagingFile
from fusecache.engine.cache import BlockCache
from fusecache.engine.journaling import JournalWriter
from fusecache.engine.nodes import FileHandle, Generation, Node, Operation
from fusecache.engine.offload import Offload
from fusecache.engine.owed import Owed
from fusecache.engine.processes import thread_group, was_killed
from fusecache.engine.tree import Tree
from fusecache.index.journal import Change, DropFile, DropOperation, PutAttributes, PutFile
from fusecache.model.errors import FusecacheError, NoSpace, ObjectChanged, ObjectMissing, TooLarge
from fusecache.model.nouns import MIB
from fusecache.model.records import FileRecord, OperationKind, PosixAttributes
from fusecache.model.states import FileState
from fusecache.policy.parts import OBJECT_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

# Space is reserved in steps, so that 4 KiB writes do not go to the ledger each.
_RESERVE_STEP = 16 * MIB
# Smaller reads and writes are done inline: a thread costs more than the page cache does.
_INLINE_BYTES = 64 * 1024
_COPY_BYTES = MIB
# With less room than this a new file is refused at once, before anything of it is accepted.
_HEADROOM_BYTES = MIB
# A reader waits so long for an object that is being renamed in the bucket.
_MOVE_SECONDS = 60.0
# Files up to this size are taken for ones that speak of others.
_SMALL_BYTES = MIB
# A queued file whose rewriting has put its upload off for so long is published as it is.
_REWRITE_SECONDS = 10.0


class Contents:
    """Reads and writes the content of file nodes."""

    def __init__(
        self,
        tree: Tree,
        cache: BlockCache,
        staging: StagingDirectory,
        journal: JournalWriter,
        owed: Owed,
        offload: Offload,
        boot_id: str,
    ) -> None:
        self._tree = tree
        self._cache = cache
        self._staging = staging
        self._journal = journal
        self._owed = owed
        self._offload = offload
        self._boot_id = boot_id
        # Closed, and perhaps not by the last that holds them.
        self._flushed: set[Generation] = set()
        self.on_sealed: Callable[[], None] = lambda: None
        self.on_read: Callable[[Node, int], None] = lambda _node, _pid: None
        self.on_name_lost: Callable[[Node, str], None] = lambda _parent, _name: None
        self.on_dropped: Callable[[Generation], None] = lambda _generation: None
        self.on_key_changed: Callable[[Generation], None] = lambda _generation: None

    # ---- handles

    def open(self, node: Node, *, writable: bool, pid: int) -> FileHandle:
        """Open a file node."""
        if writable:
            self._journal.check_writable()
        node.handles += 1
        if writable:
            node.writers += 1
            # What is being written keeps its place, even if other clients empty the directory around it.
            self._tree.pin(node)
        return FileHandle(node, writable, pid, thread_group(pid) if writable and pid else 0)

    async def release(self, handle: FileHandle) -> None:
        """Close a handle; the last writer's release seals what was flushed."""
        node = handle.node
        if handle.reader is not None:
            self._cache.close(handle.reader)
            handle.reader = None
        node.handles -= 1
        if handle.writable:
            node.writers -= 1
            if node.writers == 0:
                node.write_error = None
            self._tree.unpin(node)
        generation = node.generation
        if generation is None or generation.in_flight:
            pass
        elif not self._tree.is_linked(node):
            if node.handles == 0:
                self._let_go(generation)
        elif handle.writable and node.writers == 0 and generation.is_mutable:
            await self._end_writing(node, generation)
        self._tree.forget(node.number, 0)

    # ---- reading

    async def read(self, handle: FileHandle, offset: int, size: int) -> bytes | memoryview:
        """Return bytes [offset, offset + size), fewer only at the end of the file.

        A memoryview is valid until the caller's next checkpoint. Raises ObjectChanged if the version that
        this handle reads is no longer in the bucket, and other model errors.
        """
        node = handle.node
        generation = node.generation
        if generation is not None:
            return await self._read_staged(generation, offset, size)
        version = node.object
        if version is None or version.size == 0:
            return b""
        if handle.reader is None or handle.reader_version is not version:
            if handle.reader is not None:
                self._cache.close(handle.reader)
            elif offset == 0:
                self.on_read(node, handle.pid)
            handle.reader = self._cache.open(version.object_id, version.size)
            handle.reader_version = version
        try:
            return await self._cache.read(handle.reader, offset, size)
        except (ObjectChanged, ObjectMissing):
            # While we waited, our own publishing may have put other content, or another key, in its place.
            await self._wait_moved(node)
            if node.generation is None and node.object is version:
                node.verified = float("-inf")
                raise
            return await self.read(handle, offset, size)

    async def _wait_moved(self, node: Node) -> None:
        """If the node's object is under way to another key, wait until it is there."""
        if not self._tree.is_linked(node):
            return
        for item in self._owed.for_key(self._tree.key(node)):
            if isinstance(item, Operation) and item.node is node and item.in_flight:
                with trio.move_on_after(_MOVE_SECONDS):
                    await self._owed.wait_gone(item)

    async def _read_staged(self, generation: Generation, offset: int, size: int) -> bytes:
        size = min(size, generation.size - offset)
        if size <= 0:
            return b""
        data = generation.file.read_nowait(offset, size)
        if data is not None:
            return data
        with _in_use(generation):
            return await self._offload.disk(generation.file.read, offset, size)

    # ---- writing

    async def check_room(self) -> None:
        """Raise NoSpace if nothing can be written at all; asked before a file is made or opened for writing."""
        self._journal.check_writable()
        if not self._cache.reserve_staging_nowait(_HEADROOM_BYTES):
            try:
                await self._cache.reserve_staging(_HEADROOM_BYTES)
            except NoSpace as exc:
                raise NoSpace(
                    "the cache's disk limit is reached by files that the bucket does not have yet; "
                    "wait for uploads (`fusecache status`) or mount with a larger --cache-size"
                ) from exc
        self._cache.release_staging(_HEADROOM_BYTES)

    def create(self, node: Node) -> None:
        """Give a new file its first, empty generation."""
        generation = self._new_generation(node)
        self._journal.submit(PutFile(generation.record))

    async def write(self, handle: FileHandle, offset: int, data: bytes) -> int:
        """Write into the staging file; return the count. Raises NoSpace, TooLarge, LocalDiskError."""
        node = handle.node
        if node.write_error is not None:
            raise node.write_error
        generation = node.generation
        if generation is None or not generation.is_mutable:
            try:
                generation = await self._make_mutable(node, keep_bytes=None)
            except FusecacheError as exc:
                # These bytes are lost: nothing that is written after them may be published without them.
                node.write_error = exc
                raise
        stop = offset + len(data)
        try:
            if stop > generation.reserved:
                await self._reserve(node, generation, stop)
            await self._note_change(generation)
            if len(data) <= _INLINE_BYTES:
                generation.file.write(offset, data)
            else:
                await self._offload.disk(generation.file.write, offset, data)
        except FusecacheError as exc:
            self._fail(generation, exc)
            raise
        generation.size = max(generation.size, stop)
        await self._note_change(generation)  # another process may have closed the file meanwhile
        return len(data)

    async def truncate(self, node: Node, size: int) -> None:
        """Cut or extend with zeros. Raises NoSpace before anything is changed, TooLarge."""
        generation = node.generation
        is_new_start = size == 0 and generation is not None and generation.state is FileState.FAILED
        if generation is None or not generation.is_mutable or is_new_start:
            generation = await self._make_mutable(node, keep_bytes=size)
        if size > generation.reserved:
            await self._reserve(node, generation, size)
        await self._note_change(generation)
        generation.file.truncate(size)
        generation.size = size
        if node.writers == 0:
            # truncate(2) without an open file: nobody will flush or release it.
            await self._promise(node, generation)
            if node.writers == 0 and generation.state is FileState.FLUSHED:
                self._seal(generation)

    async def flush(self, handle: FileHandle) -> None:
        """One close(2) of the file: make what was written durable here. Raises the file's first stored error."""
        node = handle.node
        generation = node.generation
        if not handle.writable:
            return
        if node.write_error is not None:
            raise node.write_error
        if generation is None:
            return
        if generation.error is not None:
            raise generation.error
        if not generation.is_mutable or not generation.changed_since_flush:
            return
        if was_killed(handle.process or handle.pid):
            generation.killed_writer = handle
        elif (
            generation.killed_writer is not handle
        ):  # else a child that outlived it: the file is still unfinished
            generation.killed_writer = None
        if generation.killed_writer is not None:
            return
        await self._promise(node, generation)

    async def fsync(self, handle: FileHandle) -> None:
        """Return when data and journal row are on the disk. Raises the file's first stored error."""
        generation = handle.node.generation
        if generation is None:
            return
        if generation.error is not None:
            raise generation.error
        if generation.is_mutable:
            generation.record = replace(
                generation.record, size=generation.size, attributes=attributes_of(handle.node)
            )
        ticket = self._journal.submit(*self._row(generation))
        with _in_use(generation):
            await self._offload.disk(generation.file.sync)
        await ticket.wait()

    def _let_go(self, generation: Generation) -> None:
        """The last handle of an unlinked file is closed."""
        if generation.state is FileState.STORED:
            generation.node = None
            self.on_dropped(generation)
        else:
            self._journal.submit(*self.drop(generation))

    def set_attributes(self, node: Node, attributes: PosixAttributes) -> None:
        """Change mode, owner and times; published with the next content, else kept here."""
        node.mode, node.uid, node.gid = attributes.mode, attributes.uid, attributes.gid
        node.mtime_ns = attributes.mtime_ns
        generation = node.generation
        if generation is not None:
            generation.record = replace(generation.record, attributes=attributes)
            self._journal.submit(*self._row(generation))
        elif node.object is not None:
            self._journal.submit(PutAttributes(node.object.key, node.object.etag, attributes))

    def _row(self, generation: Generation) -> list[PutFile]:
        """Return the row to be journaled: none for a file that was unlinked, which must not come back after a crash."""
        is_named = generation.node is not None and self._tree.is_linked(generation.node)
        return [PutFile(generation.record)] if is_named else []

    def drop(self, generation: Generation) -> list[DropFile]:
        """End a generation that nobody needs any more; return the change to be journaled with its reason.

        One in flight cannot be dropped.
        """
        self._owed.discard(generation)
        generation.go(FileState.DROPPED)
        node = generation.node
        generation.node = None
        if node is not None:
            if node.generation is generation:
                node.generation = None
            self._tree.unpin(node)
        self.on_dropped(generation)
        return [DropFile(generation.record.generation), *self._drop_replaced(generation)]

    def _drop_replaced(self, generation: Generation) -> list[DropFile]:
        """The version that the bucket refused is not wanted any more."""
        refused, generation.replaces = generation.replaces, None
        return self.drop(refused) if refused is not None else []

    def collapse_delete(self, key: str, changes: list[Change]) -> str | None:
        """New content takes the place of a queued DELETE of its key; return what the bucket shows there, or None."""
        queued = self._owed.for_key(key)
        last = queued[-1] if queued else None
        if isinstance(last, Operation) and last.record.kind is OperationKind.DELETE and not last.in_flight:
            self._owed.remove(last)
            self._tree.unhide(key, gone=False)
            changes.append(DropOperation(last.sequence))
            return last.record.base_etag
        return None

    def settle(self, now: float, settle_seconds: float) -> None:
        """Take back promises of files that a writer still holds: the close was a forked child's."""
        for item in list(self._flushed):
            if item.state is not FileState.FLUSHED:
                self._flushed.discard(item)
            elif now - item.flushed_at >= settle_seconds and item.node is not None and item.node.writers:
                self._owed.discard(item)
                item.go(FileState.OPEN)
                # Its sequence stays: a RELEASE without another FLUSH (late pages of a mapping) seals it
                # under that.
                self._journal.submit(PutFile(item.record))

    # ---- inside

    def _new_generation(self, node: Node) -> Generation:
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
        generation = Generation(record, self._staging.create(number), node, size=0)
        node.generation = generation
        self._tree.pin(node)
        return generation

    async def _make_mutable(self, node: Node, keep_bytes: int | None) -> Generation:
        """Return content that may be changed in place, holding the first `keep_bytes` of what is there (None: all)."""
        self._journal.check_writable()
        async with node.lock:
            old = node.generation
            failed = old is not None and old.state is FileState.FAILED
            if old is not None and old.is_mutable and not (failed and keep_bytes == 0):
                return old
            keep = node.size if keep_bytes is None else min(keep_bytes, node.size)
            generation = self._new_generation(node)
            try:
                # Until the bytes are there, readers see the old ones.
                node.generation = old
                if keep:
                    await self._reserve(node, generation, keep)
                    if old is not None:
                        with _in_use(old):
                            await self._offload.disk(generation.file.copy_from, old.file, keep)
                    else:
                        await self._copy_object(node, generation.file, keep)
                    generation.size = keep
            except BaseException:
                self._abandon(generation)
                raise
            dropped: list[DropFile] = []
            if old is not None and failed:
                dropped = self.drop(old)
            elif (
                old is not None
                and not self._tree.is_linked(node)
                and not old.in_flight
                and old not in self._owed
            ):
                self._let_go(old)
            if old is not None and old.state is FileState.REJECTED:
                generation.replaces = old
            node.generation = generation
            self._journal.submit(*dropped, *self._row(generation))
            return generation

    async def _copy_object(self, node: Node, file: StagingFile, size: int) -> None:
        """Fetch the first `size` bytes of the published version: a part of them is about to be changed."""
        version = node.object
        if version is None:
            return
        reader = self._cache.open(version.object_id, version.size)
        try:
            offset = 0
            while offset < size:
                data = await self._cache.read(reader, offset, min(_COPY_BYTES, size - offset))
                file.write(offset, data)
                offset += len(data)
        finally:
            self._cache.close(reader)

    def _abandon(self, generation: Generation) -> None:
        generation.go(FileState.DROPPED)
        if generation.node is not None:
            self._tree.unpin(generation.node)
        self._cache.release_staging(generation.reserved)
        generation.file.delete()

    async def _reserve(self, node: Node, generation: Generation, size: int) -> None:
        """Reserve so that the generation may grow to `size`."""
        if size > OBJECT_BYTES_MAX:
            raise TooLarge(
                f"{self._tree.path(node)}: larger than the largest object, {OBJECT_BYTES_MAX} bytes"
            )
        need = size - generation.reserved
        step = max(need, _RESERVE_STEP)
        if self._cache.reserve_staging_nowait(step):
            generation.reserved += step
            return
        generation.reserved += need  # before the await: two writers must not both reserve the same growth
        try:
            await self._cache.reserve_staging(need)
        except BaseException:
            generation.reserved -= need
            raise

    async def _note_change(self, generation: Generation) -> None:
        """Bytes change after a close was promised: take the promise back until the next close, or the release.

        Durably, before the first byte changes: a crash must not publish a mixture as if it had been closed.
        """
        generation.changed_since_flush = True
        while generation.state is FileState.FLUSHED:
            self._owed.discard(generation)
            await self._journal.commit(PutFile(generation.go(FileState.OPEN)))

    def _fail(self, generation: Generation, error: FusecacheError) -> None:
        if generation.error is None:
            log.error("write failed path=%s error=%s", generation.record.key, error)
            generation.error = error
        self._owed.discard(generation)
        if generation.state is not FileState.FAILED:
            self._journal.submit(PutFile(generation.go(FileState.FAILED, error=str(error))))

    async def _promise(self, node: Node, generation: Generation) -> None:
        """Journal FLUSHED under a new sequence, or under the place of an older generation of the same key."""
        generation.changed_since_flush = False
        if not self._tree.is_linked(node):
            return  # unlinked while open: its content goes with the last handle
        self._owed.discard(generation)
        key = self._tree.key(node)
        changes: list[Change] = [*self._drop_replaced(generation)]
        sequence, base_etag = self._place(node, generation, key, changes)
        record = generation.go(
            FileState.FLUSHED,
            key=key,
            size=generation.size,
            sequence=sequence,
            base_etag=base_etag,
            attributes=attributes_of(node),
            boot_id=self._boot_id,
            synced=False,
            checksum="",
        )
        generation.flushed_at = trio.current_time()
        generation.waiting_since = min(generation.waiting_since, generation.flushed_at)
        self._flushed.add(generation)
        self._owed.add(generation)
        await self._journal.commit(*changes, PutFile(record))
        self.on_sealed()

    def _place(
        self,
        node: Node,
        generation: Generation,
        key: str,
        changes: list[Change],
    ) -> tuple[int, str | None]:
        """Return sequence and base for new content of `key`; what it makes needless is dropped into `changes`."""
        sequence = self._journal.next_number()
        base = node.published_etag(key)
        queued = self._owed.for_key(key)
        last = queued[-1] if queued else None
        if isinstance(last, Generation) and last.node is node and not last.in_flight:
            is_small = generation.size <= _SMALL_BYTES and not self._owed.ends_with(last)
            # A file rewritten again and again must not keep everything behind it waiting for ever.
            is_overdue = (
                trio.current_time() - last.waiting_since > _REWRITE_SECONDS or last.record.upload_id != ""
            )
            if not is_small and not is_overdue:
                generation.waiting_since = last.waiting_since
                # The newer content takes the oldest unpublished place of its key: whatever was written after
                # the old one may rely on it.
                changes += self.drop(last)
                return last.sequence, last.record.base_etag
            # A small file may speak of what was written since (`latest`): the newer content comes after that,
            # and the oldest stays where it is, for those that rely on it. Those between are not needed.
            if sum(isinstance(item, Generation) and item.node is node for item in queued) > 1:
                changes += self.drop(last)
                return sequence, last.record.base_etag
        collapsed = self.collapse_delete(key, changes)
        return sequence, self._owed.base_for(key, base if collapsed is None else collapsed)

    def _seal(self, generation: Generation) -> None:
        self._journal.submit(PutFile(generation.go(FileState.SEALED, size=generation.size)))
        generation.sealed_at = trio.current_time()
        if generation.reserved > generation.size:
            self._cache.release_staging(generation.reserved - generation.size)
            generation.reserved = generation.size
        if generation not in self._owed:
            self._owed.add(generation)
        self.on_sealed()

    async def _end_writing(self, node: Node, generation: Generation) -> None:
        """The last writer is gone: seal, or keep aside."""
        failed = generation.state is FileState.FAILED
        if failed or generation.killed_writer is not None or generation.record.sequence == 0:
            self._put_aside(node, generation)
        else:
            if generation.state is FileState.OPEN:
                await self._promise_late(node, generation)
            if node.writers == 0 and generation.state is FileState.FLUSHED:
                self._seal(generation)  # else another writer came meanwhile: its end seals

    async def _promise_late(self, node: Node, generation: Generation) -> None:
        """Pages came after the close (a mapping): same promise, same place, the newer bytes."""
        self._owed.discard(generation)
        key = self._tree.key(node)
        base = self._owed.base_for(key, node.published_etag(key))
        record = generation.go(FileState.FLUSHED, key=key, size=generation.size, base_etag=base)
        generation.changed_since_flush = False
        self._flushed.add(generation)
        self._owed.add(generation)
        await self._journal.commit(PutFile(record))

    def _put_aside(self, node: Node, generation: Generation) -> None:
        """Keep content that must not be published; the published version shows again under the name."""
        parent, name = node.parent, node.name
        if isinstance(generation.error, NoSpace):
            # Its writer was told; keeping it would hold the very room that is missing.
            log.warning("removed a file that the disk had no room for path=%s", self._tree.path(node))
            self._journal.submit(*self.drop(generation))
        else:
            self._owed.discard(generation)
            record = generation.go(FileState.ORPHAN, size=generation.size)
            self._journal.submit(PutFile(record))
            generation.file.close()
            place = self._staging.move_aside(record.generation, "orphans")
            log.warning(
                "kept aside an unfinished file path=%s bytes=%d at=%s reason=%s",
                self._tree.path(node), record.size, place, record.error or "its writer was killed before close",
            )  # fmt: skip
            self._cache.release_staging(generation.reserved - generation.size)
            generation.reserved = generation.size
            node.generation = None
            generation.node = None
            self._tree.unpin(node)
        if parent is not None and node.parent is not None:
            # The kernel holds the unfinished bytes under this inode: the name needs another one.
            self._tree.detach(node)
            self._hand_over(node, parent, name)
            self.on_name_lost(parent, name)

    def _hand_over(self, node: Node, parent: Node, name: str) -> None:
        """Give what is queued for a node to a new one of that name: its last closed version shows again."""
        queued = [
            item for item in self._owed.for_key(self._tree.child_key(parent, name)) if item.node is node
        ]
        if not queued:
            return
        heir = self._tree.make(parent, name, node.kind, attributes=attributes_of(node), version=node.object)
        for item in queued:
            item.node = heir
            self._tree.pin(heir)
            self._tree.unpin(node)
            if isinstance(item, Generation):
                heir.generation = item


@contextmanager
def _in_use(generation: Generation) -> Iterator[None]:
    """Keep a generation's file while a thread works on it, even if its bytes become cache meanwhile."""
    generation.readers += 1
    try:
        yield
    finally:
        generation.readers -= 1
        if generation.readers == 0 and generation.unread is not None:
            generation.unread.set()


def attributes_of(node: Node) -> PosixAttributes:
    """Return the node's attributes as one value."""
    return PosixAttributes(node.mode, node.uid, node.gid, node.mtime_ns)
