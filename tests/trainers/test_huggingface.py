"""transformers' Trainer and accelerate: saving, rotating, and resuming on another node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loader import latest_checkpoint
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, tree_of, wait_until
from tests.support.readme import readme_block
from tests.trainers.checks import arrivals, assert_once, assert_tidy
from tests.trainers.kills import SLEEPY, Found, Kills
from tests.trainers.workers import Worker


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process with transformers and accelerate in it."""
    with Worker("jobs_huggingface", tmp_path_factory.mktemp("trainer")) as worker:
        yield worker


@pytest.fixture(scope="module")
def undisturbed(trainer: Worker, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after eight steps on a local disk, without a break."""
    weights: str = trainer.call("train", output=str(tmp_path_factory.mktemp("local")), steps=8)
    return weights


def test_a_run_that_keeps_two_checkpoints_goes_on_elsewhere_as_if_nothing_had_happened(
    mount, bucket, trainer: Worker, undisturbed: str
):
    node: Mount = mount()
    trainer.call("train", output=f"{node.path}/run", steps=6, keep=2)
    node.sync()
    assert {name.split("/")[1] for name in bucket.names() if name.count("/") > 1} == {
        "checkpoint-4",
        "checkpoint-6",
    }
    for step in (4, 6):
        assert_last_before_deletes(bucket, f"run/checkpoint-{step}")
    assert_tidy(bucket)
    assert_once(bucket)
    other: Mount = mount()
    assert trainer.call("train", output=f"{other.path}/run", steps=8, keep=2, resume=True) == undisturbed
    other.sync()
    kept = sorted(path.name for path in (other.path / "run").iterdir())
    assert kept == ["checkpoint-6", "checkpoint-8"]


def assert_last_before_deletes(bucket, folder: str) -> None:
    """Fail unless `trainer_state.json`, which makes a checkpoint whole, came after the folder's other files."""
    inside = [
        name
        for name in arrivals(bucket, "PutObject", "CompleteMultipartUpload")
        if name.startswith(f"{folder}/")
    ]
    assert len(inside) > 4
    assert inside[-1] == f"{folder}/trainer_state.json"


@pytest.mark.case(10)
def test_an_old_checkpoint_stays_whole_when_the_network_goes_after_its_local_removal(
    mount, bucket, expect_log, trainer: Worker, undisturbed: str
):
    """Case 10."""
    expect_log("publish failed, will retry")
    node: Mount = mount()
    trainer.call("train", output=f"{node.path}/run", steps=2, keep=1)
    node.sync()
    old = {name: data for name, data in objects(bucket).items() if name.startswith("run/checkpoint-2/")}
    assert len(old) > 4
    held = f"{bucket.prefix}run/checkpoint-4/optimizer.pt"
    bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key=held))
    trainer.call("train", output=f"{node.path}/run", steps=4, keep=1, resume=True)
    assert [path.name for path in (node.path / "run").iterdir()] == ["checkpoint-4"]
    (node.path / "elsewhere").write_bytes(b"1")
    wait_until(lambda: "elsewhere" in bucket.names(), "a file elsewhere, which does not wait")
    bucket.control.pause()
    shown = objects(bucket)
    assert {name: shown.get(name) for name in old} == old
    assert "run/checkpoint-4/trainer_state.json" not in shown
    wait_until(lambda: "publish failed, will retry" in node.log(), "the node to notice", seconds=60)
    bucket.control.clear_faults()
    bucket.control.resume()
    node.sync()
    assert {name.split("/")[1] for name in bucket.names() if name.count("/") > 1} == {"checkpoint-4"}
    other: Mount = mount()
    assert trainer.call("train", output=f"{other.path}/run", steps=8, resume=True) == undisturbed


def objects(bucket) -> dict[str, bytes]:
    """Return what the bucket holds, asked of the server itself: also while nobody can reach it."""
    control = bucket.control
    return {
        key.removeprefix(bucket.prefix): control.read(key)
        for key in control.objects()
        if key.startswith(bucket.prefix) and not key.endswith("/")
    }


@pytest.mark.case(11)
def test_a_node_killed_at_any_put_leaves_a_last_checkpoint_that_is_whole(
    mount, bucket, trainer: Worker, kills: Kills, undisturbed: str, tmp_path: Path
):
    """Case 11: a checkpoint is written and the published one before it removed, while nothing is published."""
    node: Mount = mount()
    trainer.call("train", output=f"{node.path}/run", steps=2, keep=1)
    wholes = {"checkpoint-2": files_of(node.path / "run/checkpoint-2")}
    node.unmount()
    again: Mount = mount(*SLEEPY, cache=node.cache)
    trainer.call("train", output=f"{again.path}/run", steps=4, keep=1, resume=True)
    wholes["checkpoint-4"] = files_of(again.path / "run/checkpoint-4")
    assert [path.name for path in (again.path / "run").iterdir()] == ["checkpoint-4"]

    resumed: set[str] = set()
    for found in kills.at_every_request(kills.freeze(again), "run", methods="PUT"):
        last = last_checkpoint(found)
        assert found.below(f"run/{last}") == wholes[last], found.request
        if last not in resumed:
            resumed.add(last)
            other: Mount = mount("--read-only")
            # By name: left alone, the Trainer takes the highest folder, also while it is still being uploaded.
            resume = f"{other.path}/run/{last}"
            assert latest_checkpoint(other.path / "run") == Path(resume)
            assert trainer.call("train", output=str(tmp_path), steps=8, resume=resume) == undisturbed
            other.unmount()
    assert resumed == set(wholes)
    assert kills.count >= len(wholes["checkpoint-4"])
    assert_tidy(bucket)


def test_the_program_of_the_readme_resumes_on_another_node(mount, trainer: Worker):
    program = readme_block("python", "Trainer").replace(
        "save_steps=500", "save_steps=2, max_steps=4, report_to=[]"
    )
    node: Mount = mount()
    assert trainer.call("carry_out", program=program.replace("/data", str(node.path))) == ("None", 4)
    node.sync()
    other: Mount = mount()
    program = program.replace("max_steps=4", "max_steps=6").replace("/data", str(other.path))
    assert trainer.call("carry_out", program=program) == (f"{other.path}/checkpoints/checkpoint-4", 6)


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree_of(folder).items() if isinstance(data, bytes)}


def last_checkpoint(found: Found) -> str:
    """Return the highest checkpoint that has its `trainer_state.json`."""
    names = [
        name.split("/")[1]
        for name in found.files
        if name.startswith("run/checkpoint-") and name.endswith("/trainer_state.json")
    ]
    assert names, f"no checkpoint left at {found.request}"
    return max(names, key=lambda name: int(name.rpartition("-")[2]))


def test_accelerate_keeps_two_and_another_node_loads_the_last(mount, bucket, trainer: Worker, tmp_path: Path):
    straight = trainer.call("accelerate", output=str(tmp_path / "local"), saves=4, keep=9)
    node: Mount = mount()
    trainer.call("accelerate", output=f"{node.path}/run", saves=3, keep=2)
    node.sync()
    kept = {name.split("/")[2] for name in bucket.names() if name.count("/") > 2}
    assert kept == {"checkpoint_1", "checkpoint_2"}
    assert_tidy(bucket)
    assert_once(bucket)
    other: Mount = mount()
    last = f"{other.path}/run/checkpoints/checkpoint_2"
    again = trainer.call("accelerate_again", output=str(tmp_path), checkpoint=last, done=6, steps=8)
    assert again == straight


def test_accelerate_that_removes_before_it_saves_always_has_a_whole_checkpoint_in_the_bucket(
    mount, bucket, trainer: Worker
):
    """With `total_limit=1` the old checkpoint goes first, unless removed objects stay for a while."""
    node: Mount = mount("--delete-delay", "3600")
    trainer.call("accelerate", output=f"{node.path}/run", saves=1, keep=1)
    node.sync()
    old = {name: data for name, data in objects(bucket).items() if "/checkpoint_0/" in name}
    assert len(old) > 2
    held = f"{bucket.prefix}run/checkpoints/checkpoint_1/optimizer.bin"
    bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key=held))
    trainer.call("accelerate", output=f"{node.path}/run", saves=2, keep=1)
    assert [path.name for path in (node.path / "run/checkpoints").iterdir()] == ["checkpoint_1"]
    (node.path / "elsewhere").write_bytes(b"1")
    wait_until(lambda: "elsewhere" in bucket.names(), "a file elsewhere, which does not wait")
    assert {name: objects(bucket).get(name) for name in old} == old
    bucket.control.clear_faults()
    node.unmount()  # what is asked for is carried out, however long it should have waited
    assert {name.split("/")[2] for name in bucket.names() if name.count("/") > 2} == {"checkpoint_1"}


@pytest.mark.case(3)
def test_tensors_saved_over_a_published_file_replace_it_at_once_and_whole(mount, bucket, trainer: Worker):
    """Case 3."""
    node, other = mount(), mount()
    trainer.call("save_tensors", path=f"{node.path}/model.safetensors", value=1)
    node.sync()
    bucket.control.faults(
        Fault(FaultAction.HOLD, operation="PutObject", key=f"{bucket.prefix}model.safetensors")
    )
    trainer.call("save_tensors", path=f"{node.path}/model.safetensors", value=2)
    assert trainer.call("load_tensors", path=f"{node.path}/model.safetensors") == 2
    wait_until(lambda: len(bucket.operations("PutObject")) == 2, "the upload of the second", seconds=60)
    assert trainer.call("load_tensors", path=f"{other.path}/model.safetensors") == 1
    bucket.control.clear_faults()
    node.sync()
    newer: Mount = mount()
    assert trainer.call("load_tensors", path=f"{newer.path}/model.safetensors") == 2
    assert bucket.published() == [("PutObject", "model.safetensors")] * 2
    assert_tidy(bucket)
