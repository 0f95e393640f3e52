"""A small classifier with DeepSpeed ZeRO stage 2. It knows two local directories and nothing of buckets."""

import argparse
import os
from pathlib import Path

import deepspeed
import numpy
import torch

CLASSES = 4
BATCH = 8  # of all ranks together
SAVE_EVERY = 4


def make_data(directory: Path, samples: int = 96) -> None:
    """Write one `.npy` file for each sample: 16 features, then the class, that of the nearest of four points."""
    random = numpy.random.default_rng(7)
    points = random.normal(size=(CLASSES, 16))
    directory.mkdir(parents=True)
    for index in range(samples):
        features = random.normal(size=16)
        nearest = numpy.square(points - features).sum(axis=1).argmin()
        numpy.save(directory / f"{index:05d}.npy", numpy.append(features, nearest).astype("float32"))


def train(data: Path, checkpoints: Path, steps: int) -> None:
    """Train; goes on from the checkpoint that `latest` names, if there is one."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(17)
    module = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, CLASSES))
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": BATCH // ranks,
            "zero_optimization": {"stage": 2},
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1_000_000,
        },
    )
    if (checkpoints / "latest").exists():
        engine.load_checkpoint(str(checkpoints))
    files = sorted(data.glob("*.npy"))
    while engine.global_steps < steps:
        first = engine.global_steps * BATCH + rank
        samples = torch.stack(
            [torch.from_numpy(numpy.load(files[first + i * ranks])) for i in range(BATCH // ranks)]
        )
        loss = torch.nn.functional.cross_entropy(engine(samples[:, :-1]), samples[:, -1].long())
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {engine.global_steps} loss {loss.item().hex()}", flush=True)
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(str(checkpoints))
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--make-data", action="store_true", help="write the data set, and end")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    if arguments.make_data:
        make_data(arguments.data)
    else:
        train(arguments.data, arguments.checkpoints, arguments.steps)
