"""Uploads that nobody wants any more: the bucket is told to forget them, by the next mount if need be.

Invariant: from a row that loses its upload until the abort is answered, the journal has a row for the abort.
"""

import logging
import random
from contextlib import suppress

import trio

from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.index.journal import DropAbort, PutAbort
from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    ReadOnly,
    RemoteError,
    Unavailable,
)
from fusecache.policy.backoff import backoff_seconds
from fusecache.remote.store import Store

log = logging.getLogger(__name__)

# A mount that cannot abort now leaves it to the next.
_NOT_NOW = (AccessDenied, BucketMissing, CredentialsMissing, ReadOnly)


class MultipartAborts:
    """Aborts uploads, and journals which are to be. Runs on the loop."""

    def __init__(self, store: Store, journal: JournalWriter, offload: Offload) -> None:
        self._store = store
        self._journal = journal
        self._offload = offload

    def record(self, key: str, upload_id: str) -> None:
        """An upload is not wanted any more: that is on the disk before whatever is journaled next."""
        self._submit(PutAbort(key, upload_id))

    async def abort(self, key: str, upload_id: str) -> None:
        """Have the bucket forget an upload of which no attempt is under way."""
        attempt = 0
        while True:
            try:
                await self._offload.upload(self._store.abort_multipart, key, upload_id)
                break
            except Unavailable:
                attempt += 1
                await trio.sleep(backoff_seconds(attempt, random.random()))
            except _NOT_NOW as exc:
                log.warning("abort left to the next mount key=%s error=%s", key, exc)
                return
            except RemoteError as exc:
                # The bucket drops unfinished uploads by itself after a week.
                log.warning("abort failed key=%s error=%s", key, exc)
                break
        self._submit(DropAbort(key, upload_id))

    def _submit(self, change: PutAbort | DropAbort) -> None:
        # Of a journal that failed, the rows on the disk stay as they were.
        with suppress(ReadOnly):
            self._journal.submit_lazily(change)
