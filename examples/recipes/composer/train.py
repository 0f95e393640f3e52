"""A small classifier with Composer. It knows two local directories and nothing of buckets."""

import argparse
from pathlib import Path

import numpy
import torch
from composer import Callback, Logger, State, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist, reproducibility
from torch.utils.data import DataLoader, Dataset

CLASSES = 4
BATCH = 8  # of all ranks together


class Samples(Dataset):
    """One `.npy` file for each sample: 16 features, then the class."""

    def __init__(self, directory: Path) -> None:
        self.files = sorted(directory.glob("*.npy"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = torch.from_numpy(numpy.load(self.files[index]))
        return sample[:-1], sample[-1].long()


class PrintLoss(Callback):
    """One line for each step, the loss to its last bit."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            print(f"step {state.timestamp.batch.value} loss {state.loss.item().hex()}", flush=True)


def make_data(directory: Path, samples: int = 96) -> None:
    """Write a data set: the class is that of the nearest of four random points."""
    random = numpy.random.default_rng(7)
    points = random.normal(size=(CLASSES, 16))
    directory.mkdir(parents=True)
    for index in range(samples):
        features = random.normal(size=16)
        nearest = numpy.square(points - features).sum(axis=1).argmin()
        numpy.save(directory / f"{index:05d}.npy", numpy.append(features, nearest).astype("float32"))


def train(data: Path, checkpoints: Path, batches: int) -> None:
    """Train; goes on from the newest checkpoint, if there is one."""
    dist.initialize_dist("cpu")
    reproducibility.seed_all(17)
    dataset = Samples(data)
    module = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, CLASSES))
    trainer = Trainer(
        model=ComposerClassifier(module, num_classes=CLASSES),
        train_dataloader=DataLoader(
            dataset,
            batch_size=BATCH // dist.get_world_size(),
            sampler=dist.get_sampler(dataset, shuffle=False),
        ),
        optimizers=torch.optim.AdamW(module.parameters(), lr=0.01),
        max_duration=f"{batches}ba",
        run_name="recipe",
        save_folder=str(checkpoints),
        save_filename="ba{batch}-rank{rank}.pt",
        save_interval="4ba",
        save_num_checkpoints_to_keep=1,
        autoresume=True,
        callbacks=PrintLoss(),
        progress_bar=False,
        device="cpu",
    )
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--make-data", action="store_true", help="write the data set, and end")
    arguments = parser.parse_args()
    if arguments.make_data:
        make_data(arguments.data)
    else:
        train(arguments.data, arguments.checkpoints, arguments.batches)
