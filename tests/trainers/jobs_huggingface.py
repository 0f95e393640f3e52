"""A tiny language model under transformers' Trainer, and a tiny loop under accelerate."""

import hashlib
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.real_streaming import mend_torchvision
from tests.trainers.workers import serve

# What transformers imports uses torchvision wherever it finds it.
mend_torchvision()
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import ProjectConfiguration, set_seed  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402


def digest(model: torch.nn.Module) -> str:
    """Return a name for exactly these weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def new_model() -> GPT2LMHeadModel:
    """Return a model that has the same weights each time."""
    set_seed(7)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )


def samples() -> list[dict[str, torch.Tensor]]:
    """Return the data, the same each time."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 64, (64, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(*, output: str, steps: int, keep: int | None = None, resume: bool | str = False) -> str:
    """Train up to a step, saving every second one; return the digest of the weights.

    keep: save_total_limit. resume: from this checkpoint; True: from the last one in `output`, which there must be.
    """
    arguments = TrainingArguments(
        output,
        max_steps=steps,
        save_steps=2,
        save_total_limit=keep,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1000,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(new_model(), arguments, train_dataset=samples())
    trainer.train(resume_from_checkpoint=resume)
    return digest(trainer.model)


def carry_out(*, program: str) -> tuple[str, int]:
    """Carry out a program that has a model and a dataset; return where it resumed, and the last step."""
    names: dict[str, Any] = {"model": new_model(), "dataset": samples()}
    exec(program, names)
    return str(names["checkpoint"]), names["trainer"].state.global_step


def save_tensors(*, path: str, value: float) -> None:
    """Save a file of tensors over whatever is there."""
    save_file({"weights": torch.full((500_000,), value)}, path)


def load_tensors(*, path: str) -> float:
    """Return the value that `save_tensors` was given; every element has it."""
    (tensor,) = load_file(path).values()
    (value,) = tensor.unique().tolist()
    return float(value)


class _Loop:
    """A loop of one's own under accelerate."""

    def __init__(self, output: str, keep: int) -> None:
        configuration = ProjectConfiguration(output, automatic_checkpoint_naming=True, total_limit=keep)
        self.accelerator = Accelerator(cpu=True, project_config=configuration)
        model = new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.rows = torch.stack([row["input_ids"] for row in samples()])

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            rows = self.rows[step * 4 : step * 4 + 4]
            self.accelerator.backward(self.model(input_ids=rows, labels=rows).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def digest(self) -> str:
        return digest(self.accelerator.unwrap_model(self.model))


def accelerate(*, output: str, saves: int, keep: int) -> str:
    """Train two steps and save, `saves` times; return the digest of the weights."""
    loop = _Loop(output, keep)
    for index in range(saves):
        loop.steps(2 * index, 2 * index + 2)
        loop.accelerator.save_state()
    return loop.digest()


def accelerate_again(*, output: str, checkpoint: str, done: int, steps: int) -> str:
    """Go on from a checkpoint that was saved after `done` steps up to `steps`; return the digest of the weights."""
    loop = _Loop(output, 1)
    loop.accelerator.load_state(checkpoint)
    loop.steps(done, steps)
    return loop.digest()


FUNCTIONS: dict[str, Any] = {
    each.__name__: each
    for each in (train, carry_out, save_tensors, load_tensors, accelerate, accelerate_again)
}

if __name__ == "__main__":
    serve(FUNCTIONS)
