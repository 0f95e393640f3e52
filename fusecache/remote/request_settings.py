"""Headers that every request to a bucket carries by option: encryption, storage class, who pays. No I/O."""

import base64
import hashlib
from dataclasses import dataclass, field

_SSE = "x-amz-server-side-encryption"
_PAYER = "x-amz-request-payer"
_STORAGE_CLASS = "x-amz-storage-class"
_KMS_KEY = f"{_SSE}-aws-kms-key-id"
_CUSTOMER = ("customer-algorithm", "customer-key", "customer-key-md5")
_COPY_SOURCE = "x-amz-copy-source-server-side-encryption"

# Requests that make an object.
_CREATES = frozenset({"PutObject", "CreateMultipartUpload", "CopyObject"})
# Requests that read or write bytes under a customer's key.
_WITH_CUSTOMER_KEY = _CREATES | {"GetObject", "UploadPart", "UploadPartCopy"}
_COPIES = frozenset({"CopyObject", "UploadPartCopy"})

CUSTOMER_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Settings of all requests to a bucket.

    sse: server-side encryption, AES256 or aws:kms; "" leaves it to the bucket. customer_key: 32 bytes that encrypt each
    object (SSE-C); the bucket does not keep them. is_unsigned: requests without credentials.
    """

    sse: str = ""
    kms_key_id: str = ""
    customer_key: bytes = field(default=b"", repr=False)
    storage_class: str = ""
    requester_pays: bool = False
    is_unsigned: bool = False

    def headers(self, operation: str) -> dict[str, str]:
        """Return the headers of a request, names in lower case. operation: its name in the S3 API; "" is any other."""
        found: dict[str, str] = {}
        if self.requester_pays:
            found[_PAYER] = "requester"
        if operation in _CREATES:
            if self.sse:
                found[_SSE] = self.sse
            if self.kms_key_id:
                found[_KMS_KEY] = self.kms_key_id
            if self.storage_class:
                found[_STORAGE_CLASS] = self.storage_class
        if self.customer_key and operation in _WITH_CUSTOMER_KEY:
            found |= self._customer_headers(_SSE)
        if self.customer_key and operation in _COPIES:
            found |= self._customer_headers(_COPY_SOURCE)
        return found

    def _customer_headers(self, prefix: str) -> dict[str, str]:
        digest = hashlib.md5(self.customer_key, usedforsecurity=False).digest()
        values = (
            "AES256",
            *(base64.b64encode(value).decode("ascii") for value in (self.customer_key, digest)),
        )
        return {f"{prefix}-{name}": value for name, value in zip(_CUSTOMER, values, strict=True)}


NO_SETTINGS = RequestSettings()
