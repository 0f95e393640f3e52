"""What a trainer does when it saves: `python -m benchmarks.trainers '{"task": …}'` prints one JSON object.

`blocked_seconds`: until the trainer may go on; `whole_seconds`: until the save has ended. Making the tensors, starting
processes and importing torch is not counted.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TENSORS = 16
RANKS = 2
FLOAT_BYTES = 4


def torch_save(path: str, size: int, sync: str) -> dict[str, Any]:
    """Save a state of `size` bytes by torch.save. sync: what follows it: "", "fsync" or "fdatasync"."""
    import torch

    count = size // TENSORS // FLOAT_BYTES
    state = {f"layer.{index}": torch.arange(count, dtype=torch.float32) for index in range(TENSORS)}
    began = time.time()
    with open(path, "wb") as file:
        torch.save(state, file)
        if sync:
            file.flush()
            {"fsync": os.fsync, "fdatasync": os.fdatasync}[sync](file.fileno())
    closed = time.time()
    return {"began": began, "blocked_seconds": closed - began, "whole_seconds": closed - began}


def dcp(root: str, size: int, between: list[str]) -> dict[str, Any]:
    """Save a state of `size` bytes, sharded over two ranks, by DCP: in step, then asynchronously.

    `between` is a command that is run after the first, so that the second starts with nothing left to do. Returns the
    figures of both, each the slower rank's.
    """
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory(prefix="fusecache-bench-") as folder:
        # Rendezvous and answers go by files: no port is taken.
        multiprocessing.spawn(_rank, (folder, root, size, between), nprocs=RANKS)
        answers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {
        save: {name: max(answer[save][name] for answer in answers) for name in answers[0][save]}
        for save in answers[0]
    }


def _rank(rank: int, folder: str, root: str, size: int, between: list[str]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    count = size // TENSORS // RANKS // FLOAT_BYTES
    # (tensors,) of a whole shape (RANKS * count,), of which a rank holds its half
    state = {
        f"layer.{index}": DTensor.from_local(torch.arange(count, dtype=torch.float32), mesh, [Shard(0)])
        for index in range(TENSORS)
    }
    answers = {}
    for save in ("sync", "async"):
        writer = checkpoint.FileSystemWriter(os.path.join(root, save))
        dist.barrier()
        began = time.time()
        if save == "sync":
            checkpoint.save(state, storage_writer=writer)
            blocked = ended = time.time()
        else:
            response: Any = checkpoint.async_save(state, storage_writer=writer)
            blocked = time.time()
            response.result()
            ended = time.time()
        answers[save] = {"blocked_seconds": blocked - began, "whole_seconds": ended - began}
        dist.barrier()
        if rank == 0 and save == "sync":
            subprocess.run(between, check=True, stdout=subprocess.DEVNULL)
        dist.barrier()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


TASKS: dict[str, Callable[..., dict[str, Any]]] = {task.__name__: task for task in (torch_save, dcp)}


def main() -> None:
    """Do one task; what libraries print goes elsewhere."""
    request = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):
        answer = TASKS[request.pop("task")](**request)
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
