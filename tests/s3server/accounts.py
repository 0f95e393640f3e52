"""Access keys and what each may do."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from tests.s3server.errors import S3Error

WRITES = frozenset(
    {
        "PutObject",
        "CopyObject",
        "DeleteObject",
        "DeleteObjects",
        "CreateMultipartUpload",
        "UploadPart",
        "UploadPartCopy",
        "CompleteMultipartUpload",
        "AbortMultipartUpload",
        "CreateBucket",
    }
)
BUCKET_CALLS = frozenset({"HeadBucket", "CreateBucket", "ListBuckets"})
LISTINGS = frozenset({"ListObjectsV2", "ListMultipartUploads"})


@dataclass(frozen=True, slots=True)
class Account:
    """One access key. It reaches keys that start with `prefix`; without `bucket_calls` it is object-scoped.

    A key with a prefix never makes bucket calls, and lists only inside its prefix. buckets: the only ones it reaches;
    empty: all. denied: operations that it may not do, such as DeleteObject.
    """

    access_key: str
    secret_key: str
    writable: bool = True
    prefix: str = ""
    bucket_calls: bool = True
    buckets: tuple[str, ...] = ()
    denied: frozenset[str] = frozenset()

    def allows(self, operation: str, bucket: str, key: str) -> bool:
        """Return whether this key may do `operation` on `key` (for listings: the prefix asked for)."""
        if self.buckets and bucket not in self.buckets:
            return False
        if operation in self.denied or (operation in WRITES and not self.writable):
            return False
        if operation in BUCKET_CALLS:
            return self.bucket_calls and not self.prefix
        if operation == "DeleteObjects":  # decided key by key
            return True
        return key.startswith(self.prefix)


class Accounts:
    """The keys that are valid now. Safe to use from many threads."""

    def __init__(self, accounts: Iterable[Account]) -> None:
        self._lock = threading.Lock()
        self._by_key = {account.access_key: account for account in accounts}

    def add(self, account: Account) -> None:
        """Make a key valid, or replace it."""
        with self._lock:
            self._by_key[account.access_key] = account

    def revoke(self, access_key: str) -> None:
        """Make a key unknown. KeyError if it already is."""
        with self._lock:
            del self._by_key[access_key]

    def find(self, access_key: str) -> Account:
        """Return a valid key's account. S3Error InvalidAccessKeyId if there is none."""
        with self._lock:
            account = self._by_key.get(access_key)
        if account is None:
            raise S3Error("InvalidAccessKeyId", "No such access key is known here.")
        return account
