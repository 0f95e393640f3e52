"""The request log says when the bucket had something, and what ETag the bytes must have."""

import hashlib

import pytest

from benchmarks.processes import BenchmarkError
from benchmarks.published import part_sizes, published_at, puts_answered
from benchmarks.timelines import rate_between
from benchmarks.writers import PATTERN_BYTES, expected_etag, pieces
from tests.s3server import LogEntry

MIB = 2**20


def entry(
    operation: str, time: float, *, key: str = "a", bytes_in: int = 0, part: int = 0, stored: bool = True
) -> LogEntry:
    """Return a request that arrived at `time` and was answered a second later."""
    return LogEntry(
        number=1,
        time=time,
        operation=operation,
        method="PUT",
        bucket="bucket",
        key=key,
        query={"partNumber": str(part)} if part else {},
        headers={},
        connection=1,
        bytes_in=bytes_in,
        seconds=1.0,
        took_effect=stored,
        finished=True,
    )


def test_an_object_is_there_when_its_publishing_request_was_answered() -> None:
    assert published_at([entry("CompleteMultipartUpload", 10.0)], 5) == 11.0
    assert published_at([entry("PutObject", 10.0, bytes_in=5)], 5) == 11.0


def test_a_placeholder_or_a_failed_request_publishes_nothing() -> None:
    early = entry("PutObject", 1.0, bytes_in=0)
    failed = entry("CompleteMultipartUpload", 2.0, stored=False)
    assert published_at([early, failed], 5) is None
    assert published_at([early, failed, entry("CompleteMultipartUpload", 3.0)], 5) == 4.0


def test_each_small_file_counts_once_and_when_it_was_first_there() -> None:
    entries = [
        entry("PutObject", 5.0, key="b", bytes_in=4),
        entry("PutObject", 1.0, key="a", bytes_in=0),
        entry("PutObject", 2.0, key="a", bytes_in=4),
        entry("PutObject", 9.0, key="a", bytes_in=4),
        entry("PutObject", 3.0, key="c", bytes_in=4, stored=False),
    ]
    assert puts_answered(entries, 4) == [3.0, 6.0]


def test_parts_are_taken_in_the_order_of_their_numbers() -> None:
    entries = [
        entry("UploadPart", 1.0, bytes_in=20, part=10),
        entry("UploadPart", 2.0, bytes_in=10, part=2),
        entry("UploadPart", 3.0, bytes_in=7, part=3, stored=False),
    ]
    assert part_sizes(entries) == [10, 20]


@pytest.mark.parametrize("part_bytes", [5 * MIB, 8 * MIB, 3 * MIB + 1])
def test_the_expected_etag_is_that_of_the_bytes_written(part_bytes: int) -> None:
    size = 13 * MIB + 5
    whole = b"".join(pieces(0, size))
    assert len(whole) == size
    assert whole[PATTERN_BYTES : 2 * PATTERN_BYTES] == whole[:PATTERN_BYTES]
    parts = [whole[offset : offset + part_bytes] for offset in range(0, size, part_bytes)]
    digests = b"".join(hashlib.md5(part).digest() for part in parts)
    expected = f"{hashlib.md5(digests).hexdigest()}-{len(parts)}"
    assert expected_etag(size, [len(part) for part in parts]) == expected
    assert expected_etag(size, []) == hashlib.md5(whole).hexdigest()


def test_a_rate_is_that_of_its_span_alone() -> None:
    samples = [[0.0, 0.0], [1.0, 100.0], [2.0, 100.0], [4.0, 500.0]]
    assert rate_between(samples, 0.0, 4.0) == 125.0
    assert rate_between(samples, 1.0, 2.0) == 0.0
    assert rate_between(samples, 0.5, 3.0) == 100.0


def test_a_rate_beyond_what_was_sampled_is_refused() -> None:
    samples = [[0.0, 0.0], [1.0, 100.0]]
    for start, stop in ((0.5, 1.5), (-1.0, 0.5), (0.5, 0.5)):
        with pytest.raises(BenchmarkError):
            rate_between(samples, start, stop)
