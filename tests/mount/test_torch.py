"""Checkpoints as trainers write them."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loader import latest_checkpoint
from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, run, run_python, wait_until

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed.checkpoint")
safetensors = pytest.importorskip("safetensors.torch")

DISTRIBUTED = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
dist.init_process_group("gloo")
rank = dist.get_rank()
state = {f"shared{index}": torch.full((1000,), float(index)) for index in range(20)}
state |= {f"rank{rank}.{index}": torch.full((50_000,), rank + index / 10) for index in range(20)}
if sys.argv[2] == "save":
    dcp.save(state, checkpoint_id=sys.argv[1])
else:
    wanted = {name: value.clone() for name, value in state.items()}
    for value in state.values():
        value.zero_()
    dcp.load(state, checkpoint_id=sys.argv[1])
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
dist.destroy_process_group()
"""


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


def test_safetensors_over_an_existing_file(place: Place):
    old, new = ({"weights": torch.full((500_000,), value)} for value in (1.0, 2.0))
    path = place.path / "model.safetensors"
    safetensors.save_file(old, path)
    place.sync()
    safetensors.save_file(new, path)
    assert torch.equal(safetensors.load_file(path)["weights"], new["weights"])
    assert (
        torch.equal(safetensors.load(place.bucket.get("model.safetensors"))["weights"], old["weights"])
        or place.bucket.get("model.safetensors") == path.read_bytes()
    )
    place.sync()
    assert place.bucket.names() == ["model.safetensors"]
    assert torch.equal(safetensors.load_file(place.second / path.name)["weights"], new["weights"])
    if place.bucket.service.control is not None:
        assert place.bucket.published() == [("PutObject", "model.safetensors")] * 2


@pytest.mark.timeout(600)
def test_a_distributed_checkpoint_of_two_ranks_is_complete_when_its_metadata_appear(mount, bucket, tmp_path):
    one: Mount = mount("--settle-seconds", "0.5")
    program = tmp_path / "program.py"
    program.write_text(DISTRIBUTED)

    def torchrun(mode: str, root: object) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            "--nproc-per-node=2",
            str(program),
        ]
        run(sys.executable, *words, f"{root}/step-1", mode, env=environment, seconds=240)

    torchrun("save", one.path)
    one.sync()
    assert [name for name in bucket.names() if not name.endswith("/")] == [
        "step-1/.metadata",
        "step-1/__0_0.distcp",
        "step-1/__1_0.distcp",
    ]
    if bucket.service.control is not None:
        order = [name for _, name in bucket.published() if not name.endswith("/")]
        assert sorted(order[:-1]) == ["step-1/__0_0.distcp", "step-1/__1_0.distcp"]
        assert order[-1] == "step-1/.metadata"
        assert not bucket.operations("CopyObject")
    other: Mount = mount()
    torchrun("load", other.path)


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
