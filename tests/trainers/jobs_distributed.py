"""Distributed checkpoints of two ranks: each function runs on both, asked for by rank 0."""

import hashlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.trainers.workers import Calls, carry_out


def state(*, tensors: int, value: float) -> dict[str, torch.Tensor]:
    """Return this rank's weights: `tensors` of its own, and ten that both ranks hold."""
    rank = dist.get_rank()
    own = {f"rank{rank}.{index}": torch.full((16,), value + rank + index / 7) for index in range(tensors)}
    return own | {f"shared.{index}": torch.full((1000,), value - index) for index in range(10)}


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Return a name for exactly these bytes."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].numpy().tobytes())
    return found.hexdigest()


def digest_of(*, tensors: int, value: float) -> str:
    """Return the digest of the weights that were saved."""
    return digest(state(tensors=tensors, value=value))


def save(*, path: str, tensors: int, value: float, overwrite: bool = False) -> None:
    """Save synchronously, each rank its file."""
    writer = dcp.FileSystemWriter(path, overwrite=overwrite)
    dcp.save(state(tensors=tensors, value=value), storage_writer=writer)


def save_on_two_nodes(*, paths: list[str], tensors: int, value: float) -> str:
    """Save as two nodes do, each rank below its own path; return what went wrong, as this rank sees it."""
    try:
        save(path=paths[dist.get_rank()], tensors=tensors, value=value)
    except BaseException as exc:  # noqa: BLE001  # torch's own exception derives from that
        return repr(exc)
    return ""


def save_and_go_on(*, path: str, tensors: int, value: float, previous: str) -> None:
    """Save while training goes on; once that is done, rank 0 removes the previous checkpoint."""
    dcp.async_save(state(tensors=tensors, value=value), checkpoint_id=path).result()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(previous)
    dist.barrier()


def load(*, path: str, tensors: int) -> str:
    """Return the digest of what a checkpoint holds for this rank."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in state(tensors=tensors, value=0.0).items()}
    dcp.load(weights, checkpoint_id=path)
    return digest(weights)


FUNCTIONS: dict[str, Any] = {
    each.__name__: each for each in (digest_of, save, save_on_two_nodes, save_and_go_on, load)
}


def serve_ranks(functions: Mapping[str, Any]) -> None:
    """Do on every rank what rank 0 is asked to; answer with each rank's result."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    calls = Calls(sys.argv[1]) if rank == 0 else None
    while True:
        call = [calls.receive() if calls is not None else None]
        dist.broadcast_object_list(call)
        if call[0] is None:
            break
        outcome = carry_out(functions, *call[0])
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        if calls is not None:
            failures = [failure for failure, _ in outcomes if failure is not None]
            calls.answer("\n".join(failures) or None, [value for _, value in outcomes])
    dist.destroy_process_group()


if __name__ == "__main__":
    serve_ranks(FUNCTIONS)
