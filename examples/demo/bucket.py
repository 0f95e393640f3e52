"""The bucket of the demo, seen without the mount: plain boto3, below one prefix of its own.

Whatever is checked about the bucket is checked through this file, never through the mount. With no bucket
given, the S3 server of the tests is started on this machine, objects on disk, a few milliseconds away.
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError, EndpointConnectionError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

REQUESTS_AT_ONCE = 8
CONNECT_SECONDS = 10.0  # an endpoint that swallows packets shall not hold the first request for minutes
# Whatever a bucket's client raises; ValueError for an endpoint that is no URL, before any request.
BUCKET_ERRORS = (BotoCoreError, ClientError, ValueError)
UNREACHABLE = (EndpointConnectionError, ConnectTimeoutError)
WORDS = {
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "these credentials may not do that",
    "InvalidAccessKeyId": "the store does not know this access key",
    "SignatureDoesNotMatch": "the secret key is not that of the access key",
}


@dataclass(frozen=True, slots=True)
class Listed:
    """One object as LIST shows it; `last_modified` tells a rewritten object of equal bytes."""

    size: int
    etag: str
    last_modified: str


class DemoBucket:
    """One fresh prefix of one bucket. Never touches a key outside it."""

    def __init__(self, bucket: str, prefix: str, endpoint_url: str | None) -> None:
        """prefix: ends with "/" and is new; `endpoint_url` None means what the environment or AWS says."""
        if not prefix.endswith("/") or prefix == "/":
            raise ValueError(f"not a prefix of our own: {prefix!r}")
        self.bucket = bucket
        self.prefix = prefix
        self.endpoint_url = endpoint_url
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            retries={"mode": "standard", "max_attempts": 5},
            max_pool_connections=REQUESTS_AT_ONCE,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        # a session of its own: the default one would keep the credentials of whoever asked first
        self._client: S3Client = boto3.session.Session().client(
            "s3", endpoint_url=endpoint_url, config=config
        )

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()

    @property
    def url(self) -> str:
        """What to mount."""
        return f"s3://{self.bucket}/{self.prefix.rstrip('/')}"

    def objects(self, below: str = "") -> dict[str, Listed]:
        """Return the objects below `below`, by key relative to the prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix + below
        )
        return {
            row["Key"].removeprefix(self.prefix): Listed(
                row["Size"], row["ETag"], row["LastModified"].isoformat()
            )
            for page in pages
            for row in page.get("Contents", ())
        }

    def download(self, key: str, path: Path) -> None:
        """Write one object to `path`, making its folders."""
        path.parent.mkdir(parents=True, exist_ok=True)
        body = self._client.get_object(Bucket=self.bucket, Key=self.prefix + key)["Body"]
        with path.open("wb") as file:
            for piece in body.iter_chunks(1 << 20):
                file.write(piece)

    def download_all(self, below: str, folder: Path) -> Iterator[str]:
        """Download what is below `below` to `folder/KEY`, several at once; yields each key when done."""
        keys = [key for key in self.objects(below) if not key.endswith("/")]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            for key, done in [(key, pool.submit(self.download, key, folder / key)) for key in keys]:
                done.result()
                yield key

    def unfinished_uploads(self) -> list[str]:
        """Return the keys of multipart uploads that were begun and neither completed nor aborted."""
        page = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.prefix)
        return [upload["Key"].removeprefix(self.prefix) for upload in page.get("Uploads", ())]

    def delete_everything(self) -> int:
        """Delete every object and unfinished upload below the prefix; return how many objects there were."""
        page = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.prefix)
        for upload in page.get("Uploads", ()):
            self._client.abort_multipart_upload(
                Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
        keys = [self.prefix + key for key in self.objects()]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            list(pool.map(lambda key: self._client.delete_object(Bucket=self.bucket, Key=key), keys))
        return len(keys)


def describe(problem: Exception) -> str:
    """Put one of BUCKET_ERRORS in words, on one line."""
    if isinstance(problem, ClientError):
        error = problem.response["Error"]
        code, operation = error.get("Code", ""), problem.operation_name
        return f"{WORDS.get(code) or error.get('Message') or code} ({code}, {operation})"
    if isinstance(problem, UNREACHABLE):
        return "cannot be reached; is the endpoint right?"
    return " ".join(str(problem).split())


@contextlib.contextmanager
def credentials(access_key: str, secret_key: str, region: str) -> Iterator[None]:
    """Put credentials into the environment, where boto3 and the daemons find them; take them out again."""
    names = {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_DEFAULT_REGION": region,
    }
    before = {name: os.environ.get(name) for name in (*names, "AWS_PROFILE", "AWS_SESSION_TOKEN")}
    for name in before:
        os.environ.pop(name, None)
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
