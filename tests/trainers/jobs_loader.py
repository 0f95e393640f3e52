"""The loader under accelerate and under Lightning: which samples the training loop saw, and where it stood.

As a program it is one rank; `jobs_loader_ranks` runs the same functions on two.
"""

from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from loader import ElasticBatchSampler, MDSDataset, World
from loader.fast import Loader
from loader.streaming import StreamingDataLoader, StreamingDataset
from loader.torch.collate import collate
from tests.support.real_streaming import mend_torchvision
from tests.trainers.workers import serve

mend_torchvision()
import lightning  # noqa: E402
from accelerate import Accelerator  # noqa: E402

State = dict[str, Any]


def new_sampler(dataset: MDSDataset) -> ElasticBatchSampler:
    """Return this rank's sampler."""
    return ElasticBatchSampler(dataset, global_batch_size=16, canonical_nodes=4)


def order(*, directory: str, epochs: int) -> list[list[int]]:
    """Return the global batches."""
    sampler = ElasticBatchSampler(
        MDSDataset(directory), global_batch_size=16, canonical_nodes=4, world=World()
    )
    return [ids for _ in range(epochs) for ids in sampler]


def accelerate(
    *, directory: str, workers: int, steps: int, state: State | None, kind: str = "prepared"
) -> tuple[list[Any], State]:
    """Train some steps over as many epochs as it takes; return the ids of each and the sampler's state.

    kind: "prepared" or "left out", a DataLoader that accelerate's prepare is given or not; or "Loader", given to it.
    """
    dataset = MDSDataset(directory)
    sampler = new_sampler(dataset)
    if state is not None:
        sampler.load_state_dict(state)
    loader: Any = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=collate)
    if kind == "Loader":
        loader = Loader(dataset, sampler)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    batches = loader if kind == "left out" else accelerator.prepare(loader)
    if kind == "prepared":
        batches.set_epoch(sampler.epoch)  # it counts epochs by itself, from 0
    seen: list[Any] = []
    while True:
        for batch in batches:
            accelerator.backward(model(batch["x"]).sum())
            optimizer.step()
            seen.append(batch["id"].tolist())
            if kind != "Loader":
                sampler.record_step()
            if len(seen) == steps:
                return seen, (loader if kind == "Loader" else sampler).state_dict()


class Model(lightning.LightningModule):
    """Remembers what it saw, and keeps the sampler's or the loader's state in its checkpoints."""

    def __init__(self, source: ElasticBatchSampler | Loader) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.source = source
        self.seen: list[Any] = []

    def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
        self.seen.append(batch["id"].tolist())
        found: torch.Tensor = self.layer(batch["x"]).sum()
        return found

    def on_train_batch_end(self, *_: Any) -> None:
        if isinstance(self.source, ElasticBatchSampler):
            self.source.record_step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train_lightning(
    *, directory: str, kind: str, steps: int, state: State | None, ranks: int = 1, deals: bool = False
) -> tuple[list[Any], State]:
    """The same under Lightning's Trainer. kind: "DataLoader", with two workers, or "Loader".

    deals: leave Lightning its own way to deal out samples to ranks.
    """
    dataset = MDSDataset(directory)
    sampler = new_sampler(dataset)
    if state is not None:
        sampler.load_state_dict(state)
    batches: Any = Loader(dataset, sampler)
    if kind == "DataLoader":
        batches = DataLoader(dataset, batch_sampler=sampler, num_workers=2, collate_fn=collate)
    model = Model(sampler if kind == "DataLoader" else batches)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", use_distributed_sampler=deals,
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, batches)
    return model.seen, sampler.state_dict() if kind == "DataLoader" else batches.state_dict()


def streaming(
    *, directory: str, workers: int, steps: int | None, state: State | None
) -> tuple[list[Any], State]:
    """The same with StreamingDataset's face, for one iteration of it; steps None: to its end."""
    size = 16 // World.detect().ranks
    loader = StreamingDataLoader(
        StreamingDataset(local=directory, shuffle=True, batch_size=size), batch_size=size, num_workers=workers
    )
    if state is not None:
        loader.load_state_dict(state)
    seen = [batch["id"].tolist() for batch in islice(loader, steps)]
    found = loader.state_dict()
    assert found is not None
    return seen, found


FUNCTIONS: dict[str, Any] = {
    "order": order, "accelerate": accelerate, "lightning": train_lightning, "streaming": streaming,
}  # fmt: skip

if __name__ == "__main__":
    serve(FUNCTIONS)
