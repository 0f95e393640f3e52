"""Lightning's ModelCheckpoint: a temporary directory elsewhere, `last.ckpt` as a copy and as a link; and Fabric."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.trainers.checks import arrivals, assert_tidy
from tests.trainers.workers import Worker

if TYPE_CHECKING:
    from tests.support.mounts import Mount


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process with Lightning in it."""
    with Worker("jobs_lightning", tmp_path_factory.mktemp("trainer")) as worker:
        yield worker


@pytest.fixture(scope="module")
def resumed(trainer: Worker, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Saved step -> the weights after eight steps, resumed from there on a local disk.

    Not those of a run without a break: Lightning begins a DataLoader's epoch again.
    """
    directory = str(tmp_path_factory.mktemp("local"))
    trainer.call("train", directory=directory, steps=6)
    return {
        step: trainer.call("train", directory=directory, steps=8, resume=f"{directory}/step={step}.ckpt")
        for step in (4, 6)
    }


@pytest.mark.case(12)
def test_a_checkpoint_moved_from_another_disk_is_uploaded_once(
    mount, bucket, trainer: Worker, resumed: dict[int, str], tmp_path: Path
):
    """Case 12: the rename from TMPDIR says EXDEV, so that it is copied, and then its times and mode are set."""
    node: Mount = mount()
    directory = f"{node.path}/run"
    trainer.call("train", directory=directory, steps=4, temporary=str(tmp_path))
    node.sync()
    assert sorted(arrivals(bucket)) == ["run/step=2.ckpt", "run/step=4.ckpt"]
    assert_tidy(bucket)
    assert list(tmp_path.iterdir()) == []
    other: Mount = mount()
    resume = f"{other.path}/run/step=4.ckpt"
    assert trainer.call("train", directory=str(tmp_path), steps=8, resume=resume) == resumed[4]


def test_a_checkpoint_made_in_a_local_directory_of_the_mount_is_renamed_into_place(
    mount, bucket, trainer: Worker, resumed: dict[int, str], tmp_path: Path
):
    node: Mount = mount("--local-only", "tmp/")
    (node.path / "tmp").mkdir()
    trainer.call("train", directory=f"{node.path}/run", steps=4, temporary=f"{node.path}/tmp")
    assert list((node.path / "tmp").iterdir()) == []
    node.sync()
    assert sorted(arrivals(bucket)) == ["run/step=2.ckpt", "run/step=4.ckpt"]
    assert_tidy(bucket)
    other: Mount = mount()
    resume = f"{other.path}/run/step=4.ckpt"
    assert trainer.call("train", directory=str(tmp_path), steps=8, resume=resume) == resumed[4]


def test_a_last_checkpoint_that_is_a_link_leads_to_its_file_on_every_node(
    mount, bucket, trainer: Worker, resumed: dict[int, str], tmp_path: Path
):
    node: Mount = mount()
    trainer.call("train", directory=f"{node.path}/run", steps=6, temporary=str(tmp_path), save_last="link")
    assert os.readlink(node.path / "run/last.ckpt") == "step=6.ckpt"
    node.sync()
    names = arrivals(bucket)
    assert names[-1] == "run/last.ckpt"  # after what it points to
    assert_tidy(bucket)
    other: Mount = mount()
    assert os.readlink(other.path / "run/last.ckpt") == "step=6.ckpt"
    resume = f"{other.path}/run/last.ckpt"
    assert trainer.call("train", directory=str(tmp_path), steps=8, resume=resume) == resumed[6]


def test_a_last_checkpoint_that_is_a_copy_has_its_bytes_and_old_ones_go(
    mount, bucket, trainer: Worker, resumed: dict[int, str], tmp_path: Path
):
    node: Mount = mount()
    directory = f"{node.path}/run"
    trainer.call("train", directory=directory, steps=6, temporary=str(tmp_path), save_last=True, keep=1)
    node.sync()
    assert [name for name in bucket.names() if not name.endswith("/")] == ["run/last.ckpt", "run/step=6.ckpt"]
    assert_tidy(bucket)
    other: Mount = mount()
    resume = f"{other.path}/run/last.ckpt"
    assert trainer.call("train", directory=str(tmp_path), steps=8, resume=resume) == resumed[6]


def test_fabric_resumes_on_another_node_with_the_weights_of_a_run_without_a_break(
    mount, bucket, trainer: Worker, tmp_path: Path
):
    undisturbed = trainer.call("train_by_fabric", directory=str(tmp_path), temporary=str(tmp_path), steps=8)
    node: Mount = mount()
    trainer.call("train_by_fabric", directory=f"{node.path}/run", temporary=str(tmp_path), steps=6)
    node.sync()
    assert sorted(arrivals(bucket)) == [f"run/step={step}.ckpt" for step in (2, 4, 6)]
    assert_tidy(bucket)
    other: Mount = mount()
    again = {"steps": 8, "temporary": str(tmp_path), "resume": f"{other.path}/run/step=4.ckpt"}
    assert trainer.call("train_by_fabric", directory=f"{other.path}/again", **again) == undisturbed
    other.sync()
    for step in (6, 8):
        saved = bucket.get(f"again/step={step}.ckpt")
        assert saved == (other.path / f"again/step={step}.ckpt").read_bytes()
