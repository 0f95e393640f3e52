"""What happens to staged bytes that the bucket has: they become cache, so that what was just written is warm.

Invariant: bytes go only after the row that lets them go is on the disk.
"""

import logging
from collections.abc import Sequence

import trio

from fusecache.disk.staging import StagingFile
from fusecache.engine.cache.adoption import StagedObject
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import FileVersion
from fusecache.engine.publish.preparer import wait_unused
from fusecache.engine.runtime.batcher import Batcher
from fusecache.engine.runtime.journal_writer import CommitTicket, JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.index.journal import DropFile
from fusecache.model.errors import FusecacheError
from fusecache.model.objects import MIB, ObjectInfo

log = logging.getLogger(__name__)

# Nobody waits for it; but who reads such a file before that, and not from the kernel's pages, asks the bucket.
_GATHER_SECONDS = 0.04
_AT_ONCE = 64
# The room of larger ones may be waited for.
_SMALL_BYTES = MIB


class Retirement:
    """Takes generations that are stored, many in one crossing to a thread."""

    def __init__(self, cache: BlockCache, journal: JournalWriter, offload: Offload) -> None:
        self._cache = cache
        self._journal = journal
        self._offload = offload
        self._batches = Batcher(self._retire, seconds=_GATHER_SECONDS, most=_AT_ONCE, name="retire")
        self._left = 0
        self._is_over = False
        self._ended = trio.Event()

    async def run(self) -> None:
        """Retire until cancelled; what is left then is deleted by the next mount."""
        try:
            await self._batches.run()
        finally:
            self._is_over = True
            self._ended.set()

    def add(self, generation: FileVersion, version: ObjectInfo, row: CommitTicket) -> None:
        """The bucket has a generation as `version`: its bytes become cache when its row, which says so, is durable."""
        self._left += 1
        self._batches.add((generation, version, row), at_once=generation.size > _SMALL_BYTES)

    async def wait_idle(self) -> None:
        """Return when nothing is left to be retired, or nothing is retired any more."""
        while self._left and not self._is_over:
            self._batches.flush_now()
            await self._ended.wait()

    async def _retire(self, batch: list[tuple[FileVersion, ObjectInfo, CommitTicket]]) -> None:
        try:
            await self._release(batch)
        except FusecacheError as exc:
            # The journal failed, and the publisher says so; or a file cannot be removed. The next mount goes on.
            log.warning("files that are in the bucket are left where they are error=%s", exc)
        finally:
            self._left -= len(batch)
            self._ended.set()
            self._ended = trio.Event()

    async def _release(self, batch: list[tuple[FileVersion, ObjectInfo, CommitTicket]]) -> None:
        staged: list[StagedObject] = []
        needless: list[StagingFile] = []
        gone: list[DropFile] = []
        for generation, version, row in batch:
            await row.wait()
            if generation.node is not None and generation.node.version is generation:
                continue  # unlinked, and still open: it goes with its last handle
            if generation.node is None:
                continue  # it went so meanwhile
            await wait_unused(generation)
            generation.file.close()
            gone.append(DropFile(generation.record.generation))
            size, checksums = generation.size, generation.granule_checksums
            keeps = bool(size and checksums)
            self._cache.release_staging(generation.reserved - (size if keeps else 0))
            generation.reserved = 0
            if keeps:
                staged.append(StagedObject(version.object_id, size, generation.file.path, checksums))
            else:
                needless.append(generation.file)
        if staged:
            await self._cache.adopt(staged)
        if needless:
            await self._offload.disk(_delete_all, needless)
        self._journal.submit_lazily(*gone)


def _delete_all(files: Sequence[StagingFile]) -> None:
    """Run in a thread."""
    for file in files:
        file.delete()
