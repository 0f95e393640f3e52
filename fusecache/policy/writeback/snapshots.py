"""Decides which open files are published as they are, and when. Pure.

The bucket never shows a partial file. A file that is open and large, and not appended to, is being written from its
start to its end: a checkpoint on a slow disk. It is published only when it is closed, however long that takes.
"""

from fusecache.policy.writeback import multipart


def may_be_published_open(size: int, *, appended: bool) -> bool:
    """Return whether an open file looks like a log: a writer opened it with O_APPEND, or it is small."""
    return appended or size <= multipart.SINGLE_PUT_BYTES_MAX


def snapshot_interval(snapshot_seconds: float, last_upload_seconds: float) -> float:
    """Return how many seconds changes of an open file wait at most: longer if its last upload took long."""
    return snapshot_seconds * max(1.0, last_upload_seconds)
