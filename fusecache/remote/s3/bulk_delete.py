"""DeleteObjects: deletes listed objects in batches, where the store can compare each only in the listed version.

AWS and Ceph since version 20 compare the ETag of each object (docs.aws.amazon.com: "How to perform conditional
deletes"). Cloudflare R2 has no condition on deletes: callers list right before.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fusecache.model.errors import ObjectMissing, RemoteError, Unavailable
from fusecache.model.objects import ObjectInfo
from fusecache.remote.protocol.headers import quoted_etag
from fusecache.remote.protocol.responses import ERROR_BY_CODE
from fusecache.remote.s3.errors import RequestNames
from fusecache.remote.store import Store

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Answers of stores that know no DeleteObjects, or not in this form.
_NO_BATCHES = frozenset(
    {"NotImplemented", "MethodNotAllowed", "MalformedXML", "InvalidRequest", "501", "405"}
)
# Characters that XML 1.0 cannot hold: such keys are deleted one by one.
_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


@dataclass(eq=False, repr=False)
class BulkDelete:
    """Deletes objects of one bucket.

    compares_etags: the store accepts an ETag for each object; it may ignore it.
    """

    _single: Store
    _client: "S3Client"
    _request_names: RequestNames
    _bucket: str
    compares_etags: bool = field(kw_only=True)
    _has_batches: bool = field(init=False, default=True)

    def delete(self, objects: Sequence[ObjectInfo]) -> dict[str, RemoteError]:
        """Delete up to 1 000 objects, S3's limit on one request; return the errors by key. A missing object is success.

        ObjectChanged: the object is another version than `objects` has. Raises RemoteError if a whole batch fails.
        """
        failures: dict[str, RemoteError] = {}
        alone = [each for each in objects if not self._has_batches or _NOT_IN_XML.search(each.key)]
        batch = [each for each in objects if each not in alone] if alone else list(objects)
        if batch:
            try:
                failures = self._delete_batch(batch)
            except RemoteError as exc:
                if exc.code not in _NO_BATCHES:
                    raise
                self._has_batches = False
                alone = list(objects)
        for each in alone:
            try:
                self._single.delete(each.key)
            except RemoteError as exc:
                failures[each.key] = exc
        return failures

    def _delete_batch(self, batch: Sequence[ObjectInfo]) -> dict[str, RemoteError]:
        rows: list[Any] = [{"Key": each.key} for each in batch]
        if self.compares_etags:
            rows = [{"Key": each.key, "ETag": quoted_etag(each.etag)} for each in batch]
        name = f"{batch[0].key} and {len(batch) - 1} more"
        with self._request_names.named("DELETE", name, "deletes"):
            answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": rows, "Quiet": True})
        failures: dict[str, RemoteError] = {}
        for row in answer.get("Errors", ()):
            code = row.get("Code", "")
            error = ERROR_BY_CODE.get(code, Unavailable)(
                f"DELETE s3://{self._bucket}/{row['Key']}: {code}: {row.get('Message', '')}"
            )
            if not isinstance(error, ObjectMissing):
                failures[row["Key"]] = error
        return failures
