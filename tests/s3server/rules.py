"""R2's rules and the server's moods, as frozen values. Not the code that enforces them."""

from dataclasses import dataclass
from typing import TypedDict

MIB = 2**20
GIB = 2**30
TIB = 2**40
DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class Rules:
    """What the bucket refuses. The defaults are Cloudflare R2's published limits, but keys are bytes, as elsewhere.

    Source: developers.cloudflare.com/r2/platform/limits and /r2/api/s3/api.
    """

    equal_parts: bool = True
    min_part_bytes: int = 5 * MIB
    max_part_number: int = 10_000
    max_put_bytes: int = 5 * GIB - 5 * MIB
    max_object_bytes: int = int(4.995 * TIB)
    max_copy_bytes: int = 5 * GIB
    max_key_bytes: int = 1024
    max_metadata_bytes: int = 8192
    normalise_keys: bool = False
    """R2: keys that are equal in NFC name one object, which is listed as it was last written."""
    write_interval_seconds: float = 1.0
    """Two writes of one key must be this far apart; 0 switches the rule off."""
    spares_probes: bool = True
    """Not the keys by which a mount tests other stores than R2: else the start of each mount waits for a second."""
    reupload_destroys_part: bool = True
    failed_condition_discards_parts: bool = True
    upload_lifetime_seconds: float = 7 * DAY_SECONDS
    max_clock_skew_seconds: float = 900.0
    requester_pays: bool = False
    """Requests that do not agree to pay are refused."""
    anonymous_reads: bool = False
    """Objects can be read and listed without a signature."""
    full_checksums: bool = False
    """A HEAD that asks for checksums gets the SHA-256 of all bytes, whatever parts they came in."""
    conditional_writes: str = "kept"
    """`kept`; `refused`: 501 to If-Match and If-None-Match of a write; `ignored`: such a write always succeeds.

    As Ceph 16: `not-of-parts`: a completion always succeeds; `never-holds`: so does it, and an If-Match of a PUT fails.
    """
    conditional_deletes: bool = False
    """Whether DeleteObjects looks at the ETag of each object, as AWS does; R2 does not."""


class RulesChange(TypedDict, total=False):
    """Fields of `Rules` to change."""

    equal_parts: bool
    min_part_bytes: int
    max_part_number: int
    max_put_bytes: int
    max_object_bytes: int
    max_copy_bytes: int
    max_key_bytes: int
    max_metadata_bytes: int
    normalise_keys: bool
    write_interval_seconds: float
    spares_probes: bool
    reupload_destroys_part: bool
    failed_condition_discards_parts: bool
    upload_lifetime_seconds: float
    max_clock_skew_seconds: float
    requester_pays: bool
    anonymous_reads: bool
    full_checksums: bool
    conditional_writes: str
    conditional_deletes: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """How far away the bucket seems to be.

    latency: seconds before an answer's first byte; jitter: that varies by ± this fraction, 0..1.
    bandwidth, upload_bandwidth: bytes a second on each connection, None for no limit.
    total_bandwidth: bytes a second down all connections together, None for no limit.
    clock_skew: seconds by which the clock that signatures are checked against is ahead of ours.
    """

    latency: float = 0.0
    jitter: float = 0.0
    bandwidth: float | None = None
    upload_bandwidth: float | None = None
    total_bandwidth: float | None = None
    clock_skew: float = 0.0

    def __post_init__(self) -> None:
        if self.latency < 0 or not 0 <= self.jitter <= 1:
            raise ValueError(f"latency {self.latency} or jitter {self.jitter} out of range")
        for rate in (self.bandwidth, self.upload_bandwidth, self.total_bandwidth):
            if rate is not None and rate <= 0:
                raise ValueError(f"bandwidth must be positive, not {rate}")


class SettingsChange(TypedDict, total=False):
    """Fields of `Settings` to change."""

    latency: float
    jitter: float
    bandwidth: float | None
    upload_bandwidth: float | None
    total_bandwidth: float | None
    clock_skew: float
