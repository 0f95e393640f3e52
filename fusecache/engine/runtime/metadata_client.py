"""The client for LIST and HEAD: bounded retries, deadlines, detection of an unresponsive bucket and refused keys.

"Keys" are the access keys, not object names. It neither reads nor changes content, and caches nothing.
"""

import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

import trio

from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.procfs import ends_with_caller
from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    FusecacheError,
    ObjectChanged,
    ObjectMissing,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import ObjectInfo
from fusecache.policy.backoff import RequestLimit, backoff_seconds
from fusecache.policy.bucket_health import BucketHealth
from fusecache.remote.store import Store

P = ParamSpec("P")
T = TypeVar("T")

# Timeout of one request, as its connection may be dead: at most a share of the caller's patience, for a retry.
ANSWER_SECONDS = 40.0
ANSWER_SHARE = 2 / 3
# A bucket without an answer for this long counts as unresponsive: serve stale.
SILENT_SECONDS = 10.0
# Deadline while the keys are refused, or the bucket is missing. A new key's permissions take up to a minute to
# propagate, but a LOOKUP holds the directory's lock. Once the keys have been refused for longer, calls fail at once.
DENIED_SECONDS = 10.0
# Refused keys are tested at most once in this time, however many requests wait.
CREDENTIALS_RETRY_SECONDS = 1.0
# A single wrong 404 must not hide a file: a 404 (or 412) counts only after this many more.
MISSING_RETRIES = 2


@dataclass(eq=False, slots=True)
class SharedRequest:
    """A request in flight whose answer several callers may wait for. failure: why there is no answer."""

    done: bool = False
    failure: FusecacheError | None = None
    _event: trio.Event = field(default_factory=trio.Event)

    def announce(self) -> None:
        """Wake all waiting callers: there is more to see."""
        self._event.set()
        self._event = trio.Event()

    def end(self) -> None:
        """Wake all waiting callers: nothing more will come."""
        self.done = True
        self.announce()

    def fail(self, error: FusecacheError) -> None:
        """End without an answer."""
        self.failure = error
        self.end()

    async def wait(self) -> None:
        """Return at the next announcement; check `done` first."""
        await self._event.wait()


def _ignore() -> None:
    pass


class MetadataClient:
    """Sends LIST and HEAD requests from the loop.

    A refused request means that the keys do not allow this one, or that they are refused for everything. A LIST of the
    mount's own prefix decides, as it was allowed at mount time. If that is refused, too, the bucket counts as
    unresponsive: serve stale.
    """

    def __init__(
        self,
        store: Store,
        offload: Offload,
        limit: RequestLimit,
        *,
        on_unresponsive: Callable[[], None] = _ignore,
        on_granted: Callable[[], None] = _ignore,
        prefix: str = "",
        writes_by_other_keys: bool = False,
        health: BucketHealth | None = None,
    ) -> None:
        """limit: shared with the reads; as many metadata requests may be in flight beside them.

        prefix: the mount's, of every object key. writes_by_other_keys: writes use other credentials than reads.
        health: what the store records of its requests, too; None: it records nothing.
        on_unresponsive: a request got no answer in time, or the keys are refused for everything. on_granted: refused
        keys are accepted again, so that what backs off may retry; not called after an outage.
        """
        self._writes_by_other_keys = writes_by_other_keys
        self.store = store
        self._prefix = prefix
        self._offload = offload
        self._limit = limit
        self.patience_seconds = limit.patience_seconds
        self._slots = trio.CapacityLimiter(limit.limit)
        # Scopes of callers that wait: each answer to any request extends their deadlines.
        self._deadline_scopes: set[trio.CancelScope] = set()
        self.health = health or BucketHealth(trio.current_time)
        self._credentials_checked_at = float("-inf")
        self._credentials_lock = trio.Lock()
        self._tell_unresponsive, self._tell_granted = on_unresponsive, on_granted

    @property
    def is_unresponsive(self) -> bool:
        """Whether the last request got no answer, or one is overdue now."""
        return self.health.is_silent

    @property
    def refused_seconds(self) -> float:
        """How long the keys have been refused for every request; 0 if they are not."""
        return 0.0 if self.health.refusal is None else self.health.refused_seconds(has_writes=False)

    @property
    def refusal_of_writes(self) -> RemoteError | None:
        """The refusal of the keys by which writes are sent, if it is known from reads."""
        return None if self._writes_by_other_keys else self.health.refusal

    async def wait_for(self, request: SharedRequest) -> None:
        """Return at a request's next announcement, or after SILENT_SECONDS without one.

        Raises Interrupted if the caller's process is being killed.
        """
        with trio.move_on_after(SILENT_SECONDS) as scope:
            async with ends_with_caller():
                await request.wait()
        if scope.cancelled_caught:
            self._on_unresponsive(SILENT_SECONDS)

    @contextmanager
    def deadline(self, seconds: float | None = None) -> Iterator[None]:
        """Give the body a deadline [`patience_seconds`]. After it, raises Unavailable, or the refusal of the keys.

        A deadline of `patience_seconds` or more restarts with each answer to any caller: it is over only when the
        bucket answered no request for that long.
        """
        seconds = self.patience_seconds if seconds is None else seconds
        with trio.move_on_after(seconds) as scope:
            if seconds >= self.patience_seconds:
                self._deadline_scopes.add(scope)
            try:
                yield
            finally:
                self._deadline_scopes.discard(scope)
        if scope.cancelled_caught:
            self._on_unresponsive(seconds)
            if self.health.refusal is not None:
                raise self._refused(self.health.refusal)
            raise Unavailable(f"the bucket has not answered for {self.health.silent_seconds:.0f} s")

    def _on_unresponsive(self, seconds: float = 0.0) -> None:
        self.health.on_silence(seconds)
        self._tell_unresponsive()

    def _on_success(self) -> None:
        was_refused = self.health.refusal is not None
        self.health.on_answer()
        if was_refused:
            self._tell_granted()

    def start_unanswered(self, error: RemoteError) -> None:
        """The mount starts without the bucket: serve what is known, without waiting for a first failure."""
        self._on_unresponsive()
        if isinstance(error, AccessDenied | CredentialsMissing):
            self.health.on_refused(error)

    def on_write_accepted(self) -> None:
        """The bucket accepted a write. If writes use the same keys, these are no longer refused.

        It says nothing about unanswered LIST and HEAD requests: without a refusal, nothing changes.
        """
        if self.health.refusal is not None and not self._writes_by_other_keys:
            self._on_success()

    async def call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the answer. Raises the last error after `patience_seconds` (DENIED_SECONDS for refused keys).

        call: must not fill the caller's memory nor change anything: its thread may outlive a cancelled caller.
        """
        with self.deadline():
            return await self._retry_call(partial(call, *args, **kwargs))

    async def _retry_call(self, call: Callable[[], T]) -> T:
        """Retry until there is an answer, or a permanent error."""
        if (
            self.health.refusal is not None
            and self._are_credentials_checked()
            and self.refused_seconds > DENIED_SECONDS
        ):
            raise self._refused(self.health.refusal)
        began = trio.current_time()
        attempt = missing = 0
        while True:
            try:
                answer = await self._call_once(call)
                self._on_success()
                return answer
            except (ObjectChanged, ObjectMissing):
                missing += 1
                if missing > MISSING_RETRIES:
                    raise
            except (Unavailable, AccessDenied, CredentialsMissing, BucketMissing) as exc:
                attempt += 1
                deadline = began + self.patience_seconds
                if isinstance(exc, Unavailable):
                    self._on_unresponsive()
                elif isinstance(exc, BucketMissing):
                    # It says nothing about any name: serve stale.
                    self._on_unresponsive()
                    deadline = min(began, trio.current_time() - self.health.silent_seconds) + DENIED_SECONDS
                else:
                    await self._check_credentials()
                    deadline = min(began, trio.current_time() - self.refused_seconds) + DENIED_SECONDS
                pause = backoff_seconds(attempt, random.random())
                if trio.current_time() + pause > deadline:
                    raise
                await trio.sleep(pause)

    def _are_credentials_checked(self) -> bool:
        """Whether the keys were tested within CREDENTIALS_RETRY_SECONDS."""
        return trio.current_time() < self._credentials_checked_at + CREDENTIALS_RETRY_SECONDS

    async def _check_credentials(self) -> None:
        """Test the keys unless that was done just now; concurrent callers share the answer."""
        async with self._credentials_lock:
            if not self._are_credentials_checked():
                await self.try_credentials()

    async def try_credentials(self) -> None:
        """LIST the mount's prefix, which the keys must allow, and record whether they are refused."""
        try:
            await self._call_once(partial(self.store.list_page, self._prefix, limit=1))
        except (AccessDenied, CredentialsMissing) as exc:
            self.health.on_refused(exc)
            self._tell_unresponsive()
        except FusecacheError:
            self._on_unresponsive()
        else:
            self._on_success()
        self._credentials_checked_at = trio.current_time()

    def _refused(self, refusal: RemoteError) -> RemoteError:
        """Return a new error of the same type that says for how long the keys have been refused."""
        message = f"the bucket has refused the keys for {self.refused_seconds:.0f} s, last error: {refusal}"
        return type(refusal)(message)

    async def _call_once(self, call: Callable[[], T]) -> T:
        """Send one request once the shared limit allows; report success or throttling to it."""
        silence_seconds = self._limit.silent_until - trio.current_time()
        if silence_seconds > 0:
            await trio.sleep(silence_seconds)
        self._slots.total_tokens = self._limit.limit
        request = object()  # holds its slot as long as its thread runs
        await self._slots.acquire_on_behalf_of(request)
        try:
            with self.deadline(min(ANSWER_SECONDS, ANSWER_SHARE * self.patience_seconds)):
                answer = await self._offload.metadata(
                    call, partial(self._slots.release_on_behalf_of, request)
                )
        except RemoteError as exc:
            if exc.asks_to_slow_down:
                self._limit.on_throttled(trio.current_time(), exc.retry_after_seconds)
            raise
        self._on_response()
        return answer

    def _on_response(self) -> None:
        now = trio.current_time()
        self._limit.on_success(now)
        for scope in self._deadline_scopes:
            scope.deadline = max(scope.deadline, now + self.patience_seconds)

    async def list_all(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        """Yield every object whose key starts with `prefix`, in the bucket's order. One page is in memory at a time.

        Raises what `call` raises. Iterate under `contextlib.aclosing`.
        """
        token: str | None = None
        while True:
            page = await self.call(self.store.list_page, prefix, token=token)
            for info in page.objects:
                yield info
            token = page.next_token
            if token is None:
                return

    async def rows(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that reads or writes many listing rows, in the LMDB threads."""
        return await self._offload.rows(partial(call, *args, **kwargs))
