"""The disk space account of the cache directory: `used + reserved <= limit`, for cache and staging files together.

Bytes are reserved before they are written. Pure: it neither evicts nor waits, it only returns what is missing.

Invariants:
1. No granted reservation makes the total exceed the limit.
2. Staging files take at most their share, so that one checkpoint does not evict the whole dataset.
Only two causes put the total above the limit: `restore_*` (a limit lowered between two starts) and overhead.
"""

from fusecache.model.objects import STAGING_SHARE_PERCENT

# The kernel holds accepted writes in its page cache. The reserve for them is at most 1/8 of staging, however much
# memory the node has.
RESERVE_SHARE = 8
# Above 75 % of the staging space without the write reserve, closes wait for uploads.
HIGH_WATER_PERCENT = 75


class SpaceLedger:
    """Counts bytes used by cached blocks, reserved for blocks being written, and held by staging files.

    overhead_bytes: what the index and the file system need besides; measured, not reserved.
    write_reserve_bytes: kept free, when new files are created, for writes that the kernel has accepted but the daemon
    has not received yet.
    """

    def __init__(self, limit_bytes: int, write_reserve_bytes: int = 0) -> None:
        if limit_bytes <= 0 or write_reserve_bytes < 0:
            raise ValueError(
                f"the limit must be positive, not {limit_bytes}; the reserve {write_reserve_bytes}"
            )
        self.limit_bytes = limit_bytes
        self.write_reserve_bytes = min(write_reserve_bytes, self.staging_limit_bytes // RESERVE_SHARE)
        self.cache_bytes = 0
        self.reserved_bytes = 0
        self.overhead_bytes = 0
        self.staging_bytes = 0  # what staging files hold

    @property
    def staging_limit_bytes(self) -> int:
        """The most bytes that staging files may hold."""
        return self.limit_bytes * STAGING_SHARE_PERCENT // 100

    @property
    def high_water_bytes(self) -> int:
        """How many bytes staging files may hold before closes wait for uploads."""
        return (self.staging_limit_bytes - self.write_reserve_bytes) * HIGH_WATER_PERCENT // 100

    @property
    def is_staging_high(self) -> bool:
        """Whether closes wait for uploads."""
        return self.staging_bytes > self.high_water_bytes

    @property
    def total_bytes(self) -> int:
        """All bytes that are used or reserved."""
        return self.cache_bytes + self.reserved_bytes + self.staging_bytes + self.overhead_bytes

    def shortage_bytes(self, nbytes: int) -> int:
        """Return how many bytes must be freed before `nbytes` more fit; 0 if they fit now."""
        return max(0, self.total_bytes + nbytes - self.limit_bytes)

    def reserve_cache(self, nbytes: int) -> bool:
        """Reserve space for blocks about to be written; False if it does not fit."""
        if self.shortage_bytes(nbytes):
            return False
        self.reserved_bytes += nbytes
        return True

    def commit_cache(self, nbytes: int) -> None:
        """The reserved bytes have been written."""
        self.cancel_cache(nbytes)
        self.cache_bytes += nbytes

    def cancel_cache(self, nbytes: int) -> None:
        """The reserved bytes will not be written."""
        assert 0 <= nbytes <= self.reserved_bytes, (nbytes, self.reserved_bytes)
        self.reserved_bytes -= nbytes

    def release_cache(self, nbytes: int) -> None:
        """Blocks were evicted."""
        assert 0 <= nbytes <= self.cache_bytes, (nbytes, self.cache_bytes)
        self.cache_bytes -= nbytes

    def staging_left(self) -> int:
        """Return how many bytes more staging files may take, not counting what must be evicted for them."""
        return self.staging_limit_bytes - self.staging_bytes

    def writable_bytes(self, free_bytes: int) -> int:
        """Return how many bytes new writes may take, without the reserve. free_bytes: what the disk could hold."""
        return max(0, min(self.staging_left(), free_bytes) - self.write_reserve_bytes)

    def reserve_staging(self, nbytes: int) -> bool:
        """Reserve space for a staging file; False if it does not fit now."""
        if nbytes > self.staging_left() or self.shortage_bytes(nbytes):
            return False
        self.restore_staging(nbytes)
        return True

    def release_staging(self, nbytes: int) -> None:
        """A staging file shrank or was removed."""
        assert 0 <= nbytes <= self.staging_bytes, (nbytes, self.staging_bytes)
        self.restore_staging(-nbytes)

    def adopt(self, nbytes: int) -> None:
        """A staging file of `nbytes` became a cache file."""
        self.release_staging(nbytes)
        self.cache_bytes += nbytes

    def restore_cache(self, nbytes: int) -> None:
        """Account for blocks found at start, even above the limit."""
        self.cache_bytes += nbytes

    def restore_staging(self, nbytes: int) -> None:
        """Account for staging files found at start, even above the limit."""
        self.staging_bytes += nbytes
