"""What may happen to sealed content before its turn to be published: sync and checksums, and the parts of large files.

Small files are synced many at once: one crossing to a thread, one sync of the folder, and no task for each.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import trio

from fusecache.disk.staging import StagingFile, checksum_of_checksums, sync_all
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import Generation, Item, Prepared
from fusecache.engine.publish.multipart_uploader import PartUploads
from fusecache.engine.runtime.batcher import Batches
from fusecache.engine.runtime.exception_groups import one_failure
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.index.journal import DropFile, PutFile
from fusecache.model.errors import Damaged, FusecacheError, LocalDiskError, NoSpace, ReadOnly, RemoteError
from fusecache.model.objects import MIB
from fusecache.model.states import OWED, FileState
from fusecache.policy.writeback.multipart import choose_part_bytes, part_extents

log = logging.getLogger(__name__)

# So many files are looked after in advance; so many of them are read back at once.
FILES_AHEAD = 256
FILES_AT_ONCE = 8
# Files up to this size are synced together: so many, and those that come within so long.
_SMALL_BYTES = MIB
_SMALL_AT_ONCE = 16
_GATHER_SECONDS = 0.02


class Preparer:
    """Prepares generations in the background, in the order of the queue."""

    def __init__(
        self, uploads: PartUploads, cache: BlockCache, journal: JournalWriter, offload: Offload
    ) -> None:
        self._uploads = uploads
        self._cache = cache
        self._journal = journal
        self._offload = offload
        self._nursery: trio.Nursery | None = None
        self._running = 0
        self._syncing = trio.CapacityLimiter(FILES_AT_ONCE)
        self._small = Batches(
            self._prepare_small, seconds=_GATHER_SECONDS, most=_SMALL_AT_ONCE, name="prepare small"
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the preparations until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = self._uploads.nursery = nursery
            nursery.start_soon(self._small.run, name="prepare small files")
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                # Handlers of the mount's last moments still come here.
                self._nursery = self._uploads.nursery = None

    def begin(self, items: list[Item], is_settled: Callable[[Generation], bool]) -> None:
        """Start preparing the first generations that are not prepared yet: the settled ones, and the large ones.

        Settling puts off only what publishes.
        """
        for item in items:
            if self._running >= FILES_AHEAD:
                return
            if not isinstance(item, Generation) or is_begun(item):
                continue
            if is_settled(item) or (item.state is FileState.SEALED and choose_part_bytes(item.size)):
                self._start(item)

    async def wait(self, generation: Generation) -> None:
        """Return when the generation can be published. Raises what prevents it."""
        while generation.state in OWED:
            if self._nursery is None:
                await trio.sleep_forever()  # the mount ends: so does who waits here
            prepared = generation.prepared
            if prepared is None or not is_begun(generation):
                prepared = self._start(generation)
            if not prepared.done.is_set():
                await prepared.done.wait()
            if generation.prepared is not prepared:
                continue  # begun anew meanwhile: the key is another
            if prepared.failure is not None:
                raise prepared.failure
            return

    def restart(self, generation: Generation) -> None:
        """Forget parts that were sent: the upload is lost, or the key is another."""
        self._stop(generation)
        generation.prepared = None

    def dropped(self, generation: Generation) -> None:
        """Clean up after content that nobody needs any more: parts, reservation, file."""
        self._stop(generation)
        if self._nursery is not None:
            self._nursery.start_soon(self._discard, generation, name=f"discard {generation.record.key}")

    # ---- inside

    def _start(self, generation: Generation) -> Prepared:
        if self._nursery is None:
            raise RuntimeError("the preparer is not running")
        prepared = Prepared(trio.Event(), trio.CancelScope())
        generation.prepared = prepared
        self._running += 1
        if _is_small(generation):
            self._small.add((generation, prepared))
        else:
            name = f"prepare {generation.record.key}"
            self._nursery.start_soon(self._prepare, generation, prepared, name=name)
        return prepared

    def _stop(self, generation: Generation) -> None:
        """Nobody needs the preparation any more. A thread that works on it goes on, but changes nothing here."""
        if generation.prepared is not None:
            generation.prepared.scope.cancel()
        self._uploads.drop(generation)

    async def _prepare(self, generation: Generation, prepared: Prepared) -> None:
        try:
            with prepared.scope, one_failure():
                # Not wanted any more since it was started: no upload must begin that nobody would end.
                await trio.lowlevel.checkpoint_if_cancelled()
                failure: FusecacheError | None = None
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._sync, generation, prepared, name="sync")
                    if choose_part_bytes(generation.size):
                        failure = await self._finish(generation)
                    else:
                        self._uploads.drop(generation)  # cut since: it is one PUT now
                prepared.failure = failure
        except FusecacheError as exc:
            prepared.failure = exc
        finally:
            self._running -= 1
            prepared.done.set()

    async def _finish(self, generation: Generation) -> RemoteError | Damaged | None:
        """Return what the bucket has against it: on this disk it is to be safe all the same."""
        try:
            await self._uploads.finish(generation)
        except (RemoteError, Damaged) as exc:
            return exc
        return None

    async def _prepare_small(self, batch: list[tuple[Generation, Prepared]]) -> None:
        try:
            unsynced: list[tuple[Generation, Prepared]] = []
            for generation, prepared in batch:
                if prepared.scope.cancel_called:
                    continue
                if generation.record.synced:
                    _close_unread(generation)
                else:
                    unsynced.append((generation, prepared))
            if not unsynced:
                return
            async with self._syncing:
                found = await self._offload.disk(sync_all, [each.file for each, _ in unsynced])
            for (generation, prepared), checksums in zip(unsynced, found, strict=True):
                try:
                    if isinstance(checksums, LocalDiskError):
                        raise checksums
                    if not prepared.scope.cancel_called:
                        self._note_synced(generation, checksums)
                except FusecacheError as exc:
                    prepared.failure = exc
        finally:
            for _, prepared in batch:
                self._running -= 1
                prepared.done.set()

    async def _sync(self, generation: Generation, prepared: Prepared) -> None:
        """Bring the bytes to the disk for good, and journal what they are."""
        file = generation.file
        if generation.record.synced:
            _close_unread(generation)
            return
        async with self._syncing:
            if generation.upload is None:
                checksums = await self._offload.disk(_sync_and_sum, file)
            else:
                await self._offload.disk(_sync, file)
                checksums = await self._checksums(generation)
        if not prepared.scope.cancel_called:
            self._note_synced(generation, checksums)

    def _note_synced(self, generation: Generation, checksums: bytes) -> None:
        _close_unread(generation)
        generation.granule_checksums = checksums
        checksum = checksum_of_checksums(checksums)
        generation.record = replace(generation.record, synced=True, checksum=checksum)
        self._journal.submit_lazily(PutFile(generation.record))

    async def _checksums(self, generation: Generation) -> bytes:
        """Return the checksums of all granules; those of parts that are sent are mostly known."""
        upload = generation.upload
        if upload is None:  # forgotten while the bytes were synced
            return await self._offload.disk(generation.file.checksums)
        parts = []
        for index, (offset, size) in enumerate(part_extents(generation.size, upload.parts.part_bytes)):
            known = upload.parts.digests(index)
            if known is None:
                parts.append(await self._offload.disk(generation.file.checksums, offset, size))
            else:
                parts.append(known.checksums)
        return b"".join(parts)

    async def _discard(self, generation: Generation) -> None:
        if generation.prepared is not None:
            await generation.prepared.done.wait()
        try:
            await unread(generation)
            await self._journal.settled()  # a crash must not find the row of a file that is gone
        except FusecacheError:
            return
        try:
            await self._offload.disk(generation.file.delete)
        except FusecacheError as exc:
            # It holds its room until the next mount finds it.
            log.warning("a file that nobody needs any more cannot be removed error=%s", exc)
            return
        self._cache.release_staging(generation.reserved)
        generation.reserved = 0
        with suppress(ReadOnly):  # of a journal that failed: the next mount finds the row, and ends this
            self._journal.submit_lazily(DropFile(generation.record.generation))


def is_begun(generation: Generation) -> bool:
    """Return whether nothing is to be tried (again) to prepare a generation.

    What the bucket did not take may be sent again. What the disk did not take must not be asked for again: after a
    failed fsync the kernel calls the pages clean that it has lost, and another one succeeds (fsync(2)).
    """
    prepared = generation.prepared
    return prepared is not None and not isinstance(prepared.failure, RemoteError)


async def unread(generation: Generation) -> None:
    """Return when no thread works on a generation's file."""
    while generation.readers:
        generation.unread = trio.Event()
        await generation.unread.wait()


def _is_small(generation: Generation) -> bool:
    """Return whether one sync and one PUT are all that it takes."""
    has_parts = (
        generation.upload is not None or generation.record.upload_id or choose_part_bytes(generation.size)
    )
    return generation.size <= _SMALL_BYTES and not has_parts


def _close_unread(generation: Generation) -> None:
    """Who only waits for the bucket needs no descriptor."""
    if generation.readers == 0:
        generation.file.close()


def _sync(file: StagingFile) -> None:
    try:
        file.sync()
    except NoSpace as exc:
        # The disk did not take the bytes that it had accepted: what is in the file now is not what was written.
        raise LocalDiskError(str(exc)) from exc


def _sync_and_sum(file: StagingFile) -> bytes:
    """Bring the bytes to the disk, and return the checksums of all granules."""
    _sync(file)
    return file.checksums()
