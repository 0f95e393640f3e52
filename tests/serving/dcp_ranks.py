"""One rank that saves or loads a sharded checkpoint: `torchrun -m tests.serving.dcp_ranks {save,load} FOLDER MIB`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.serving.jobs import digest, made_tensors


def main() -> None:
    what, folder, mib = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = made_tensors(mib)
    if what == "load":
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    if what == "save":
        checkpoint.save(state, checkpoint_id=folder)
    else:
        checkpoint.load(state, checkpoint_id=folder)
        found = digest((name, tensor.full_tensor()) for name, tensor in state.items())
        if dist.get_rank() == 0:
            print(found)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
