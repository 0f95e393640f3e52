"""Which directories are checkpoints, which are whole, which go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.config.option_groups import ORDER_LAST
from fusecache.model.objects import ObjectInfo
from fusecache.policy.checkpoints import CheckpointSurvey, Fate, checkpoint_folder

REMOVED, KEPT, BEING_WRITTEN, INCOMPLETE, RECENT = (
    Fate.REMOVED,
    Fate.KEPT,
    Fate.BEING_WRITTEN,
    Fate.INCOMPLETE,
    Fate.RECENT,
)


def survey(*objects: tuple[str, float]) -> CheckpointSurvey:
    """Return the survey of objects of one byte: their keys and times."""
    found = CheckpointSurvey("run/", ORDER_LAST)
    for key, modified in objects:
        found.add(ObjectInfo(key, "etag", 1, modified))
    return found


def fates(
    found: CheckpointSurvey, keep: int | None = 1, *, incomplete: bool = False, newest: float = 1e9
) -> dict[str, Fate]:
    rows = found.fates(keep=keep, removes_incomplete=incomplete, newest_seconds=newest)
    return {summary.folder.removeprefix("run/").rstrip("/"): fate for summary, fate in rows}


@pytest.mark.parametrize(
    ("key", "folder"),
    [
        ("run/step-1000/a.pt", "run/step-1000/"),
        ("run/a/checkpoint-500/deep/b", "run/a/checkpoint-500/"),
        ("run/global_step20/global_step20/x", "run/global_step20/"),
        ("run/ep0-ba100/x", "run/ep0-ba100/"),
        ("run/epoch=3-step=7.ckpt/x", "run/epoch=3-step=7.ckpt/"),
        ("run/iter_0000100/", "run/iter_0000100/"),
        ("run/checkpoints/0100/x", "run/checkpoints/0100/"),
        ("run/model-step-5/x", "run/model-step-5/"),
        ("run/step-1000.pt", None),
        ("run/data/0100/index.json", None),
        ("run/steps/x", None),
        ("run/shard-5/x", None),
        ("run/backup_2024/x", None),
        ("run/latest", None),
    ],
)
def test_step_like_directories_are_checkpoints(key: str, folder: str | None) -> None:
    assert checkpoint_folder(key, "run/") == folder


def test_source_above_numbers_counts_as_their_parent() -> None:
    assert checkpoint_folder("run/ckpt/7/x", "run/ckpt/") == "run/ckpt/7/"


def test_newest_are_those_of_highest_steps() -> None:
    found = survey(*((f"run/step-{step}/.metadata", step) for step in (9, 10, 100)))
    assert fates(found, 2) == {"step-9": REMOVED, "step-10": KEPT, "step-100": KEPT}


def test_run_that_went_back_keeps_both_ends() -> None:
    found = survey(("run/step-100/.metadata", 1), ("run/step-200/.metadata", 2), ("run/step-50/.metadata", 3))
    assert fates(found) == {"step-100": REMOVED, "step-200": KEPT, "step-50": KEPT}


def test_early_marker_alone_is_not_whole() -> None:
    """Of two markers one is written early: a checkpoint with it alone is being written."""
    early, late = "model.safetensors.index.json", "trainer_state.json"
    found = survey(
        *((f"run/checkpoint-{step}/{name}", step) for step in (1, 2) for name in (early, late)),
        (f"run/checkpoint-3/{early}", 3),
        (f"run/checkpoint-4/{early}", 4),
    )
    assert fates(found) == {
        "checkpoint-1": REMOVED,
        "checkpoint-2": KEPT,
        "checkpoint-3": BEING_WRITTEN,
        "checkpoint-4": BEING_WRITTEN,
    }


def test_markers_of_each_rank_are_one_kind() -> None:
    found = survey(
        ("run/step-1/0.done", 1),
        ("run/step-1/1.done", 1),
        ("run/step-2/0.done", 2),
        ("run/step-2/17.done", 2),
    )
    assert fates(found) == {"step-1": REMOVED, "step-2": KEPT}


def test_series_without_any_marker_stays() -> None:
    found = survey(("run/step-1/a", 1), ("run/step-2/a", 2))
    assert fates(found, incomplete=True) == {"step-1": BEING_WRITTEN, "step-2": BEING_WRITTEN}


def test_series_do_not_count_for_each_other() -> None:
    found = survey(
        ("run/a/step-1/.metadata", 1), ("run/b/step-2/.metadata", 2), ("run/a/tmp-step-3/.metadata", 3)
    )
    assert set(fates(found).values()) == {KEPT}


def test_by_age_a_young_object_keeps_all() -> None:
    found = survey(("run/step-1/a", 1), ("run/step-1/b", 9), ("run/step-2/a", 2))
    assert fates(found, None, newest=5) == {"step-1": RECENT, "step-2": REMOVED}


CHECKPOINTS = st.dictionaries(
    st.integers(0, 30), st.tuples(st.booleans(), st.floats(0, 100)), min_size=1, max_size=12
)


@given(steps=CHECKPOINTS, keep=st.integers(1, 5), incomplete=st.booleans(), newest=st.floats(0, 100))
def test_enough_whole_ones_stay_always(
    *, steps: dict[int, tuple[bool, float]], keep: int, incomplete: bool, newest: float
) -> None:
    found = survey(
        *((f"run/step-{step}/{name}", modified)
          for step, (is_whole, modified) in steps.items()
          for name in ("a", *([".metadata"] if is_whole else [])))
    )  # fmt: skip
    got = fates(found, keep, incomplete=incomplete, newest=newest)
    whole = {step for step, (is_whole, _) in steps.items() if is_whole}
    gone = {int(name.removeprefix("step-")) for name, fate in got.items() if fate is REMOVED}
    highest = set(sorted(whole)[-keep:])
    assert len(whole - gone) >= min(keep, len(whole))
    assert not gone & highest
    assert all(steps[step][1] <= newest for step in gone)
    # An incomplete one goes only on request, and only if it is older than the newest whole one.
    assert all(incomplete and step < max(whole) for step in gone - whole)
