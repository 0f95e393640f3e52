"""Aborts multipart uploads that are no longer needed; what fails now is left to the next mount.

Invariant: from the moment a file's row loses its upload until the abort is answered, the journal has a row for the
abort.
"""

import logging
import random

import trio

from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.index.journal import DropAbort, PutAbort
from fusecache.model.errors import TRANSIENT, ReadOnly, RemoteError, Unavailable
from fusecache.policy.backoff import backoff_seconds
from fusecache.remote.store import Store

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
