"""The loader under trainers on two ranks: each function runs on both, asked for by rank 0."""

from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from loader import ElasticBatchSampler, MDSDataset, World
from tests.trainers.jobs_distributed import serve_ranks
from tests.trainers.jobs_loader import FUNCTIONS


def peers(*, directory: str, dp: int, tp: int) -> list[list[int]]:
    """Return the batches of this rank, where ranks are (dp, tp)."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    world = World.detect(mesh=mesh["dp"])
    return list(
        ElasticBatchSampler(MDSDataset(directory), global_batch_size=16, canonical_nodes=4, world=world)
    )


def refusal(*, trainer: str, **arguments: Any) -> str:
    """Return the error that a trainer ends with."""
    try:
        FUNCTIONS[trainer](**arguments)
    except Exception as problem:  # noqa: BLE001  # whose error it is, the test asks
        return f"{type(problem).__name__}: {problem}"
    return ""


if __name__ == "__main__":
    serve_ranks({**FUNCTIONS, "peers": peers, "refusal": refusal})
