"""Prepares file versions ahead of their publish slot: fsync and checksums, and the parts of large files.

It makes nothing visible in the bucket. Small files are synced in batches: one thread call and one sync of the folder,
without a task for each.

Starts the preparation of queued files ahead of their publish slots, in scans that the publisher's loop asks for.

"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import islice

import trio

from fusecache.disk.staging import StagingFile, checksum_of_checksums, sync_all
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import FileVersion, Preparation, QueuedChange
from fusecache.engine.publish.multipart_uploader import MultipartUploader
from fusecache.engine.publish.schedule import LIGHT_BYTES, PublishSchedule
from fusecache.engine.runtime.batcher import Batcher
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import TaskNursery, unwrap_single_error
from fusecache.index.journal import DropFile, PutFile
from fusecache.model.errors import (
    Damaged,
    FusecacheError,
    InternalError,
    LocalDiskError,
    NoSpace,
    RemoteError,
    TooManyFiles,
)
from fusecache.model.objects import MIB
from fusecache.model.records import OWED, FileState
from fusecache.policy.backoff import LONGEST_SECONDS
from fusecache.policy.writeback.multipart import choose_part_bytes, part_extents

log = logging.getLogger(__name__)

# Files in preparation at a time, and how many of them are synced and read back concurrently.
FILES_AHEAD = 256
FILES_AT_ONCE = 8
# Files up to this size are synced in batches: at most this many, and only what arrives within _BATCH_SECONDS.
_SMALL_BYTES = MIB
_BATCH_FILES = 16
_BATCH_SECONDS = 0.02


class Preparer:
    """Prepares file versions in the background, in the order in which they are given."""

    def __init__(
        self,
        uploader: MultipartUploader,
        cache: BlockCache,
        journal: JournalWriter,
        offload: Offload,
        tasks: TaskNursery,
    ) -> None:
        self._tasks = tasks
        self.uploader = uploader
        self._cache = cache
        self._journal = journal
        self._offload = offload
        self._running = 0
        self._syncing = trio.CapacityLimiter(FILES_AT_ONCE)
        self._small = Batcher(
            self._prepare_small,
            tasks,
            seconds=_BATCH_SECONDS,
            most=_BATCH_FILES,
            name="prepare-small",
            on_failed=_on_small_failed,
        )

    def start(self) -> None:
        """Start to prepare small files in batches."""
        self._tasks.keep({"prepare-batches": self._small.run})

    def begin(self, version: FileVersion, *, is_settled: bool) -> None:
        """Start preparing a file version, unless too many are in preparation: a settled one, or a large sealed one.

        The settle delay defers publishing only, not the parts of large files.
        """
        if self._running >= FILES_AHEAD or is_prepared_or_failed_locally(version):
            return
        if is_settled or (version.state is FileState.SEALED and choose_part_bytes(version.size)):
            self._start(version)

    async def wait(self, version: FileVersion) -> None:
        """Return when the file version can be published. Raises what prevents it."""
        while version.state in OWED:
            if not self._tasks.is_open:
                await trio.sleep_forever()  # the mount is about to end, and cancels the caller
            prepared = version.upload.preparation
            if prepared is None or not is_prepared_or_failed_locally(version):
                prepared = self._start(version)
            if not prepared.done.is_set():
                await prepared.done.wait()
            if version.upload.preparation is not prepared:
                continue  # restarted while waiting: the key changed, or the upload was lost
            if prepared.failure is not None:
                raise prepared.failure
            return

    def restart(self, version: FileVersion) -> None:
        """Forget parts that were sent: the upload is lost or useless, or the key changed."""
        self._stop(version)
        version.upload.preparation = None

    def dropped(self, version: FileVersion) -> None:
        """Clean up after obsolete content: parts, reservation, file."""
        self._stop(version)
        if self._tasks.is_open:  # FUSE handlers still call this while the mount ends
            self._tasks.start_soon("discard", self._discard, version, about=version.record.key)

    # ---- inside

    def _start(self, version: FileVersion) -> Preparation:
        before = version.upload.preparation
        if before is not None and isinstance(before.failure, InternalError):
            self.uploader.drop(version)  # its parts may be in any state
        prepared = version.upload.preparation = Preparation(trio.Event(), trio.CancelScope())
        self._running += 1
        if _is_small(version):
            self._small.add((version, prepared))
        else:
            self._tasks.start_soon(
                "prepare",
                *(self._prepare, version, prepared),
                about=version.record.key,
                on_failed=partial(setattr, prepared, "failure"),
            )
        return prepared

    def _stop(self, version: FileVersion) -> None:
        """Cancel a preparation. A thread that works on it runs to its end, but its result is ignored."""
        if version.upload.preparation is not None:
            version.upload.preparation.scope.cancel()
        self.uploader.drop(version)

    async def _prepare(self, version: FileVersion, prepared: Preparation) -> None:
        try:
            with prepared.scope, unwrap_single_error():
                # Cancelled before it ran: it must not begin an upload, which nothing would abort.
                await trio.lowlevel.checkpoint_if_cancelled()
                failure: FusecacheError | None = None
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._sync, version, prepared, name="sync")
                    if choose_part_bytes(version.size):
                        failure = await self._finish(version)
                    else:
                        self.uploader.drop(version)  # truncated since: one PutObject now
                prepared.failure = failure
        except FusecacheError as exc:
            prepared.failure = exc
        finally:
            self._running -= 1
            prepared.done.set()

    async def _finish(self, version: FileVersion) -> FusecacheError | None:
        """Return the upload's error, and do not raise it: the concurrent sync to the local disk must finish."""
        try:
            await self.uploader.finish(version)
        except (RemoteError, Damaged, InternalError) as exc:
            return exc
        except FusecacheError:
            raise
        except Exception as exc:  # noqa: BLE001  # recorded
            return self._record("prepare", exc, version)
        return None

    def _record(self, task: str, error: Exception, version: FileVersion) -> InternalError:
        return self._tasks.supervisor.record(task, error, version.record.key)

    async def _prepare_small(self, batch: list[tuple[FileVersion, Preparation]]) -> None:
        try:
            unsynced: list[tuple[FileVersion, Preparation]] = []
            for version, prepared in batch:
                if prepared.scope.cancel_called:
                    continue
                if version.record.synced:
                    _close_unused(version)
                else:
                    unsynced.append((version, prepared))
            if not unsynced:
                return
            async with self._syncing:
                found = await self._offload.disk(sync_all, [each.file for each, _ in unsynced])
            self._on_small_synced(list(zip(unsynced, found, strict=True)))
        finally:
            for _, prepared in batch:
                self._running -= 1
                prepared.done.set()

    def _on_small_synced(
        self, files: list[tuple[tuple[FileVersion, Preparation], bytes | Exception]]
    ) -> None:
        # Errors first: the kernel reports them once, and what follows may fail.
        for (version, prepared), result in files:
            if isinstance(result, FusecacheError):
                prepared.failure = result
            elif isinstance(result, Exception):
                prepared.failure = self._record("prepare-small", result, version)
        for (version, prepared), result in files:
            if isinstance(result, bytes) and not prepared.scope.cancel_called:
                self._on_synced(version, result)

    async def _sync(self, version: FileVersion, prepared: Preparation) -> None:
        """Sync the bytes to the disk, and journal their checksum."""
        file = version.file
        if version.record.synced:
            _close_unused(version)
            return
        async with self._syncing:
            if version.upload.multipart is None:
                checksums = await self._offload.disk(_sync_and_sum, file)
            else:
                await self._offload.disk(_sync, file)
                checksums = await self._checksums(version)
        if not prepared.scope.cancel_called:
            self._on_synced(version, checksums)

    def _on_synced(self, version: FileVersion, checksums: bytes) -> None:
        _close_unused(version)
        version.granule_checksums = checksums
        checksum = checksum_of_checksums(checksums)
        version.record = replace(version.record, synced=True, checksum=checksum)
        self._journal.submit_lazily(PutFile(version.record))

    async def _checksums(self, version: FileVersion) -> bytes:
        """Return the checksums of all granules; those of parts that were digested for sending are known."""
        upload = version.upload.multipart
        if upload is None:  # dropped while the bytes were synced
            return await self._offload.disk(version.file.checksums)
        parts = []
        for index, (offset, size) in enumerate(part_extents(version.size, upload.parts.part_bytes)):
            known = upload.parts.digests(index)
            if known is None:
                parts.append(await self._offload.disk(version.file.checksums, offset, size))
            else:
                parts.append(known.checksums)
        return b"".join(parts)

    async def _discard(self, version: FileVersion) -> None:
        if version.upload.preparation is not None:
            await version.upload.preparation.done.wait()
        try:
            await version.use.wait_unread()
            await self._journal.wait_committed()  # a crash must not find the row of a file that is gone
        except FusecacheError:
            return
        try:
            await self._offload.disk(version.file.delete)
        except FusecacheError as exc:
            # Its space stays reserved until the next mount removes it.
            log.warning("obsolete staging file not removed, the next mount retries error=%s", exc)
            return
        self._cache.release_staging(version.reserved)
        version.reserved = 0
        self._journal.submit_lazily(DropFile(version.record.generation))


def is_prepared_or_failed_locally(version: FileVersion) -> bool:
    """Return whether a file version needs no preparation, or must get no second one.

    A request that failed may be sent again, and a file be opened again. A local fsync that failed must not be retried:
    the kernel marks the pages that it lost as clean, and the next fsync succeeds (fsync(2)). An InternalError is none.
    """
    prepared = version.upload.preparation
    again = (RemoteError, TooManyFiles, InternalError)
    return prepared is not None and not isinstance(prepared.failure, again)


def _on_small_failed(batch: list[tuple[FileVersion, Preparation]], error: InternalError) -> None:
    """Fail the preparations that did not come to their end."""
    for version, prepared in batch:
        if not version.record.synced:
            prepared.failure = prepared.failure or error


def _is_small(version: FileVersion) -> bool:
    """Return whether one sync and one PutObject are enough."""
    has_parts = (
        version.upload.multipart is not None or version.record.upload_id or choose_part_bytes(version.size)
    )
    return version.size <= _SMALL_BYTES and not has_parts


def _close_unused(version: FileVersion) -> None:
    """Close the staging file if nothing reads it: a file that only waits for the bucket needs no descriptor."""
    if version.use.readers == 0:
        version.file.close()


def _sync(file: StagingFile) -> None:
    try:
        file.sync()
    except NoSpace as exc:
        # The disk lost bytes that it had accepted (delayed allocation): the file is not what was written.
        raise LocalDiskError(str(exc)) from exc


def _sync_and_sum(file: StagingFile) -> bytes:
    """Sync the bytes to the disk, and return the checksums of all granules."""
    _sync(file)
    return file.checksums()


# Files that one scan looks at. It stops after _SCAN_UNSETTLED files that have not settled, as the ones behind them are
# younger. Two scans are at least _SCAN_SECONDS apart.
_SCAN_FILES = 512
_SCAN_UNSETTLED = 16
_SCAN_SECONDS = 0.02
# Interval at which a preparation that failed ahead of its slot is retried.
_RETRY_SECONDS = LONGEST_SECONDS


class PrepareAhead:
    """Keeps the queued files that are not prepared yet, oldest first. Times are the loop's."""

    def __init__(self, preparer: Preparer, schedule: PublishSchedule) -> None:
        self._preparer = preparer
        self._schedule = schedule
        self._unprepared: dict[FileVersion, None] = {}
        self._scanned_at = self._retry_at = float("-inf")

    def add(self, item: QueuedChange, now: float) -> None:
        """A change was queued."""
        # No part of a deferred file is sent ahead: its name may still change.
        if isinstance(item, FileVersion) and not (
            choose_part_bytes(item.size) and self._schedule.is_deferred(item, now)
        ):
            self._unprepared[item] = None

    def discard(self, item: QueuedChange) -> None:
        """A change left the queue."""
        if isinstance(item, FileVersion):
            self._unprepared.pop(item, None)

    def next_scan(self) -> float:
        """Return the time of the next scan: never if all files are prepared."""
        return self._scanned_at + _SCAN_SECONDS if self._unprepared else float("inf")

    def scan(self, now: float) -> None:
        """Start preparing files that have settled, and large ones."""
        self._scanned_at = now
        unsettled = 0
        for version in list(islice(self._unprepared, _SCAN_FILES)):
            is_settled = self._schedule.is_settled(version, now)
            if is_settled or version.size > LIGHT_BYTES:
                self._preparer.begin(version, is_settled=is_settled)
                if is_prepared_or_failed_locally(version):
                    del self._unprepared[version]
                continue
            unsettled += 1
            if unsettled > _SCAN_UNSETTLED:
                break

    def retry_soon(self, now: float) -> None:
        """The cause of failures may be gone: let the next scan retry them."""
        self._retry_at = now

    def retry(self, failing: Iterable[QueuedChange], now: float) -> None:
        """Retry preparations that failed before the file's publish slot: until then nothing else retries them."""
        if now < self._retry_at:
            return
        self._retry_at = now + _RETRY_SECONDS
        for item in failing:
            if (
                isinstance(item, FileVersion)
                and not is_prepared_or_failed_locally(item)
                and not self._schedule.failing.of(item).count
            ):
                self._unprepared[item] = None
