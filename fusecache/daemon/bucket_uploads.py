"""`fusecache uploads s3://…`: surveys the unfinished uploads of a bucket that need not be mounted."""

import os
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any

from fusecache.engine.admin.uploads import UploadsInUse, UploadSurvey, survey_bucket
from fusecache.remote.endpoints import choose_endpoint
from fusecache.remote.s3.store import S3Store


def bucket_uploads(
    source: str,
    in_use: Collection[tuple[Collection[str], Collection[str]]],
    *,
    older_than_seconds: float,
    aborts: bool,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    credentials_file: Path | None = None,
) -> dict[str, Any]:
    """Return the uploads below a source, as the daemon does for a mount; abort the old ones if asked.

    in_use: the upload ids and keys that each running mount of this node needs.
    """
    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    endpoint = choose_endpoint(os.environ, endpoint_url=endpoint_url, region=region)
    used = [UploadsInUse(frozenset(upload_ids), frozenset(keys)) for upload_ids, keys in in_use]
    survey = UploadSurvey(older_than_seconds, used)
    with closing(S3Store(bucket, endpoint, profile=profile, credentials_file=credentials_file)) as store:
        survey_bucket(store, prefix, survey, aborts=aborts)
    return survey.as_dict()
