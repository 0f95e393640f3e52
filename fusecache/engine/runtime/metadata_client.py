"""Requests for names and facts (LIST, HEAD), retried for a bounded time."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

import trio

from fusecache.engine.runtime.offload import Offload
from fusecache.model.errors import (
    AccessDenied,
    CredentialsMissing,
    FusecacheError,
    ObjectChanged,
    ObjectMissing,
    RemoteError,
    Unavailable,
)
from fusecache.policy.backoff import RequestLimit, backoff_seconds
from fusecache.remote.store import Store

P = ParamSpec("P")
T = TypeVar("T")

# A reader of names waits so long for an unreachable bucket before it gets EIO.
UNREACHABLE_SECONDS = 60.0
# One request waits so long for its answer, as its connection may be dead: another one has the rest of the time.
ANSWER_SECONDS = 40.0
# A bucket that has not answered for so long does not answer: what is known must do.
SILENT_SECONDS = 10.0
# Permissions of a new key take up to a minute to arrive; a LOOKUP holds the directory's lock, so wait less. Keys that
# have been refused for so long are refused at once.
DENIED_SECONDS = 10.0
# Refused keys are tried so often at most, whatever is asked for.
KEYS_AGAIN_SECONDS = 1.0
# One wrong 404 must not hide a file: what was listed is gone when so many more answers say so too.
DENIALS_CHECKED = 2


@dataclass(eq=False, slots=True)
class SharedRequest:
    """A question to the bucket whose answer several may wait for. failure: why there is none."""

    done: bool = False
    failure: FusecacheError | None = None
    _event: trio.Event = field(default_factory=trio.Event)

    def announce(self) -> None:
        """Wake those who wait: there is more to see."""
        self._event.set()
        self._event = trio.Event()

    def end(self) -> None:
        """Wake those who wait: there is nothing more to come."""
        self.done = True
        self.announce()

    async def wait(self) -> None:
        """Return at the next announcement; ask for `done` before."""
        await self._event.wait()


class MetadataClient:
    """Asks the bucket from the loop.

    A request that is refused may be one that the keys do not allow, or the keys are refused for all. What tells is a
    LIST of the mount's own prefix, which was granted when it was mounted: where that is refused too, the bucket counts
    as one that does not answer, and what is known does.
    """

    def __init__(
        self,
        store: Store,
        offload: Offload,
        limit: RequestLimit,
        *,
        prefix: str = "",
        writes_by_other_keys: bool = False,
    ) -> None:
        """limit: shared with the reads; as many requests for names may be in flight beside them.

        prefix: the mount's, of every key. writes_by_other_keys: than those that read.
        """
        self._writes_by_other_keys = writes_by_other_keys
        self.store = store
        self._prefix = prefix
        self._offload = offload
        self._limit = limit
        self._slots = trio.CapacityLimiter(limit.limit)
        # Who waits for the bucket goes on doing so while it answers others.
        self._deadline_seconds: set[trio.CancelScope] = set()
        self._unresponsive_since: float | None = None
        self._refused_since: float | None = None
        self._refusal: RemoteError | None = None
        self._keys_tried = float("-inf")
        self._trying_keys = trio.Lock()
        self.on_unresponsive: Callable[[], None] = lambda: None
        # Told when keys that were refused are granted something: what else waits for that need wait no longer. Not so
        # after an outage: a bucket that comes back has enough to do.
        self.on_granted: Callable[[], None] = lambda: None

    @property
    def is_unresponsive(self) -> bool:
        """Whether the bucket did not answer when it was last asked, or does not answer now."""
        return self._unresponsive_since is not None

    @property
    def unresponsive_seconds(self) -> float:
        """How long that has been so; 0 if it is not."""
        return 0.0 if self._unresponsive_since is None else trio.current_time() - self._unresponsive_since

    @property
    def refused_seconds(self) -> float:
        """How long the keys have been refused, whatever was asked; 0 if they are not."""
        return 0.0 if self._refused_since is None else trio.current_time() - self._refused_since

    async def wait_for(self, asked: SharedRequest) -> None:
        """Return when there is more to see of a question, or when the bucket has been silent for too long."""
        with trio.move_on_after(SILENT_SECONDS) as patience:
            await asked.wait()
        if patience.cancelled_caught:
            self._on_unresponsive(SILENT_SECONDS)

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Let the body wait so long for the bucket. Raises Unavailable, or how it refuses the keys, if that is over.

        A full minute is one in which the bucket answers nobody: it begins anew with each answer.
        """
        with trio.move_on_after(seconds) as scope:
            if seconds >= UNREACHABLE_SECONDS:
                self._deadline_seconds.add(scope)
            try:
                yield
            finally:
                self._deadline_seconds.discard(scope)
        if scope.cancelled_caught:
            self._on_unresponsive(seconds)
            if self._refusal is not None:
                raise self._refused(self._refusal)
            raise Unavailable(f"the bucket has not answered for {self.unresponsive_seconds:.0f} s")

    def _on_unresponsive(self, seconds: float = 0.0) -> None:
        if self._unresponsive_since is None:
            self._unresponsive_since = trio.current_time() - seconds
        self.on_unresponsive()

    def _on_success(self) -> None:
        was_refused = self._refusal is not None
        self._unresponsive_since = self._refused_since = self._refusal = None
        if was_refused:
            self.on_granted()

    def on_write_accepted(self) -> None:
        """The bucket took a write: by the keys that read, if those are the same.

        That it is silent when it is asked for names may go on all the same.
        """
        if self._refusal is not None and not self._writes_by_other_keys:
            self._on_success()

    async def call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the answer. Raises the last error after UNREACHABLE_SECONDS (DENIED_SECONDS for refused keys).

        call: fills no memory of ours and changes nothing; it may still run in its thread when nobody waits for it.
        """
        with self.deadline(UNREACHABLE_SECONDS):
            return await self._retry_call(partial(call, *args, **kwargs))

    async def _retry_call(self, call: Callable[[], T]) -> T:
        """Ask until there is an answer, or an error that does not pass."""
        if (
            self._refusal is not None
            and self._are_credentials_checked()
            and self.refused_seconds > DENIED_SECONDS
        ):
            raise self._refused(self._refusal)
        began = trio.current_time()
        attempt = denials = 0
        while True:
            try:
                answer = await self._call_once(call)
                self._on_success()
                return answer
            except (ObjectChanged, ObjectMissing):
                denials += 1
                if denials > DENIALS_CHECKED:
                    raise
            except (Unavailable, AccessDenied, CredentialsMissing) as exc:
                attempt += 1
                deadline = began + UNREACHABLE_SECONDS
                if isinstance(exc, Unavailable):
                    self._on_unresponsive()
                else:
                    await self._check_credentials()
                    deadline = min(began, trio.current_time() - self.refused_seconds) + DENIED_SECONDS
                pause = backoff_seconds(attempt, random.random())
                if trio.current_time() + pause > deadline:
                    raise
                await trio.sleep(pause)

    def _are_credentials_checked(self) -> bool:
        """Whether the keys were tried just now."""
        return trio.current_time() < self._keys_tried + KEYS_AGAIN_SECONDS

    async def _check_credentials(self) -> None:
        """Try the keys, unless that was done just now; who wants to know meanwhile waits for the same answer."""
        async with self._trying_keys:
            if not self._are_credentials_checked():
                await self.try_credentials()

    async def try_credentials(self) -> None:
        """Ask for what the keys must allow, and note whether they are refused."""
        try:
            await self._call_once(partial(self.store.list_page, self._prefix, limit=1))
        except (AccessDenied, CredentialsMissing) as exc:
            self._refusal = exc
            if self._refused_since is None:
                self._refused_since = trio.current_time()
            self._on_unresponsive()
        except FusecacheError:
            self._on_unresponsive()
        else:
            self._on_success()
        self._keys_tried = trio.current_time()

    def _refused(self, refusal: RemoteError) -> RemoteError:
        """Return an error of our own that says how the keys were refused last."""
        words = f"the bucket has refused the keys for {self.refused_seconds:.0f} s, at last: {refusal}"
        return type(refusal)(words)

    async def _call_once(self, call: Callable[[], T]) -> T:
        """Ask when the bucket lets us; have it heard if it says to slow down."""
        silence_seconds = self._limit.silent_until - trio.current_time()
        if silence_seconds > 0:
            await trio.sleep(silence_seconds)
        self._slots.total_tokens = self._limit.limit
        request = object()  # which holds its slot as long as its thread runs
        await self._slots.acquire_on_behalf_of(request)
        try:
            with self.deadline(ANSWER_SECONDS):
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
        for scope in self._deadline_seconds:
            scope.deadline = max(scope.deadline, now + UNREACHABLE_SECONDS)

    async def rows(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what reads or writes many rows of listings."""
        return await self._offload.rows(partial(call, *args, **kwargs))
