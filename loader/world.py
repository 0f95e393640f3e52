"""Who this process is among those that read: nodes, ranks, and which of them it is.

Not a process group: it starts nothing, and waits for nobody. It imports torch at no time; where
torch.distributed is up, its module is loaded already.
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
    """torch.distributed's DeviceMesh, as far as it is needed here."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True)
class Machine:
    """Where this process runs. What is done once for all processes of a machine is that of local rank 0.

    number: of the machine. local_rank: of this process there. dp_ranks: ascending, the data-parallel ranks whose
    samples the machine's processes read; where nobody knows exactly, more than these.
    """

    number: int
    local_rank: int
    dp_ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class World:
    """The data-parallel ranks, and this one among them, as orders deal samples out to them.

    rank: 0 <= rank < ranks, node by node. ranks_per_node: 0 stands for "all on one node".
    Ranks that shall see the same samples (tensor, sequence, pipeline parallel) pass the same rank here. Then nodes
    need not be machines: place says where this process runs; None: on machine `node`, which has the ranks of this node.
    told: (rank, ranks) that detect() found in the environment, for confirm().
    Raises OrderError for numbers that contradict each other.
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
        """How many nodes."""
        return self.ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.ranks_per_node

    @property
    def rank_of_node(self) -> int:
        """This rank among those of its node."""
        return self.rank % self.ranks_per_node

    @property
    def machine(self) -> Machine:
        """Where this process runs."""
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
        """Find out from torch.distributed if it is initialised, else from the environment, else one rank.

        There, RANK and WORLD_SIZE count, else what mpirun of Open MPI tells, else a Slurm step. LOCAL_WORLD_SIZE,
        or one of these, gives the ranks of a node; without, all count as one node, which is warned of. Where tensor,
        sequence or pipeline peers must see the same samples, one of these says who they are: dp_rank and
        dp_size (both or neither); mesh, the data-parallel part of a DeviceMesh, such as `mesh["dp"]` or
        `mesh["replicate", "shard"]`; or replication, the number of consecutive ranks that are peers, whose nodes are
        StreamingDataset's. Which of them a machine has, the last two say exactly; dp_rank only nearly. Raises
        OrderError if they contradict each other or the environment, or that is incomplete, or says that nodes have
        different numbers of ranks, or ranks that do not follow each other.
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
                "dp_rank with dp_size, mesh and replication say the same thing: give one of them"
            )
        number, local_rank = divmod(rank, ranks_per_node)
        here = range(rank - local_rank, rank - local_rank + ranks_per_node)
        found: set[int] = set()
        if mesh is not None:
            dp_rank, dp_size = _position_in(mesh)
            found = _detected_in(mesh, here)
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
            found = _detected_by_rule(rank, ranks // dp_size, dp_rank, dp_size, here)
        place = Machine(number, local_rank, sorted(found) if found else range(dp_size))
        if replication != 1:
            # StreamingDataset's nodes keep their number of ranks, and become fewer; not to divide is to be one.
            dp_per_node = dp_size if dp_size % ranks_per_node else ranks_per_node
            return cls(dp_rank, dp_size, dp_per_node, place=place, told=told)
        machines = max(ranks // ranks_per_node, 1)
        # A replica that spans machines leaves no whole one to a data-parallel rank: count them all as one node.
        dp_per_node = dp_size // machines if dp_size % machines == 0 else dp_size
        # What the caller said himself needs no confirmation.
        return cls(dp_rank, dp_size, dp_per_node, place=place)

    def confirm(self) -> None:
        """Raise OrderError if torch.distributed was initialised since detect() and contradicts the environment."""
        known = _distributed()
        if self.told is not None and known is not None and known != self.told:
            raise OrderError(
                f"this is rank {known[0]} of {known[1]} by torch.distributed, but was made as rank {self.told[0]} of "
                f"{self.told[1]} by the environment: make it after init_process_group, or pass a sampler world="
            )


def _position_in(mesh: Mesh) -> tuple[int, int]:
    """(rank, ranks) within a mesh, counted along its last dimension first."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise OrderError(f"this process is not in the mesh of shape {tuple(mesh.shape)}")
    rank = 0
    for place, size in zip(coordinate, mesh.shape, strict=True):
        rank = rank * size + place
    return rank, math.prod(mesh.shape)


def _detected_in(mesh: Any, ranks: Sequence[int]) -> set[int]:
    """The data-parallel ranks that these ranks are, by the mesh that `mesh` is cut out of; empty if nobody knows."""
    root = _root_of(mesh) if hasattr(mesh, "mesh") else None
    if root is None:
        return set()
    places = {int(rank): place for place, rank in np.ndenumerate(np.array(root.mesh.tolist()))}
    # One for each data-parallel rank, in their order: they differ from this process in nothing else.
    group = [places[rank] for rank in np.array(mesh.mesh.tolist()).ravel().tolist()]
    axes = [axis for axis, along in enumerate(zip(*group, strict=True)) if len(set(along)) > 1]
    numbers = {tuple(place[axis] for axis in axes): number for number, place in enumerate(group)}
    return {numbers[tuple(places[rank][axis] for axis in axes)] for rank in ranks if rank in places}


def _root_of(mesh: Any) -> Any:
    """The DeviceMesh that another one was cut out of, itself if it was not; None if this torch does not tell."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()  # torch has no other way to ask
    # until torch 2.9
    keeper: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    return keeper.get_root_mesh(mesh) if hasattr(keeper, "get_root_mesh") else None


def _detected_by_rule(rank: int, peers: int, dp_rank: int, dp_size: int, ranks: Sequence[int]) -> set[int]:
    """The data-parallel ranks that these ranks may be, where `rank` is known to be dp_rank; empty if no rule fits.

    Ranks are numbered with so many peers next to each other (tensor parallel), then by dp_rank, then all other peers
    (pipeline stages): all numbers that fit are taken, of which one is right.
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
    # Asked before Slurm: the daemons that mpirun has on the nodes of a job are the tasks of a step themselves.
    rank, ranks = (
        _number(variables, "OMPI_COMM_WORLD_RANK"),
        _number(variables, "OMPI_COMM_WORLD_SIZE", least=1),
    )
    return None if rank is None or ranks is None else (rank, ranks)


def _from_slurm(variables: Mapping[str, str]) -> tuple[int, int] | None:
    rank = _number(variables, "SLURM_PROCID")
    ranks = _number(variables, "SLURM_STEP_NUM_TASKS") or _number(variables, "SLURM_NTASKS")
    # A batch script has both, too, and is one process: only what srun started is in a step.
    if rank is None or ranks is None or _number(variables, "SLURM_STEP_ID") is None:
        return None
    return rank, ranks


def _ranks_per_node(variables: Mapping[str, str], rank: int, ranks: int) -> int:
    local = _number(variables, "LOCAL_WORLD_SIZE", least=1)
    mpi, slurm = _from_mpi(variables), _from_slurm(variables)
    # A launcher of other numbers has started something that started the ranks: it does not know of them.
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
    """Raise OrderError if a launcher says that a node's ranks are not the `per_node` that follow each other."""
    nodes = _number(variables, "GROUP_WORLD_SIZE")  # torchrun's; LOCAL_WORLD_SIZE is that of this node there
    if nodes is not None and _number(variables, "WORLD_SIZE") == ranks != nodes * per_node:
        raise OrderError(
            f"torchrun has started {ranks} ranks on {nodes} nodes of which this one has {per_node}, not {nodes} nodes "
            f"of {per_node} ranks: give all the same number, or pass world=World(rank, ranks), for one node"
        )
    mpi, slurm = _from_mpi(variables), _from_slurm(variables)
    place, remedy = None, ""
    in_turn = False
    if mpi is not None and mpi[1] == ranks:
        place, remedy = _number(variables, "OMPI_COMM_WORLD_LOCAL_RANK"), "start mpirun with --map-by slot"
    elif slurm is not None and slurm[1] == ranks:
        place, remedy = _number(variables, "SLURM_LOCALID"), "start srun with -m block"
        # Rank 0 is where it would be in blocks, too: it must not wait for ranks that have failed. Who numbers ranks by
        # himself may have mended it.
        is_slurms = _distributed() is None and "RANK" not in variables
        in_turn = is_slurms and per_node > 1 and variables.get("SLURM_DISTRIBUTION", "").startswith("cyclic")
    if in_turn or place not in (None, rank % per_node):
        raise OrderError(
            f"rank {rank} of {ranks} is not the one that it is in blocks of {per_node} ranks a node: they are dealt "
            f"out to nodes in turn; {remedy}, or, for one node, set LOCAL_WORLD_SIZE to {ranks} or pass "
            f"world=World(rank, ranks)"
        )


def _tasks_per_node(variables: Mapping[str, str]) -> int | None:
    """Return 8 for Slurm's "8(x2)" or "8,8", None if it says nothing."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE")
    if not text:
        return None
    parts = [re.fullmatch(r"(\d+)(\(x\d+\))?", part) for part in text.split(",")]
    numbers = {int(part[1]) if part else None for part in parts}
    number = numbers.pop()
    if numbers or number is None:
        raise OrderError(
            f"Slurm's tasks per node are {text!r}: nodes are counted only where all have the same number; set "
            f"LOCAL_WORLD_SIZE to the number of all tasks, or pass world=World(rank, ranks), for one node"
        )
    return number


@cache  # once a process
def _warn_of_one_node(ranks: int) -> None:
    log.warning(
        "the ranks of a node are not known: all %d count as one node, whose rank 0 alone tells a mount what comes; "
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
        raise OrderError(
            f"{name}={text!r} in the environment is less than {least}: set it right, or unset it"
        )
    return number
