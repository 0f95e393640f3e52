"""Pointers to the last checkpoint at every kill: text files as DeepSpeed and Megatron keep them, Composer's symlink.

The libraries themselves want GPUs or half a gigabyte; what they do with files is this.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

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


def save_like_megatron(root: Path, step: int, *, keep: int) -> None:
    """Write a folder of the format torch_dist, then the file with its number; remove the folder that is too old."""
    folder = root / f"iter_{step:07}"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"__{number}_0.distcp").write_bytes(pattern(500 * KIB, seed=10 * step + number))
    for name in (".metadata", "common.pt", "metadata.json"):
        (folder / name).write_bytes(pattern(KIB, seed=step))
    with open(root / "latest_checkpointed_iteration.txt", "w") as file:
        file.write(str(step))
    old = root / f"iter_{step - keep:07}"
    if old.exists():
        shutil.rmtree(old)


@dataclass(frozen=True)
class Library:
    """How a library keeps its last checkpoint. folder: of a step; step_of: of the text in the file `pointer`."""

    save: Callable[..., None]
    pointer: str
    folder: str
    step_of: Callable[[str], int]


LIBRARIES = {
    "DeepSpeed": Library(
        save_like_deepspeed, "latest", "global_step{}", lambda text: int(text.removeprefix("global_step"))
    ),
    "Megatron": Library(save_like_megatron, "latest_checkpointed_iteration.txt", "iter_{:07}", int),
}


def save_like_composer(root: Path, step: int) -> None:
    """Write one file, and let the symlink point to it."""
    name = f"ep0-ba{step}-rank0.pt"
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(pattern(700 * KIB, seed=step))
    link = root / "latest-rank0.pt"
    if link.is_symlink():
        link.unlink()
    link.symlink_to(name)


@pytest.mark.parametrize("name", LIBRARIES)
def test_latest_always_names_a_folder_that_is_whole(mount, bucket, kills: Kills, name: str):
    library = LIBRARIES[name]
    node: Mount = mount()
    library.save(node.path / "run", 1, keep=2)
    wholes = {1: tree_of(node.path / "run" / library.folder.format(1))}
    node.unmount()
    again: Mount = mount(*SLEEPY, cache=node.cache)
    for step in (2, 3):
        library.save(again.path / "run", step, keep=2)
        wholes[step] = tree_of(again.path / "run" / library.folder.format(step))
    seen = set()
    for found in kills.at_every_request(kills.freeze(again), "run"):
        latest = library.step_of(found.files[f"run/{library.pointer}"].decode())
        assert found.below(f"run/{library.folder.format(latest)}") == wholes[latest], found.request
        seen.add(latest)
    assert {1, 3} <= seen
    assert kills.count >= 2 * 2 + 1 + 2  # files of two steps, the pointer, and the first step's removal
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
