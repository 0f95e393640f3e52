"""Requests for names and facts (LIST, HEAD), retried for a bounded time."""

import random
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import trio

from fusecache.engine.offload import Offload
from fusecache.model.errors import AccessDenied, Unavailable
from fusecache.policy.backoff import backoff_seconds
from fusecache.remote.store import Store

P = ParamSpec("P")
T = TypeVar("T")

# A reader of names waits so long for an unreachable bucket before it gets EIO.
UNREACHABLE_SECONDS = 60.0
# Permissions of a new key take up to a minute to arrive; a LOOKUP holds the directory's lock, so wait less.
DENIED_SECONDS = 10.0


class Requests:
    """Asks the bucket from the loop."""

    def __init__(self, store: Store, offload: Offload) -> None:
        self.store = store
        self._offload = offload
        # Whether the bucket did not answer when it was last asked.
        self.is_struggling = False
        self.on_struggle: Callable[[], None] = lambda: None

    async def ask(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the answer. Raises the last error after UNREACHABLE_SECONDS (DENIED_SECONDS for refused keys)."""
        began = trio.current_time()
        attempt = 0
        while True:
            try:
                answer = await self._offload.network(partial(call, *args, **kwargs))
                self.is_struggling = False
                return answer
            except (Unavailable, AccessDenied) as exc:
                attempt += 1
                if isinstance(exc, Unavailable):
                    self.is_struggling = True
                    self.on_struggle()
                pause = backoff_seconds(attempt, random.random())
                limit = UNREACHABLE_SECONDS if isinstance(exc, Unavailable) else DENIED_SECONDS
                if trio.current_time() + pause > began + limit:
                    raise
                await trio.sleep(pause)
