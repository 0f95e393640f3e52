"""The disk space account of the cache directory: `used + reserved <= limit`, for cache and staging files together.

Bytes are reserved before they are written. Pure: it neither evicts nor waits, it only returns what is missing.

Invariants:
1. No granted reservation makes the total exceed the limit.
2. Staging files take at most their share, so that one checkpoint does not evict the whole dataset.
3. Of several buckets, each finds its guaranteed part of the staging space free (`FairShares`).
Only two causes put the total above the limit: `restore_*` (a limit lowered between two starts) and overhead.
"""

from collections.abc import Sequence

from fusecache.model.objects import STAGING_SHARE_PERCENT
from fusecache.policy.fair_shares import FairShares

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

    def __init__(
        self, limit_bytes: int, write_reserve_bytes: int = 0, buckets: Sequence[str] = ("",)
    ) -> None:
        """buckets: the names of all writable buckets."""
        if limit_bytes <= 0 or write_reserve_bytes < 0:
            raise ValueError(
                f"the limit must be positive, not {limit_bytes}; the reserve {write_reserve_bytes}"
            )
        self.limit_bytes = limit_bytes
        self.write_reserve_bytes = min(write_reserve_bytes, self.staging_limit_bytes // RESERVE_SHARE)
        self.cache_bytes = 0
        self.reserved_bytes = 0
        self.overhead_bytes = 0
        self._shares = FairShares(buckets, self.staging_limit_bytes)
        # A bucket that has only its guaranteed part left needs its reserve there, and at least half for new files.
        self._own_reserve_bytes = min(self.write_reserve_bytes, self._shares.guaranteed // 2)

    @property
    def staging_limit_bytes(self) -> int:
        """The most bytes that staging files may hold."""
        return self.limit_bytes * STAGING_SHARE_PERCENT // 100

    @property
    def staging_bytes(self) -> int:
        """What staging files hold."""
        return self._shares.total

    def high_water_bytes(self, bucket: str = "") -> int:
        """Return how many bytes staging files may hold before a bucket's closes wait for uploads."""
        usable = self.staging_limit_bytes - self._shares.kept_from(bucket)
        return (usable - self.write_reserve_bytes) * HIGH_WATER_PERCENT // 100

    def is_staging_high(self, bucket: str = "") -> bool:
        """Return whether a bucket's closes wait: not before it has taken as large a part of what it is guaranteed."""
        shares = self._shares
        own = (shares.guaranteed - self._own_reserve_bytes) * HIGH_WATER_PERCENT // 100
        held = shares.guaranteed - shares.unused(bucket)
        return self.staging_bytes > self.high_water_bytes(bucket) and held >= own

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

    def staging_left(self, bucket: str = "") -> int:
        """Return how many bytes more a bucket's staging files may take, not counting what must be evicted for them."""
        return self._shares.left(bucket)

    def writable_bytes(self, bucket: str, free_bytes: int) -> int:
        """Return how many bytes new writes may take, without the reserve. free_bytes: what the disk could hold."""
        shares = self._shares
        free = min(self.staging_limit_bytes - self.staging_bytes, free_bytes)
        own = min(shares.unused(bucket), free_bytes)
        return max(
            0, free - shares.kept_from(bucket) - self.write_reserve_bytes, own - self._own_reserve_bytes
        )

    def reserve_staging(self, nbytes: int, bucket: str = "") -> bool:
        """Reserve space for a staging file; False if it does not fit now."""
        if nbytes > self.staging_left(bucket) or self.shortage_bytes(nbytes):
            return False
        self.restore_staging(nbytes, bucket)
        return True

    def release_staging(self, nbytes: int, bucket: str = "") -> None:
        """A staging file shrank or was removed."""
        assert 0 <= nbytes <= self.staging_bytes, (nbytes, self.staging_bytes)
        self.restore_staging(-nbytes, bucket)

    def adopt(self, nbytes: int, bucket: str = "") -> None:
        """A staging file of `nbytes` became a cache file."""
        self.release_staging(nbytes, bucket)
        self.cache_bytes += nbytes

    def restore_cache(self, nbytes: int) -> None:
        """Account for blocks found at start, even above the limit."""
        self.cache_bytes += nbytes

    def restore_staging(self, nbytes: int, bucket: str = "") -> None:
        """Account for staging files found at start, even above the limit."""
        self._shares.take(bucket, nbytes)
