"""Copies inside a bucket: in one request, or in equal parts if the object is too large for one.

Invariant: if a copy returns an ETag, the copy holds the bytes of the requested version.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusecache.model.errors import FusecacheError, ObjectChanged, ObjectMissing, RemoteError
from fusecache.model.objects import ObjectId
from fusecache.remote.endpoints import Transport
from fusecache.remote.protocol.headers import (
    HEADERS_PARAMETER,
    bare_etag,
    copy_condition_headers,
    quoted_etag,
)
from fusecache.remote.protocol.user_metadata import STANDARD_HEADERS, metadata_arguments
from fusecache.remote.s3.errors import RequestNames
from fusecache.remote.store import Condition, Store

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef


@dataclass(frozen=True, slots=True)
class CopyRequests:
    """Copies objects inside one bucket. head: returns botocore's HeadObject response for a key.

    storage_class: of new objects; a copy has that of its source.
    """

    store: Store
    client: "S3Client"
    head: "Callable[[str], HeadObjectOutputTypeDef]"
    request_names: RequestNames
    bucket: str
    transport: Transport
    is_r2: bool
    storage_class: str = ""

    def copy(
        self,
        source: ObjectId,
        key: str,
        condition: Condition | None,
        metadata: Mapping[str, str] | None,
        size: int | None,
    ) -> str:
        """Copy, as `Store.copy` specifies."""
        kept: dict[str, Any] = {}
        # A copy does not keep the storage class by itself. One HEAD a copy: other stores need it for the target.
        asks = self.is_r2 or bool(self.storage_class)
        if asks or metadata is not None or size is None or size > self.transport.single_copy_bytes:
            facts = self.head(source.key)
            self._require_version(facts, source)
            if metadata is not None:
                kept = metadata_arguments(metadata)
            else:
                names = (*STANDARD_HEADERS.values(), "Metadata")
                kept = {name: facts[name] for name in names if facts.get(name)}  # type: ignore[literal-required]
            # A store that has classes names that of every object but those of the standard one.
            storage_class = facts.get("StorageClass") or ("STANDARD" if self.storage_class else "")
            if storage_class:
                kept["StorageClass"] = storage_class
            if facts["ContentLength"] > self.transport.single_copy_bytes:
                return self._copy_in_parts(source, key, facts["ContentLength"], condition, kept)
        arguments: dict[str, Any] = {
            "Bucket": self.bucket,
            "Key": key,
            "CopySource": {"Bucket": self.bucket, "Key": source.key},
            "CopySourceIfMatch": quoted_etag(source.etag),
            "MetadataDirective": "COPY",
        }
        if metadata is not None:
            arguments |= {"MetadataDirective": "REPLACE", **kept}
        elif "StorageClass" in kept:
            arguments["StorageClass"] = kept["StorageClass"]
        if condition is not None and self.is_r2:
            arguments[HEADERS_PARAMETER] = copy_condition_headers(condition)
        elif condition is not None:
            self._require_condition(key, condition)
        with self.request_names.named(f"COPY from {source.key!r}", key, "copies"):
            answer = self.client.copy_object(**arguments)
        return bare_etag(answer["CopyObjectResult"]["ETag"])

    # ---- private

    def _require_version(self, facts: "HeadObjectOutputTypeDef", source: ObjectId) -> None:
        found = bare_etag(facts["ETag"])
        if found != source.etag:
            raise ObjectChanged(
                f"s3://{self.bucket}/{source.key} is now version {found}, not {source.etag}: not copied"
            )

    def _require_condition(self, key: str, condition: Condition) -> None:
        """Check the destination with a HEAD, for endpoints whose copies take no precondition. Not atomic."""
        try:
            found: str | None = bare_etag(self.head(key)["ETag"])
        except ObjectMissing:
            found = None
        if found != condition.etag:
            raise ObjectChanged(
                f"s3://{self.bucket}/{key}: expected {condition.etag or 'none'}, found {found or 'none'}"
            )

    def _copy_in_parts(
        self, source: ObjectId, key: str, size: int, condition: Condition | None, kept: Mapping[str, Any]
    ) -> str:
        with self.request_names.named("CREATE UPLOAD", key, "creates"):
            upload_id = self.client.create_multipart_upload(Bucket=self.bucket, Key=key, **kept)["UploadId"]
        try:
            etags = []
            step = self.transport.copy_part_bytes
            for number, start in enumerate(range(0, size, step), 1):
                with self.request_names.named(f"COPY PART {number} from {source.key!r}", key, "copies"):
                    part = self.client.upload_part_copy(
                        Bucket=self.bucket,
                        Key=key,
                        UploadId=upload_id,
                        PartNumber=number,
                        CopySource={"Bucket": self.bucket, "Key": source.key},
                        CopySourceRange=f"bytes={start}-{min(start + step, size) - 1}",
                    )
                etags.append(bare_etag(part["CopyPartResult"]["ETag"]))
            # R2's part copies take no precondition on the source. The version is checked before the first part and
            # after the last, so every part is from that version.
            self._require_version(self.head(source.key), source)
            if condition is not None:
                self._require_condition(key, condition)
            return self.store.complete_multipart(key, upload_id, etags, condition=condition)
        except FusecacheError:
            # Abandoned parts cost storage for a week. If the abort fails, raise the copy's error regardless.
            with suppress(RemoteError):
                self.store.abort_multipart(key, upload_id)
            raise
