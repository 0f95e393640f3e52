"""The publisher of one bucket sends its queued changes: many requests in flight, each when order and time allow.

It decides neither the order (`policy/writeback/publish_order.py`) nor the times (`schedule.py`). `results.py` and
`rejections.py` apply the bucket's answers.

Invariants:
1. The journal says PUBLISHING before the request is sent, and STORED after the answer. Only then are local bytes freed.
2. The publisher retries a failing request without end. A change that the bucket rejects permanently is kept and
   reported. It holds back nothing but commit markers, and deletes behind them (`commit_markers.py`). Outside the queue,
   rejected changes that bring a name are repeated now and then: an object is restored from its archive, say.
3. After a lost answer the bucket decides: a request took effect if the object there carries our uuid in its metadata.
4. A change in state PUBLISHING stays queued: later changes of the same name are queued behind it.
5. After an unexpected exception, a bug, a change keeps its place in the order and is retried a few times. If that does
   not help, it is rejected like a change that the bucket rejects: it must not hold back all others.
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import trio

from fusecache.engine.namespace.nodes import FileVersion, Operation, QueuedChange
from fusecache.engine.publish.bucket_writer import MAKES
from fusecache.engine.publish.preparer import PrepareAhead, Preparer
from fusecache.engine.publish.results import PublishResults
from fusecache.engine.publish.schedule import (
    Failures,
    PublishRequests,
    PublishSchedule,
    is_light,
)
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.supervisor import TaskNursery
from fusecache.engine.writeback.queue import WritebackQueue
from fusecache.index.journal import PutFile, PutOperation
from fusecache.model.errors import (
    TRANSIENT,
    FusecacheError,
    InternalError,
    NoSpace,
    ObjectChanged,
    ObjectMissing,
    PartsRefused,
    TooManyFiles,
)
from fusecache.model.records import FileState, OperationKind
from fusecache.policy.backoff import backoff_seconds
from fusecache.remote.store import Sent

log = logging.getLogger(__name__)
T = TypeVar("T")

# Each file wakes the loop several times: events within this time share one pass.
_PASS_SECONDS = 0.005
# From this many light changes in flight on, a slot that stays empty for a moment costs little: passes and journal rows
# are batched for longer.
_BUSY_CHANGES = 8
_BUSY_PASS_SECONDS = 0.02
# A pass that begins so late means that the loop stood still: releases of closed files may lie unread in the kernel.
# Their content must not come after what was closed behind them. They are read within this time.
_LATE_SECONDS = 0.1
# Longest pause between two passes while anything is queued: that a file has settled sends no event. And while something
# is due within that time: a pass that is due shows that the loop stands still.
_POLL_SECONDS = 1.0
_SETTLING_POLL_SECONDS = 0.02
# ObjectMissing: another client removed the object during the request, and the retry looks again. NoSpace: the bytes
# of a closed file could not be synced, for lack of space on the disk. TooManyFiles: it could not be opened.
_RETRIED = (*TRANSIENT, ObjectMissing, NoSpace, TooManyFiles)
# Maximum retries per change after InvalidPart, or after an unexpected exception.
_RESTARTS_MAX = 4


class Publisher:
    """Takes changes from the schedule when they are due, and makes the bucket show them."""

    def __init__(
        self,
        queue: WritebackQueue,
        journal: JournalWriter,
        schedule: PublishSchedule,
        preparer: Preparer,
        requests: PublishRequests,
        results: PublishResults,
        tasks: TaskNursery,
        *,
        last_wins: bool = False,
    ) -> None:
        """last_wins: replace a version that another client wrote concurrently."""
        self._tasks = tasks
        self._queue = queue
        self._order = queue.order
        self._journal = journal
        self._preparer = preparer
        self._schedule = schedule
        self._ahead = PrepareAhead(preparer, schedule)
        self._results = results
        self.retirement = results.retirement
        self.rejections = results.rejections
        self._wake = trio.Event()
        self._pass_due = float("inf")
        self._requests = requests
        self._probe: QueuedChange | None = None
        self._failing = schedule.failing
        self._last_wins = last_wins

    # ---- status and events

    @property
    def failure(self) -> FusecacheError | None:
        """The error that keeps changes from the bucket, if there is one; first the kind that a person can fix."""
        return self._journal.failure or self._failing.failure

    @property
    def blocking_error(self) -> FusecacheError | None:
        """The error that seems to block all publishing: no request has succeeded since it was first seen."""
        return self._journal.failure or self._failing.blocking_error

    @property
    def last_success(self) -> float:
        """Loop time of the last publishing request that the bucket accepted; -inf: none yet."""
        return self._failing.outage.last_success

    def wake(self) -> None:
        """Have the loop look at the queue again: there may be more to publish."""
        self._pass_due = min(self._pass_due, trio.current_time())
        self._wake.set()

    def end_pauses(self) -> None:
        """The cause of failures may be gone: retry now, without waiting for back-off."""
        now = trio.current_time()
        self._failing.outage.try_now()
        self._failing.end_pauses()
        self._schedule.recompute(now)
        self._ahead.retry_soon(now)
        self._preparer.uploader.end_pauses()
        self.wake()

    @contextmanager
    def draining(self) -> Iterator[None]:
        """While the body runs, publish without settle delay: the mount is about to end."""
        self._schedule.draining += 1
        self._schedule.recompute(trio.current_time())
        self.wake()
        try:
            yield
        finally:
            self._schedule.draining -= 1
            self._schedule.recompute(trio.current_time())

    async def wait_progress(self) -> None:
        """Return when a change joins or leaves the queue. Raises what keeps the journal from being written."""
        self._journal.check_writable()
        await self._queue.wait_changed()

    def is_deferred(self, item: QueuedChange) -> bool:
        """Whether the change is a deferred removal: `delete_delay` is not over, or a process here has the file open.

        The removal of a directory that held such a file is deferred with it.
        """
        return self.deferred_seconds(item) > 0

    def deferred_seconds(self, item: QueuedChange) -> float:
        """For how long at most the change stays a deferred removal; 0: it is none."""
        if not isinstance(item, Operation):
            return 0.0
        now, left = trio.current_time(), self._order.left_below(item.sequence)
        operations = (item, *(each for each in map(self._queue.get, left) if isinstance(each, Operation)))
        return max(self._schedule.deferred_seconds(each, now) for each in operations)

    def on_failing(self, item: QueuedChange, error: FusecacheError) -> Failures:
        """A request for a change failed in a way that may pass.

        The uploader also calls this, for parts that it sends ahead of the change's slot.
        """
        if item not in self._queue:
            return Failures()  # written again, removed, or not closed yet
        return self._failing.add(item, error)

    def on_success(self, item: QueuedChange) -> None:
        """The bucket accepted a part of a change: its failures are over."""
        self._on_response(trio.current_time())
        if item not in self._queue:
            return
        self._failing.clear(item)

    # ---- the loop

    def start(self) -> None:
        """Start to publish. What is queued by now is the journal's."""
        self._schedule.on_resumed(trio.current_time())
        self._tasks.keep(
            {
                "retire": self.retirement.run,
                "publish": self._run,
                "repeat-rejected": self._repeat_rejected,
                "held-markers": self.rejections.commit_markers.run,
            }
        )

    async def _run(self) -> None:
        try:
            await self._dispatch()
        except Exception:
            self._schedule.rebuild(self._requests, trio.current_time())
            raise

    async def _wait_for_journal(self) -> None:
        """Publish nothing while the journal cannot be written, and let callers of `wait_progress` know."""
        while self._journal.failure is not None:
            with trio.move_on_after(_POLL_SECONDS):
                await self._journal.wait_healthy()
            if self._journal.refusal is not None:
                self._queue.announce()

    async def _dispatch(self) -> None:
        while True:
            self._wake, self._pass_due = trio.Event(), float("inf")
            await self._wait_for_journal()
            now = trio.current_time()
            self._prepare_ahead(now)
            while (item := self._next_item(now)) is not None:
                if item in self._requests:
                    continue  # queued again during its attempt (rename, conflict): due again when that attempt ends
                failed = self._failing.of(item).count > 0
                self._requests.begin(item, light=is_light(item), failed=failed)
                self._tasks.start_soon(
                    "publish-change",
                    *(self._publish, item),
                    about=item.changed_keys()[-1],
                    on_failed=partial(self._on_failed, item),
                )
            if len(self._order):
                deadline = self._schedule.next_time()
                if self._failing.outage.is_on:
                    deadline = max(deadline, self._failing.outage.quiet_until)
                # Files settle, and are synced to the disk, also while the bucket does not answer.
                pause = _POLL_SECONDS if deadline > now + _POLL_SECONDS else _SETTLING_POLL_SECONDS
                deadline = min(deadline, now + pause, self._ahead.next_scan())
            else:
                deadline = float("inf")
            if not self._wake.is_set():
                self._pass_due = deadline
                with trio.move_on_at(deadline):
                    await self._wake.wait()
            if trio.current_time() > self._pass_due + _LATE_SECONDS:
                await trio.sleep(_LATE_SECONDS)
            is_busy = self._requests.light >= _BUSY_CHANGES
            await trio.sleep_until(now + (_BUSY_PASS_SECONDS if is_busy else _PASS_SECONDS))

    def _next_item(self, now: float) -> QueuedChange | None:
        """Return the change to publish now, if one is due and a slot is free. An open circuit allows one probe."""
        if self._failing.outage.is_on:
            is_probing = self._requests.is_sending or self._probe in self._requests
            if is_probing or now < self._failing.outage.quiet_until:
                return None
            self._probe = self._schedule.next_probe(now)
            return self._probe
        for light in (True, False):
            if self._requests.has_slot(light=light):
                failed = self._requests.has_slot_after_failure(light=light)
                item = self._schedule.next(now, light=light, failed=failed)
                if item is not None:
                    return item
        return None

    def _prepare_ahead(self, now: float) -> None:
        """Start preparing files ahead of their slots."""
        if not self._failing.outage.is_on:
            self._ahead.retry(self._failing, now)
        if now >= self._ahead.next_scan():
            self._ahead.scan(now)

    # ---- the queue's events

    def on_added(self, item: QueuedChange) -> None:
        """A change was queued."""
        self._schedule.on_added(item, trio.current_time())
        self._ahead.add(item, trio.current_time())
        self.wake()

    def on_removed(self, item: QueuedChange) -> None:
        """A change left the queue."""
        self._schedule.on_removed(item)
        self._ahead.discard(item)
        self.wake()

    # ---- one change

    async def _publish(self, item: QueuedChange) -> None:
        try:
            await self._attempt(item)
        except _RETRIED as exc:
            self._retry_later(item, exc)
        except FusecacheError as exc:
            await self._resolve(item, exc)
        except Exception as exc:  # noqa: BLE001  # recorded
            about = item.changed_keys()[-1]
            await self._resolve(item, self._tasks.supervisor.record("publish-change", exc, about))
        finally:
            self._requests.end(item)
            self._schedule.requeue(item, trio.current_time())
            self.wake()

    async def _resolve(self, item: QueuedChange, error: FusecacheError) -> None:
        """An attempt failed in a way that time alone does not fix."""
        if isinstance(error, (PartsRefused, InternalError)) and self._is_restarted(item, error):
            return
        if self._last_wins and isinstance(error, ObjectChanged) and isinstance(item, FileVersion):
            await self._replace_remote(item)
        elif item in self._queue:
            await self.rejections.handle_error(item, error)

    def _on_failed(self, item: QueuedChange, error: InternalError) -> None:
        """Even the handling of a failed attempt failed unexpectedly: retry the change later."""
        self._retry_later(item, error)
        self._schedule.rebuild(self._requests, trio.current_time())

    def _retry_later(self, item: QueuedChange, error: FusecacheError) -> None:
        """An attempt failed: retry the change after a back-off."""
        if item not in self._queue:
            return
        now = trio.current_time()
        failures = self.on_failing(item, error)
        failures.count += 1
        pause = backoff_seconds(failures.count, random.random())
        failures.pause_until = now + pause
        self._failing.outage.on_failure(id(item), now, random.random())
        log.warning(
            "publish failed, will retry key=%s attempt=%d retry_in_seconds=%.1f error=%s",
            item.changed_keys()[-1], failures.count, pause, error,
        )  # fmt: skip

    def _is_restarted(self, item: QueuedChange, error: FusecacheError) -> bool:
        """Return whether the change is prepared again from the start, after InvalidPart or an unexpected exception."""
        if item not in self._queue:
            return True
        failures = self._failing.add(item, error)
        if failures.restarts >= _RESTARTS_MAX:
            return False
        failures.restarts += 1
        if isinstance(item, FileVersion):
            self._preparer.restart(item)
        self._retry_later(item, error)
        return True

    async def _replace_remote(self, item: FileVersion) -> None:
        """Another client changed the key first: have the next attempt replace that version."""
        try:
            etag = await self._requests.send(self._requests.writer.current_etag, item.record.key)
        except _RETRIED as exc:
            self._retry_later(item, exc)
        except FusecacheError as exc:
            if item in self._queue:
                await self.rejections.handle_error(item, exc)
        else:
            if item in self._queue:
                await self.rejections.replace_remote(item, etag)

    async def _attempt(self, item: QueuedChange) -> None:
        if isinstance(item, FileVersion):
            await self._preparer.wait(item)
            if not self._schedule.may_go(item, trio.current_time()):
                return  # dropped, or renamed and so at another place in the order, while its bytes were sent
            if self.rejections.is_directory_there(item):
                name = f"{item.record.key}: another client made a directory of this name"
                await self.rejections.handle_error(item, ObjectChanged(name))
                return
            self.rejections.commit_markers.check(item)
            submit = (
                self._journal.submit if self._requests.light < _BUSY_CHANGES else self._journal.submit_batched
            )
            await submit(PutFile(item.transition_to(FileState.PUBLISHING))).committed()
            version = await self._send(item, self._requests.writer.publish_file, item.record, item.file.path)
            self._results.stored(item, version)
            return
        if not self._schedule.may_go(item, trio.current_time()):
            return
        if not item.in_flight:
            item.record = replace(item.record, sent=True)
            if item.record.kind is OperationKind.DELETE:
                self._queue.settle(item)
                self._journal.submit(PutOperation(item.record))
        await self._journal.wait_all_committed()  # the row must be on disk before the bucket can change
        publish = partial(self._requests.writer.publish_operation, may_hide=self.rejections.may_hide(item))
        result = await self._send(item, publish, item.record)
        await self._results.done(item, result)

    async def _repeat_rejected(self) -> None:
        """Repeat rejected changes that bring a name, one after the other, with growing pauses while they fail.

        A removal is repeated only on request: by then you may want to keep what is there.
        """
        failures = 1
        while True:
            items = [each for each in self.rejections.operations() if each.record.kind in MAKES]
            pause = backoff_seconds(failures, random.random()) if failures else 0.0
            with trio.move_on_after(pause if items else float("inf")):
                await self.rejections.wait_rejected()
                failures = 1
                continue
            # What this node changes under the same names comes first.
            free = (each for each in items if not any(map(self._queue.for_key, each.changed_keys())))
            item = next(free, None)
            try:
                failures = 0 if item is not None and await self.repeat(item) else failures + 1
            except FusecacheError as exc:
                log.info("change not repeated error=%s", exc)
                failures += 1

    async def repeat(self, item: Operation) -> bool:
        """Send a rejected change of names again; return whether it was still rejected. Raises what the bucket says."""
        if not self.rejections.has(item):
            return False
        try:
            result = await self._send(item, self._requests.writer.publish_operation, item.record)
        except _RETRIED:
            raise  # not an answer to this change
        except ObjectChanged:
            log.warning("rejected change dropped, as its names have changed key=%s", item.changed_keys()[-1])
            await self._journal.commit(*self.rejections.drop(item))
            raise
        except FusecacheError as exc:
            if self.rejections.has(item):
                await self._journal.commit(self.rejections.keep(item, exc))
            raise
        self.rejections.on_repeated(item)
        await self._results.done(item, result)
        return True

    async def _send(self, item: QueuedChange, call: Callable[..., T], *args: object) -> T:
        """Send a publishing request once the bucket does not throttle."""
        await self._requests.wait_allowed()
        sends_bytes = isinstance(item, FileVersion) and not is_light(item) and not item.record.upload_id
        async with self._requests.slot(sends_bytes=sends_bytes):
            self._schedule.on_written(item, trio.current_time())
            if isinstance(item, FileVersion):
                item.upload.request = Sent(trio.current_time())
                args = (*args, item.upload.request)
            try:
                answer = await self._requests.send(call, *args, sends_bytes=sends_bytes)
            finally:
                if isinstance(item, FileVersion):
                    item.upload.request = None
        now = trio.current_time()
        self._schedule.on_written(item, now)
        self._failing.clear(item)
        self._on_response(now)
        return answer

    def _on_response(self, now: float) -> None:
        if self._failing.outage.on_success(now):
            self.end_pauses()
