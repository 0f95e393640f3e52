"""A small training run, without torch: `train.py FOLDER` reads FOLDER/dataset, and writes FOLDER/run.

run/order.txt has the number of each sample in the order of the reads. The checkpoints depend on that order.
"""

import sys
from pathlib import Path

import numpy as np

from loader import ElasticBatchSampler, Hints, MDSDataset

CHECKPOINT_STEPS = 8


def main(folder: Path) -> None:
    """Train for two epochs."""
    dataset = MDSDataset(folder / "dataset")
    sampler = ElasticBatchSampler(dataset, global_batch_size=16, seed=17)
    run = folder / "run"
    run.mkdir()
    weights, step = np.zeros(64), 0
    with Hints(dataset, sampler), (run / "order.txt").open("w") as order:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in sampler:
                for number in batch:
                    sample = dataset[int(number)]
                    weights = 0.9 * weights + sample["x"]
                    order.write(f"{sample['number']}\n")
                sampler.record_step()
                step += 1
                if step % CHECKPOINT_STEPS == 0:
                    np.save(run / f"step-{step:03d}.npy", weights)
    np.save(run / "final.npy", weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
