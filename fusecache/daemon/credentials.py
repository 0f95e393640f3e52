"""Renews credentials while the bucket refuses them: the user may have put new ones into their source.

Not here: sources that renew by themselves before their keys expire. They do so at each request (`remote.s3`).
"""

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from fusecache.model.errors import FusecacheError
from fusecache.policy.backoff import backoff_seconds
from fusecache.remote.read_write_split import ReadWriteSplit

log = logging.getLogger(__name__)

# Interval of the check whether the bucket refuses the credentials.
CHECK_SECONDS = 5.0
# Shortest time between two reloads of refused credentials; longest pause after one that failed, as of a half-written
# file.
RELOAD_SECONDS = 30.0
# A store may refuse valid credentials for a short time. The daemon logs a warning only after this long.
DENIED_SECONDS = 10.0
# The permissions of a new key take up to a minute to take effect. Keys that are refused for longer are wrong.
AUTH_FAILED_SECONDS = 90.0


@dataclass(eq=False, repr=False)
class CredentialRenewal:
    """Reloads refused credentials from their source.

    try_again: sends a request with the new credentials, and retries everything that waits.
    """

    _remote: ReadWriteSplit
    has_pending_writes: Callable[[], bool] = field(kw_only=True)
    try_again: Callable[[], Awaitable[None]] = field(kw_only=True)
    _next_reload: float = field(init=False, default=float("-inf"))
    _failures: int = field(init=False, default=0)
    _error: str = field(init=False, default="")
    _logged: str = field(init=False, default="")

    def facts(self) -> dict[str, Any]:
        """Return the status fields about the credentials."""
        denied_seconds = self._denied_seconds()
        state = "auth-failed" if denied_seconds >= AUTH_FAILED_SECONDS else "ok"
        return {"state": state, "denied_seconds": round(denied_seconds, 1), "keys_error": self._error}

    async def run(self) -> None:
        """Reload the credentials, while they are refused, until cancelled."""
        while True:
            await trio.sleep(CHECK_SECONDS)
            if not self._denied_seconds():
                self._on_accepted()
            elif trio.current_time() >= self._next_reload:
                self._next_reload = trio.current_time() + RELOAD_SECONDS
                await self._reload()
                # Send a request even if no program reads: otherwise the state of the read credentials stays unknown.
                await self.try_again()
                denied_seconds = self._denied_seconds()
                if denied_seconds >= DENIED_SECONDS and not self._error:
                    log.warning(
                        "credentials refused and reloaded denied_seconds=%.0f; "
                        "see `fusecache status` for how to renew them",
                        denied_seconds,
                    )

    async def _reload(self) -> None:
        try:
            await trio.to_thread.run_sync(self._remote.reload)
        except FusecacheError as exc:
            self._failures += 1
            pause = min(RELOAD_SECONDS, backoff_seconds(self._failures, random.random()))
            self._next_reload = trio.current_time() + pause
            self._error = str(exc)
            if self._error != self._logged:
                self._logged = self._error
                log.warning(
                    "refused credentials could not be reloaded, the old ones stay in use, will retry error=%s",
                    exc,
                )
        else:
            self._failures, self._error = 0, ""

    def _on_accepted(self) -> None:
        self._failures, self._error, self._logged = 0, "", ""

    def _denied_seconds(self) -> float:
        # With an empty queue no write request shows whether writes are allowed again: ignore the old refusal.
        writes = self._remote.writes_denied.seconds() if self.has_pending_writes() else 0.0
        return max(self._remote.reads_denied.seconds(), writes)
