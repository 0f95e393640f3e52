"""Writes are done at once while the disk takes them quickly, and seldom tried so while it does not."""

from fusecache.policy.writeback.inline_write_gate import InlineWriteGate


def at_once(pace: InlineWriteGate, count: int, seconds: float) -> int:
    """Decide on `count` writes that take so long; return how many were done at once."""
    done = 0
    for _ in range(count):
        if pace.is_quick():
            done += 1
            pace.record(seconds)
    return done


def test_quick_writes_are_done_at_once() -> None:
    assert at_once(InlineWriteGate(), 10_000, 0.0003) == 10_000


def test_of_slow_writes_hardly_any_holds_the_others_up() -> None:
    pace = InlineWriteGate()
    assert at_once(pace, 100, 0.2) <= 4
    assert at_once(pace, 100_000, 0.2) <= 40


def test_one_slow_write_costs_little() -> None:
    pace = InlineWriteGate()
    at_once(pace, 1, 0.2)
    assert at_once(pace, 1000, 0.0003) >= 980


def test_a_disk_that_is_well_again_is_believed() -> None:
    pace = InlineWriteGate()
    at_once(pace, 100_000, 0.2)
    at_once(pace, 10_000, 0.0003)
    at_once(pace, 1, 0.2)
    assert at_once(pace, 1000, 0.0003) >= 980
