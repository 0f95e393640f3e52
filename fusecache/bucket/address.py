"""Where a bucket is, the keys for it, and its unfinished uploads, for commands that do not need a mount."""

import os
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusecache.engine.admin.upload_survey import UploadsInUse, UploadSurvey, survey_bucket
from fusecache.remote.endpoints import Credentials, Endpoint, Transport, choose_endpoint
from fusecache.remote.s3.store import S3Store

# More attempts than a mount makes, which has a retry loop of its own.
PATIENT = Transport(max_connections=4, attempts=5)


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix in a bucket: empty, or ending in '/'."""

    bucket: str
    prefix: str
    endpoint: Endpoint

    @property
    def source(self) -> str:
        """The bucket and prefix as a person writes them."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def has_bucket_of(self, other: "Place") -> bool:
        """Return whether both lie in the same bucket."""
        return (self.bucket, self.endpoint.url) == (other.bucket, other.endpoint.url)


@dataclass(frozen=True, slots=True)
class BucketKeys:
    """Where keys come from: the first field that is set, else the AWS chain."""

    credentials: Credentials | None = None
    credentials_file: Path | None = None
    profile: str | None = None


def place_of(bucket: str, prefix: str, *, endpoint_url: str | None, region: str | None) -> Place:
    """Return the place that a command names. endpoint_url, region: None takes them from the environment.

    Raises ConfigError.
    """
    endpoint = choose_endpoint(os.environ, endpoint_url=endpoint_url, region=region)
    prefix = prefix.rstrip("/")
    return Place(bucket, f"{prefix}/" if prefix else "", endpoint)


def open_store(place: Place, keys: BucketKeys, transport: Transport = PATIENT) -> S3Store:
    """Return a store on a bucket; makes no request. Raises ConfigError, CredentialsMissing."""
    return S3Store(
        place.bucket,
        place.endpoint,
        credentials=keys.credentials,
        credentials_file=keys.credentials_file,
        profile=keys.profile,
        transport=transport,
    )


def bucket_uploads(
    place: Place,
    keys: BucketKeys,
    prefix: str,
    in_use: Collection[tuple[Collection[str], Collection[str]]],
    *,
    older_than_seconds: float,
    aborts: bool,
) -> dict[str, Any]:
    """Return the uploads whose keys begin with a prefix, as the daemon does for a mount; abort the old ones if asked.

    in_use: the upload ids and keys that each running mount of this node needs.
    """
    used = [UploadsInUse(frozenset(upload_ids), frozenset(keys)) for upload_ids, keys in in_use]
    survey = UploadSurvey(older_than_seconds, used)
    with closing(open_store(place, keys)) as store:
        survey_bucket(store, prefix, survey, aborts=aborts)
    return survey.as_dict()
