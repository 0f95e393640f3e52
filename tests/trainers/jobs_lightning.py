"""A tiny model under Lightning's Trainer and its ModelCheckpoint, and under Fabric."""

import hashlib
import os
import tempfile
from typing import Any, Literal

import torch

from tests.support.real_streaming import mend_torchvision
from tests.trainers.workers import serve

# What Lightning imports uses torchvision wherever it finds it.
mend_torchvision()
import lightning  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402


class Model(lightning.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(16, 16)

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        return (self.layer(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            found.update(name.encode() + tensor.numpy().tobytes())
        return found.hexdigest()


def write_below(temporary: str) -> None:
    """Let Lightning write its checkpoints in this TMPDIR, before it moves them."""
    os.environ["TMPDIR"] = temporary
    tempfile.tempdir = None


def train(
    *,
    directory: str,
    steps: int,
    temporary: str | None = None,
    save_last: bool | Literal["link"] | None = None,
    keep: int = -1,
    resume: str | None = None,
) -> str:
    """Train up to a step, saving every second one into `directory`; return the digest of the weights.

    temporary: TMPDIR. keep: save_top_k, of the newest.
    """
    if temporary is not None:
        write_below(temporary)
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    checkpoints = ModelCheckpoint(
        directory,
        filename="{step}",
        every_n_train_steps=2,
        save_top_k=keep,
        monitor=None if keep < 0 else "step",
        mode="max",
        save_last=save_last,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=resume)
    return model.digest()


def train_by_fabric(*, directory: str, steps: int, temporary: str, resume: str | None = None) -> str:
    """Train weights in a loop of our own, saved every second one by `Fabric.save`; return their digest."""
    write_below(temporary)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    bare = Model()
    model, optimizer = fabric.setup(bare, bare.configure_optimizers())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if resume is not None:
        fabric.load(resume, state)
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(3)).split(4)
    while state["step"] < steps:
        batch = rows[state["step"]]
        fabric.backward(model.training_step(batch, 0))
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % 2 == 0:
            fabric.save(f"{directory}/step={state['step']}.ckpt", state)
    return bare.digest()


FUNCTIONS: dict[str, Any] = {"train": train, "train_by_fabric": train_by_fabric}

if __name__ == "__main__":
    serve(FUNCTIONS)
