"""Which objects are selected, and what that saves."""

import pytest

from fusecache.policy.checkpoints import Selection, dollars_a_month


@pytest.mark.parametrize(
    ("selection", "newest"),
    [
        (Selection(), 10_000 - 3600),
        (Selection(older_than_seconds=60), 10_000 - 3600),
        (Selection(older_than_seconds=7200), 10_000 - 7200),
        (Selection(older_than_seconds=60, even_recent=True), 10_000 - 60),
        (Selection(even_recent=True), 10_000 - 1),
    ],
)
def test_last_hour_is_younger_than_allowed(selection: Selection, newest: float) -> None:
    assert selection.newest_seconds(10_000) == newest


@pytest.mark.parametrize(
    ("selection", "name", "has"),
    [
        (Selection(), "any/name", True),
        (Selection(prefix="a/", suffix=".tmp"), "a/b.tmp", True),
        (Selection(prefix="a/", suffix=".tmp"), "b/a/b.tmp", False),
        (Selection(pattern="*.tmp"), "a/b.tmp", True),
        (Selection(pattern="a/*.tmp"), "a/c/b.tmp", True),
        (Selection(pattern="a/*.tmp"), "c/a/b.tmp", False),
        (Selection(pattern="B.tmp"), "a/b.tmp", False),
    ],
)
def test_names_are_selected(selection: Selection, name: str, *, has: bool) -> None:
    assert selection.has_name(name) is has


def test_price_is_known_on_r2_only() -> None:
    terabyte = 10**12
    assert dollars_a_month(terabyte, is_r2=True, dollars_per_gb=None) == pytest.approx(15.0)
    assert dollars_a_month(terabyte, is_r2=False, dollars_per_gb=None) is None
    assert dollars_a_month(terabyte, is_r2=False, dollars_per_gb=0.02) == pytest.approx(20.0)
    assert dollars_a_month(terabyte, is_r2=True, dollars_per_gb=0.0) == 0.0
