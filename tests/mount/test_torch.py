"""Checkpoints as trainers write them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from loader import latest_checkpoint
from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, run_python, wait_until

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed.checkpoint")


def test_torch_save_and_load(place: Place):
    state = {"weights": torch.arange(1_000_000.0), "step": 7}
    torch.save(state, place.path / "model.pt")
    loaded = torch.load(place.path / "model.pt")
    assert loaded["step"] == 7
    assert torch.equal(loaded["weights"], state["weights"])
    place.sync()
    mapped = torch.load(place.second / "model.pt", mmap=True)
    assert torch.equal(mapped["weights"], state["weights"])
    if place.bucket.service.control is not None:
        assert place.bucket.published() == [("PutObject", "model.pt")]


def test_torch_save_again_and_again_over_the_same_name(place: Place):
    for step in range(3):
        torch.save({"step": torch.tensor(step)}, place.path / "last.pt")
        assert torch.load(place.path / "last.pt")["step"].item() == step
    place.sync()
    assert torch.load(place.second / "last.pt")["step"].item() == 2


def test_a_killed_torch_save_leaves_the_old_checkpoint(place: Place, expect_log):
    expect_log("quarantined unfinished file")
    torch.save({"step": 1}, place.path / "model.pt")
    place.sync()
    old = (place.path / "model.pt").read_bytes()
    program = """
import os, signal, sys, torch
class Poison:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
torch.save({"weights": torch.zeros(1_000_000), "end": Poison()}, sys.argv[1])
"""
    assert run_python(program, place.path / "model.pt", check=False).returncode == -9
    (place.path / "after").write_bytes(b"1")
    place.sync()
    assert torch.load(place.second / "model.pt") == {"step": 1}
    # The kernel tells the daemon of the last close when the program is gone already.
    wait_until(lambda: (place.path / "model.pt").read_bytes() == old, "the published version to show again")
    assert torch.load(place.path / "model.pt") == {"step": 1}


def unlink_and_link(link: Path, target: str) -> None:
    """As Composer does."""
    link.unlink()
    link.symlink_to(target)


def link_and_rename(link: Path, target: str) -> None:
    """As `ln --symbolic --force` does."""
    beside = link.with_name("CuXQX3Z")
    beside.symlink_to(target)
    beside.replace(link)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("change", [unlink_and_link, link_and_rename])
def test_a_published_link_to_the_last_checkpoint_is_changed_several_times_before_it_is_published(
    mount, bucket, expect_log, change: Callable[[Path, str], None], times: int
):
    expect_log("recovered files=")
    node: Mount = mount()
    (node.path / "latest").symlink_to("step-0.pt")
    node.unmount()
    again: Mount = mount("--settle-seconds", "3600", cache=node.cache)
    for step in range(times):
        change(again.path / "latest", f"step-{step + 1}.pt")
    again.kill()
    recovered: Mount = mount(cache=node.cache)
    assert os.readlink(recovered.path / "latest") == f"step-{times}.pt"
    recovered.sync()
    assert bucket.names() == ["latest"]
    other: Mount = mount()
    assert os.readlink(other.path / "latest") == f"step-{times}.pt"


@pytest.mark.s3server_only
@pytest.mark.parametrize(
    ("older", "newer", "marker"),
    [("checkpoint-2", "checkpoint-4", "trainer_state.json"), ("step-2", "step-4", ".metadata")],
)
def test_another_node_resumes_from_the_newest_checkpoint_that_the_bucket_has_whole(
    place: Place, older: str, newer: str, marker: str
):
    bucket, control = place.bucket, place.bucket.control
    for name in (older, newer):
        if name == newer:
            held = f"{bucket.prefix}{newer}/__0_0.distcp"
            control.faults(Fault(FaultAction.HOLD, operation="PutObject", key=held))
        (place.path / name).mkdir()
        for file in ("__0_0.distcp", "__1_0.distcp", marker):
            (place.path / name / file).write_bytes(b"content")
        if name == older:
            place.sync()
    wait_until(lambda: f"{newer}/__1_0.distcp" in bucket.names(), "a part of the newer one")
    wait_until(lambda: newer in os.listdir(place.second), "the second node to see it")
    assert latest_checkpoint(place.second) == place.second / older
    assert latest_checkpoint(place.path) == place.path / newer
    control.clear_faults()
    place.sync()
    wait_until(lambda: (place.second / newer / marker).exists(), "the second node to see all of it")
    assert latest_checkpoint(place.second) == place.second / newer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_are_found(place: Place):
    assert latest_checkpoint(place.path) is None
    for step in (5, 10):
        distributed.save({"weights": torch.ones(1000)}, checkpoint_id=place.path / f"step-{step}")
    assert latest_checkpoint(place.path) == place.path / "step-10"
    torch.save({"step": 7}, place.path / "step-20.pt")
    assert latest_checkpoint(place.path) == place.path / "step-20.pt"
