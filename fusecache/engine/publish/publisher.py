"""Publishes queued changes: many requests in flight, each one sent when its order and its time allow.

`policy/writeback/publish_order.py` decides the order, `schedule.py` the times; `results.py` applies what the bucket
answered.

Invariants:
1. The journal says PUBLISHING before the request that publishes, STORED after it, and only then do local bytes go.
2. Nothing is given up: a failing request is sent again without end. What the bucket refuses for good is kept,
   reported, and no longer holds the others up.
3. A request whose answer was lost is settled by what the bucket shows: is the uuid in its metadata ours?
4. From PUBLISHING on nothing can be taken back: whatever happens to the name is queued behind it.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import trio

from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.lookup import Names
from fusecache.engine.namespace.nodes import Generation, Item, Node, Operation
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.publish.bucket_writer import Publishing
from fusecache.engine.publish.preparer import Preparer, is_begun
from fusecache.engine.publish.results import Outcomes
from fusecache.engine.publish.retirement import Retiring
from fusecache.engine.publish.schedule import LIGHT_BYTES, Failures, Turns
from fusecache.engine.runtime.exception_groups import one_failure
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.write.file_io import Contents
from fusecache.engine.writeback.queue import Owed
from fusecache.index.journal import PutFile
from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    FusecacheError,
    NoSpace,
    ObjectChanged,
    ObjectMissing,
    PartsRefused,
    ReadOnly,
    RemoteError,
    StateError,
    Throttled,
    Unavailable,
)
from fusecache.model.records import OperationKind
from fusecache.model.states import FileState
from fusecache.policy.backoff import LONGEST_SECONDS, Outage, RequestLimit, backoff_seconds
from fusecache.policy.writeback.multipart import choose_part_bytes
from fusecache.remote.store import Sent

log = logging.getLogger(__name__)
T = TypeVar("T")

# Items under way at once. Of a request's 100 ms to a distant bucket the node works one or two: 64 keep it busy. Of the
# heavy ones many may wait for their parts. Those that failed before leave half of it to others.
LIGHT_AT_ONCE = 64
HEAVY_AT_ONCE = 64
# Of those that send many bytes themselves; parts are counted apart.
SENDING_AT_ONCE = 16
# So many items are looked at in advance, not more often than this.
_AHEAD = 512
_RESTING = 16
_AHEAD_SECONDS = 0.02
# What failed of it is tried again so often.
_AGAIN_SECONDS = LONGEST_SECONDS
# After a pause of the loop, what lies unread in the kernel is heard of within this time.
_UNSURE_SECONDS = 0.05
# Each file wakes the loop several times: what comes within this time is looked at in one pass.
_PASS_SECONDS = 0.005
# While so many items are under way a place more or less empty for a moment matters little: passes, and rows of the
# journal, gather for longer.
_CROWD = 8
_CROWD_PASS_SECONDS = 0.02
# Files are looked at so often at least while anything is owed: they settle without telling.
_LOOK_SECONDS = 1.0
# Causes that pass, or that a person can mend while we wait. What is missing was removed just now: looking again tells.
_WORTH_WAITING = (Unavailable, AccessDenied, CredentialsMissing, BucketMissing, ObjectMissing)
# So often the parts of a file are sent again that the bucket does not want as it has them.
_BEGUN_ANEW_MAX = 4
# The journal cannot be written: nothing can be published, as nobody could tell afterwards what was.
_STOPPED = (NoSpace, StateError, ReadOnly)


class Publisher:
    """Takes items from the queue as their turn comes, and makes the bucket show them."""

    def __init__(
        self,
        tree: Tree,
        names: Names,
        contents: Contents,
        owed: Owed,
        journal: JournalWriter,
        cache: BlockCache,
        preparer: Preparer,
        publishing: Publishing,
        offload: Offload,
        limit: RequestLimit,
        *,
        settle_seconds: float,
        temp_names: tuple[str, ...] = (),
        delete_delay: float = 0.0,
        last_wins: bool = False,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """limit: shared with the reads, so that a bucket that asks for fewer requests gets fewer of all kinds.

        last_wins: what another client changed meanwhile is replaced. on_taken: told whenever the bucket took something.
        """
        self._contents = contents
        self._owed = owed
        self._journal = journal
        self._preparer = preparer
        self._publishing = publishing
        self._offload = offload
        self._limit = limit
        self._settle_seconds = settle_seconds
        self._turns = Turns(
            owed, settle_seconds=settle_seconds, temp_names=temp_names, delete_delay=delete_delay
        )
        self._retiring = Retiring(cache, journal, offload)
        self._outcomes = outcomes = Outcomes(tree, names, contents, owed, journal, preparer, self._retiring)
        self._draining = 0
        self._wake = trio.Event()
        self._progress = trio.Event()
        # Of those under way: whether they are light, and failed before.
        self._under_way: dict[Item, tuple[bool, bool]] = {}
        self._light = 0
        self._failed_before: Counter[bool] = Counter()
        self._tried: Item | None = None
        self._asking = 0
        self._slots = trio.CapacityLimiter(LIGHT_AT_ONCE)
        self._sending = trio.CapacityLimiter(SENDING_AT_ONCE)
        self._unprepared: dict[Generation, None] = {}
        self._prepared_at = self._again_at = float("-inf")
        self._outage = Outage()
        self._failing: dict[Item, FusecacheError] = {}
        self._stopped: FusecacheError | None = None
        self.on_name_lost: Callable[[Node, str], None] = lambda _parent, _name: None
        self.on_conflict: Callable[[str, str, int, str, int], None] = lambda *_: None
        self.on_published: Callable[[str], None] = lambda _key: None
        self._on_taken = on_taken
        self._last_wins = last_wins
        outcomes.on_name_lost = lambda parent, name: self.on_name_lost(parent, name)
        outcomes.on_conflict = lambda *facts: self.on_conflict(*facts)
        outcomes.on_published = lambda key: self.on_published(key)
        self.on_gone: Callable[[str, str | None], None] = lambda _key, _etag: None
        outcomes.on_gone = lambda key, etag: self.on_gone(key, etag)
        contents.on_sealed = self.wake
        owed.is_aside = lambda item: self._turns.is_aside(item, trio.current_time())
        owed.on_added, owed.on_removed = self._note_added, self._note_removed
        owed.on_change = self._note_change

    # ---- for others

    @property
    def rejected(self) -> list[Item]:
        """What the bucket refused for good, or could not be read back, unless it was removed or replaced since."""
        return self._outcomes.rejected

    @rejected.setter
    def rejected(self, items: list[Item]) -> None:
        self._outcomes.rejected = items

    def note_start(self, highest: int) -> None:
        """What the daemon before left has places up to `highest`; what it kept back may go on."""
        self._outcomes.note_start(highest)

    @property
    def conflicts(self) -> list[str]:
        """The newest keys that another client was quicker with."""
        return list(self._outcomes.conflicts)

    @property
    def kept_as(self) -> dict[str, str]:
        """Where our version of such a key is kept, "" if the change was given up."""
        return self._outcomes.conflicts

    @property
    def failure(self) -> FusecacheError | None:
        """Why something is not published, if an error is the reason: one that a person can mend first."""
        if self._stopped is not None:
            return self._stopped
        # One that is asked to slow down does so, and goes on; three in a row are an outage.
        is_on = self._outage.is_on
        errors = [each for each in self._failing.values() if is_on or not isinstance(each, Throttled)]
        mendable = (error for error in errors if not isinstance(error, Unavailable))
        return next(mendable, errors[0] if errors else None)

    @property
    def hindrance(self) -> FusecacheError | None:
        """Why nothing at all is published, as far as can be told: nothing was since such an error was first seen."""
        if self._stopped is not None:
            return self._stopped
        last = self._outage.last_success
        errors = (error for item, error in self._failing.items() if last < self._turns.failing_since(item))
        return next((error for error in errors if not isinstance(error, Unavailable)), None)

    def wake(self) -> None:
        """Look at the queue again."""
        self._wake.set()

    def end_pauses(self) -> None:
        """Whatever made requests fail may be over: try again now what pauses."""
        self._outage.try_now()
        self._end_pauses(trio.current_time())

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Publish without waiting for files to settle: the mount is about to end."""
        self._draining += 1
        self._turns.hurry(trio.current_time(), is_draining=True)
        self.wake()
        try:
            yield
        finally:
            self._draining -= 1
            self._turns.hurry(trio.current_time(), is_draining=self._draining > 0)

    async def wait_progress(self) -> None:
        """Return when an item was published, given up, or taken back. Raises what stopped publishing for good."""
        if self._stopped is not None:
            raise self._stopped
        await self._progress.wait()

    async def wait_retired(self) -> None:
        """Return when the staged bytes of all that was published are cache."""
        await self._retiring.ended()

    def is_temporary(self, item: Item) -> bool:
        """Whether the item waits because of its temporary name."""
        return self._turns.is_temporary(item, trio.current_time())

    def is_put_off(self, item: Item) -> bool:
        """Whether the item is a removal that waits on purpose: for its delay, or for those who have the file open.

        So does that of a directory which held the file.
        """
        return self.put_off_seconds(item) > 0

    def put_off_seconds(self, item: Item) -> float:
        """For how long at most the item is a removal that waits on purpose; 0: it is none."""
        if not isinstance(item, Operation):
            return 0.0
        now, left = trio.current_time(), self._owed.order.left_below(item.sequence)
        operations = (item, *(each for each in map(self._owed.get, left) if isinstance(each, Operation)))
        return max(self._turns.put_off_seconds(each, now) for each in operations)

    def note_failing(self, item: Item, error: FusecacheError) -> Failures:
        """A request for an item failed in a way that may pass: if others succeed meanwhile it holds fewer of them back.

        Also told of items whose parts are sent before their turn.
        """
        if item not in self._owed:
            return Failures()  # written on, removed, or not closed yet
        failures = self._turns.note_failed(item, trio.current_time())
        self._failing[item] = item.error = error
        if self._outage.last_success > failures.first:
            self._owed.order.note_stuck(item.sequence)
        return failures

    def note_well(self, item: Item) -> None:
        """The bucket took a part of an item: what failed goes on."""
        self._note_answered(trio.current_time())
        if item not in self._owed:
            return
        self._turns.note_well(item)
        self._owed.order.note_well(item.sequence)
        self._failing.pop(item, None)
        item.error = None

    # ---- the loop

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled."""
        task_status.started()
        try:
            with one_failure():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._retiring.run, name="retire stored files")
                    await self._dispatch(nursery)
        except _STOPPED as exc:
            log.exception("publishing stopped; what is not in the bucket waits for the next mount")
            self._stopped = exc
            self._announce()
            await trio.sleep_forever()

    async def _dispatch(self, nursery: trio.Nursery) -> None:
        while True:
            self._wake = trio.Event()
            self._journal.check_writable()
            now = trio.current_time()
            next_look = self._look_ahead(now)
            while (item := self._next_item(now)) is not None:
                if item in self._under_way:
                    continue  # renamed, or in conflict, meanwhile: it gets its turn when that attempt ends
                light, failed = _is_light(item), self._turns.failures_of(item) > 0
                self._under_way[item] = light, failed
                self._light += light
                self._failed_before[light] += failed
                nursery.start_soon(self._publish, item, name=f"publish {item.changed_keys()[-1]}")
            if len(self._owed):
                deadline = self._turns.next_time()
                if self._outage.is_on:
                    deadline = max(deadline, self._outage.quiet_until)
                # Files settle, and are brought to the disk, also while the bucket does not answer.
                deadline = min(deadline, now + _LOOK_SECONDS, next_look)
            else:
                deadline = float("inf")
            if not self._wake.is_set():
                with trio.move_on_at(deadline):
                    await self._wake.wait()
            await trio.sleep_until(now + (_PASS_SECONDS if self._light < _CROWD else _CROWD_PASS_SECONDS))

    def _next_item(self, now: float) -> Item | None:
        """Return what is to be published now, if there is room for it."""
        if self._outage.is_on:
            is_trying = self._light or self._asking or self._tried in self._under_way
            if is_trying or now < self._outage.quiet_until:
                return None
            self._tried = self._turns.next_to_try(now)
            return self._tried
        for light, most in ((True, LIGHT_AT_ONCE), (False, HEAVY_AT_ONCE)):
            if (self._light if light else len(self._under_way) - self._light) < most:
                failed = self._failed_before[light] < most // 2
                item = self._turns.next(now, light=light, failed=failed)
                if item is not None:
                    return item
        return None

    def _look_ahead(self, now: float) -> float:
        """Prepare what settles, also while it waits for its turn; return when to look again."""
        if now < self._prepared_at + _AHEAD_SECONDS:
            return self._prepared_at + _AHEAD_SECONDS
        self._prepared_at = now
        self._prepare_again(now)
        is_unsure = self._contents.settle(now, self._settle_seconds)
        first: list[Generation] = []
        resting = 0
        for item in islice(self._unprepared, _AHEAD):
            if self._turns.is_settled(item, now) or item.size > LIGHT_BYTES:
                first.append(item)
            else:
                resting += 1  # and those behind it, which came later, will most likely, too
                if resting > _RESTING:
                    break
        self._preparer.begin([*first], lambda generation: self._turns.is_settled(generation, now))
        for generation in first:
            if is_begun(generation):
                del self._unprepared[generation]
        return now + _UNSURE_SECONDS if is_unsure else float("inf")

    def _note_added(self, item: Item) -> None:
        self._turns.note_added(item, trio.current_time())
        # Of what is aside no part is sent: it may get another name.
        if isinstance(item, Generation) and not (
            choose_part_bytes(item.size) and self._turns.is_aside(item, trio.current_time())
        ):
            self._unprepared[item] = None

    def _note_removed(self, item: Item) -> None:
        self._turns.note_removed(item)
        self._failing.pop(item, None)
        if isinstance(item, Generation):
            self._unprepared.pop(item, None)

    def _note_change(self) -> None:
        self.wake()
        self._announce()

    def _announce(self) -> None:
        if self._progress.statistics().tasks_waiting:
            self._progress.set()
            self._progress = trio.Event()

    # ---- one item

    async def _publish(self, item: Item) -> None:
        try:
            await self._attempt(item)
        except _WORTH_WAITING as exc:
            self._put_off(item, exc)
        except _STOPPED:
            raise
        except Exception as exc:
            if isinstance(exc, PartsRefused) and self._begins_anew(item, exc):
                return
            if not isinstance(exc, FusecacheError):
                # A mistake of ours: it must not keep everything else from the bucket.
                log.exception("unexpected failure key=%s", item.changed_keys()[-1])
            if self._last_wins and isinstance(exc, ObjectChanged) and isinstance(item, Generation):
                await self._replace_theirs(item)
            elif item in self._owed:
                await self._outcomes.resolve(item, exc)
        finally:
            light, failed = self._under_way.pop(item)
            self._light -= light
            self._failed_before[light] -= failed
            self._turns.again(item, trio.current_time())
            self.wake()

    def _put_off(self, item: Item, error: FusecacheError) -> None:
        """An attempt failed: the item pauses."""
        if item not in self._owed:
            return
        now = trio.current_time()
        failures = self.note_failing(item, error)
        failures.count += 1
        pause = backoff_seconds(failures.count, random.random())
        failures.pause_until = now + pause
        self._outage.on_failure(id(item), now, random.random())
        log.warning(
            "publishing waits key=%s attempt=%d seconds=%.1f error=%s",
            item.changed_keys()[-1], failures.count, pause, error,
        )  # fmt: skip

    def _begins_anew(self, item: Item, error: PartsRefused) -> bool:
        """The bucket has the parts, and does not want them so: send them again, a few times."""
        if item not in self._owed:
            return True
        failures = self._turns.note_failed(item, trio.current_time())
        if failures.begun_anew >= _BEGUN_ANEW_MAX:
            return False
        failures.begun_anew += 1
        if isinstance(item, Generation):
            self._preparer.restart(item)
        self._put_off(item, error)
        return True

    async def _replace_theirs(self, item: Generation) -> None:
        """Another client's version came between: ours is to replace that, at its next turn."""
        try:
            theirs = await self._offload.publish(self._publishing.shown, item.record.key)
        except _WORTH_WAITING as exc:
            self._put_off(item, exc)
        except FusecacheError as exc:
            if item in self._owed:
                await self._outcomes.resolve(item, exc)
        else:
            if item in self._owed:
                await self._outcomes.replace_theirs(item, theirs)

    async def _attempt(self, item: Item) -> None:
        if isinstance(item, Generation):
            await self._preparer.wait(item)
            if not self._turns.may_go(item, trio.current_time()):
                return  # dropped, or under another key and so in another place, while its bytes were sent
            self._outcomes.tellers.check(item)
            submit = self._journal.submit if self._light < _CROWD else self._journal.submit_patiently
            await submit(PutFile(item.go(FileState.PUBLISHING))).wait()
            version = await self._ask(item, self._publishing.publish_file, item.record, item.file.path)
            self._outcomes.stored(item, version)
            return
        if not self._turns.may_go(item, trio.current_time()):
            return
        if (
            item.record.kind is OperationKind.DELETE
            and (keeper := self._outcomes.tellers.keeper_of(item)) is not None
        ):
            await self._outcomes.keep(item, keeper)
            return
        item.in_flight = True
        await self._journal.settled()  # its row must be on the disk before its effect
        outcome = await self._ask(item, self._publishing.publish_operation, item.record)
        await self._outcomes.done(item, outcome)

    async def _ask(self, item: Item, call: Callable[..., T], *args: object) -> T:
        """Send a publishing request when the bucket lets us; have it heard if it says to slow down."""
        quiet_until = self._outage.quiet_until if self._outage.is_on else float("-inf")
        quiet_until = max(quiet_until, self._limit.silent_until)
        if trio.current_time() < quiet_until:  # a sleep that ends at once costs a tenth of a millisecond
            await trio.sleep_until(quiet_until)
        sends_bytes = isinstance(item, Generation) and not _is_light(item) and not item.record.upload_id
        slots, most = (self._sending, SENDING_AT_ONCE) if sends_bytes else (self._slots, LIGHT_AT_ONCE)
        slots.total_tokens = min(most, self._limit.limit)
        async with slots:
            self._turns.note_written(item, trio.current_time())
            self._asking += 1
            if isinstance(item, Generation):
                item.asked = Sent(trio.current_time())
                args = (*args, item.asked)
            try:
                send = self._offload.upload if sends_bytes else self._offload.publish
                answer = await send(call, *args)
            except RemoteError as exc:
                if exc.asks_to_slow_down:
                    self._limit.on_throttled(trio.current_time(), exc.retry_after_seconds)
                raise
            finally:
                self._asking -= 1
                if isinstance(item, Generation):
                    item.asked = None
        now = trio.current_time()
        self._turns.note_written(item, now)
        self._limit.on_success(now)
        self._on_taken()
        self._failing.pop(item, None)
        item.error = None
        self._note_answered(now)
        return answer

    def _note_answered(self, now: float) -> None:
        if self._outage.on_success(now):
            self._end_pauses(now)

    def _end_pauses(self, now: float) -> None:
        self._turns.end_pauses()
        self._turns.hurry(now, is_draining=self._draining > 0)
        self._again_at = now
        self.wake()

    def _prepare_again(self, now: float) -> None:
        """Have parts sent again that failed before their turn: nobody else does, before that."""
        if now < self._again_at or self._outage.is_on:
            return
        self._again_at = now + _AGAIN_SECONDS
        for item in self._failing:
            if isinstance(item, Generation) and not is_begun(item) and not self._turns.failures_of(item):
                self._unprepared[item] = None


def _is_light(item: Item) -> bool:
    """Whether an item has few bytes."""
    return not isinstance(item, Generation) or item.size <= LIGHT_BYTES
