"""Random and chosen programs, their node ended at any commit, request and file operation: no promise is ever broken."""

import itertools
import os
import re

import pytest

from tests.history.crashes import COMMIT, FILE, REQUEST, Moment
from tests.history.programs import KILL, REPLACES, STOP, Program, Step, every_moment, training
from tests.history.runs import Findings, raise_failed, run_histories, run_one, run_program, seeds_from

# Of random programs; `make fuzz` is for more.
HISTORIES = int(os.environ.get("FUSECACHE_TEST_HISTORIES", "120"))
CHUNKS = 4
LARGE = 150_000  # sent in three parts here

CHECKPOINTS: tuple[Step, ...] = (
    ("checkpoint", "d", 100),
    ("drain",),
    ("checkpoint", "e", LARGE),
    ("remove_all", "d"),
    ("symlink", "last.ckpt", "e"),
)
RENAMES: tuple[Step, ...] = (
    ("checkpoint", "d", 7),
    ("drain",),
    ("save", "d/b", LARGE),
    ("rename", "d/a", "a"),
    ("rename_folder", "d", "e"),
    ("safetensors", "latest", 100),
)
# A checkpoint under a temporary name, and another one.
SAVES_1: tuple[Step, ...] = (("save", "1.tmp", 100), ("complete", "1.tmp"))
SAVES_2: tuple[Step, ...] = (("save", "2.tmp", 100), ("complete", "2.tmp"))
REWRITES: tuple[Step, ...] = (
    ("save", "a", LARGE),
    ("wait", 1.2),
    ("save", "a", 5),
    ("open", 0, "a", "keep"),
    ("write", 0, "end", LARGE),
    ("close", 0),
    ("open", 1, "b", "truncate"),
    ("write", 1, "end", LARGE),
    ("flush", 1),
    ("wait", 3.0),
    ("late", 1, 0.5),
    ("unlink", "a"),
    ("replace", "a", 100),
)


@pytest.mark.case(34)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_histories(chunk: int) -> None:
    findings = Findings()
    run_histories(seeds_from(1 + chunk * 100_000), HISTORIES // CHUNKS, findings)
    assert findings.histories >= HISTORIES // CHUNKS


@pytest.mark.case(34)
def test_random_histories_of_a_node_whose_threads_are_slow() -> None:
    """Threads cannot be called back: what they were begun for may be gone when they return."""
    findings = Findings()
    run_histories(seeds_from(600_000), HISTORIES // 8, findings, moments_a_program=2, slow_threads=True)
    assert findings.histories >= HISTORIES // 8


@pytest.mark.case(34)
@pytest.mark.parametrize(
    "steps", [CHECKPOINTS, RENAMES, REWRITES], ids=["checkpoints", "renames", "rewrites"]
)
@pytest.mark.parametrize("kind", [COMMIT, REQUEST])
def test_a_node_that_ends_at_any_commit_or_request(steps: tuple[Step, ...], kind: str) -> None:
    whole = run_program(Program(1, steps))
    if whole.why:
        raise_failed(Program(1, steps), whole.why)
    findings = Findings()
    for moment in every_moment(whole.counts, [kind]):
        run_one(Program(1, steps, (moment,)), findings)
    assert findings.histories >= 2 * whole.counts[kind] - 4


@pytest.mark.case(34)
def test_every_point_of_a_files_way_is_one_at_which_nodes_ended() -> None:
    """Write, FLUSH, Create, part k, all parts, Complete sent and answered, Copy, Delete."""
    steps: tuple[Step, ...] = (
        ("save", "a", LARGE), ("drain",), ("rename", "a", "b"), ("drain",), ("unlink", "b")
    )  # fmt: skip
    whole = run_program(Program(2, steps))
    assert not whole.why
    findings = Findings()
    for moment in every_moment(whole.counts):
        run_one(Program(2, steps, (moment,)), findings)
    ended = " ".join(findings.labels)
    for label in (
        "file write after", "commit flushed.* after", "create_multipart after", "upload_part before",
        "upload_part after",
        "complete_multipart before", "complete_multipart after", "copy before", "copy after", "delete before",
        "delete after", "commit .*stored.* after", "file sync before", "commit .*publishing.* after",
    ):  # fmt: skip
        assert re.search(label, ended), f"no node ended at {label!r}: {ended}"
    assert findings.labels["upload_part after"] == 3  # after part 1, 2, and all


@pytest.mark.case(34)
@pytest.mark.parametrize("replaces", REPLACES)
@pytest.mark.parametrize("pause", [0.0, 1.2])
def test_a_trainer_finds_a_checkpoint_wherever_its_node_stops_or_is_killed(
    replaces: str, pause: float
) -> None:
    """With work pending, and it goes on. pause: seconds after each step, in which the bucket takes what is due."""
    saves = training(REPLACES[replaces], "", 3, 100)
    steps = [each for step in saves for each in ((step, ("wait", pause)) if pause else (step,))]
    first = steps.index(("drain",)) + 1
    ends = zip(
        range(first, len(steps) + 1), itertools.cycle((STOP, KILL) if pause else (KILL, STOP)), strict=False
    )
    programs = [Program(1, (*steps[:place], end, *steps[place:])) for place, end in ends]
    assert {run_program(program).why for program in programs} == {""}


# ---- what was broken once


@pytest.mark.parametrize(
    ("steps", "moments"),
    [
        pytest.param([("checkpoint", "d", 7), ("rename_folder", "d", "e")], [], id="order in a renamed directory"),
        pytest.param(
            [("mkdir", "d"), ("mkdir", "e"), ("save", "e/.metadata", 0), ("checkpoint", "e", 0),
             ("rename", "e/.metadata", "latest"), ("rename", "latest", "d/latest")],
            [],
            id="a published marker's newer version is moved twice, by the name of an older file",
        ),
        pytest.param(
            [("checkpoint", "d", 7), ("drain",), ("rename_folder", "d", "e")], [], id="order in a renamed published one"
        ),
        pytest.param(
            [("save", "b", 1), ("save", "b", 2), ("save", ".metadata", 3), ("save", "b", 4), ("save", ".metadata", 5)],
            [],
            id="the second of three versions that wait",
        ),
        pytest.param(
            [("save", "a", 7), ("drain",), ("open", 0, "a", "keep"), ("write", 0, "end", 5), ("rename", "a", "b"),
             ("wait", 10.0), ("look",)],
            [],
            id="a published file renamed while it is written",
        ),
        pytest.param(
            [("mkdir", "d"), ("save", "a", 0), ("symlink", "b", "a"), ("drain",), ("rename", "a", "d/a"),
             ("rename", "b", "d/b")],
            [Moment(REQUEST, 3, "before")],
            id="a renamed empty file and a renamed symlink, not published yet",
        ),
        pytest.param(
            [("mkdir", "d"), ("save", "latest", 100), ("drain",), ("safetensors", "b", LARGE),
             ("rename", "latest", "d/a")],
            [Moment(REQUEST, 1, "before"), Moment(REQUEST, 0, "after"), Moment(REQUEST, 6, "before")],
            id="a rename behind an upload under way",
        ),
        pytest.param(
            [("save", "latest", 5000), ("checkpoint", "d", 7), ("save", "latest", 100), ("rename", "latest", "b")],
            [],
            id="a rename with two versions that wait",
        ),
        pytest.param(
            [("checkpoint", "d", 7), ("drain",), ("rename_folder", "d", "e")],
            [Moment(REQUEST, 9, "after")],
            id="a file published while its directory is read",
        ),
        pytest.param(
            [("mkdir", "d"), ("checkpoint", "d/f", 5000), ("checkpoint", "d/f", 150000), ("remove_all", "d/f")],
            [Moment(FILE, 22, "after")],
            id="a checkpoint that is removed before it is there",
        ),
        pytest.param(
            [("checkpoint", "d", 100), ("rename", "d/a", "d/b")],
            [],
            id="a shard renamed over another of its checkpoint",
        ),
        pytest.param(
            [("mkdir", "d"), ("mkdir", "d/f"), ("save", "d/f/.metadata", LARGE), ("wait", 1.2),
             ("save", "d/c.tmp", 5000), ("remove_all", "d/f"), ("checkpoint", "d", LARGE), ("unlink", "d/c.tmp")],
            [],
            id="a temporary file removed beside a removal",
        ),
        pytest.param(
            [("mkdir", "d"), ("save", "d/c.tmp", 5000), ("drain",), ("save", "d/c.tmp", 100),
             ("rename", "d/c.tmp", "latest"), ("checkpoint", "d", 7)],
            [Moment(FILE, 19, "before")],
            id="a removal behind moved content that is written again",
        ),
        pytest.param(
            [("mkdir", "e"), ("save", "latest", 1), ("wait", 1.2), ("rename", "latest", "e/b"),
             ("save", "latest", 5000)],
            [],
            id="a name that comes back at once",
        ),
        pytest.param(
            [("mkdir", "d"), ("save", "c.tmp", 5000), ("drain",), ("save", "c.tmp", 7), ("rename", "c.tmp", "d/c.tmp")],
            [],
            id="a published temporary file's newer version goes to another directory",
        ),
        pytest.param(
            [("mkdir", "d"), ("save", "a", 7), ("drain",), ("save", "a", LARGE), ("rename", "a", "d/a"),
             ("rename_folder", "d", "e")],
            [],
            id="a published file's newer version is moved, and then its directory is",
        ),
        pytest.param(
            [("save", "a", 7), ("drain",), ("save", "a", LARGE), ("rename", "a", "b"), ("rename", "b", "c")],
            [],
            id="a published file's newer version is moved twice",
        ),
        pytest.param(
            [("mkdir", "d"), ("save", "latest", 100), ("checkpoint", "e", 100), ("wait", 65.0),
             ("rename", "latest", "d/c.tmp"), ("save", ".metadata", 1), ("rename", "d/c.tmp", "d/a")],
            [],
            id="what speaks of others is saved between two moves of a published file's newer version",
        ),
        pytest.param(
            [("save", "a", 150_000), ("drain",), ("truncate", "a", 7), ("rename", "a", ".metadata"),
             ("unlink", ".metadata")],
            [Moment(COMMIT, 4, "after")],
            id="a file removed whose rename follows a version of it that waits",
        ),
        pytest.param(
            [("mkdir", "d"), ("mkdir", "d/f"), ("save_by_rename", ".metadata", 0), ("symlink", "d/c.tmp", "../x"),
             ("rename", ".metadata", "d/c.tmp")],
            [Moment(REQUEST, 2, "after")],
            id="a file renamed over a symlink that was its directory's only entry",
        ),
        pytest.param(
            [("mkdir", "d"), ("mkdir", "e"), ("save", "a", 100), ("drain",), ("mkdir", "d/f"),
             ("open", 2, "a", "truncate"), ("outage",), ("rename_folder", "d/f", "e"), ("wait", 65.0)],
            [Moment(FILE, 5, "before")],
            id="a directory renamed onto another before a file that is held open is published",
        ),
        pytest.param(
            [("save", ".metadata", 100), ("checkpoint", "e", 7), ("open", 3, ".metadata", "keep"),
             ("save_by_rename", ".metadata", 7)],
            [Moment(REQUEST, 1, "before")],
            id="a version that waits is open for writing while another is renamed over it",
        ),
        pytest.param(
            [("open", 1, "latest", "truncate"), ("checkpoint", "d", 7), ("save", "d/a", 5000), ("late", 1, 0.0)],
            [],
            id="late pages of a marker that is older than another file's newer version",
        ),
        pytest.param(
            [("save", "c", 7), ("drain",), ("save", "c", 100), ("rename", "c", "a"), ("open", 2, "a", "truncate")],
            [Moment(REQUEST, 2, "before")],
            id="the old name's delete stays where it was though newer content of the new name waits",
        ),
        pytest.param(
            [("save", "b", 7), ("drain",), ("open", 3, "b", "keep"), ("unlink", "b"), ("drain",)],
            [],
            id="a sync while a removed file is still open",
        ),
        pytest.param(
            [("mkdir", "d"), ("save", "d/c.tmp", 7), ("drain",), ("save", "d/c.tmp", 100),
             ("rename", "d/c.tmp", "d/a"), ("open", 2, "d/a", "truncate")],
            [Moment(REQUEST, 3, "before")],
            id="a drain after a restart includes the delete of a temporary name that was published",
        ),
        pytest.param(
            [("mkdir", "d"), ("save", "d/b", 7), ("drain",), ("open", 2, "d/b", "truncate"), ("wait", 60.5),
             ("save", "d/a", 100), ("save", "d/b", 100)],
            [],
            id="a close in the place of what was to be published while the file stayed open",
        ),
        pytest.param(
            [("save", "old", 100), ("complete", "old"), ("drain",), ("save", "new.tmp", 100), ("complete", "new.tmp"),
             ("unlink", "old"), ("rename", "new.tmp", "new")],
            [],
            id="a delete before the rename of a newer checkpoint",
        ),
        pytest.param(
            [("save", "old", 100), ("complete", "old"), ("drain",), ("save", "new.1", 100), ("complete", "new.1"),
             ("unlink", "old"), STOP, ("rename", "new.1", "new")],
            [],
            id="a restart between a delete and the rename of a newer checkpoint",
        ),
        pytest.param(
            [("save", "last.ckpt", 100), ("complete", "last.ckpt"), ("drain",), ("save", "last.ckpt.tmp", 100),
             ("complete", "last.ckpt.tmp"), ("unlink", "last.ckpt"), ("save", "a", 7),
             ("rename", "last.ckpt.tmp", "last.ckpt")],
            [],
            id="a file is written between the delete and the rename of a checkpoint with a commit marker's name",
        ),
        pytest.param(
            [("save", "old", 100), ("complete", "old"), ("drain",), *SAVES_1, ("unlink", "old"), *SAVES_2,
             ("unlink", "1.tmp")],
            [],
            id="a newer checkpoint under a temporary name is removed for an even newer one",
        ),
        pytest.param(
            [("save", "old", 100), ("complete", "old"), ("drain",), *SAVES_1, ("unlink", "old"), *SAVES_2,
             ("wait", 40.0), *SAVES_1, *SAVES_2, ("wait", 30.0), ("unlink", "1.tmp")],
            [],
            id="the same later than a delete follows",
        ),
        pytest.param(
            [*training(REPLACES["a folder of the same name"], "", 3, 100), STOP],
            [],
            id="content whose directory was removed after it was renamed, and was made again",
        ),
        pytest.param(
            [("mkdir", "d"), ("save", "a", 150_000), ("save", "d/.metadata", 150_000), ("rename", "a", "d/a"),
             ("rename_folder", "d", "e")],
            [Moment(REQUEST, 2, "after")],
            id="a directory renamed with a queued marker that is older than a file that was moved beside it",
        ),
    ],
)  # fmt: skip
def test_programs_that_once_broke_a_promise(steps: list[Step], moments: list[Moment]) -> None:
    assert run_program(Program(1, tuple(steps), tuple(moments))).why == ""


def test_local_bytes_go_only_after_the_row_that_lets_them_go() -> None:
    steps: tuple[Step, ...] = (("save", "a", 7), ("save", "a", LARGE), ("save", "a", 9), ("unlink", "a"))
    for seed in range(2):  # of the order in which tasks have their turns
        moments = every_moment(run_program(Program(seed, steps)).counts, [COMMIT, FILE])
        assert {run_program(Program(seed, steps, (moment,))).why for moment in moments} == {""}


@pytest.mark.parametrize("change", [("unlink", "a"), ("rename", "a", "b"), ("save", "a", LARGE)])
def test_an_upload_that_was_ended_is_aborted_though_the_node_ends_before_that(change: Step) -> None:
    """A part fails once: the upload is under way when its file goes, or gets another name or content."""
    steps: tuple[Step, ...] = (("save", "a", LARGE), ("fail", 2, "before"), ("wait", 1.2), change)
    moments = every_moment(run_program(Program(1, steps)).counts, [COMMIT, REQUEST])
    assert {run_program(Program(1, steps, (moment,))).why for moment in moments} == {""}


def test_a_close_that_is_taken_back_leaves_the_closed_version_before_it() -> None:
    """One program closed the file; another, which holds it twice, closes it once and goes on writing."""
    steps: tuple[Step, ...] = (
        ("save", "a", 7), ("open", 0, "a", "keep"), ("write", 0, "end", LARGE), ("flush", 0), ("write", 0, "start", 5),
    )  # fmt: skip
    moments = every_moment(run_program(Program(1, steps)).counts, [COMMIT])
    assert {run_program(Program(1, steps, (moment,))).why for moment in moments} == {""}


def test_a_close_that_was_taken_back_and_is_made_again_has_its_new_place() -> None:
    """Another writer is left at the first close of `b`. Its own close, which changes nothing, comes after `latest`."""
    steps: tuple[Step, ...] = (
        ("mkdir", "d"), ("save", "a", 1), ("drain",), ("open", 2, "b", "truncate"), ("rename", "a", "d/a"),
        ("save", "b", 5000), ("replace", "d/a", 0), ("replace", "latest", LARGE), ("wait", 1.2),
    )  # fmt: skip
    moments = every_moment(run_program(Program(1, steps)).counts, [COMMIT])
    assert {run_program(Program(1, steps, (moment,))).why for moment in moments} == {""}
