"""The command `uploads`: lists unfinished multipart uploads of all clients, and aborts old ones.

Invariant: no upload is aborted that a running mount of this node still needs.
"""

import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.index.journal import Journal
from fusecache.model.objects import UnfinishedUpload
from fusecache.model.records import OperationKind
from fusecache.remote.store import Store

# Uploads listed in an answer; the rest is only counted.
NAMED = 50


@dataclass(frozen=True, slots=True)
class UploadsInUse:
    """The uploads that a mount needs. keys: of renames in the queue, whose copies may be multipart uploads."""

    upload_ids: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()

    def has(self, upload: UnfinishedUpload) -> bool:
        """Return whether an upload is one of them."""
        return upload.upload_id in self.upload_ids or upload.key in self.keys


@dataclass(slots=True)
class UploadSurvey:
    """What was found, and what of it may be aborted: uploads at least `older_than_seconds` old that are not in use.

    uploads: the first NAMED, in key order. Counts include all.
    """

    older_than_seconds: float
    in_use: Collection[UploadsInUse]
    count: int = 0
    old_count: int = 0
    aborted_count: int = 0
    uploads: list[dict[str, Any]] = field(default_factory=list)
    _now: float = field(default_factory=time.time)

    def add(self, upload: UnfinishedUpload, *, aborts: bool) -> bool:
        """Record an upload; return whether to abort it now."""
        age_seconds = max(0.0, self._now - upload.begun)
        is_used = any(each.has(upload) for each in self.in_use)
        is_old = age_seconds >= self.older_than_seconds and not is_used
        self.count += 1
        self.old_count += is_old
        self.aborted_count += is_old and aborts
        if len(self.uploads) < NAMED:
            self.uploads.append(
                {
                    **asdict(upload),
                    "age_seconds": round(age_seconds, 1),
                    "in_use": is_used,
                    "aborted": is_old and aborts,
                }
            )
        return is_old and aborts

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values of bounded size."""
        return {
            "count": self.count,
            "old_count": self.old_count,
            "aborted_count": self.aborted_count,
            "uploads": list(self.uploads),
        }


def survey_bucket(store: Store, prefix: str, survey: UploadSurvey, *, aborts: bool) -> None:
    """Survey the uploads below a prefix without a mount. Blocking."""
    token: str | None = None
    while True:
        page = store.list_uploads(prefix, token=token)
        for upload in page.uploads:
            if survey.add(upload, aborts=aborts):
                store.abort_multipart(upload.key, upload.upload_id)
        token = page.next_token
        if token is None:
            return


@dataclass(eq=False, repr=False)
class UploadAdmin:
    """Surveys the uploads below the mount's paths."""

    _tree: Tree
    _client: MetadataClient
    _journal_rows: Journal

    async def survey(self, path: str, older_than_seconds: float, *, aborts: bool) -> UploadSurvey:
        """List the uploads whose keys begin with a path's; abort those not in use and old enough."""
        survey = UploadSurvey(older_than_seconds, [await self.in_use()])
        client, prefix = self._client, self._tree.key_of_path(path)
        token: str | None = None
        while True:
            page = await client.call(client.store.list_uploads, prefix, token=token)
            for upload in page.uploads:
                if survey.add(upload, aborts=aborts):
                    await client.call(client.store.abort_multipart, upload.key, upload.upload_id)
            token = page.next_token
            if token is None:
                return survey

    async def in_use(self) -> UploadsInUse:
        """Return the uploads that this mount needs, or aborts by itself."""
        return await self._client.rows(self._read_journal)

    def _read_journal(self) -> UploadsInUse:
        rows = self._journal_rows
        upload_ids = {row.upload_id for row in rows.files() if row.upload_id}
        upload_ids |= {upload_id for _, upload_id in rows.aborts()}
        targets = {row.target for row in rows.operations() if row.kind is OperationKind.RENAME}
        return UploadsInUse(frozenset(upload_ids), frozenset(targets))
