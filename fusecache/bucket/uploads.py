"""`fusecache uploads s3://…`: surveys the unfinished uploads of a bucket that need not be mounted."""

from collections.abc import Collection
from contextlib import closing
from typing import Any

from fusecache.bucket.address import BucketKeys, Place, open_store
from fusecache.engine.admin.upload_survey import UploadsInUse, UploadSurvey, survey_bucket


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
