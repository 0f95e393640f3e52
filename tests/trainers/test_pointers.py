"""Pointers to the last checkpoint, as DeepSpeed (a text file) and Composer (a symlink) keep them, at every kill.

The libraries themselves want GPUs or half a gigabyte; what they do with files is this.
"""

import os
import shutil
from pathlib import Path

from tests.support.mounts import Mount, pattern, tree_of
from tests.trainers.checks import assert_tidy
from tests.trainers.kills import SLEEPY, Kills

KIB = 2**10


def save_like_deepspeed(root: Path, step: int, *, keep: int) -> None:
    """Write a folder of shards, then `latest` with its name; remove the folder that is too old."""
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(pattern(300 * KIB, seed=10 * step))
    (folder / "mp_rank_00_model_states.pt").write_bytes(pattern(900 * KIB, seed=step))
    with open(root / "latest", "w") as file:
        file.write(f"global_step{step}")
    old = root / f"global_step{step - keep}"
    if old.exists():
        shutil.rmtree(old)


def save_like_composer(root: Path, step: int) -> None:
    """Write one file, and let the symlink point to it."""
    name = f"ep0-ba{step}-rank0.pt"
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(pattern(700 * KIB, seed=step))
    link = root / "latest-rank0.pt"
    if link.is_symlink():
        link.unlink()
    link.symlink_to(name)


def test_latest_always_names_a_folder_that_is_whole(mount, bucket, kills: Kills):
    node: Mount = mount()
    save_like_deepspeed(node.path / "run", 1, keep=2)
    wholes = {"global_step1": tree_of(node.path / "run/global_step1")}
    node.unmount()
    again: Mount = mount(*SLEEPY, cache=node.cache)
    for step in (2, 3):
        save_like_deepspeed(again.path / "run", step, keep=2)
        wholes[f"global_step{step}"] = tree_of(again.path / f"run/global_step{step}")
    seen = set()
    for found in kills.at_every_request(kills.freeze(again), "run"):
        latest = found.files["run/latest"].decode()
        assert found.below(f"run/{latest}") == wholes[latest], found.request
        seen.add(latest)
    assert {"global_step1", "global_step3"} <= seen
    assert kills.count >= 2 * 2 + 1 + 2  # files of two steps, latest, and the first step's removal
    assert_tidy(bucket)


def test_a_symlink_to_the_last_file_is_never_there_before_it(mount, bucket, kills: Kills):
    node: Mount = mount()
    save_like_composer(node.path / "run", 1)
    node.unmount()
    again: Mount = mount(*SLEEPY, cache=node.cache)
    for step in (2, 3):
        save_like_composer(again.path / "run", step)
    wholes = {path.name: path.read_bytes() for path in (again.path / "run").glob("ep0-*")}
    seen = set()
    for found in kills.at_every_request(kills.freeze(again), "run"):
        target = found.links.get("run/latest-rank0.pt")
        # Between the unlink and the new link the node had none either.
        if target is not None:
            assert found.below("run").get(target) == wholes[target], found.request
            seen.add(target)
    assert {"ep0-ba1-rank0.pt", "ep0-ba3-rank0.pt"} <= seen
    assert_tidy(bucket)
    other: Mount = mount()
    assert os.readlink(other.path / "run/latest-rank0.pt") == "ep0-ba3-rank0.pt"
    assert (other.path / "run/latest-rank0.pt").read_bytes() == wholes["ep0-ba3-rank0.pt"]
