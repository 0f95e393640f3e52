"""Train a small byte-level transformer on MDS shards; any number of ranks continues where others stopped.

    torchrun --standalone --nproc-per-node 2 -m examples.demo.train \\
        --data /mnt/bucket/dataset --checkpoints /mnt/bucket/checkpoints --log-dir /var/tmp/log --phase first

Everything here is a local path: that the folders are a bucket is the mount's business, and `Hints` tells it what will
be read; without a mount it does nothing. Three things make the
run elastic: the sampler's order depends on no world size, its state travels in the checkpoint, and so does
everything else that the next step depends on. A checkpoint counts once `.metadata` is there, which
torch.distributed.checkpoint writes last. SIGTERM means "save and stop": a node with notice loses no step.
"""

import argparse
import json
import logging
import os
import signal
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from loader import ElasticBatchSampler, Hints, MDSDataset, latest_checkpoint

BYTE_VALUES = 256  # the vocabulary: one token a byte

log = logging.getLogger("train")


class Transformer(nn.Module):
    """A decoder-only transformer over bytes: (batch, length) tokens -> (batch, length, 256) logits."""

    def __init__(self, context: int, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTE_VALUES, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        # no dropout: a redone step then has the same loss, whoever redoes it
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, BYTE_VALUES)
        self.mask: Tensor
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte; `tokens` is exactly one context long."""
        hidden = self.token(tokens) + self.position  # (batch, context, width)
        logits: Tensor = self.head(self.body(hidden, mask=self.mask, is_causal=True))
        return logits


@dataclass
class TrainingState(Stateful):
    """All that the next step depends on, in one object that torch.distributed.checkpoint saves and loads."""

    model: nn.Module
    optimizer: Optimizer
    sampler: ElasticBatchSampler
    step: int = 0  # global batches consumed since the run began

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, sampler position and step: the same on every rank."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        # the sampler's dict as text: one entry, whatever its keys are
        sampler = json.dumps(self.sampler.state_dict())
        return {"model": model, "optimizer": optimizer, "sampler": sampler, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`; the sampler refuses one of another dataset or order."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.sampler.load_state_dict(json.loads(state_dict["sampler"]))
        self.step = state_dict["step"]


class StepLog:
    """One JSON line an event and rank, outside the mount: what this rank consumed, where its time went."""

    def __init__(self, folder: Path, phase: str) -> None:
        rank = dist.get_rank()
        self._always = {"phase": phase, "rank": rank, "ranks": dist.get_world_size()}
        self._file = (folder / f"{phase}-rank{rank}.jsonl").open("a", buffering=1)  # a line is written whole

    def write(self, event: str, **values: object) -> None:
        """Append one line."""
        self._file.write(json.dumps({"event": event, "time": time.time(), **self._always, **values}) + "\n")


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole, as rank 0 sees it, so that all ranks take the same one."""
    found = [latest_checkpoint(folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def load_place(sampler: ElasticBatchSampler, checkpoint: Path) -> None:
    """Put the sampler alone where a checkpoint was taken: what it reads next can come while the model is loaded."""
    place = {"training": {"sampler": ""}}
    dcp.load(place, checkpoint_id=checkpoint)
    sampler.load_state_dict(json.loads(place["training"]["sampler"]))


def save(state: TrainingState, folder: Path, events: StepLog) -> None:
    """Save `state` as `folder/step-NNNN`; returns when the files are closed: the mount uploads meanwhile."""
    started = time.perf_counter()
    path = folder / f"step-{state.step:04d}"
    dcp.save({"training": state}, checkpoint_id=path)
    events.write("checkpoint", step=state.step, seconds=time.perf_counter() - started, name=path.name)


def train(
    state: TrainingState, batches: DataLoader[Any], options: argparse.Namespace, events: StepLog
) -> bool:
    """Train to the end of the epoch, or to the step after SIGTERM. Returns whether the epoch is finished."""
    model = DistributedDataParallel(state.model)
    notice = torch.zeros(1)
    signal.signal(signal.SIGTERM, lambda *_: notice.fill_(1))
    step_began = time.perf_counter()
    stop = False

    for batch in batches:
        wait_seconds = time.perf_counter() - step_began
        tokens = batch["tokens"][:, : options.context + 1].long()  # (samples of this rank, context + 1)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.step += 1
        state.sampler.record_step()  # a DataLoader reads ahead: only this loop knows what was consumed
        # a signal reaches each rank at its own time: they stop together, after the first of them knows
        told = notice.clone()
        dist.all_reduce(told, dist.ReduceOp.MAX)
        stop = bool(told)
        events.write(
            "step",
            step=state.step,
            ids=batch["id"].tolist(),
            crcs=[zlib.crc32(row.numpy()) for row in batch["tokens"]],
            loss=loss.item(),
            wait_seconds=wait_seconds,
            step_seconds=time.perf_counter() - step_began,
        )
        if stop or state.step % options.checkpoint_every == 0:
            save(state, options.checkpoints, events)
        if stop:
            break
        step_began = time.perf_counter()
    return not stop


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of an MDS dataset")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--final", type=Path, help="file for the weights at the end of the epoch")
    parser.add_argument("--log-dir", type=Path, required=True, help="local folder for the step log")
    parser.add_argument("--phase", default="train", help="name of this part of the run, in the step log")
    parser.add_argument("--global-batch-size", type=int, default=32, help="samples a step, over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument(
        "--canonical-nodes", type=int, default=4, help="part of the order: never change it in a run"
    )
    parser.add_argument("--context", type=int, default=128, help="tokens of each sample that are trained on")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument(
        "--hints",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="tell the mount what will be read",
    )
    return parser.parse_args()


def main() -> None:
    """Resume from the newest whole checkpoint, if there is one, and train."""
    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    events = StepLog(options.log_dir, options.phase)

    dataset = MDSDataset(options.data)
    sampler = ElasticBatchSampler(
        dataset,
        global_batch_size=options.global_batch_size,
        seed=options.seed,
        order="py1e",
        canonical_nodes=options.canonical_nodes,
    )
    checkpoint = newest_checkpoint(options.checkpoints)
    if checkpoint is not None:
        load_place(sampler, checkpoint)
    hints = Hints(dataset, sampler) if options.hints else None
    model = Transformer(options.context)
    state = TrainingState(model, AdamW(model.parameters(), lr=2e-3), sampler)
    if checkpoint is not None:
        dcp.load({"training": state}, checkpoint_id=checkpoint)
    log.info("rank %d of %d begins at step %d", dist.get_rank(), dist.get_world_size(), state.step)
    events.write("start", step=state.step, resumed_from=checkpoint and checkpoint.name, pid=os.getpid())

    finished = train(state, DataLoader(dataset, batch_sampler=sampler), options, events)
    if finished and state.step % options.checkpoint_every:
        save(state, options.checkpoints, events)
    if finished and options.final is not None and dist.get_rank() == 0:
        torch.save(model.state_dict(), options.final)
    events.write("end", step=state.step, finished=finished)
    if hints is not None:
        hints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
