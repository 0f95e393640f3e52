"""Sends the parts of large files: some while a file is still being written, the rest once it is sealed.

It never completes an upload: the publisher does, and until then readers of the bucket see nothing of it.

Invariants:
1. The journal has an upload before its first part is sent, and every part that the bucket holds unchanged.
2. A part counts only if none of its bytes changed since its attempt began; two attempts of one part never overlap.
3. An upload is aborted only after its last attempt ended: a part that arrived later would stay in the bucket.
4. An upload that backs off after a failure keeps no slot for long that another upload could use.

Aborts multipart uploads that are no longer needed; what fails now is left to the next mount.

Invariant: from the moment a file's row loses its upload until the abort is answered, the journal has a row for the
abort.

Whether a file may be uploaded before it is sealed, and whether such an upload can still become its object.
"""

import logging
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import trio

from fusecache.disk.staging import digests
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import FileVersion, MultipartUpload
from fusecache.engine.publish.bucket_writer import carried_by
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.engine.write.snapshots import Snapshots
from fusecache.engine.write.version_states import VersionStates
from fusecache.index.journal import DropAbort, PutAbort
from fusecache.model.errors import (
    TRANSIENT,
    Damaged,
    FusecacheError,
    InternalError,
    NotAsSent,
    ReadOnly,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import content_metadata
from fusecache.model.records import FileState, PosixAttributes, without_upload
from fusecache.policy.backoff import backoff_seconds
from fusecache.policy.writeback.digest_throttle import DigestThrottle
from fusecache.policy.writeback.multipart import (
    PARTS_MAX,
    DigestAttempt,
    Digests,
    PartTable,
    choose_growing_part_bytes,
    choose_part_bytes,
    ready_parts,
)
from fusecache.remote.store import FileSlice, Sent, Store

log = logging.getLogger(__name__)

# Errors that leave the abort to the next mount, as only a person can fix them. `abort` retries Unavailable before.
_LEFT_TO_NEXT_MOUNT = (*TRANSIENT, ReadOnly)


class MultipartAborts:
    """Aborts uploads, and journals pending aborts. Runs on the loop."""

    def __init__(self, store: Store, journal: JournalWriter, offload: Offload) -> None:
        self._store = store
        self._journal = journal
        self._offload = offload

    def record(self, key: str, upload_id: str) -> None:
        """An upload is no longer needed: queue a journal row for its abort, ahead of all rows queued later."""
        self._submit(PutAbort(key, upload_id))

    async def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload that has no request in flight; retry while the bucket does not answer."""
        attempt = 0
        while True:
            try:
                await self._offload.upload(self._store.abort_multipart, key, upload_id)
                break
            except Unavailable:
                attempt += 1
                await trio.sleep(backoff_seconds(attempt, random.random()))
            except _LEFT_TO_NEXT_MOUNT as exc:
                log.warning("multipart abort left to the next mount key=%s error=%s", key, exc)
                return
            except RemoteError as exc:
                # The bucket drops unfinished uploads by itself after a week.
                log.warning("multipart abort failed, not retried key=%s error=%s", key, exc)
                break
        self._submit(DropAbort(key, upload_id))

    def _submit(self, change: PutAbort | DropAbort) -> None:
        # After a journal failure the rows on disk stay as they are.
        self._journal.submit_lazily(change)


# A program set an mtime that is in the future, or further than this before the upload began: the object must carry it.
_MTIME_SLACK_NS = 60 * 1_000_000_000


def can_become_object(version: FileVersion, upload: MultipartUpload) -> bool:
    """Return whether an upload that began before the file's final size and attributes can become its object."""
    part_bytes = upload.parts.part_bytes
    return (
        upload.key == version.record.key
        and version.size <= part_bytes * PARTS_MAX
        and _metadata_still_valid(upload.attributes, version.record.attributes)
    )


def _metadata_still_valid(then: PosixAttributes, now: PosixAttributes) -> bool:
    """Return whether the metadata given at an upload's begin still holds: mode, owner, and mtime.

    The mtime may have moved on: from _MTIME_SLACK_NS before its first value to _MTIME_SLACK_NS after now.
    """
    if (then.mode, then.uid, then.gid) != (now.mode, now.uid, now.gid):
        return False
    return now.mtime_ns == then.mtime_ns or (
        then.mtime_ns - _MTIME_SLACK_NS <= now.mtime_ns <= time.time_ns() + _MTIME_SLACK_NS
    )


T = TypeVar("T")

# One connection carries 80 MB/s to a distant bucket: 16 fill 10 Gbit/s.
PARTS_AT_ONCE = 16
# Limits for a file that is still being written. Its writer needs the processors more than the upload does (MD5 of
# 1 GiB takes 2 s of one processor), and a file that is written in a moment is not uploaded sooner by this.
_PROCESSORS = len(os.sched_getaffinity(0))
EARLY_PARTS_AT_ONCE = max(1, min(8, _PROCESSORS // 2))
EARLY_AFTER_SECONDS = 1.0
# Attempts before the failures of a sealed file's upload are raised to the publisher: most are over by then.
_FINISH_ATTEMPTS = 3
# As `grows_at`: no file is ever written this far.
NEVER = 1 << 63


class MultipartUploader:
    """Sends parts, those of sealed files first."""

    def __init__(
        self,
        store: Store,
        journal: JournalWriter,
        offload: Offload,
        cache: BlockCache,
        states: VersionStates,
        snapshots: Snapshots,
        events: Events,
        tasks: TaskNursery,
    ) -> None:
        """cache: its reads come first, and share the limit of requests."""
        self._tasks = tasks
        self._store = store
        self._journal = journal
        self._offload = offload
        self._cache = cache
        self._aborts = MultipartAborts(store, journal, offload)
        self._states = states
        self._snapshots = snapshots
        self._limit = cache.request_limit
        self._events = events
        self._in_flight = 0
        self._throttle = DigestThrottle(_PROCESSORS)
        self._is_throttled = False
        # Parts that are digested, or wait for it. Few are digested at a time, so that the first one is sent soon.
        self._digesting = 0
        self._digests = trio.CapacityLimiter(2 * _PROCESSORS)
        self._active: dict[FileVersion, MultipartUpload] = {}

    def on_growth(self, version: FileVersion) -> None:
        """The writer went past the end of another part: send the parts behind it, if they will probably not change."""
        part_bytes = choose_growing_part_bytes(version.size)
        ready = ready_parts(version.upload.written_bytes, part_bytes)
        version.upload.grows_at = (ready + 1) * part_bytes + part_bytes // 4
        upload = version.upload.multipart
        if upload is not None and upload.parts.part_bytes != part_bytes:
            log.info(
                "multipart upload restarted with larger parts key=%s part_bytes=%d", upload.key, part_bytes
            )
            self.drop(version)
            upload = None
        if not self._tasks.is_open or not self._may_begin_early(version):
            version.upload.grows_at = NEVER
            return
        version.upload.growing_since = min(version.upload.growing_since, trio.current_time())
        if trio.current_time() < version.upload.growing_since + EARLY_AFTER_SECONDS:
            return
        if upload is None:
            upload = self._begin(version, part_bytes)
        upload.ready = ready
        self._pump()

    async def finish(self, version: FileVersion) -> None:
        """Return when the bucket holds every part of a sealed file version. Raises what prevents it.

        Errors that may pass are raised after a few retries; call again to go on.
        """
        upload = version.upload.multipart
        if upload is not None and not can_become_object(version, upload):
            self.drop(version)
            upload = None
        if upload is None:
            upload = self._resume(version) or self._begin(version, choose_part_bytes(version.size))
        upload.is_sealed = True
        upload.failure, upload.quiet_until = None, float("-inf")
        upload.ready = -(-version.size // upload.parts.part_bytes)
        self._active[version] = upload
        self._pump()
        while not upload.stopped.is_set():
            if upload.failure is not None:
                self._active.pop(version, None)
                raise upload.failure
            if upload.upload_id and upload.parts.is_complete(version.size):
                self._active.pop(version, None)
                # After a truncation the table still has parts behind the end of the file.
                etags = upload.parts.etags()[: upload.ready]
                version.record = replace(version.record, part_etags=etags)
                return
            await upload.changed.wait()

    def drop(self, version: FileVersion) -> None:
        """Forget an upload and abort it in the bucket: its content is obsolete, or its key changed."""
        self._active.pop(version, None)
        record, upload = version.record, version.upload.multipart
        version.upload.multipart = None
        version.upload.sent_bytes = 0
        if upload is None and record.upload_id:
            upload = MultipartUpload(
                record.key, PartTable(record.part_bytes), record.attributes, record.upload_id
            )
        if upload is None:
            return
        if record.upload_id:
            # Ahead of the file's row without the upload.
            self._aborts.record(upload.key, record.upload_id)
        version.record = without_upload(record)
        upload.stop()
        if self._tasks.is_open:
            self._tasks.start_soon("upload-abort", self._abort, upload, about=upload.key)

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload of an earlier run."""
        self._tasks.start_soon("upload-abort", self._aborts.abort, key, upload_id, about=key)

    def end_pauses(self) -> None:
        """The cause of failures may be gone: retry now, without waiting for back-off."""
        for upload in self._active.values():
            upload.quiet_until = float("-inf")
        self._pump()

    # ---- one upload

    def _may_begin_early(self, version: FileVersion) -> bool:
        """Return whether a file that is being written will probably be published as it is, under its present name."""
        node = version.node
        if node is None or not self._states.has_name(node) or version.close_state.killed_writer is not None:
            return False
        if version.state not in {FileState.OPEN, FileState.FLUSHED}:
            return False
        if version.upload.multipart is not None and not version.upload.multipart.parts.is_worth_it:
            return False
        # rsync and other programs write under a hidden name first, then rename.
        return not node.name.startswith(".") and not self._snapshots.has_temporary_name(node)

    def _begin(self, version: FileVersion, part_bytes: int) -> MultipartUpload:
        record = version.record
        upload = MultipartUpload(record.key, PartTable(part_bytes), record.attributes)
        version.upload.multipart = self._active[version] = upload
        self._start_create(version, upload)
        return upload

    def _start_create(self, version: FileVersion, upload: MultipartUpload) -> None:
        upload.attempts += 1
        upload.is_asked = True
        on_failed = partial(self._on_unexpected, version, upload)
        self._tasks.start_soon(
            "upload-create", self._create, version, upload, about=upload.key, on_failed=on_failed
        )

    def _resume(self, version: FileVersion) -> MultipartUpload | None:
        """Return the upload that an earlier run began."""
        record = version.record
        if not record.upload_id:
            return None
        upload = MultipartUpload(
            record.key,
            PartTable(record.part_bytes),
            record.upload_attributes or record.attributes,
            record.upload_id,
            is_known=True,
        )
        upload.parts.restore(record.part_etags)
        if not can_become_object(version, upload):
            self.drop(version)
            return None
        version.upload.multipart = upload
        version.upload.sent_bytes = upload.parts.held_bytes(version.size)
        return upload

    async def _create(self, version: FileVersion, upload: MultipartUpload) -> None:
        record = version.record
        try:
            metadata = content_metadata(record.uuid, upload.attributes)
            if record.carries:
                ask = partial(self._offload.upload, carried_by, self._store, record)
                metadata = {**await self._send_request(version, upload, ask), **metadata}
            create = partial(self._store.create_multipart, upload.key, metadata=metadata)
            upload.upload_id = await self._send_request(
                version, upload, partial(self._offload.upload, create)
            )
            if not upload.stopped.is_set():
                version.record = replace(
                    version.record,
                    upload_id=upload.upload_id,
                    part_bytes=upload.parts.part_bytes,
                    part_etags=(),
                    upload_attributes=upload.attributes,
                )
                await self._journal.submit(*self._states.row_of(version)).committed()
                upload.is_known = True
        except FusecacheError as exc:
            self._on_failed(version, upload, exc)
        finally:
            upload.attempts -= 1
            upload.is_asked = False
            upload.announce()
        self._pump()

    def _pump(self) -> None:
        """Start as many attempts as the limits, and the processor time that reads need, allow."""
        if not self._tasks.is_open:
            return  # the mount is about to end
        most = min(PARTS_AT_ONCE, self._limit.limit)
        now, is_read = trio.current_time(), self._cache.is_fetching()
        for version, upload in sorted(self._active.items(), key=_sealed_first):
            if upload.failure is not None or now < upload.quiet_until:
                continue
            if not upload.is_known and not upload.upload_id and not upload.is_asked:
                self._start_create(version, upload)
            at_once = PARTS_AT_ONCE if upload.is_sealed else EARLY_PARTS_AT_ONCE
            if upload.failures:
                at_once = 1  # a probe; the slots are free for other uploads
            while self._in_flight < most and upload.attempts < at_once:
                index = _next_part(version, upload)
                if index is None:
                    break
                # A part whose digests are known takes almost no processor time.
                needs_digest = is_read and upload.parts.needs_reading(index)
                if needs_digest and (self._digesting >= self._throttle.at_once or self._throttle.delay(now)):
                    self._wait_for_throttle()
                    break
                self._in_flight += 1
                upload.attempts += 1
                attempt = upload.parts.begin(index, version.size)
                self._tasks.start_soon(
                    "upload-part",
                    *(self._send, version, upload, attempt),
                    about=f"{index + 1} of {upload.key}",
                    on_failed=partial(self._on_unexpected, version, upload),
                )
                if needs_digest:
                    return  # `_digest` pumps again once it has started

    def _wait_for_throttle(self) -> None:
        """Pump again when the throttle allows another digest. While one runs, its end pumps anyway."""
        if not self._is_throttled and not self._digesting:
            self._is_throttled = True
            self._tasks.keep({"upload-throttle": self._resume_after_throttle})

    async def _resume_after_throttle(self) -> None:
        await trio.sleep(self._throttle.delay(trio.current_time()))
        self._is_throttled = False
        self._pump()

    async def _send(self, version: FileVersion, upload: MultipartUpload, attempt: DigestAttempt) -> None:
        """Make one attempt at one part; after a failure `_on_failed` decides when the next one begins.

        It reads the bytes twice: for the digests, and to send them.
        """
        try:
            etag = await self._send_if_wanted(version, upload, attempt)
            if upload.parts.end(attempt, etag) and not upload.stopped.is_set():
                version.record = replace(version.record, part_etags=upload.parts.etags())
                version.upload.sent_bytes = upload.parts.held_bytes(version.size)
                self._journal.submit(*self._states.row_of(version))
        except FusecacheError as exc:
            self._fail(version, upload, exc)
        finally:
            self._in_flight -= 1
            upload.attempts -= 1
            upload.announce()
        self._pump()

    async def _send_if_wanted(
        self, version: FileVersion, upload: MultipartUpload, attempt: DigestAttempt
    ) -> str:
        """Digest and send a part; return its ETag, "" if that failed, or if it is not wanted now."""
        try:
            found = await self._digest(version, upload, attempt)
            if found is not None:
                send = partial(self._send_bytes, version, upload, attempt, found.md5)
                return await self._send_request(version, upload, send)
        except FusecacheError as exc:
            # If the bytes changed, or went, during the attempt, that explains any failure: ignore it.
            if upload.parts.is_current(attempt):
                if isinstance(exc, NotAsSent):
                    upload.parts.doubt(attempt)
                self._on_failed(version, upload, exc)
        return ""

    async def _digest(
        self, version: FileVersion, upload: MultipartUpload, attempt: DigestAttempt
    ) -> Digests | None:
        """Return the digests of a part, None if it is no longer wanted, or not now.

        After NotAsSent they are computed again. Raises Damaged if they differ although no writer changed the part.
        """
        known = upload.parts.digests(attempt.index)
        if not upload.parts.needs_reading(attempt.index):
            return known
        self._digesting += 1
        self._pump()
        try:
            async with self._digests:
                began = trio.current_time()
                if began < upload.quiet_until or not self._is_wanted(upload, attempt):
                    return None
                path = version.file.path
                read = Digests(*await self._offload.upload(digests, path, attempt.offset, attempt.size))
        finally:
            self._digesting -= 1
        now = trio.current_time()
        self._throttle.on_digested(now, now - began)
        if not self._is_wanted(upload, attempt):
            return None
        if known is not None and known != read:
            raise Damaged(
                f"{path}: part {attempt.index + 1} changed without a write through the mount (bad disk, or another "
                f"program); {upload.key} is not published, `fusecache recover` lists the bytes that are left"
            )
        upload.parts.record_digests(attempt, read)
        self._pump()
        return read

    def _is_wanted(self, upload: MultipartUpload, attempt: DigestAttempt) -> bool:
        return not upload.stopped.is_set() and upload.parts.is_current(attempt)

    async def _send_bytes(
        self, version: FileVersion, upload: MultipartUpload, attempt: DigestAttempt, md5: bytes
    ) -> str:
        sent = upload.sending[attempt.index] = Sent(trio.current_time())
        body = FileSlice(str(version.file.path), attempt.offset, attempt.size, md5, sent)
        put, number = self._store.upload_part, attempt.index + 1
        try:
            return await self._offload.upload(put, upload.key, upload.upload_id, number, body)
        finally:
            del upload.sending[attempt.index]

    def _on_failed(self, version: FileVersion, upload: MultipartUpload, error: FusecacheError) -> None:
        """A request failed. If that may pass, the upload backs off, then sends one request as a probe."""
        if not isinstance(error, TRANSIENT):
            self._fail(version, upload, error)
            return
        now = trio.current_time()
        if self._active.get(version) is not upload or now < upload.quiet_until:
            return  # dropped, or a concurrent request of the same upload failed first
        upload.failures += 1
        self._events.on_failing(version, error)
        if upload.is_sealed and upload.failures >= _FINISH_ATTEMPTS:
            self._fail(version, upload, error)
            return
        pause = backoff_seconds(upload.failures, random.random())
        log.warning(
            "upload failed, will retry key=%s attempt=%d retry_in_seconds=%.1f error=%s",
            upload.key, upload.failures, pause, error,
        )  # fmt: skip
        upload.quiet_until = now + pause
        self._tasks.keep({"upload-pause": partial(self._pump_at, upload.quiet_until)})

    def _on_unexpected(self, version: FileVersion, upload: MultipartUpload, error: InternalError) -> None:
        """A request failed unexpectedly: the upload ends, and starts again from its first part."""
        self._fail(version, upload, error)
        upload.announce()
        self._pump()

    async def _pump_at(self, moment: float) -> None:
        await trio.sleep_until(moment)
        self._pump()

    def _fail(self, version: FileVersion, upload: MultipartUpload, error: FusecacheError) -> None:
        """An upload cannot go on: `finish` raises why. The upload of an unsealed file is dropped until the seal."""
        if upload.stopped.is_set():
            return
        if upload.is_sealed:
            upload.failure = upload.failure or error
        else:
            log.info(
                "early upload dropped, will start again after the close key=%s error=%s", upload.key, error
            )
            version.upload.grows_at = NEVER
            self.drop(version)

    async def _abort(self, upload: MultipartUpload) -> None:
        while upload.attempts:
            await upload.changed.wait()
        if upload.upload_id:
            self._aborts.record(upload.key, upload.upload_id)  # perhaps created since `drop`: no row had it
            await self._aborts.abort(upload.key, upload.upload_id)

    # ---- inside

    async def _send_request(
        self, version: FileVersion, upload: MultipartUpload, call: Callable[[], Awaitable[T]]
    ) -> T:
        """Send a request once the shared limit allows; report success or throttling to it."""
        await trio.sleep_until(max(trio.current_time(), self._limit.silent_until))
        try:
            answer = await call()
        except TRANSIENT as exc:
            if exc.asks_to_slow_down:
                self._limit.on_throttled(trio.current_time(), exc.retry_after_seconds)
            raise
        self._limit.on_success(trio.current_time())
        upload.failures, upload.quiet_until = 0, float("-inf")
        self._events.on_success(version)
        return answer


def _next_part(version: FileVersion, upload: MultipartUpload) -> int | None:
    """Return the next part to send; None: there is none, or the upload is being created and journaled."""
    parts = upload.parts
    if not upload.is_known:
        return None
    if upload.is_sealed:
        return parts.next_unsent(upload.ready)
    if not parts.is_worth_it:
        return None
    # The file may have been truncated since.
    index = parts.next_unsent(min(upload.ready, version.size // parts.part_bytes))
    # A part that failed with NotAsSent is digested again once the file is sealed.
    return None if index is None or parts.is_doubted(index) else index


def _sealed_first(entry: tuple[FileVersion, MultipartUpload]) -> tuple[bool, int]:
    version, upload = entry
    return not upload.is_sealed, version.sequence
