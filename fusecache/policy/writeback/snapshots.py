"""Which files that are still open are published as they are, and when. Pure.

The bucket shows nothing partial. A file that is open and large, and is not appended to, is one that somebody writes
from its start to its end: a checkpoint on a slow disk. It is published when it is closed, however long that takes.
"""

from fusecache.policy.writeback import multipart


def may_be_published_open(size: int, *, appended: bool) -> bool:
    """Return whether a file looks like a log: opened with O_APPEND by a writer, or small."""
    return appended or size <= multipart.SINGLE_PUT_BYTES_MAX


def snapshot_interval(snapshot_seconds: float, last_upload_seconds: float) -> float:
    """Return how long changes of an open file wait at most: longer for one whose upload takes long."""
    return snapshot_seconds * max(1.0, last_upload_seconds)
