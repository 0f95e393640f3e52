"""Which removals rely on which queued writes."""

from fusecache.policy.writeback.rotation import Rotation


def test_the_write_that_the_oldest_removal_waits_for_is_relied_on_once_something_newer_was_written() -> None:
    queue = Rotation()
    queue.add_write(1, "run/step-1")
    queue.add_removal(2)
    assert not queue.blocks_a_delete(1), "nothing came since: all of it is to go"
    queue.add_write(3, "run/step-2")
    assert queue.blocks_a_delete(1)
    assert not queue.blocks_a_delete(3), "the oldest removal does not wait for it"
    queue.remove(2, "run/step-0")
    assert not queue.blocks_a_delete(1)


def test_removals_that_relied_on_what_left_are_told_until_they_wait_for_the_newest_write() -> None:
    queue = Rotation()
    queue.add_write(1, "run/step-1")
    queue.add_removal(2)
    queue.add_write(3, "run/step-2")
    queue.add_removal(4)
    queue.add_write(5, "run/step-3")
    queue.add_removal(6)
    assert queue.deletes_blocked_by(1) == [2, 4, 6], "all, so that they keep their order"
    assert queue.deletes_blocked_by(3) == [4, 6]
    assert queue.deletes_blocked_by(5) == []
    assert queue.deletes_after(5) == [6]


def test_what_is_written_anew_in_a_directory_is_known() -> None:
    queue = Rotation()
    queue.add_removal(1)
    queue.add_write(2, "run/log")
    assert not queue.is_written_since(1, "run/last/.metadata")
    queue.add_write(3, "run/last/shard")
    assert queue.is_written_since(1, "run/last/.metadata")
    queue.remove(3, "run/last/shard")
    assert not queue.is_written_since(1, "run/last/.metadata")


def test_what_is_taken_out_leaves_nothing_behind() -> None:
    queue = Rotation()
    queue.add_write(1, "d/a")
    queue.add_removal(2)
    queue.add_write(3, "d/c")
    queue.remove(7, "d/made/")  # a marker, which is neither
    assert queue.deletes_blocked_by(1) == [2]
    for sequence, key in ((3, "d/c"), (2, "d/b"), (1, "d/a")):
        queue.remove(sequence, key)
    assert queue.deletes_blocked_by(0) == []
    assert not queue.is_written_since(0, "d/b")
