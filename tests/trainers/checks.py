"""What every test asks of the bucket's request log."""

import fnmatch

from fusecache.config.option_groups import TEMP_NAMES
from tests.support.s3_buckets import PUBLISHING, WRITES, Bucket


def arrivals(bucket: Bucket, *operations: str) -> list[str]:
    """Return the names for which publishing requests arrived, in that order; markers of directories are left out."""
    return [name for _, name in bucket.operations(*(operations or PUBLISHING)) if not name.endswith("/")]


def assert_tidy(bucket: Bucket, *, copies: bool = False) -> None:
    """Fail if a temporary name ever reached the bucket, or anything was copied in it."""
    names = {name for _, name in bucket.operations(*WRITES)}
    temporary = [
        name
        for name in names
        if any(fnmatch.fnmatchcase(name.rpartition("/")[2], pattern) for pattern in TEMP_NAMES)
    ]
    assert temporary == []
    if not copies:
        assert bucket.operations("CopyObject", "UploadPartCopy") == []


def assert_once(bucket: Bucket) -> None:
    """Fail if a file was published twice."""
    names = arrivals(bucket, "PutObject", "CompleteMultipartUpload")
    assert sorted(names) == sorted(set(names))


def assert_last(bucket: Bucket, name: str, folder: str) -> None:
    """Fail unless a file was published after all others of its folder."""
    inside = [each for each in arrivals(bucket) if each.startswith(f"{folder}/")]
    assert inside, f"nothing in {folder}"
    assert inside[-1] == f"{folder}/{name}", inside
