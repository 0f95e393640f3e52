"""Publishes files of a folder through the engine: staged, journaled, and sent in the order of publishing.

A file is copied into the engine as a program copies it into a mount. From then on all promises of a mount hold
(docs/semantics.md). What is special here: the folder's state says which version of an object each file comes from, and
only that version is replaced or removed.

Invariants:
1. An object is replaced only if it is the version of the file's row, and removed only under the same condition.
2. Before content is handed over, the state has its uuid. After a crash the object's metadata says whether it arrived.
3. A commit marker is handed over only when every changed file in its directory and below was.
"""

import hashlib
import os
import stat
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from fusecache.config.options import MountOptions
from fusecache.daemon.bucket_link import BucketLink, bucket_access
from fusecache.daemon.connect import StartConnection, record_conditions
from fusecache.disk.state_directory import StateDirectory
from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import FileVersion, Kind, Node, in_use
from fusecache.engine.namespace.tree import Ownership
from fusecache.engine.options import EngineOptions
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.folder.local_folder import FolderScan, LocalFile, LocalFolder, is_closed
from fusecache.folder.state import Row, SentContent, Stamp
from fusecache.model.errors import FolderError, FusecacheError, NotEmpty, NotFound, ObjectMissing
from fusecache.model.format_text import count_text, size_text
from fusecache.model.objects import GENERATION, MIB
from fusecache.model.records import FileState, PosixAttributes
from fusecache.policy.name_patterns import matches_any
from fusecache.remote.read_write_split import ReadWriteSplit

UPLOAD_THREADS = 16
PUBLISH_THREADS = 32
METADATA_THREADS = 8
# Files that are copied at a time: their closes share a commit of the journal.
_TAKERS = 8
_COPY_BYTES = 4 * MIB


@dataclass(slots=True)
class PushReport:
    """What was published. conflicts: another client's version was there; failed: reasons, by name."""

    published_files: int = 0
    published_bytes: int = 0
    removed_files: int = 0
    conflicts: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Return it as a line for people."""
        removed = f", {count_text(self.removed_files, 'object')} removed" if self.removed_files else ""
        return f"{count_text(self.published_files, 'file')}, {size_text(self.published_bytes)} published{removed}"

    @property
    def status(self) -> int:
        """The exit status."""
        return 1 if self.failed else 3 if self.conflicts else 0


@dataclass(frozen=True, eq=False, slots=True)
class _Taken:
    """Content that the engine has. version: None for a symlink."""

    stamp: Stamp
    node: Node
    version: FileVersion | None


class FolderPublisher:
    """Hands files over to a running engine, and records what the bucket has accepted."""

    def __init__(
        self,
        folder: LocalFolder,
        filesystem: FileSystem,
        remote: ReadWriteSplit,
        options: MountOptions,
        *,
        is_forced: bool = False,
    ) -> None:
        self.report = PushReport()
        self._folder = folder
        self._state = folder.state
        self._filesystem = filesystem
        self._remote = remote
        self._prefix = options.prefix
        self._order_last = options.writeback.order_last
        self._is_forced = is_forced
        self._taken: dict[str, _Taken] = {}
        self._removing: set[str] = set()
        self._dropping = trio.Lock()
        # Conflicts and what the bucket refuses, at which stamp: tried again when the file changes.
        self._left_out: dict[str, Stamp] = {}
        # What the present pass could not hand over: tried again by the next one.
        self._missing: set[str] = set()
        self._parents = trio.Lock()

    # ---- what is to do

    def changed(self, found: FolderScan) -> list[LocalFile]:
        """Return the files that the bucket lacks, in the order of their changes, commit markers last."""
        for reasons in (self._left_out, self.report.failed):
            for name in reasons.keys() - found.files.keys() - found.unusable.keys():
                del reasons[name]
        files = [each for each in found.files.values() if not self._is_known(each)]
        return sorted(files, key=lambda each: (*self._marker_rank(each.name), each.changed_ns))

    def _is_known(self, file: LocalFile) -> bool:
        row, taken = self._state.rows.get(file.name), self._taken.get(file.name)
        if taken is not None:
            return taken.stamp == file.stamp
        return (row is not None and row.stamp == file.stamp) or self._left_out.get(file.name) == file.stamp

    def _marker_rank(self, name: str) -> tuple[bool, int]:
        is_marker = matches_any(name.rpartition("/")[2], self._order_last)
        return is_marker, -name.count("/") if is_marker else 0

    @property
    def has_moved(self) -> bool:
        """Whether a file was changed between the present pass's scan and its turn."""
        return not self._missing <= self.report.failed.keys()

    @property
    def under_way(self) -> list[str]:
        """Names that were handed over, and that the bucket has not accepted yet."""
        return [*self._taken, *self._removing]

    # ---- after a crash

    async def restore(self) -> None:
        """Find out what became of content that an earlier process handed over. Raises RemoteError."""
        await self._drop_copies("orphan", "suspect", "refused")
        # The log may be ahead of the engine's journal, which then has content that the bucket accepted.
        if self._state.sent or len(self._filesystem.queue):
            await self._filesystem.drain(until_empty=True)
        for name, sent in list(self._state.sent.items()):
            try:
                there = await trio.to_thread.run_sync(self._remote.primary().head, self._prefix + name)
            except ObjectMissing:
                there = None
            row = self._state.rows.get(name)
            if there is not None and (there.metadata or {}).get(GENERATION) == sent.uuid:
                self._state.have(name, Row(sent.stamp, there.etag))
            elif row is not None:
                self._state.have(name, row)
            else:
                self._state.forget(name)

    async def drop_unfinished(self) -> None:
        """Free the engine's copies of files that changed while they were copied."""
        if self._filesystem.quarantine.statistics()["aside_bytes"]:
            await self._drop_copies("orphan", "suspect")

    async def _drop_copies(self, *kinds: str) -> None:
        """Delete entries of `recover`: the folder has the content, or newer one."""
        quarantine = self._filesystem.quarantine
        async with self._dropping:  # of two that delete the same entry, one finds none
            for row in (await quarantine.listing())["entries"]:
                if row["kind"] in kinds:
                    await quarantine.delete(row["id"])

    # ---- handing over

    async def take(self, files: Iterable[LocalFile]) -> None:
        """Hand files over to the engine, commit markers after the others."""
        limiter = trio.CapacityLimiter(_TAKERS)
        self._missing = set()
        markers = []

        async def take_one(file: LocalFile) -> None:
            async with limiter:
                await self._take(file)

        async with trio.open_nursery() as nursery:
            for file in files:
                if self._marker_rank(file.name)[0]:
                    markers.append(file)
                else:
                    nursery.start_soon(take_one, file)
        for file in markers:
            below = file.name[: file.name.rfind("/") + 1]
            left = (*self._left_out, *self._missing)
            missing = next((name for name in left if name.startswith(below)), None)
            if missing is None:
                await self._take(file)
            else:
                self._fail(file.name, f"held back: it may stand for {missing}")

    async def _take(self, file: LocalFile) -> None:
        try:
            for reasons in (self._left_out, self.report.conflicts, self.report.failed):
                reasons.pop(file.name, None)
            node = await self._shown(file.name)
            conflict = await self._conflict(file, node)
            if conflict is not None:
                if conflict:
                    self._left_out[file.name] = file.stamp
                    self.report.conflicts[file.name] = conflict
            elif file.target:
                await self._take_link(file, node)
            else:
                await self._take_content(file, node)
        except (FusecacheError, OSError) as exc:
            if isinstance(exc, FileNotFoundError):
                return  # removed or renamed since the scan
            self._fail(file.name, str(exc))

    def _fail(self, name: str, why: str) -> None:
        self._missing.add(name)
        self.report.failed[name] = why

    async def _shown(self, name: str) -> Node | None:
        try:
            return await self._filesystem.resolve(name)
        except NotFound:
            return None

    async def _conflict(self, file: LocalFile, node: Node | None) -> str | None:
        """Return why an object must not be replaced; "" if it has the file's content already; None: go on."""
        if file.name in self._taken:
            return None  # what is there, or will be, is ours
        row = self._state.rows.get(file.name)
        shown = None if node is None or node.object is None else node.object.etag
        if node is not None and node.kind is Kind.DIRECTORY:
            return "the bucket has a directory of this name: rename the file"
        if shown == (None if row is None else row.etag):
            return None
        if (
            node is not None
            and shown is not None
            and await trio.to_thread.run_sync(self._is_same, file, node)
        ):
            self._state.have(file.name, Row(file.stamp, shown))
            return ""
        if self._is_forced:
            return None
        if shown is None:
            what = "another client removed it"
        elif row is None:
            what = "the bucket has another object of this name, which this folder neither pulled nor pushed"
        else:
            what = "another client changed it"
        return (
            f"{what}: both are kept. Publish the file with `push --force`, rename it, or take the object with "
            "`pull --force`"
        )

    def _is_same(self, file: LocalFile, node: Node) -> bool:
        if file.target or node.kind is Kind.SYMLINK:
            return file.target == node.target
        if node.object is None or node.object.size != file.stamp.size or len(node.object.etag) != 32:
            return False
        with open(self._folder.open(file.name), "rb") as content:
            md5 = hashlib.file_digest(content, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
            return md5 == node.object.etag and Stamp.of(os.fstat(content.fileno())) == file.stamp

    async def _parent(self, name: str) -> Node:
        """Return the directory of a name; make what is missing of it."""
        async with self._parents:
            node, path = self._filesystem.tree.root, ""
            for part in name.split("/")[:-1]:
                path = f"{path}/{part}".strip("/")
                found = await self._shown(path)
                if found is not None and found.kind is not Kind.DIRECTORY:
                    raise FolderError(f"the bucket has an object {path}: rename the directory")
                node = found or await self._filesystem.namespace_ops.mkdir(node, part, 0o755)
            return node

    async def _take_link(self, file: LocalFile, node: Node | None) -> None:
        parent, name = await self._parent(file.name), file.name.rpartition("/")[2]
        with in_use(parent):
            self._filesystem.symlinks.check_new(parent, name, file.target)
            if node is not None:
                await self._filesystem.namespace_ops.unlink(parent, name)
            made = await self._filesystem.namespace_ops.symlink(parent, name, file.target)
        self._taken[file.name] = _Taken(file.stamp, made, None)

    async def _take_content(self, file: LocalFile, node: Node | None) -> None:
        file_io, descriptor = self._filesystem.file_io, self._folder.open(file.name)
        try:
            if not _is_as_scanned(descriptor, file):
                self._missing.add(file.name)  # the next scan finds what it is then
                return
            if not is_closed(descriptor):
                return  # as on a mount, nothing waits for it
            parent, name = await self._parent(file.name), file.name.rpartition("/")[2]
            with in_use(parent):
                if node is not None and node.kind is Kind.SYMLINK:
                    await self._filesystem.namespace_ops.unlink(parent, name)
                    node = None
                await file_io.check_space(node or parent)
                if node is None:
                    node = await self._filesystem.namespace_ops.create(parent, name, file.mode)
            handle = file_io.open(node, writable=True, pid=0)
            try:
                await file_io.truncate(node, 0)
                await self._copy(descriptor, file, node, handle)
                owner = os.fstat(descriptor)
                file_io.set_attributes(
                    node, PosixAttributes(file.mode, owner.st_uid, owner.st_gid, file.stamp.mtime_ns)
                )
                assert node.version is not None
                self._state.send(file.name, SentContent(file.stamp, node.version.record.uuid))
                await self._filesystem.close_protocol.flush(handle)
                self._taken[file.name] = _Taken(file.stamp, node, node.version)
            except BaseException as exc:
                # Never published: a part of the content is no version of the file.
                node.write_error = (
                    exc if isinstance(exc, FusecacheError) else FolderError(f"not copied: {exc!r}")
                )
                raise
            finally:
                with trio.CancelScope(shield=True):
                    await file_io.release(handle)
        finally:
            os.close(descriptor)

    async def _copy(self, descriptor: int, file: LocalFile, node: Node, handle: object) -> None:
        offset = 0
        while data := await trio.to_thread.run_sync(os.pread, descriptor, _COPY_BYTES, offset):
            await self._filesystem.file_io.write(handle, offset, data)  # type: ignore[arg-type]
            offset += len(data)
        if offset != file.stamp.size or not _is_as_scanned(descriptor, file) or not is_closed(descriptor):
            raise FolderError("it changes while it is read: it is published once it is closed")

    # ---- removing

    async def remove_missing(self, found: FolderScan) -> None:
        """Remove the objects of files that are gone here, if they are the versions that this folder had."""
        unread = tuple(name for name in found.unusable if name.endswith("/") or not name)
        emptied = set()
        for name, row in list(self._state.rows.items()):
            if name in found.files or name in found.unusable or name in self._taken or name in self._removing:
                continue
            if name.startswith(unread) if unread else False:
                continue
            node = await self._shown(name)
            if node is None or node.object is None:
                self._state.forget(name)
                continue
            if node.object.etag != row.etag:
                self.report.conflicts[name] = (
                    "removed here, but another client changed it: the object is kept"
                )
                continue
            parent, _, last = name.rpartition("/")
            await self._filesystem.namespace_ops.unlink(await self._filesystem.resolve(parent), last)
            self._removing.add(name)
            emptied.add(parent)
        for path in sorted(emptied, key=lambda each: -each.count("/")):
            await self._remove_directories(path)

    async def _remove_directories(self, path: str) -> None:
        """Remove the markers of directories that are gone here, as far as they are empty."""
        while path and self._folder.stat(path) is None:
            above, _, name = path.rpartition("/")
            try:
                await self._filesystem.namespace_ops.rmdir(await self._filesystem.resolve(above), name)
            except (NotEmpty, NotFound):
                return
            path = above

    # ---- recording

    def record(self) -> None:
        """Record what the bucket has accepted, and what it has not."""
        for name, taken in list(self._taken.items()):
            row = self._accepted(name, taken)
            if row is not None:
                self._state.have(name, row)
                self.report.published_files += 1
                self.report.published_bytes += taken.stamp.size
                del self._taken[name]
        queue, kept_as = self._filesystem.queue, self._filesystem.publisher.rejections.conflicts
        for name in list(self._removing):
            key = self._prefix + name
            if key in kept_as:
                self.report.conflicts[name] = (
                    "removed here, but another client changed it: the object is kept"
                )
            elif queue.for_key(key):
                continue
            else:
                self._state.forget(name)
                self.report.removed_files += 1
            self._removing.discard(name)

    def _accepted(self, name: str, taken: _Taken) -> Row | None:
        """Return the row of content that the bucket has. Names what it has rejected."""
        node, version = taken.node, taken.version
        if version is None:
            return None if node.object is None else Row(taken.stamp, node.object.etag)
        if version.record.key != self._prefix + name:
            kept = version.record.key.removeprefix(self._prefix)
            self._give_up(
                name, taken, self.report.conflicts, f"another client changed it first: yours is {kept} there"
            )
        elif version.state is FileState.REJECTED:
            self._give_up(name, taken, self.report.failed, f"the bucket refuses it: {version.error}")
        elif version.state is FileState.ORPHAN:
            self._give_up(name, taken, self.report.failed, str(version.error))
        elif version.state is FileState.STORED and node.object is not None:
            if (node.object.metadata or {}).get(GENERATION) == version.record.uuid:
                return Row(taken.stamp, node.object.etag)
            del self._taken[name]  # another client was faster afterwards: the next comparison tells
        return None

    def _give_up(self, name: str, taken: _Taken, reasons: dict[str, str], why: str) -> None:
        del self._taken[name]
        self._left_out[name] = taken.stamp
        reasons[name] = why


def _is_as_scanned(descriptor: int, file: LocalFile) -> bool:
    """Return whether an open file is still what the scan found."""
    found = os.fstat(descriptor)
    same = (Stamp.of(found), found.st_ctime_ns) == (file.stamp, file.changed_ns)
    return same and stat.S_ISREG(found.st_mode)


@asynccontextmanager
async def running_engine(
    options: MountOptions, connection: StartConnection, identity: str
) -> AsyncIterator[FileSystem]:
    """Run an engine without a kernel while the body runs. Raises StateError, LocalDiskError, MountError."""
    supervisor = Supervisor()
    offload = Offload(
        supervisor,
        network_threads=METADATA_THREADS,
        upload_threads=UPLOAD_THREADS,
        publish_threads=PUBLISH_THREADS,
    )
    with StateDirectory(options.cache_dir, identity) as directory:
        record_conditions(directory, identity, connection.remote.conditional_writes)
        filesystem = FileSystem(
            connection.remote,
            offload,
            EngineOptions(
                directory=options.cache_dir,
                prefix=options.prefix,
                ownership=Ownership(os.geteuid(), os.getegid(), options.umask),
                cache_bytes=options.cache_size,
                buffer_bytes=options.memory,
                settle_seconds=0.0,  # what is handed over is closed and at rest
                snapshot_seconds=float("inf"),  # an open file is being copied
                order_last=options.writeback.order_last,
                delete_delay=options.writeback.delete_delay,
                drain_seconds=options.writeback.drain_timeout,
                last_wins=options.writeback.conflict == "last-wins",
                access=bucket_access(options, connection.remote.health),
            ),
            supervisor,
        )
        link = BucketLink(options, connection, filesystem, lambda: None)
        async with filesystem.running():
            await link.start()
            async with trio.open_nursery() as nursery:
                link.run_in(nursery, supervisor)
                try:
                    yield filesystem
                finally:  # after Ctrl-C as well
                    offload.abandon_reads()
                    if len(filesystem.queue):
                        offload.abandon_writes()  # like a kill: the next start finds out what took effect
                    nursery.cancel_scope.cancel()
