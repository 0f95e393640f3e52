"""Limits the processor time that uploads spend on digests while the bucket is being read. Pure.

A program waits for the bytes that it reads, but not for an upload, so uploads give way. Not a limit on bandwidth or
on requests.

Digests are what a part costs most: 1.6 s of one processor a GB (MD5, AMD EPYC of 2025). The throttle counts the time
that each digest really took. So an upload also gives way to any other work that keeps the processors busy.
"""

# While the bucket is being read, digests may take 1/12 of the time of all processors. Measured with two processors
# that node and bucket share: with 1/8, 4 GiB went up at 50 MB/s and a reader kept 0.65 of its speed; with 1/10, at
# 43 MB/s and 0.70 (benchmarks/cases_uploads.py, `train`).
SHARE = 12


class DigestThrottle:
    """Says when the next part may be digested while the bucket is being read. Times are the loop's, in seconds."""

    def __init__(self, processors: int) -> None:
        self.at_once = max(1, processors // SHARE)
        # Seconds of rest for each second of digest work.
        self._rest_factor = max(0.0, SHARE / processors - 1)
        self._paused_until = float("-inf")

    def on_digested(self, now: float, seconds: float) -> None:
        """Record that the digests of a part took `seconds` and ended at `now`."""
        self._paused_until = max(self._paused_until, now + seconds * self._rest_factor)

    def delay(self, now: float) -> float:
        """Return the seconds until the digests of another part may begin; 0: now."""
        return max(0.0, self._paused_until - now)
