"""How long somebody waits, for what room, and which open files are published."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.objects import MIB
from fusecache.policy.backoff import ProgressTimeout
from fusecache.policy.cache.space_ledger import RESERVE_SHARE, SpaceLedger
from fusecache.policy.writeback import multipart
from fusecache.policy.writeback.snapshots import may_be_published_open, snapshot_interval


@given(st.lists(st.tuples(st.floats(0, 400), st.integers(0, 2)), max_size=30))
def test_patience_ends_after_so_long_without_progress_and_not_before(steps: list[tuple[float, int]]) -> None:
    now = moved = 0.0
    patience = ProgressTimeout(now, 300)
    mark: int | None = None
    for pause, progress in steps:
        now += pause
        assert patience.is_over(now) == (now - moved >= 300)
        if progress != mark:
            mark, moved = progress, now
        patience.on_progress(progress, now)


@given(st.integers(1, 1 << 44), st.integers(0, 1 << 44))
def test_closes_wait_below_what_is_refused_and_that_is_below_the_limit(limit: int, reserve: int) -> None:
    ledger = SpaceLedger(limit, reserve)
    refused = ledger.staging_limit_bytes - ledger.write_reserve_bytes
    assert 0 <= ledger.high_water_bytes <= refused <= ledger.staging_limit_bytes <= limit * 7 // 10
    assert ledger.write_reserve_bytes <= min(reserve, ledger.staging_limit_bytes // RESERVE_SHARE)


@pytest.mark.parametrize(
    ("size", "appended", "published"),
    [(1, False, True), (64 * MIB, False, True), (64 * MIB + 1, False, False), (1 << 40, True, True)],
)
def test_a_large_file_is_published_open_only_if_it_is_appended_to(
    *, size: int, appended: bool, published: bool
) -> None:
    assert multipart.SINGLE_PUT_BYTES_MAX == 64 * MIB
    assert may_be_published_open(size, appended=appended) == published


def test_the_interval_grows_with_the_upload_and_never_shrinks() -> None:
    assert [snapshot_interval(60, seconds) for seconds in (0, 0.5, 1, 10)] == [60, 60, 60, 600]
