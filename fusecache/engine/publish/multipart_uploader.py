"""Multipart uploads: parts of a large file go to the bucket while it is being written, the rest when it is sealed.

Nothing of it is visible before the publisher completes the upload.

Invariants:
1. The journal knows an upload before its first part is sent, and of every part that the bucket holds as it is.
2. A part counts only if none of its bytes changed since its attempt began; two attempts of one part never overlap.
3. An upload is aborted after the last of its attempts ended: a part that came later would stay.
4. An upload that pauses after a failure holds nothing for long that another could use.
"""

import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import trio

from fusecache.disk.staging import digests
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.nodes import FileVersion
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.namespace.upload_state import MultipartUpload
from fusecache.engine.publish.multipart_aborts import MultipartAborts
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import PutFile
from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    Damaged,
    FusecacheError,
    NotAsSent,
    Unavailable,
)
from fusecache.model.metadata import content_metadata
from fusecache.model.records import PosixAttributes, without_upload
from fusecache.model.states import FileState
from fusecache.policy.backoff import backoff_seconds
from fusecache.policy.name_patterns import matches_any
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
T = TypeVar("T")

# 16 connections at the 80 MB/s that one of them carries to a distant bucket fill 10 Gbit/s.
PARTS_AT_ONCE = 16
# So many parts are read for their digests before there is an upload: those that can be sent at once then.
READ_FIRST = PARTS_AT_ONCE
# While a file is written, its writer needs the processors more than its upload does, and what is written in a moment
# is not sent sooner for being disturbed: MD5 of 1 GiB takes a processor for two seconds.
_PROCESSORS = len(os.sched_getaffinity(0))
PARTS_AT_ONCE_AHEAD = max(1, min(8, _PROCESSORS // 2))
AHEAD_AFTER_SECONDS = 1.0
# Causes that pass, or that a person can mend while we wait.
_WORTH_WAITING = (Unavailable, AccessDenied, CredentialsMissing, BucketMissing)
# An upload is tried so often on its own before who waits for it hears of its failures: most are over by then.
_TRIES = 3
# A time of last change that lies further back than the upload's begin was set by somebody: it must go with the object.
_NATURAL_NS = 60 * 1_000_000_000
# No file is ever written so far.
NEVER = 1 << 63


class MultipartUploader:
    """Sends parts, those of sealed files first. The nursery is given before anything is written."""

    def __init__(
        self,
        store: Store,
        tree: Tree,
        journal: JournalWriter,
        offload: Offload,
        cache: BlockCache,
        queue: WritebackQueue,
        temp_names: tuple[str, ...],
    ) -> None:
        """cache: whose reads come first, and share one limit of requests with the parts."""
        self._store = store
        self._tree = tree
        self._journal = journal
        self._offload = offload
        self._cache = cache
        self._aborts = MultipartAborts(store, journal, offload)
        self._queue = queue
        self._limit = cache.limit
        self._temp_names = temp_names
        self.on_failing: Callable[[FileVersion, FusecacheError], object] = lambda _generation, _error: None
        self.on_success: Callable[[FileVersion], None] = lambda _generation: None
        self._under_way = 0
        self._throttle = DigestThrottle(_PROCESSORS)
        self._is_resting = False
        # Parts that are read for their digests, or wait for that: not all at once, so that the first is sent soon.
        self._digesting = 0
        self._digests = trio.CapacityLimiter(2 * _PROCESSORS)
        self._active: dict[FileVersion, MultipartUpload] = {}
        self.nursery: trio.Nursery | None = None

    def on_growth(self, version: FileVersion) -> None:
        """The writer has passed another part: send those that it left behind, if they are likely to stay."""
        part_bytes = choose_growing_part_bytes(version.size)
        ready = ready_parts(version.written, part_bytes)
        version.grows_at = (ready + 1) * part_bytes + part_bytes // 4
        upload = version.upload
        if upload is not None and upload.parts.part_bytes != part_bytes:
            log.info("upload begins anew with larger parts key=%s bytes=%d", upload.key, part_bytes)
            self.drop(version)
            upload = None
        if self.nursery is None or not self._may_go_ahead(version):
            version.grows_at = NEVER
            return
        version.growing_since = min(version.growing_since, trio.current_time())
        if trio.current_time() < version.growing_since + AHEAD_AFTER_SECONDS:
            return
        if upload is None:
            upload = self._begin(version, part_bytes)
        upload.ready = ready
        self._pump()

    async def finish(self, version: FileVersion) -> None:
        """Return when the bucket holds every part of a sealed generation. Raises what prevents it.

        Of what may pass: the bucket was asked a few times, and is asked again when this is called again.
        """
        upload = version.upload
        if upload is not None and not self._is_fit(version, upload):
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
                # Of a file that was cut, the table knows parts behind its end.
                etags = upload.parts.etags()[: upload.ready]
                version.record = replace(version.record, part_etags=etags)
                return
            await upload.changed.wait()

    def drop(self, version: FileVersion) -> None:
        """Forget an upload and have the bucket forget it: its content is not wanted, or not under that key."""
        self._active.pop(version, None)
        record, upload = version.record, version.upload
        version.upload = None
        version.sent_bytes = 0
        if upload is None and record.upload_id:
            upload = MultipartUpload(
                version.upload_key, PartTable(record.part_bytes), record.attributes, record.upload_id
            )
        if upload is None:
            return
        if record.upload_id:
            # Before the row that no longer has it.
            self._aborts.record(upload.key, record.upload_id)
        version.record = without_upload(record)
        upload.stop()
        if self.nursery is not None:
            self.nursery.start_soon(self._abort, upload, name=f"abort {upload.key}")

    def abort(self, key: str, upload_id: str) -> None:
        """Have the bucket forget an upload of an earlier run."""
        if self.nursery is not None:
            self.nursery.start_soon(self._aborts.abort, key, upload_id, name=f"abort {key}")

    def end_pauses(self) -> None:
        """Whatever made requests fail may be over: try again now what pauses."""
        for upload in self._active.values():
            upload.quiet_until = float("-inf")
        if self.nursery is not None:
            self._pump()

    # ---- deciding

    def _may_go_ahead(self, version: FileVersion) -> bool:
        """Say whether a file that is being written will probably be published as it is, under its present name."""
        node = version.node
        if node is None or not self._tree.is_linked(node) or version.killed_writer is not None:
            return False
        if version.state not in {FileState.OPEN, FileState.FLUSHED}:
            return False
        if version.upload is not None and not version.upload.parts.is_worth_it:
            return False
        name = version.record.key.rpartition("/")[2]
        # rsync and others write under a hidden name first.
        return not name.startswith(".") and not matches_any(name, self._temp_names)

    def _is_fit(self, version: FileVersion, upload: MultipartUpload) -> bool:
        """Say whether what was begun before the file's size and attributes were known can become its object."""
        part_bytes = upload.parts.part_bytes
        return (
            upload.key == version.record.key
            and choose_part_bytes(version.size) > 0
            and version.size <= part_bytes * PARTS_MAX
            and _metadata_still_valid(upload.attributes, version.record.attributes)
        )

    # ---- one upload

    def _begin(self, version: FileVersion, part_bytes: int) -> MultipartUpload:
        record = version.record
        upload = MultipartUpload(record.key, PartTable(part_bytes), record.attributes)
        version.upload = self._active[version] = upload
        self._start_create(version, upload)
        return upload

    def _start_create(self, version: FileVersion, upload: MultipartUpload) -> None:
        upload.attempts += 1
        upload.is_asked = True
        assert self.nursery is not None
        self.nursery.start_soon(self._create, version, upload, name=f"create upload {upload.key}")

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
        if not self._is_fit(version, upload):
            self.drop(version)
            return None
        version.upload = upload
        version.sent_bytes = upload.parts.held_bytes(version.size)
        return upload

    async def _create(self, version: FileVersion, upload: MultipartUpload) -> None:
        metadata = content_metadata(version.record.uuid, upload.attributes)
        create = partial(self._store.create_multipart, upload.key, metadata=metadata)
        try:
            upload.upload_id = await self._send_metadata(
                version, upload, partial(self._offload.upload, create)
            )
            if not upload.stopped.is_set():
                version.upload_key = upload.key
                version.record = replace(
                    version.record,
                    upload_id=upload.upload_id,
                    part_bytes=upload.parts.part_bytes,
                    part_etags=(),
                    upload_attributes=upload.attributes,
                )
                await self._journal.commit(*self._row(version))
                upload.is_known = True
        except FusecacheError as exc:
            self._on_failed(version, upload, exc)
        finally:
            upload.attempts -= 1
            upload.is_asked = False
            upload.announce()
        self._pump()

    def _pump(self) -> None:
        """Start as many attempts as there is room for, and as reads leave time for."""
        if self.nursery is None:
            return  # the mount ends
        most = min(PARTS_AT_ONCE, self._limit.limit)
        now, is_read = trio.current_time(), self._cache.is_fetching()
        for version, upload in sorted(self._active.items(), key=_sealed_first):
            if upload.failure is not None or now < upload.quiet_until:
                continue
            if not upload.is_known and not upload.upload_id and not upload.is_asked:
                self._start_create(version, upload)
            at_once = PARTS_AT_ONCE if upload.is_sealed else PARTS_AT_ONCE_AHEAD
            if upload.failures:
                at_once = 1  # that tries, and leaves the room to others
            while self._under_way < most and upload.attempts < at_once:
                index = _next_part(version, upload)
                if index is None:
                    break
                # One whose digests are known takes next to nothing of the processors.
                takes_time = is_read and upload.parts.needs_reading(index)
                if takes_time and (self._digesting >= self._throttle.at_once or self._throttle.delay(now)):
                    self._rest()
                    break
                self._under_way += 1
                upload.attempts += 1
                attempt = upload.parts.begin(index, version.size)
                self.nursery.start_soon(
                    self._send, version, upload, attempt, name=f"part {index + 1} {upload.key}"
                )
                if takes_time:
                    return  # it looks for another one once it is at work

    def _rest(self) -> None:
        """Look again when reads leave time for another part; whoever ends its digests looks anyway."""
        if not self._is_resting and not self._digesting:
            self._is_resting = True
            assert self.nursery is not None
            self.nursery.start_soon(self._resume_after_throttle, name="rest beside reads")

    async def _resume_after_throttle(self) -> None:
        await trio.sleep(self._throttle.delay(trio.current_time()))
        self._is_resting = False
        self._pump()

    async def _send(self, version: FileVersion, upload: MultipartUpload, attempt: DigestAttempt) -> None:
        """Send one part, once: of a failure `_note_failed` says when another attempt begins.

        One pass for the digests, one to send the bytes; that if there is an upload by then.
        """
        etag = ""
        try:
            found = await self._digest(version, upload, attempt)
            if found is not None and upload.is_known:
                send = partial(self._send_bytes, version, upload, attempt, found.md5)
                etag = await self._send_metadata(version, upload, send)
        except FusecacheError as exc:
            # Bytes that changed, or went, meanwhile explain any failure.
            if upload.parts.is_current(attempt):
                if isinstance(exc, NotAsSent):
                    upload.parts.doubt(attempt)
                self._on_failed(version, upload, exc)
        try:
            if upload.parts.end(attempt, etag) and not upload.stopped.is_set():
                version.record = replace(version.record, part_etags=upload.parts.etags())
                version.sent_bytes = upload.parts.held_bytes(version.size)
                self._journal.submit(*self._row(version))
        except FusecacheError as exc:
            self._fail(version, upload, exc)
        finally:
            self._under_way -= 1
            upload.attempts -= 1
            upload.announce()
        self._pump()

    async def _digest(
        self, version: FileVersion, upload: MultipartUpload, attempt: DigestAttempt
    ) -> Digests | None:
        """Return the digests of a part, None if it is not wanted any more, or not now.

        Of one that did not arrive as it was sent they are taken again. Raises Damaged if they are others then: nobody
        wrote it meanwhile.
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
                f"{path}: part {attempt.index + 1} is not what it was: the disk, or somebody else, changed it; "
                f"{upload.key} is not published, `fusecache recover` has what is left"
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
        """A request failed: if that may pass, the upload pauses, then one request tries."""
        if not isinstance(error, _WORTH_WAITING):
            self._fail(version, upload, error)
            return
        now = trio.current_time()
        if self._active.get(version) is not upload or now < upload.quiet_until:
            return  # one of those beside it failed as well
        upload.failures += 1
        self.on_failing(version, error)
        if upload.is_sealed and upload.failures >= _TRIES:
            self._fail(version, upload, error)
            return
        pause = backoff_seconds(upload.failures, random.random())
        log.warning(
            "upload waits key=%s attempt=%d seconds=%.1f error=%s", upload.key, upload.failures, pause, error
        )
        upload.quiet_until = now + pause
        if self.nursery is not None:
            self.nursery.start_soon(self._pump_at, upload.quiet_until, name=f"pause of {upload.key}")

    async def _pump_at(self, moment: float) -> None:
        await trio.sleep_until(moment)
        self._pump()

    def _fail(self, version: FileVersion, upload: MultipartUpload, error: FusecacheError) -> None:
        """An upload cannot go on: who waits for it hears why; one that nobody waits for yet is begun anew later."""
        if upload.stopped.is_set():
            return
        if upload.is_sealed:
            upload.failure = upload.failure or error
        else:
            log.info("sending ahead given up key=%s error=%s", upload.key, error)
            version.grows_at = NEVER
            self.drop(version)

    async def _abort(self, upload: MultipartUpload) -> None:
        while upload.attempts:
            await upload.changed.wait()
        if upload.upload_id:
            self._aborts.record(upload.key, upload.upload_id)  # perhaps created since: no row knew of it
            await self._aborts.abort(upload.key, upload.upload_id)

    # ---- inside

    async def _send_metadata(
        self, version: FileVersion, upload: MultipartUpload, call: Callable[[], Awaitable[T]]
    ) -> T:
        """Send a request when the bucket lets us; have it heard how that went."""
        await trio.sleep_until(max(trio.current_time(), self._limit.silent_until))
        try:
            answer = await call()
        except _WORTH_WAITING as exc:
            if exc.asks_to_slow_down:
                self._limit.on_throttled(trio.current_time(), exc.retry_after_seconds)
            raise
        self._limit.on_success(trio.current_time())
        upload.failures, upload.quiet_until = 0, float("-inf")
        self.on_success(version)
        return answer

    def _row(self, version: FileVersion) -> Iterator[PutFile]:
        """Yield the row to be journaled.

        None for a file that was unlinked, which must not come back after a crash, unless it is to be published before
        what another was renamed over it for.
        """
        is_named = version.node is not None and self._tree.is_linked(version.node)
        if is_named or version in self._queue:
            yield PutFile(version.record)


def _next_part(version: FileVersion, upload: MultipartUpload) -> int | None:
    """Return the part that is to be sent next, or read for its digests while the bucket and the journal are asked."""
    parts = upload.parts
    if upload.is_sealed:
        return (
            parts.next_unsent(upload.ready)
            if upload.is_known
            else parts.next_unread(min(upload.ready, READ_FIRST))
        )
    if not upload.is_known or not parts.is_worth_it:
        return None
    # The file may have been cut since.
    index = parts.next_unsent(min(upload.ready, version.size // parts.part_bytes))
    # One that did not arrive as it was sent is looked at again when nobody changes it any more.
    return None if index is None or parts.is_doubted(index) else index


def _metadata_still_valid(then: PosixAttributes, now: PosixAttributes) -> bool:
    """Say whether the metadata given at an upload's begin still tell mode, owner and, within its duration, time."""
    if (then.mode, then.uid, then.gid) != (now.mode, now.uid, now.gid):
        return False
    return now.mtime_ns == then.mtime_ns or (
        then.mtime_ns - _NATURAL_NS <= now.mtime_ns <= time.time_ns() + _NATURAL_NS
    )


def _sealed_first(entry: tuple[FileVersion, MultipartUpload]) -> tuple[bool, int]:
    version, upload = entry
    return not upload.is_sealed, version.sequence
