"""Content of files: handles, reading it, and the generations that writing makes.

What a close promises is in `close.py`; the publisher carries it out.

Invariant: a sealed generation never changes; a writer that comes later gets a new one.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import trio

from fusecache.disk.staging import StagingDirectory, StagingFile
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.holds import being_written, bytes_in_use
from fusecache.engine.namespace.nodes import FileHandle, Generation, Node, Operation, attributes_of
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.procfs import thread_group
from fusecache.engine.write.close import Promises, is_killed
from fusecache.engine.writeback.queue import Owed
from fusecache.index.journal import Change, PutAttributes, PutFile
from fusecache.model.errors import FusecacheError, NoSpace, NotFound, ObjectChanged, ObjectMissing, TooLarge
from fusecache.model.objects import MIB, ObjectInfo
from fusecache.model.records import FileRecord, PosixAttributes
from fusecache.model.states import FileState
from fusecache.policy.writeback.inline_write_gate import WritePace
from fusecache.policy.writeback.multipart import OBJECT_BYTES_MAX

# Space is reserved in steps, so that 4 KiB writes do not go to the ledger each; small ones for small files, as of those
# many may be open at once.
_RESERVE_STEPS = (64 * 1024, 16 * MIB)
_COPY_BYTES = MIB
# With less room than this a new file is refused at once, before anything of it is accepted.
_HEADROOM_BYTES = MIB
_FULL = (
    "the cache's disk limit is reached by files that the bucket does not have yet; "
    "wait for uploads (`fusecache status`) or mount with a larger --cache-size"
)
# The kernel sends RELEASE as close(2) returns, and waits for nobody: it may come after the OPEN of who opens the file
# next. So long that one waits: by then it is settled that the file is open still, and the close was a forked child's.
_RELEASE_SECONDS = 2.0
# A reader waits so long for an object that is being renamed in the bucket.
_MOVE_SECONDS = 60.0


class Contents(Promises):
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
        super().__init__(tree, cache, staging, journal, owed, offload, boot_id)
        self.on_read: Callable[[Node, int], None] = lambda _node, _pid: None
        self._pace = WritePace()
        self.on_grown: Callable[[Generation], None] = lambda _generation: None
        # Files that somebody has open for writing.
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
            # What is being written keeps its place, even if other clients empty the directory around it.
            self._tree.pin(node)
        process = thread_group(pid) if writable and pid else 0
        return FileHandle(node, writable, pid, process, writable and appends)

    async def closed(self, node: Node) -> None:
        """Return when a close that has returned has ended here too: what is written next must not take it back."""
        generation = node.generation
        if generation is None or generation.changed_since_flush or generation.flushed_by is None:
            return
        if generation.state is FileState.FLUSHED:
            with trio.move_on_after(_RELEASE_SECONDS):
                await generation.flushed_by.released.wait()

    async def release(self, handle: FileHandle) -> None:
        """Close a handle; the last writer's release seals what was flushed."""
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
            self._tree.unpin(node)
        generation = node.generation
        if generation is None or generation.in_flight:
            pass
        elif not self._tree.is_linked(node):
            self._end_replaced(handle, generation)
        elif handle.writable and node.writers == 0 and generation.is_mutable:
            await self._end_writing(handle, generation)
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
        with bytes_in_use(generation):
            return await self._offload.disk(generation.file.read, offset, size)

    # ---- writing

    async def check_room(self, path_of: Callable[[], str] = lambda: "") -> None:
        """Raise NoSpace if nothing can be written at all; asked before a file is made or opened for it.

        path_of: returns its path, where somebody is to be told.
        """
        self._journal.check_writable()
        with self._shortage_noted(path_of, 0):
            self._check_admitted(_HEADROOM_BYTES)
            if not self._cache.reserve_staging_nowait(_HEADROOM_BYTES):
                try:
                    await self._cache.reserve_staging(_HEADROOM_BYTES)
                except NoSpace as exc:
                    raise NoSpace(_FULL) from exc
        self._cache.release_staging(_HEADROOM_BYTES)

    @contextmanager
    def _shortage_noted(self, path_of: Callable[[], str], size: int) -> Iterator[None]:
        try:
            yield
        except NoSpace as exc:
            if path := path_of():
                self.shortages.note(path, size, exc)
            raise

    def _check_admitted(self, nbytes: int) -> None:
        """Raise NoSpace if so much may not be begun, for the sake of what the kernel has accepted already."""
        if nbytes > self._cache.writable_bytes():
            raise NoSpace(_FULL)

    def create(self, node: Node) -> None:
        """Give a new file its first, empty generation."""
        generation = self._new_generation(node)
        self._journal.submit_lazily(PutFile(generation.record))

    async def write(self, handle: FileHandle, offset: int, data: bytes) -> int:
        """Write into the staging file; return the count. Raises NoSpace, TooLarge, LocalDiskError."""
        node = handle.node
        stop = offset + len(data)
        try:
            generation = await self._writable_to(node, stop)
        except NoSpace as exc:
            self.shortages.note(self._tree.path(node), stop, exc)
            raise
        if handle.is_flushed and is_killed(handle):
            # Pages of a mapping, whose end says nothing but RELEASE: the process may be gone by then.
            generation.killed_writer = handle
        try:
            with being_written(generation):
                generation.note_changed(offset, stop)  # before it, and after it: a part may be read meanwhile
                await self._put(generation.file, offset, data)
                has_grown = generation.note_written(offset, stop)
        except FusecacheError as exc:
            self._fail(generation, exc)
            if isinstance(exc, NoSpace):
                self.shortages.note(self._tree.path(node), stop, exc)
            raise
        if has_grown and not self.is_local(node):
            self.on_grown(generation)
        await self._note_change(generation)  # another process may have closed the file meanwhile
        return len(data)

    async def _writable_to(self, node: Node, stop: int) -> Generation:
        """Return content that may be written up to `stop` until the caller's next checkpoint, and say that it changes.

        What fails here loses the bytes that were to be written: nothing written after them may be published.
        """
        while True:
            if node.write_error is not None:
                raise node.write_error
            generation = node.generation
            if generation is None or not generation.is_mutable:
                try:
                    generation = await self._make_mutable(node, keep_bytes=None)
                except FusecacheError as exc:
                    node.write_error = exc
                    raise
            try:
                if generation.state is FileState.FAILED and generation.error is not None:
                    raise generation.error
                if stop > generation.reserved:
                    await self._reserve(node, generation, stop)
                await self._note_change(generation)
            except FusecacheError as exc:
                if generation.is_mutable:
                    self._fail(generation, exc)
                else:  # published as it was, meanwhile: that is whole without these bytes
                    node.write_error = exc
                raise
            if generation.is_mutable and stop <= generation.reserved:
                return generation
            # Else it was closed, or published as it is, meanwhile: what comes now is newer.

    async def truncate(self, node: Node, size: int) -> None:
        """Cut or extend with zeros. Raises NoSpace before anything is changed, TooLarge."""
        self._check_size(node, size)
        if size > node.size:
            with self._shortage_noted(lambda: self._tree.path(node), size):
                self._check_admitted(size - node.size)
        generation = node.generation
        is_new_start = size == 0 and generation is not None and generation.state is FileState.FAILED
        if generation is None or not generation.is_mutable or is_new_start:
            generation = await self._make_mutable(node, keep_bytes=size)
        while True:
            if size > generation.reserved:
                await self._reserve(node, generation, size)
            await self._note_change(generation)
            if generation.is_mutable and size <= generation.reserved:
                break
            generation = await self._make_mutable(node, keep_bytes=size)
        generation.file.truncate(size)
        generation.note_changed(min(size, generation.size), max(size, generation.size))
        generation.size = size
        if node.writers == 0:
            # truncate(2) without an open file: nobody will flush or release it.
            await self._promise(node, generation)
            self._seal_closed(node, generation)

    def set_attributes(self, node: Node, attributes: PosixAttributes) -> None:
        """Change mode, owner and times; published with the next content, else kept here."""
        node.mode, node.uid, node.gid = attributes.mode, attributes.uid, attributes.gid
        node.mtime_ns = attributes.mtime_ns
        generation = node.generation
        if generation is not None:
            generation.record = replace(generation.record, attributes=attributes)
            is_promised = not (generation.is_mutable and generation.changed_since_flush)
            # The kernel sets the time of what was written just before it tells of the close, whose row has it too.
            submit = self._journal.submit if is_promised else self._journal.submit_lazily
            submit(*self._row(generation))
        elif node.object is not None:
            self._journal.submit(PutAttributes(node.object.key, node.object.etag, attributes))

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
                    await self._fill(node, generation, old, keep)
                    generation.size = keep
                if not self._tree.is_linked(node) and not node.handles:
                    raise NotFound(f"{node.name}: it was removed meanwhile")
            except BaseException:
                self._abandon(generation)
                raise
            dropped: list[Change] = []
            if old is not None and failed:
                dropped = self.drop(old)
            elif (
                old is not None
                and old.state is not FileState.DROPPED
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

    async def _fill(self, node: Node, generation: Generation, old: Generation | None, size: int) -> None:
        """Copy the first `size` bytes of what is there."""
        if old is None:
            await self._reserve(node, generation, size)
            await self._copy_object(node, generation.file, size)
            return
        with bytes_in_use(old):  # from here on: it may be published while we wait for room
            await self._reserve(node, generation, size)
            await self._offload.disk(generation.file.copy_from, old.file, size)

    async def _copy_object(self, node: Node, file: StagingFile, size: int) -> None:
        """Fetch the first `size` bytes of the published version: a part of them is about to be changed."""
        while (version := node.object) is not None:
            try:
                await self._copy_version(version, file, size)
            except (ObjectChanged, ObjectMissing):
                # Our own publishing may have put it under another key meanwhile: from there again.
                await self._wait_moved(node)
                if node.object is None or node.object.key == version.key or node.object.size != version.size:
                    node.verified = float("-inf")
                    raise
            else:
                return

    async def _copy_version(self, version: ObjectInfo, file: StagingFile, size: int) -> None:
        reader = self._cache.open(version.object_id, version.size)
        try:
            offset = 0
            while offset < size:
                data = await self._cache.read(reader, offset, min(_COPY_BYTES, size - offset))
                length = len(data)
                await self._put(file, offset, data)
                offset += length
        finally:
            self._cache.close(reader)

    async def _put(self, file: StagingFile, offset: int, data: bytes | memoryview) -> None:
        """Write into a staging file: at once while the disk takes it at memory speed, else in a thread."""
        if self._pace.is_quick():
            began = time.perf_counter()
            file.write(offset, data)
            self._pace.note(time.perf_counter() - began)
        else:
            # A view is valid until this checkpoint only.
            await self._offload.disk(file.write, offset, bytes(data))

    def _abandon(self, generation: Generation) -> None:
        generation.go(FileState.DROPPED)
        if generation.node is not None:
            self._tree.unpin(generation.node)
        self._cache.release_staging(generation.reserved)
        generation.reserved = 0
        generation.file.delete()

    def _check_size(self, node: Node, size: int) -> None:
        if size > OBJECT_BYTES_MAX:
            raise TooLarge(
                f"{self._tree.path(node)}: larger than the largest object, {OBJECT_BYTES_MAX} bytes"
            )

    async def _reserve(self, node: Node, generation: Generation, size: int) -> None:
        """Reserve so that the generation may grow to `size`."""
        self._check_size(node, size)
        need = size - generation.reserved
        smallest, largest = _RESERVE_STEPS
        step = max(need, min(max(generation.size, smallest), largest))
        if self._cache.reserve_staging_nowait(step):
            generation.reserved += step
            return
        async with generation.growth:  # two writers must not both reserve the same growth
            need = size - generation.reserved
            if need <= 0:
                return
            await self._cache.reserve_staging(need)
            if generation.is_mutable:
                generation.reserved += need
            else:
                self._cache.release_staging(need)  # closed, published or removed meanwhile
