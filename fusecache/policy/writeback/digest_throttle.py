"""How much of the processors uploads take while somebody reads: who reads waits, who uploads does not.

Parts cost digests above all, which take a processor for 1.6 s a GB (MD5, AMD EPYC of 2025). Taken by the time that they
really took, an upload gives way to whatever else keeps the processors busy.
"""

# Beside reads, parts are digested a twelfth of the time of all processors. With an eighth, and two processors that node
# and bucket share, 4 GiB went up at 50 MB/s and a reader kept 0.65 of his speed, with a tenth at 43 MB/s and 0.70
# (benchmarks/cases_uploads.py, `train`).
SHARE = 12


class DigestThrottle:
    """Says when the next part may be digested beside reads. Times are the loop's, in seconds."""

    def __init__(self, processors: int) -> None:
        self.at_once = max(1, processors // SHARE)
        # For each second of work so many of rest.
        self._rest = max(0.0, SHARE / processors - 1)
        self._until = float("-inf")

    def on_digested(self, now: float, seconds: float) -> None:
        """The digests of a part took so long, until now."""
        self._until = max(self._until, now + seconds * self._rest)

    def delay(self, now: float) -> float:
        """Return the seconds until another part may begin; 0: now."""
        return max(0.0, self._until - now)
