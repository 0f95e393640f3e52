"""What may happen to sealed content before its turn to be published: sync and checksums, and the parts of large files.

Also what happens after: staged bytes become cache.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import trio

from fusecache.disk.staging import checksum_of_checksums
from fusecache.engine.cache import BlockCache
from fusecache.engine.groups import one_failure
from fusecache.engine.journaling import JournalWriter
from fusecache.engine.nodes import Generation, Item, Prepared
from fusecache.engine.offload import Offload
from fusecache.index.journal import DropFile, PutFile
from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    FusecacheError,
    LocalDiskError,
    NoSpace,
    RemoteError,
    Unavailable,
)
from fusecache.model.metadata import content_metadata
from fusecache.model.nouns import ObjectInfo
from fusecache.model.states import OWED
from fusecache.policy.backoff import backoff_seconds
from fusecache.policy.parts import choose_part_bytes, part_extents
from fusecache.remote.store import FileSlice, Store

log = logging.getLogger(__name__)

# So many files are looked after in advance; so many of them are read back, or send parts, at once; each sends so many
# parts at once.
FILES_AHEAD = 256
FILES_AT_ONCE = 4
PARTS_AT_ONCE = 4


class Preparer:
    """Prepares generations in the background, in the order of the queue."""

    def __init__(self, store: Store, cache: BlockCache, journal: JournalWriter, offload: Offload) -> None:
        self._store = store
        self._cache = cache
        self._journal = journal
        self._offload = offload
        self._nursery: trio.Nursery | None = None
        self._running = 0
        # Apart: while the bucket cannot be reached, what is closed must still come to the disk for good.
        self._syncing = trio.CapacityLimiter(FILES_AT_ONCE)
        self._sending = trio.CapacityLimiter(FILES_AT_ONCE)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the preparations until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def begin(self, items: list[Item], is_settled: Callable[[Generation], bool]) -> None:
        """Start preparing the first settled generations that are not prepared yet."""
        for item in items:
            if self._running >= FILES_AHEAD:
                return
            if isinstance(item, Generation) and item.prepared is None and is_settled(item):
                self._start(item)

    async def wait(self, generation: Generation) -> None:
        """Return when the generation can be published. Raises what prevents it."""
        while generation.state in OWED:
            prepared = generation.prepared or self._start(generation)
            await prepared.done.wait()
            if generation.prepared is not prepared:
                continue  # begun anew meanwhile: the key is another
            if prepared.failure is not None:
                generation.prepared = None
                raise prepared.failure
            return

    def restart(self, generation: Generation) -> None:
        """Forget parts that were sent: the upload is lost, or the key is another."""
        self._stop(generation)
        generation.prepared = None
        generation.record = replace(generation.record, upload_id="", part_bytes=0, part_etags=())
        generation.sent_bytes = 0

    def dropped(self, generation: Generation) -> None:
        """Clean up after content that nobody needs any more: parts, reservation, file."""
        self._stop(generation)
        if self._nursery is not None:
            self._nursery.start_soon(self._discard, generation, name=f"discard {generation.record.key}")

    async def retire(self, generation: Generation, version: ObjectInfo) -> None:
        """The bucket has it: the staged bytes become cache, so that what was just written is warm."""
        await self._no_readers(generation)
        generation.file.close()
        size = generation.size
        self._cache.release_staging(generation.reserved - size)
        generation.reserved = 0
        if size and generation.granule_checksums:
            await self._cache.adopt(
                version.object_id, size, generation.file.path, generation.granule_checksums
            )
        else:
            self._cache.release_staging(size)
            await self._offload.disk(generation.file.delete)
        self._journal.submit(DropFile(generation.record.generation))

    # ---- inside

    def _start(self, generation: Generation) -> Prepared:
        if self._nursery is None:
            raise RuntimeError("the preparer is not running")
        prepared = Prepared(trio.Event(), trio.CancelScope())
        generation.prepared = prepared
        self._running += 1
        self._nursery.start_soon(self._prepare, generation, prepared, name=f"prepare {generation.record.key}")
        return prepared

    def _stop(self, generation: Generation) -> None:
        """Nobody needs the parts any more. A thread that works on them goes on, but changes nothing here."""
        if generation.prepared is not None:
            generation.prepared.scope.cancel()
        if generation.record.upload_id:
            self._abort_soon(generation.upload_key, generation.record.upload_id, generation.prepared)

    async def _prepare(self, generation: Generation, prepared: Prepared) -> None:
        try:
            with prepared.scope:
                if not generation.record.synced:
                    async with self._syncing:
                        await self._sync(generation, prepared)
                if choose_part_bytes(generation.size):
                    async with self._sending:
                        await self._send_parts(generation, prepared)
        except FusecacheError as exc:
            prepared.failure = exc
        finally:
            self._running -= 1
            prepared.done.set()

    async def _sync(self, generation: Generation, prepared: Prepared) -> None:
        """Bring the bytes to the disk for good, and journal what they are."""
        file = generation.file
        try:
            await self._offload.disk(file.sync)
        except NoSpace as exc:
            # The disk did not take the bytes that it had accepted: what is in the file now is not what was written.
            raise LocalDiskError(str(exc)) from exc
        generation.granule_checksums = await self._offload.disk(file.checksums)
        if prepared.scope.cancel_called:
            return
        if generation.readers == 0:
            file.close()  # who only waits for the bucket needs no descriptor
        checksum = checksum_of_checksums(generation.granule_checksums)
        generation.record = replace(generation.record, synced=True, checksum=checksum)
        await self._journal.commit(PutFile(generation.record))

    async def _send_parts(self, generation: Generation, prepared: Prepared) -> None:
        part_bytes = choose_part_bytes(generation.size)
        extents = part_extents(generation.size, part_bytes)
        record = generation.record
        if not record.upload_id:
            metadata = content_metadata(record.uuid, record.attributes)
            create = partial(self._store.create_multipart, record.key, metadata=metadata)
            upload_id = await self._persist(generation, create)
            if prepared.scope.cancel_called:
                self._abort_soon(record.key, upload_id, prepared)
                return
            generation.upload_key = record.key
            generation.record = replace(
                generation.record,
                upload_id=upload_id,
                part_bytes=part_bytes,
                part_etags=("",) * len(extents),
            )
            await self._journal.commit(PutFile(generation.record))
        generation.sent_bytes = sum(
            size for (_, size), etag in zip(extents, generation.record.part_etags, strict=True) if etag
        )
        limiter = trio.CapacityLimiter(PARTS_AT_ONCE)

        async def send(index: int, offset: int, size: int) -> None:
            async with limiter:
                body = FileSlice(str(generation.file.path), offset, size)
                key, upload_id = generation.record.key, generation.record.upload_id
                etag = await self._persist(
                    generation, self._store.upload_part, key, upload_id, index + 1, body
                )
                if prepared.scope.cancel_called:
                    return
                etags = list(generation.record.part_etags)
                etags[index] = etag
                generation.record = replace(generation.record, part_etags=tuple(etags))
                generation.sent_bytes += size
                self._journal.submit(PutFile(generation.record))

        with one_failure():
            async with trio.open_nursery() as nursery:
                for index, (offset, size) in enumerate(extents):
                    if not generation.record.part_etags[index]:
                        nursery.start_soon(send, index, offset, size, name=f"part {index + 1} {record.key}")

    async def _persist(self, generation: Generation, call: Callable[..., str], *args: object) -> str:
        """Send a request again until the bucket answers it."""
        attempt = 0
        while True:
            try:
                return await self._offload.upload(call, *args)
            except (Unavailable, AccessDenied, CredentialsMissing, BucketMissing) as exc:
                attempt += 1
                pause = backoff_seconds(attempt, random.random())
                log.warning(
                    "upload waits key=%s attempt=%d seconds=%.1f error=%s",
                    generation.record.key, attempt, pause, exc,
                )  # fmt: skip
                await trio.sleep(pause)

    async def _no_readers(self, generation: Generation) -> None:
        while generation.readers:
            generation.unread = trio.Event()
            await generation.unread.wait()

    async def _discard(self, generation: Generation) -> None:
        if generation.prepared is not None:
            await generation.prepared.done.wait()
        await self._no_readers(generation)
        await self._offload.disk(generation.file.delete)
        self._cache.release_staging(generation.reserved)
        generation.reserved = 0

    def _abort_soon(self, key: str, upload_id: str, prepared: Prepared | None) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._abort, key, upload_id, prepared, name=f"abort {key}")

    async def _abort(self, key: str, upload_id: str, prepared: Prepared | None) -> None:
        if prepared is not None:
            await prepared.done.wait()  # a part that comes after the abort would stay
        try:
            await self._offload.upload(self._store.abort_multipart, key, upload_id)
        except RemoteError as exc:
            # The bucket drops unfinished uploads by itself after a week.
            log.warning("abort failed key=%s error=%s", key, exc)
