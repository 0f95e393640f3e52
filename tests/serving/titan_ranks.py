"""Ranks that take batches as torchtitan's trainer does, and save their state as its checkpoints do.

`python -m tests.serving.titan_ranks RANKS BATCH DATA SAVED FIRST COUNT` starts the ranks, and prints their batches.
"""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import torch.distributed as dist
from torch.distributed import checkpoint

from loader.torchtitan import TitanLoader


def run_rank(size: int, data: str, saved: Path, first: int, count: int) -> None:
    dist.init_process_group("gloo")
    config = TitanLoader.Config(dataset_path=data)
    ranks = dist.get_world_size()
    loader = config.build(
        dp_world_size=ranks,
        dp_rank=dist.get_rank(),
        tokenizer=None,
        seq_len=8,
        local_batch_size=size // ranks,
        snapshot_every_n_steps=1,
    )
    if first:
        checkpoint.load({"dataloader": loader}, checkpoint_id=saved / f"step-{first}")
    batches, batch = [], iter(loader)
    for _ in range(count):
        inputs, labels = next(batch)
        assert (inputs["input"] + 1 == labels).all()
        batches.append(inputs["input"][:, 0].tolist())
    checkpoint.save({"dataloader": loader}, checkpoint_id=saved / f"step-{first + count}")
    everyone: list[list[list[int]]] = [[]] * ranks
    dist.all_gather_object(everyone, batches)
    if dist.get_rank() == 0:
        steps = [list(chain.from_iterable(step)) for step in zip(*everyone, strict=True)]
        print(json.dumps({"batches": steps}))  # noqa: T201
    dist.destroy_process_group()


def main() -> None:
    if sys.argv[1] == "rank":
        _, _, size, data, saved, first, count = sys.argv
        run_rank(int(size), data, Path(saved), int(first), int(count))
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={sys.argv[1]}"]
    words = [sys.executable, *launcher, "-m", "tests.serving.titan_ranks", "rank", *sys.argv[2:]]
    subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
