"""Shares of buckets: a guaranteed part for each, and all that is free for the first taker."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.cache.space_ledger import SpaceLedger
from fusecache.policy.fair_shares import FairShares

BUCKETS = ("a", "b", "c")


@given(st.integers(6, 10_000), st.lists(st.tuples(st.sampled_from(BUCKETS), st.integers(0, 10_000))))
def test_each_bucket_finds_its_part_whatever_the_others_take(
    capacity: int, wishes: list[tuple[str, int]]
) -> None:
    shares = FairShares(BUCKETS, capacity)
    taken = dict.fromkeys(BUCKETS, 0)
    for bucket, wish in wishes:
        amount = min(wish, shares.left(bucket))
        shares.take(bucket, amount)
        taken[bucket] += amount
        assert sum(taken.values()) == shares.total <= capacity
        for other in BUCKETS:
            assert shares.left(other) >= max(0, capacity // 6 - taken[other])


def test_one_that_is_busy_alone_takes_what_is_free() -> None:
    shares = FairShares(("a", "b"), 100)
    assert shares.left("a") == shares.left("b") == 75
    shares.take("a", 75)
    assert (shares.left("a"), shares.left("b")) == (0, 25)
    shares.take("b", 25)
    shares.take("a", -30)
    assert (shares.left("a"), shares.left("b")) == (30, 30)


def test_a_single_bucket_has_all() -> None:
    shares = FairShares(("",), 100)
    shares.take("any", 60)
    assert shares.left("any") == shares.left("") == 40
    assert (shares.guaranteed, shares.kept_from(""), shares.unused("")) == (0, 0, 0)


@pytest.mark.parametrize("reserve", [0, 1 << 30])
@pytest.mark.parametrize("writers", [("a", "b"), BUCKETS])
def test_closes_wait_before_files_are_refused(reserve: int, writers: tuple[str, ...]) -> None:
    """In the bucket that is away, and in the other one that has only its guaranteed part."""
    ledger = SpaceLedger(100_000, reserve, writers)

    def fill(bucket: str, may_take: Callable[[], bool]) -> int:
        taken = 0
        while may_take():
            assert ledger.reserve_staging(1, bucket)
            taken += 1
        return taken

    def is_writable(bucket: str) -> bool:
        return ledger.writable_bytes(bucket, 100_000) > 0

    assert fill("a", lambda: is_writable("a") and not ledger.is_staging_high("a")) >= 25_000
    assert is_writable("a")
    fill("a", lambda: ledger.staging_left("a") > 0)  # what the kernel had accepted, too
    assert not is_writable("a")
    for bucket in writers[1:]:
        own = fill(bucket, lambda bucket=bucket: is_writable(bucket) and not ledger.is_staging_high(bucket))
        assert is_writable(bucket)
        assert own >= ledger.staging_limit_bytes // (2 * len(writers)) * 3 // 8
    assert ledger.staging_bytes <= ledger.staging_limit_bytes
