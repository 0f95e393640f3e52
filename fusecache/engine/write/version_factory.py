"""Makes file versions: the empty one of a new file, and a writable copy of content that must not change.

Invariant: a sealed version never changes. A writer that comes later gets a new version.
"""

import uuid
from dataclasses import dataclass

from fusecache.disk.staging import StagingDirectory
from fusecache.engine.namespace.nodes import FileVersion, Node, attributes_of
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.callers import ends_with_caller
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.write.disposal import VersionDisposal, named_row
from fusecache.engine.write.staging_space import StagingSpace
from fusecache.engine.write.staging_writer import StagingWriter
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import Change, PutFile
from fusecache.model.errors import NotFound
from fusecache.model.records import FileRecord
from fusecache.model.states import FileState


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
