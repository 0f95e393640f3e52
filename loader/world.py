"""Finds the rank of this process, the number of ranks and the nodes that they run on.

It is not a process group: it starts no process and never waits for another rank. It never imports torch. If
torch.distributed is in use, the caller has already loaded that module.
"""

import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, Self

import numpy as np

from loader.base.argument_checks import optional_whole, whole_number
from loader.errors import OrderError

log = logging.getLogger(__name__)


class Mesh(Protocol):
    """The part of torch.distributed's DeviceMesh that the loader uses."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that this process runs on. Local rank 0 does the work that a machine does once for all processes.

    number: of the machine. local_rank: of this process on it. dp_ranks: the data-parallel ranks whose samples the
    machine's processes read, ascending. It is a superset where the exact ranks are unknown.
    """

    number: int
    local_rank: int
    dp_ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class World:
    """The data-parallel rank of this process and the number of ranks, as the sample order deals samples to them.

    rank: 0 <= rank < ranks; ranks are numbered node by node. ranks_per_node: 0 means that all ranks are on one node.
    Ranks that must see the same samples (tensor, sequence or pipeline parallel peers) pass the same rank here. A node
    is then not always a machine, so `place` says where this process runs. None: on machine `node`, which runs exactly
    the ranks of this node. told: (rank, ranks) that detect() found in the environment, for confirm().
    Raises OrderError if the numbers contradict each other.
    """

    rank: int = 0
    ranks: int = 1
    ranks_per_node: int = 0
    place: Machine | None = field(default=None, compare=False, kw_only=True)
    told: tuple[int, int] | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("rank", "ranks", "ranks_per_node"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name))
        if self.ranks_per_node == 0:
            object.__setattr__(self, "ranks_per_node", self.ranks)
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise OrderError(f"rank {self.rank} of {self.ranks} ranks does not exist")
        if self.ranks_per_node < 1 or self.ranks % self.ranks_per_node:
            raise OrderError(f"{self.ranks} ranks do not fill nodes of {self.ranks_per_node} ranks")

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """The node that this rank is on."""
        return self.rank // self.ranks_per_node

    @property
    def rank_of_node(self) -> int:
        """The index of this rank among the ranks of its node."""
        return self.rank % self.ranks_per_node

    @property
    def machine(self) -> Machine:
        """The machine that this process runs on."""
        first = self.rank - self.rank_of_node
        return self.place or Machine(self.node, self.rank_of_node, range(first, first + self.ranks_per_node))

    @classmethod
    def detect(
        cls,
        *,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: Mesh | None = None,
        replication: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Return the world by torch.distributed if it is initialised, else by the environment, else a single rank.

        Environment, first match: RANK and WORLD_SIZE, Open MPI's mpirun, a Slurm step. LOCAL_WORLD_SIZE, or the
        launcher found, gives the ranks of a node. Without it all ranks count as one node, and a warning is logged.
        If tensor, sequence or pipeline peers must see the same samples, name them by one of: dp_rank with dp_size;
        mesh, the data-parallel part of a DeviceMesh, such as `mesh["dp"]` or `mesh["replicate", "shard"]`; or
        replication, the number of consecutive ranks that are peers, with StreamingDataset's rule for nodes.
        mesh and replication give the ranks of a machine exactly, dp_rank only approximately.
        Raises OrderError if these contradict each other or the environment. It also raises OrderError for an
        incomplete environment, nodes with different numbers of ranks, and nodes whose ranks are not consecutive.
        """
        variables = os.environ if environment is None else environment
        known = _distributed()
        rank, ranks = known or _from_environment(variables)
        told = (rank, ranks) if known is None else None
        ranks_per_node = _ranks_per_node(variables, rank, ranks)
        dp_rank, dp_size = optional_whole(dp_rank, "dp_rank"), optional_whole(dp_size, "dp_size")
        replication = whole_number(replication, "replication")
        if (dp_rank is None) != (dp_size is None):
            raise OrderError("dp_rank and dp_size go together: give both or neither")
        if (dp_rank is not None) + (mesh is not None) + (replication != 1) > 1:
            raise OrderError(
                "dp_rank with dp_size, mesh and replication exclude each other: pass only one of them"
            )
        number, local_rank = divmod(rank, ranks_per_node)
        here = range(rank - local_rank, rank - local_rank + ranks_per_node)
        found: set[int] = set()
        if mesh is not None:
            dp_rank, dp_size = _position_in(mesh)
            found = _dp_ranks_by_mesh(mesh, here)
        elif replication != 1:
            if replication < 1 or ranks % replication:
                raise OrderError(f"{ranks} ranks do not divide into {replication} consecutive ones each")
            dp_rank, dp_size = rank // replication, ranks // replication
            found = {other // replication for other in here}
        if dp_rank is None or dp_size is None:
            return cls(rank, ranks, ranks_per_node, told=told)
        if dp_size < 1 or ranks % dp_size:
            raise OrderError(f"{ranks} ranks do not divide into dp_size {dp_size}")
        if replication == 1 and mesh is None:
            found = _dp_ranks_by_rule(rank, ranks // dp_size, dp_rank, dp_size, here)
        place = Machine(number, local_rank, sorted(found) if found else range(dp_size))
        if replication != 1:
            # As in StreamingDataset: a node keeps its number of ranks, there are fewer nodes; else there is one node.
            dp_per_node = dp_size if dp_size % ranks_per_node else ranks_per_node
            return cls(dp_rank, dp_size, dp_per_node, place=place, told=told)
        machines = max(ranks // ranks_per_node, 1)
        # A replica that spans machines leaves no data-parallel rank a whole machine: count all as one node.
        dp_per_node = dp_size // machines if dp_size % machines == 0 else dp_size
        # No `told`: the caller gave the ranks explicitly, so there is nothing to confirm.
        return cls(dp_rank, dp_size, dp_per_node, place=place)

    def confirm(self) -> None:
        """Raise OrderError if torch.distributed was initialised after detect() and contradicts the environment."""
        known = _distributed()
        if self.told is not None and known is not None and known != self.told:
            raise OrderError(
                f"this is rank {known[0]} of {known[1]} by torch.distributed, but was made as rank {self.told[0]} of "
                f"{self.told[1]} by the environment: make it after init_process_group, or pass a sampler world="
            )


def _position_in(mesh: Mesh) -> tuple[int, int]:
    """Return (rank, ranks) within a mesh, counted along its last dimension first."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise OrderError(f"this process is not in the mesh of shape {tuple(mesh.shape)}")
    rank = 0
    for place, size in zip(coordinate, mesh.shape, strict=True):
        rank = rank * size + place
    return rank, math.prod(mesh.shape)


def _dp_ranks_by_mesh(mesh: Any, ranks: Sequence[int]) -> set[int]:
    """Return the data-parallel ranks of `ranks`, by the root mesh that `mesh` is a slice of; empty if unknown."""
    root = _root_of(mesh) if hasattr(mesh, "mesh") else None
    if root is None:
        return set()
    places = {int(rank): place for place, rank in np.ndenumerate(np.array(root.mesh.tolist()))}
    # One process per data-parallel rank, in order. Their other coordinates equal those of this process.
    group = [places[rank] for rank in np.array(mesh.mesh.tolist()).ravel().tolist()]
    axes = [axis for axis, along in enumerate(zip(*group, strict=True)) if len(set(along)) > 1]
    numbers = {tuple(place[axis] for axis in axes): number for number, place in enumerate(group)}
    return {numbers[tuple(places[rank][axis] for axis in axes)] for rank in ranks if rank in places}


def _root_of(mesh: Any) -> Any:
    """Return the root DeviceMesh of a mesh (itself if it is the root); None if this torch version cannot say."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()  # torch has no public API for it
    # torch up to 2.9 keeps it here
    keeper: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    return keeper.get_root_mesh(mesh) if hasattr(keeper, "get_root_mesh") else None


def _dp_ranks_by_rule(rank: int, peers: int, dp_rank: int, dp_size: int, ranks: Sequence[int]) -> set[int]:
    """Return a superset of the data-parallel ranks of `ranks`, given that `rank` is dp_rank; empty if no rule fits.

    Assumed numbering: some peers are consecutive (tensor parallel), then dp_rank counts, then the other peers
    (pipeline stages). The split of the peers is unknown, so the result unites all splits that fit; one is right.
    """
    steps = [step for step in range(1, peers + 1) if peers % step == 0 and rank // step % dp_size == dp_rank]
    return {other // step % dp_size for step in steps for other in ranks}


def _distributed() -> tuple[int, int] | None:
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return int(module.get_rank()), int(module.get_world_size())


def _from_environment(variables: Mapping[str, str]) -> tuple[int, int]:
    rank, ranks = _number(variables, "RANK"), _number(variables, "WORLD_SIZE", least=1)
    if (rank is None) != (ranks is None):
        raise OrderError("RANK and WORLD_SIZE go together: the environment has only one of them")
    if rank is not None and ranks is not None:
        return rank, ranks
    return _from_mpi(variables) or _from_slurm(variables) or (0, 1)


def _from_mpi(variables: Mapping[str, str]) -> tuple[int, int] | None:
    # Before Slurm: inside a Slurm job, mpirun's own daemons on the nodes are the tasks of a Slurm step.
    rank, ranks = (
        _number(variables, "OMPI_COMM_WORLD_RANK"),
        _number(variables, "OMPI_COMM_WORLD_SIZE", least=1),
    )
    return None if rank is None or ranks is None else (rank, ranks)


def _from_slurm(variables: Mapping[str, str]) -> tuple[int, int] | None:
    rank = _number(variables, "SLURM_PROCID")
    ranks = _number(variables, "SLURM_STEP_NUM_TASKS") or _number(variables, "SLURM_NTASKS")
    # A batch script has both variables too, but is one process. Only processes that srun started have a step id.
    if rank is None or ranks is None or _number(variables, "SLURM_STEP_ID") is None:
        return None
    return rank, ranks


def _ranks_per_node(variables: Mapping[str, str], rank: int, ranks: int) -> int:
    local = _number(variables, "LOCAL_WORLD_SIZE", least=1)
    mpi, slurm = _from_mpi(variables), _from_slurm(variables)
    # A launcher with another number of ranks started a second launcher, and does not know the final ranks.
    if local is None and mpi is not None and mpi[1] == ranks:
        local = _number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE", least=1)
    elif local is None and slurm is not None and slurm[1] == ranks:
        local = _tasks_per_node(variables)
    if local is None and rank == 0 and ranks > 1:
        _warn_of_one_node(ranks)
    if local and local < ranks:
        _check_blocks(variables, rank, ranks, local)
    return local or ranks


def _check_blocks(variables: Mapping[str, str], rank: int, ranks: int, per_node: int) -> None:
    """Raise OrderError if the launcher says that the ranks of a node are not `per_node` consecutive ones."""
    # torchrun's; its LOCAL_WORLD_SIZE is that of this node only.
    nodes = _number(variables, "GROUP_WORLD_SIZE")
    if nodes is not None and _number(variables, "WORLD_SIZE") == ranks != nodes * per_node:
        raise OrderError(
            f"torchrun has started {ranks} ranks on {nodes} nodes of which this one has {per_node}, not {nodes} nodes "
            f"of {per_node} ranks: give each node the same number, or pass world=World(rank, ranks), for one node"
        )
    mpi, slurm = _from_mpi(variables), _from_slurm(variables)
    place, remedy = None, ""
    in_turn = False
    if mpi is not None and mpi[1] == ranks:
        place, remedy = _number(variables, "OMPI_COMM_WORLD_LOCAL_RANK"), "start mpirun with --map-by slot"
    elif slurm is not None and slurm[1] == ranks:
        place, remedy = _number(variables, "SLURM_LOCALID"), "start srun with -m block"
        # Rank 0 has the same place in both layouts, so check the distribution too: otherwise rank 0 would wait for
        # ranks that failed. Skip this if RANK is set or a process group exists: their ranks may be in blocks.
        is_slurms = _distributed() is None and "RANK" not in variables
        in_turn = is_slurms and per_node > 1 and variables.get("SLURM_DISTRIBUTION", "").startswith("cyclic")
    if in_turn or place not in (None, rank % per_node):
        raise OrderError(
            f"rank {rank} of {ranks} is not where blocks of {per_node} consecutive ranks a node put it: the launcher "
            f"deals ranks out to nodes in turn; {remedy}, or, for one node, set LOCAL_WORLD_SIZE to {ranks} or pass "
            f"world=World(rank, ranks)"
        )


def _tasks_per_node(variables: Mapping[str, str]) -> int | None:
    """Return 8 for Slurm's "8(x2)" or "8,8"; None if the variables are not set."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE")
    if not text:
        return None
    parts = [re.fullmatch(r"(\d+)(\(x\d+\))?", part) for part in text.split(",")]
    numbers = {int(part[1]) if part else None for part in parts}
    number = numbers.pop()
    if numbers or number is None:
        raise OrderError(
            f"Slurm's tasks per node are {text!r}: all nodes must have the same number; set "
            f"LOCAL_WORLD_SIZE to the number of all tasks, or pass world=World(rank, ranks), for one node"
        )
    return number


@cache  # at most one warning a process
def _warn_of_one_node(ranks: int) -> None:
    log.warning(
        "number of ranks per node unknown: all %d ranks count as one node, and only its rank 0 sends hints to a mount; "
        "if there are more nodes, set LOCAL_WORLD_SIZE, or pass world=World(rank, ranks, ranks_per_node)",
        ranks,
    )


def _number(variables: Mapping[str, str], name: str, least: int = 0) -> int | None:
    text = variables.get(name)
    if text is None or not text.strip():
        return None
    try:
        number = int(text)
    except ValueError:
        raise OrderError(f"{name}={text!r} in the environment is not a number") from None
    if number < least:
        raise OrderError(f"{name}={text!r} in the environment is less than {least}: correct it, or unset it")
    return number
