"""A mount that started without its bucket: waits for the first answer, and then finishes what a start does."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from fusecache.model.errors import FusecacheError, RemoteError
from fusecache.model.format_text import count_text

log = logging.getLogger(__name__)

# Interval of the requests that find out whether the bucket answers.
CHECK_SECONDS = 5.0


@dataclass(eq=False, repr=False)
class FirstContact:
    """Waits for the bucket's first answer. failure: why the mount starts without it; None: it answered.

    reads: the bucket answers reads, and refuses only writes.

    try_again: sends a request. finish: does what only a bucket that answers allows. remedy: how to renew refused keys;
    "" if the bucket only does not answer.
    """

    _failure: RemoteError | None
    reads: bool = field(kw_only=True)
    is_answered: Callable[[], bool] = field(kw_only=True)
    try_again: Callable[[], Awaitable[None]] = field(kw_only=True)
    finish: Callable[[], Awaitable[None]] = field(kw_only=True)
    remedy: str = field(kw_only=True)

    def facts(self) -> dict[str, Any]:
        """Return the status fields about the start."""
        return {"start_failure": str(self._failure or "")}

    def text(self, pending_files: int) -> str:
        """Return what the user who mounts must know; "" if the bucket answered."""
        if self._failure is None:
            return ""
        waiting = f"{count_text(pending_files, 'change')} waiting for upload"
        if self.reads:
            return (
                f"DEGRADED: the keys may not write: {self._failure}; {waiting}: give the keys that permission"
            )
        return (
            f"DEGRADED: started without the bucket: {self._failure}; readable are cached files by name, and "
            f"{waiting}; all else fails"
        ) + (
            f": {self.remedy}" if self.remedy else " until the bucket answers; then the mount heals by itself"
        )

    async def run(self) -> None:
        """Return once the bucket has answered and the start is finished."""
        while self._failure is not None:
            await trio.sleep(CHECK_SECONDS)
            await self.try_again()
            if not self.is_answered():
                continue
            try:
                await self.finish()
            except RemoteError:
                continue  # it does not answer any more
            except FusecacheError as exc:
                # The mount is in use: nothing is gained by ending it.
                log.error("the bucket answers, but a check of the start failed: %s", exc)
            else:
                log.info("the bucket answers: the mount is no longer degraded")
            self._failure = None
