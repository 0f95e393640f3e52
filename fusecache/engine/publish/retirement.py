"""Hands the staged bytes of published files over to the cache, so that a file just written is warm.

Invariant: a staging file leaves only after its STORED row is on disk. Until the cache has its bytes, the node of a file
says where they are (`Node.staged`): if the daemon dies, its successor hands them over.
"""

import logging
from collections.abc import Sequence

import trio

from fusecache.disk.staging import StagingFile
from fusecache.engine.cache.adoption import StagedObject
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import FileVersion, Node
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.batcher import Batcher
from fusecache.engine.runtime.journal_writer import CommitTicket, JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.index.journal import DropFile
from fusecache.model.errors import FusecacheError, InternalError, LocalDiskError
from fusecache.model.objects import ObjectId, ObjectInfo

log = logging.getLogger(__name__)

# No caller waits for the handover. But until it is done, a read that the page cache cannot serve goes to the bucket.
_BATCH_SECONDS = 0.04
_BATCH_FILES = 64

_Stored = tuple[FileVersion, ObjectInfo, CommitTicket | None]


class Retirement:
    """Hands over stored file versions, many in one thread call."""

    def __init__(
        self, tree: Tree, cache: BlockCache, journal: JournalWriter, offload: Offload, tasks: TaskNursery
    ) -> None:
        self._tree = tree
        self._cache = cache
        self._journal = journal
        self._offload = offload
        self._batches = Batcher(self._retire, tasks, seconds=_BATCH_SECONDS, most=_BATCH_FILES, name="retire")
        self._pending = 0
        self._has_ended = False
        self._ended = trio.Event()

    async def run(self) -> None:
        """Hand over until cancelled; the next mount deletes staging files that are left then."""
        self._has_ended = False
        self._wake()
        try:
            await self._batches.run()
        finally:
            self._has_ended = True
            self._wake()

    def add(self, version: FileVersion, published: ObjectInfo, row: CommitTicket | None) -> None:
        """The bucket shows a file as `published`: hand its bytes over once `row`, which says so, is on disk.

        None: it is.
        """
        self._pending += 1
        self._batches.add((version, published, row))

    def take_over(self, version: FileVersion) -> None:
        """Hand over what the daemon before published, and journaled as stored."""
        if version.node is not None and version.node.object is not None:
            self.add(version, version.node.object, None)

    async def rename(self, source: ObjectId, copy: ObjectId) -> None:
        """The bucket shows a copy of an object in its place: what the cache has of it stays."""
        await self._cache.rename(source, copy)

    async def wait_idle(self) -> None:
        """Return when every handover is done, or `run` has ended."""
        while self._pending and not self._has_ended:
            self._batches.flush_now()
            await self._ended.wait()

    async def _retire(self, batch: list[_Stored]) -> None:
        try:
            await self._release(batch)
        except FusecacheError as exc:
            log.warning("published files stay in staging until the next mount error=%s", exc)
        finally:
            self._pending -= len(batch)
            self._wake()

    def _wake(self) -> None:
        """Have `wait_idle` look again."""
        self._ended.set()
        self._ended = trio.Event()

    async def _release(self, batch: list[_Stored]) -> None:
        staged: list[StagedObject] = []
        files: list[StagingFile] = []
        rows: list[DropFile] = []
        released: list[tuple[Node, int]] = []
        for version, published, row in batch:
            try:
                if row is not None:
                    await row.committed()
            except InternalError as exc:
                log.warning("a published file stays in staging until the next mount error=%s", exc)
                continue
            if version.node is not None and version.node.version is version:
                continue  # unlinked, and still open: its last close disposes of it
            if version.node is None:
                continue  # unlinked, and disposed of by its last close
            await version.use.wait_unread()
            version.file.close()
            rows.append(DropFile(version.record.generation))
            released.append((version.node, version.record.generation))
            size, checksums = version.size, version.granule_checksums
            if size and not checksums:  # it was synced, and prepared, by the daemon before
                checksums = await self._offload.disk(version.file.checksums)
            is_cacheable = bool(size and checksums)
            self._cache.release_staging(version.reserved - (size if is_cacheable else 0))
            version.reserved = 0
            if is_cacheable:
                staged.append(StagedObject(published.object_id, size, version.file.path, checksums))
            files.append(version.file)
        if staged:
            await self._cache.adopt(staged)
        await self._offload.disk(_delete_all, files)
        for node, generation in released:
            self._tree.set_cached(node, generation)
        self._journal.submit_lazily(*rows)


def _delete_all(files: Sequence[StagingFile]) -> None:
    """Run in a thread."""
    for file in files:
        try:
            file.delete()
        except LocalDiskError as exc:
            log.warning("uploaded staging file not removed; check the cache directory error=%s", exc)
