"""A data module of LitGPT: one `.npy` file of tokens for each sample, read in the order of their names."""

import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from litgpt.data import DataModule
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

VOCABULARY = 64
LENGTH = 33  # the input, and the target of its last token


class Samples(Dataset):
    """The files of a directory."""

    def __init__(self, directory: Path) -> None:
        self.files = sorted(directory.glob("*.npy"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(numpy.load(self.files[index]))


class Tokens(DataModule):
    """Loaders whose state is saved in the checkpoint: a resumed run goes on with the next sample."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.batch_size = 1

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader(Samples(self.path / "train"), batch_size=self.batch_size)

    def val_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader(Samples(self.path / "validation"), batch_size=self.batch_size)


def make_data(directory: Path) -> None:
    """Write sequences that count upwards, with a stride of their own."""
    random = numpy.random.default_rng(7)
    for name, samples in (("train", 96), ("validation", 4)):
        (directory / name).mkdir(parents=True)
        for index in range(samples):
            first, stride = random.integers(0, VOCABULARY, 2)
            numpy.save(
                directory / name / f"{index:05d}.npy", (first + stride * numpy.arange(LENGTH)) % VOCABULARY
            )


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
