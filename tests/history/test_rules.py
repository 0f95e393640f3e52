"""The rules themselves: each forbids what it should, so that a history which passes means something."""

import pytest

from tests.history.checkpoints import Checkpoints
from tests.history.past import NOTHING, Cause, Change, Link, Past, Value
from tests.history.rules import Effect, Rules, Violation


class Story:
    """A past and a bucket, told step by step."""

    def __init__(self) -> None:
        self.checkpoints = Checkpoints()
        self.past = Past(self.checkpoints.see_node)
        self.time = 0.0
        self.rules = Rules(self.past, lambda: self.time, self.checkpoints)

    def close(self, path: str, value: Value) -> None:
        self._promise({path: Change(frozenset({value}), Cause.CLOSE)}, Cause.CLOSE)

    def checkpoint(self, files: dict[str, Value]) -> None:
        for path, value in files.items():
            self.close(path, value)
        self.checkpoints.complete(self.past.step, frozenset(files.values()))

    def unlink(self, path: str) -> None:
        self._promise({path: Change(NOTHING, Cause.UNLINK)}, Cause.UNLINK)

    def rename(self, old: str, new: str, cause: Cause = Cause.RENAME) -> None:
        moved = {old: Change(NOTHING, cause, new), new: Change(self.past.now(old), cause, old)}
        self._promise(moved, cause)

    def put(self, path: str, value: Value, method: str = "put") -> None:
        self.rules.see(Effect(method, path, value))

    def delete(self, path: str) -> None:
        self.rules.see(Effect("delete", path, None))

    def _promise(self, changes: dict[str, Change], cause: Cause) -> None:
        self.past.keep(self.past.begin(changes, {}, cause, self.time))


@pytest.fixture
def story() -> Story:
    return Story()


def test_what_was_never_closed_is_forbidden(story: Story) -> None:
    story.close("a", b"1")
    with pytest.raises(Violation, match="never held"):
        story.put("a", b"12")


def test_going_back_is_forbidden(story: Story) -> None:
    story.close("a", b"1")
    story.close("a", b"2")
    story.put("a", b"2")
    with pytest.raises(Violation, match="only before"):
        story.put("a", b"1")


def test_new_files_may_come_in_any_order(story: Story) -> None:
    for name in "abc":
        story.close(name, name.encode())
    for name in "cab":
        story.put(name, name.encode())


@pytest.mark.parametrize("last", ["d/.metadata", "d/latest", "_SUCCESS"])
def test_an_index_before_its_shards_is_forbidden(story: Story, last: str) -> None:
    story.close("d/shard", b"1")
    story.close(last, b"2")
    with pytest.raises(Violation, match="d/shard still shows"):
        story.put(last, b"2")
    story.put("d/shard", b"1")
    story.put(last, b"2")


def test_an_index_may_go_before_what_lies_elsewhere(story: Story) -> None:
    story.close("other/shard", b"1")
    story.close("d/.metadata", b"2")
    story.put("d/.metadata", b"2")


def test_an_index_with_shards_of_the_one_before_is_forbidden(story: Story) -> None:
    for value in (b"1", b"2"):
        story.close("shard", value)
        story.close("index.json", b"of " + value)
    story.put("shard", b"1")
    story.put("index.json", b"of 1")
    with pytest.raises(Violation, match="shard still shows"):
        story.put("index.json", b"of 2")


def test_overwriting_before_older_files_is_forbidden(story: Story) -> None:
    story.close("a", b"1")
    story.put("a", b"1")
    story.close("b", b"2")
    story.close("a", b"3")
    with pytest.raises(Violation, match="b still shows"):
        story.put("a", b"3")


def test_a_closed_file_may_take_the_place_of_its_snapshot_and_no_older_one(story: Story) -> None:
    """A file that is held open after a close may have a snapshot in the queue from then on."""
    story.close("older", b"0")
    story.close("a", b"1")
    story.put("a", b"1")
    story.past.widen("a", frozenset({b"12"}))
    story.close("b", b"2")
    story.close("a", b"123")
    with pytest.raises(Violation, match="older still shows"):
        story.put("a", b"123")
    story.put("older", b"0")
    story.put("a", b"123")


@pytest.mark.parametrize("shows", ["the snapshot", "what another writer closed"])
def test_nor_the_place_of_what_shows(story: Story, shows: str) -> None:
    story.close("a", b"1")
    story.put("a", b"1")
    if shows == "what another writer closed":
        story.close("a", b"12")
        story.past.widen("a", frozenset({b"1"}))
    else:
        story.past.widen("a", frozenset({b"12"}))
    story.put("a", b"12")
    story.close("b", b"2")
    story.close("a", b"123")
    with pytest.raises(Violation, match="b still shows"):
        story.put("a", b"123")


def test_a_symlink_before_its_target_is_forbidden(story: Story) -> None:
    story.close("a", b"1")
    story.close("link", Link("a"))
    with pytest.raises(Violation, match="a still shows"):
        story.put("link", Link("a"))


def test_deleting_before_a_write_elsewhere_is_forbidden(story: Story) -> None:
    story.close("step-1/a", b"1")
    story.put("step-1/a", b"1")
    story.close("step-2/a", b"2")
    story.unlink("step-1/a")
    with pytest.raises(Violation, match="step-2/a still shows"):
        story.delete("step-1/a")
    story.put("step-2/a", b"2")
    story.delete("step-1/a")


def test_deleting_what_is_there_is_forbidden(story: Story) -> None:
    story.close("a", b"1")
    story.put("a", b"1")
    with pytest.raises(Violation, match="never held"):
        story.delete("a")


def test_a_rename_that_deletes_first_is_forbidden(story: Story) -> None:
    story.close("a", b"1")
    story.put("a", b"1")
    story.rename("a", "b")
    with pytest.raises(Violation, match="moved to b"):
        story.delete("a")
    story.put("b", b"1", "copy")
    story.delete("a")


def test_another_order_in_a_renamed_directory_is_forbidden(story: Story) -> None:
    story.close("d/b", b"1")
    story.close("d/.metadata", b"2")
    moved: dict[str, Change] = {}
    for name in ("b", ".metadata"):
        value = story.past.now(f"d/{name}")
        moved[f"d/{name}"] = Change(NOTHING, Cause.FOLDER_RENAME, f"e/{name}")
        moved[f"e/{name}"] = Change(value, Cause.FOLDER_RENAME, f"d/{name}")
    story.past.keep(story.past.begin(moved, {"d": False, "e": True}, Cause.FOLDER_RENAME, 0.0))
    with pytest.raises(Violation, match="moved with e/b"):
        story.put("e/.metadata", b"2")
    story.put("e/b", b"1")
    story.put("e/.metadata", b"2")


def test_a_temporary_name_before_60_seconds_is_forbidden(story: Story) -> None:
    story.close("a.tmp", b"1")
    story.time = 59.0
    with pytest.raises(Violation, match="temporary"):
        story.put("a.tmp", b"1")
    story.time = 60.0
    story.put("a.tmp", b"1")


def test_a_marker_of_a_directory_that_never_was_is_forbidden(story: Story) -> None:
    with pytest.raises(Violation, match="never was"):
        story.put("d/", b"")


def test_removing_a_directory_before_older_changes_beside_it_is_forbidden(story: Story) -> None:
    story.past.keep(story.past.begin({}, {"d": True}, Cause.MKDIR, 0.0))
    story.put("d/", b"")
    story.close("a", b"1")
    story.past.keep(story.past.begin({}, {"d": False}, Cause.RMDIR, 0.0))
    with pytest.raises(Violation, match="a still shows"):
        story.delete("d/")


def test_a_removal_may_be_late(story: Story) -> None:
    story.close("d/old", b"1")
    story.put("d/old", b"1")
    story.unlink("d/old")
    story.close("d/.metadata", b"2")
    story.put("d/.metadata", b"2")
    story.delete("d/old")


def test_the_removal_of_a_commit_marker_may_not_be_late_in_its_directory(story: Story) -> None:
    """What was written over beside the old marker would look like what the marker names."""
    for path in ("d/.metadata", "d/shard", "latest"):
        story.close(path, b"1")
        story.put(path, b"1")
    story.unlink("d/.metadata")
    story.close("latest", b"2")
    story.close("d/shard", b"2")
    story.put("latest", b"2")
    with pytest.raises(Violation, match=r"d/\.metadata still shows"):
        story.put("d/shard", b"2")
    story.delete("d/.metadata")
    story.put("d/shard", b"2")


def test_removing_a_directory_before_what_was_removed_in_it_is_forbidden(story: Story) -> None:
    story.past.keep(story.past.begin({}, {"d": True}, Cause.MKDIR, 0.0))
    story.put("d/", b"")
    story.close("d/old", b"1")
    story.put("d/old", b"1")
    story.unlink("d/old")
    story.past.keep(story.past.begin({}, {"d": False}, Cause.RMDIR, 0.0))
    with pytest.raises(Violation, match="d/old still shows"):
        story.delete("d/")


# ---- checkpoints


def come_to_a_delete_before_a_rename(story: Story) -> None:
    """The newer checkpoint has a temporary name as the older one is deleted."""
    story.checkpoint({"old": b"1"})
    story.put("old", b"1")
    story.time = 100.0
    story.close("new.tmp", b"2")
    story.checkpoints.complete(story.past.step, frozenset({b"2"}))
    story.unlink("old")
    story.rename("new.tmp", "new")


def test_deleting_the_only_checkpoint_is_forbidden(story: Story) -> None:
    come_to_a_delete_before_a_rename(story)
    with pytest.raises(Violation, match="no checkpoint is whole any more"):
        story.delete("old")


def test_deleting_a_checkpoint_is_allowed_once_the_newer_one_shows(story: Story) -> None:
    come_to_a_delete_before_a_rename(story)
    story.put("new", b"2")
    story.delete("old")
    story.unlink("new")
    story.delete("new")  # the node has none either


def test_half_a_checkpoint_is_none(story: Story) -> None:
    story.checkpoint({"d/a": b"1", "d/b": b"2"})
    story.put("d/a", b"1")
    story.put("d/b", b"2")
    story.checkpoint({"e/c": b"3"})
    story.close("d/a", b"4")
    with pytest.raises(Violation, match="no checkpoint is whole any more"):
        story.put("d/a", b"4")


def test_a_bucket_without_a_checkpoint_is_allowed_where_the_node_had_none(story: Story) -> None:
    story.checkpoint({"a": b"1"})
    story.put("a", b"1")
    story.unlink("a")
    story.checkpoint({"b": b"2"})
    story.delete("a")
