"""The bucket behind the mounts: boto3 for what every S3 has, the test server's hand for the rest."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fusecache.remote.s3.store import PROBE_NAME
from tests.s3server import Control, LogEntry, boto_client

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

WRITES = (
    "PutObject",
    "CopyObject",
    "UploadPartCopy",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
    "DeleteObject",
    "DeleteObjects",
)
# What makes an object appear, change or go; parts in advance do not.
PUBLISHING = ("PutObject", "CopyObject", "CompleteMultipartUpload", "DeleteObject")
# Options from outside that hold for every mount of the tests.
PASSED_ON = ("FUSECACHE_FUSE_LIBRARY", "FUSECACHE_KEEP_MOUNTED", "FUSECACHE_MOVERS")


@dataclass(frozen=True, slots=True)
class Service:
    """An S3 service with one bucket for tests.

    control: None if it is not the project's own server. proxy: URL of the HTTP proxy to it.
    """

    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str
    control: Control | None = None
    ca_path: str | None = None
    proxy: str = ""

    @classmethod
    def named_outside(cls) -> "Service | None":
        """Return the service that the environment names: FUSECACHE_TEST_ENDPOINT, _BUCKET, _ACCESS_KEY, _SECRET_KEY."""
        endpoint, *others = (
            os.environ.get(f"FUSECACHE_TEST_{name}", "")
            for name in ("ENDPOINT", "ACCESS_KEY", "SECRET_KEY", "BUCKET")
        )
        return cls(endpoint, *others) if endpoint else None

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that uses it."""
        others = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("FUSECACHE_") or name in PASSED_ON
        }
        return {
            # A test says when its mount has a keeper: else what dies is to stay dead.
            "FUSECACHE_KEEP_MOUNTED": "no",
            **others,
            **({"HTTP_PROXY": self.proxy} if self.proxy else {}),
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            # Neither a person's profile nor a cloud's metadata service is asked.
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> "S3Client":
        """Return a boto3 client that is patient: R2 allows one write a second to a key."""
        return boto_client(self, retries={"mode": "standard", "total_max_attempts": 8})


@dataclass(frozen=True)
class Bucket:
    """The part of a bucket below `prefix` (empty, or ending in '/'); names are relative to it."""

    service: Service
    client: "S3Client"
    prefix: str

    def below(self, folder: str) -> "Bucket":
        """Return the part below a folder."""
        return replace(self, prefix=f"{self.prefix}{folder}/")

    def as_r2(self) -> "Bucket":
        """Return it by a host name of Cloudflare R2: the test server is the proxy to that host."""
        url = "http://account.r2.cloudflarestorage.com"
        return replace(self, service=replace(self.service, endpoint_url=url, proxy=self.service.endpoint_url))

    @property
    def source(self) -> str:
        """What `fusecache mount` takes."""
        return f"s3://{self.service.bucket}/{self.prefix}"

    @property
    def control(self) -> Control:
        """The hand behind the server; only in tests marked `s3server_only`."""
        assert self.service.control is not None, "the test lacks the marker s3server_only"
        return self.service.control

    # ---- objects

    def put(self, name: str, data: bytes = b"", metadata: dict[str, str] | None = None) -> str:
        """Write as another client would; return the ETag."""
        if self.service.control is not None:
            return self.service.control.put(self.prefix + name, data, metadata or {})
        key = self.prefix + name
        answer = self.client.put_object(
            Bucket=self.service.bucket, Key=key, Body=data, Metadata=metadata or {}
        )
        return answer["ETag"].strip('"')

    def get(self, name: str) -> bytes:
        """Return an object's bytes."""
        answer = self.client.get_object(Bucket=self.service.bucket, Key=self.prefix + name)
        with answer["Body"] as body:
            return body.read()

    def head(self, name: str) -> dict[str, Any]:
        """Return what HEAD tells."""
        return dict(self.client.head_object(Bucket=self.service.bucket, Key=self.prefix + name))

    def delete(self, name: str) -> None:
        """Delete as another client would."""
        self.client.delete_object(Bucket=self.service.bucket, Key=self.prefix + name)

    def sizes(self) -> dict[str, int]:
        """Return name -> bytes of every object, the prefix's own marker left out."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.service.bucket, Prefix=self.prefix
        )
        rows = [row for page in pages for row in page.get("Contents", [])]
        return {row["Key"][len(self.prefix) :]: row["Size"] for row in rows if row["Key"] != self.prefix}

    def names(self) -> list[str]:
        """Return the names of every object, in the bucket's order."""
        return list(self.sizes())

    def uploads(self) -> list[str]:
        """Return the names of multipart uploads in progress."""
        answer = self.client.list_multipart_uploads(Bucket=self.service.bucket, Prefix=self.prefix)
        return [row["Key"][len(self.prefix) :] for row in answer.get("Uploads", [])]

    # ---- requests, of the project's own server only

    def requests(self, *operations: str) -> list[LogEntry]:
        """Return the requests for keys below the prefix, oldest first; only those operations, if any are given."""
        return [entry for entry in self._entries() if not operations or entry.operation in operations]

    def operations(self, *operations: str) -> list[tuple[str, str]]:
        """Return (operation, name) of the requests below the prefix."""
        return [(entry.operation, entry.key[len(self.prefix) :]) for entry in self.requests(*operations)]

    def published(self) -> list[tuple[str, str]]:
        """Return (operation, name) of every request that made an object appear, change or go."""
        return self.operations(*PUBLISHING)

    def _entries(self) -> Iterator[LogEntry]:
        for entry in self.control.log():
            asked = entry.key or entry.query.get("prefix", "")
            if asked.startswith(self.prefix) and PROBE_NAME not in asked:
                yield entry
