"""Finding out which rank this is."""

import logging
import math
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from loader import ElasticBatchSampler, MDSWriter, OrderError, World
from loader.streaming import StreamingDataset
from loader.world import Machine
from tests.support.streaming_library import load_library

TASK = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}


def test_a_lone_process_is_one_rank() -> None:
    assert World.detect(environment={}) == World(0, 1, 1)


def test_torchrun_tells_by_environment() -> None:
    world = World.detect(environment={"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (world.nodes, world.node, world.rank_of_node) == (2, 1, 1)


def test_without_a_local_size_all_ranks_are_one_node() -> None:
    assert World.detect(environment={"RANK": "5", "WORLD_SIZE": "8"}).nodes == 1


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        (TASK | {"SLURM_TASKS_PER_NODE": "4(x2)"}, World(5, 8, 4)),
        (TASK | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),2", "SLURM_TASKS_PER_NODE": "8"}, World(5, 8, 2)),
        (TASK | {"LOCAL_WORLD_SIZE": "4"}, World(5, 8, 4)),
        ({"SLURM_STEP_ID": "3", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, World(1, 2)),
        # `srun --pty` of one task, in a job of eight
        (TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, World()),
        # a batch script, which is in no step
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, World()),
        # torchrun in each of two tasks
        (
            TASK | {"SLURM_STEP_NUM_TASKS": "2", "RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            World(9, 16, 8),
        ),
    ],
)
def test_srun_tells_by_environment(environment: dict[str, str], world: World) -> None:
    assert World.detect(environment=environment) == world


def test_mpirun_tells_by_environment_within_a_step_of_its_own_daemons_too() -> None:
    environment = {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }
    assert World.detect(environment=environment) == World(5, 8, 4)
    daemons = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert World.detect(environment=environment | daemons) == World(5, 8, 4)


@pytest.mark.parametrize("tasks", ["4,2(x2)", "8(y2)"])
def test_nodes_with_different_numbers_of_tasks_are_an_error_that_says_what_to_pass(tasks: str) -> None:
    with pytest.raises(OrderError, match=re.escape(repr(tasks)) + ".* world="):
        World.detect(environment=TASK | {"SLURM_TASKS_PER_NODE": tasks})


CYCLIC = r"deals ranks out to nodes in turn.*-m block.*world="


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # -m cyclic on 2 nodes: ranks 1, 3, 5, 7 are tasks 0 to 3 of node 1
        ({"SLURM_LOCALID": "2", "SLURM_NODEID": "1"}, CYCLIC),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}, CYCLIC),
        # rank 0 is where it would be anyhow, and must not wait for the others
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_DISTRIBUTION": "cyclic:block"}, CYCLIC),
        # -m plane=2: ranks 4, 5 are tasks 2, 3 of node 0
        ({"SLURM_PROCID": "4", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}, CYCLIC),
        # though LOCAL_WORLD_SIZE says how many
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_TASKS_PER_NODE": "", "SLURM_LOCALID": "2"}, CYCLIC),
        ({"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_TASKS": "7"}, r"'2\(x3\),1'.* world="),
    ],
)
def test_tasks_that_slurm_has_not_put_in_blocks_of_one_size_are_an_error_that_says_what_to_do(
    changes: dict[str, str], told: str
) -> None:
    environment = TASK | {"SLURM_TASKS_PER_NODE": "4(x2)"} | changes
    with pytest.raises(OrderError, match=told):
        World.detect(environment=environment)
    # what it says: all as one node
    ranks = int(environment["SLURM_STEP_NUM_TASKS"])
    rank = int(environment["SLURM_PROCID"])
    assert World.detect(environment=environment | {"LOCAL_WORLD_SIZE": str(ranks)}) == World(rank, ranks)


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        ({"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_DISTRIBUTION": "block:cyclic"}, World(5, 8, 4)),
        # numbered anew, node by node, by who set RANK
        (
            {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_DISTRIBUTION": "cyclic",
             "RANK": "4", "WORLD_SIZE": "8"},
            World(4, 8, 4),
        ),
        # one task a node, or one node: in turn and in blocks are the same
        (
            {"SLURM_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0", "SLURM_DISTRIBUTION": "cyclic"},
            World(5, 8, 1),
        ),
        (
            {"SLURM_TASKS_PER_NODE": "8", "SLURM_LOCALID": "5", "SLURM_NODEID": "0", "SLURM_DISTRIBUTION": "cyclic"},
            World(5, 8, 8),
        ),
        # torchrun in each of two tasks says all by itself
        (
            {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2",
             "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_DISTRIBUTION": "cyclic", "RANK": "9", "WORLD_SIZE": "16",
             "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "2"},
            World(9, 16, 8),
        ),
    ],
)  # fmt: skip
def test_tasks_that_slurm_has_put_in_blocks_are_the_ranks_of_their_nodes(
    changes: dict[str, str], world: World
) -> None:
    assert World.detect(environment=TASK | {"SLURM_TASKS_PER_NODE": "4(x2)"} | changes) == world


def test_mpiruns_ranks_dealt_out_to_nodes_in_turn_are_an_error() -> None:
    environment = {
        "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    }  # fmt: skip
    with pytest.raises(OrderError, match=r"deals ranks out to nodes in turn.*--map-by slot"):
        World.detect(environment=environment)
    assert World.detect(environment=environment | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}) == World(5, 8, 4)


@pytest.mark.parametrize(("rank", "local"), [(0, 4), (5, 2), (7, 2)])
def test_torchruns_of_different_numbers_of_processes_are_an_error_on_each(rank: int, local: int) -> None:
    """4, 2 and 2: of 8 ranks each node's number is a part, so that ranks would believe different things."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_WORLD_SIZE": "3",
    }
    with pytest.raises(OrderError, match=rf"3 nodes of {local} ranks.* world="):
        World.detect(environment=environment)


def test_data_parallel_ranks_replace_all_ranks() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert World.detect(dp_rank=2, dp_size=4, environment=environment) == World(2, 4, 2)
    # one replica over both nodes: no node has a rank of its own
    assert World.detect(dp_rank=0, dp_size=1, environment=environment) == World(0, 1, 1)


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}],
)
def test_an_impossible_environment_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(OrderError):
        World.detect(environment=environment)


def test_half_of_a_data_parallel_place_is_an_error() -> None:
    with pytest.raises(OrderError, match="go together"):
        World.detect(dp_rank=1, environment={})


@pytest.mark.parametrize(
    ("rank", "ranks", "per_node"), [(-1, 1, 0), (1, 1, 0), (0, 3, 2), (0, 0, 0), (0, 2, -1)]
)
def test_an_impossible_world_is_an_error(rank: int, ranks: int, per_node: int) -> None:
    with pytest.raises(OrderError):
        World(rank, ranks, per_node)


@pytest.mark.parametrize(
    ("nodes", "per_node", "replication"), [(2, 4, 2), (2, 4, 4), (2, 4, 8), (4, 2, 2), (8, 8, 2), (2, 3, 2)]
)
def test_consecutive_ranks_can_be_replicas_of_each_other_on_streamings_nodes(
    nodes: int, per_node: int, replication: int
) -> None:
    library = load_library()
    batches = []
    for rank in range(nodes * per_node):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(nodes * per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
        }
        world = World.detect(replication=replication, environment=environment)
        real = library.world(nodes, per_node, 1, rank).replicate(replication)
        assert (world.rank, world.ranks, world.nodes) == (real.rank, real.num_ranks, real.num_nodes)
        here = range(rank // per_node * per_node, (rank // per_node + 1) * per_node)
        dp_ranks = sorted({other // replication for other in here})
        assert world.machine == Machine(rank // per_node, rank % per_node, dp_ranks)
        sampler = ElasticBatchSampler([500] * 4, global_batch_size=96, canonical_nodes=4, world=world)
        batches.append(list(islice(sampler, 3)))
    for peers in range(0, len(batches), replication):
        assert batches[peers : peers + replication] == [batches[peers]] * replication
    single = ElasticBatchSampler([500] * 4, global_batch_size=96, canonical_nodes=4, world=World())
    shared = [sorted(chain.from_iterable(parts)) for parts in zip(*batches[::replication], strict=True)]
    assert shared == [sorted(batch) for batch in islice(single, 3)]


def mesh_world(rank: int, shape: dict[str, int], dp: tuple[str, ...], per_node: int) -> World:
    """What a rank of a real mesh is, whose other ranks do not exist; several dimensions are made one."""
    ranks = math.prod(shape.values())
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))[dp]
        world = World.detect(mesh=mesh, environment={"LOCAL_WORLD_SIZE": str(per_node)})
        if len(dp) > 1:
            flat = World.detect(mesh=mesh._flatten("dp"), environment={"LOCAL_WORLD_SIZE": str(per_node)})
            assert (flat, flat.machine) == (world, world.machine)
        return world
    finally:
        torch.distributed.destroy_process_group()


MESHES = [
    ({"dp": 8}, 4),
    ({"dp": 4, "tp": 2}, 4),
    ({"pp": 2, "dp": 2, "tp": 2}, 4),
    ({"pp": 2, "dp": 4}, 4),
    ({"dp": 2, "tp": 8}, 4),
    ({"pp": 4, "dp": 2, "tp": 8}, 8),
    ({"pp": 2, "dp": 4, "tp": 4}, 8),
    ({"pp": 4, "dp": 1, "tp": 8}, 8),
    ({"pp": 2, "dp": 8, "tp": 2}, 8),
    ({"replicate": 2, "pp": 2, "shard": 2, "tp": 2}, 4),
]


@pytest.mark.parametrize(("shape", "per_node"), MESHES, ids=str)
def test_each_machine_of_a_mesh_has_one_process_for_it_that_knows_whose_samples_are_read_there(
    shape: dict[str, int], per_node: int
) -> None:
    ranks = math.prod(shape.values())
    dp = tuple(name for name in shape if name in ("dp", "replicate", "shard"))
    axes = [list(shape).index(name) for name in dp]
    sizes = [shape[name] for name in dp]
    places = np.array(np.unravel_index(np.arange(ranks), tuple(shape.values())))
    dp_ranks = np.ravel_multi_index(tuple(places[axes]), sizes).tolist()
    for machine in range(ranks // per_node):
        first = machine * per_node
        expected = sorted(set(dp_ranks[first : first + per_node]))
        worlds = [mesh_world(rank, shape, dp, per_node) for rank in (first, first + 1)]
        assert [(world.rank, world.ranks) for world in worlds] == [
            (dp_ranks[rank], math.prod(sizes)) for rank in (first, first + 1)
        ]
        assert [world.machine for world in worlds] == [
            Machine(machine, local_rank, expected) for local_rank in (0, 1)
        ]
        if len(dp) == 1:  # who says no more than his own place is told of some more, not of fewer
            environment = {"RANK": str(first), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_node)}
            told = World.detect(dp_rank=dp_ranks[first], dp_size=sizes[0], environment=environment)
            assert set(told.machine.dp_ranks) >= set(expected)
            assert told.machine.local_rank == 0


def test_of_a_mesh_that_nobody_knows_all_data_parallel_ranks_may_be_on_a_machine() -> None:
    class Unknown:
        shape = (4,)

        def get_coordinate(self) -> list[int]:
            return [1]

    environment = {"RANK": "8", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}
    machine = World.detect(mesh=Unknown(), environment=environment).machine
    assert (machine.number, machine.local_rank, list(machine.dp_ranks)) == (1, 0, [0, 1, 2, 3])
    # its own place contradicts all numberings
    odd = World.detect(dp_rank=1, dp_size=4, environment=environment | {"RANK": "0"}).machine
    assert list(odd.dp_ranks) == [0, 1, 2, 3]


def test_replication_that_does_not_divide_the_ranks_is_an_error() -> None:
    for replication in (0, 3):
        with pytest.raises(OrderError, match="consecutive"):
            World.detect(replication=replication, environment={"RANK": "0", "WORLD_SIZE": "8"})


@pytest.fixture
def rank_five_of_eight() -> Iterator[None]:
    """torch.distributed as rank 5 of 8, of which the others do not exist."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("rank_five_of_eight")
def test_a_device_mesh_tells_the_data_parallel_rank() -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    environment = {"LOCAL_WORLD_SIZE": "4"}
    assert World.detect(environment=environment) == World(5, 8, 4)
    assert World.detect(mesh=mesh["dp"], environment=environment) == World(2, 4, 2)
    assert World.detect(mesh=mesh["tp"], environment=environment) == World(1, 2, 1)
    assert World.detect(mesh=mesh, environment=environment) == World(5, 8, 4)
    sharded = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    assert World.detect(mesh=sharded["replicate", "shard"], environment=environment).rank == 2
    with pytest.raises(OrderError, match="pass only one of them"):
        World.detect(mesh=mesh["dp"], replication=2)
    with pytest.raises(OrderError, match="pass only one of them"):
        World.detect(mesh=mesh["dp"], dp_rank=1, dp_size=4)


@pytest.mark.usefixtures("rank_five_of_eight")
def test_the_launcher_tells_the_ranks_of_a_node_where_it_has_started_them_all() -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    for environment, per_node in (
        (TASK | {"SLURM_TASKS_PER_NODE": "4(x2)"}, 4),
        (mpi, 2),
        # two tasks, each of which has started four ranks by itself
        (TASK | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, 8),
    ):
        assert World.detect(environment=environment) == World(5, 8, per_node)


def test_ranks_of_unknown_nodes_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loader"):
        for rank in ("0", "0", "1"):
            assert World.detect(environment={"RANK": rank, "WORLD_SIZE": "12"}).nodes == 1
        World.detect(environment={"RANK": "0", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "4"})
        World.detect(environment={})
    (message,) = caplog.messages
    assert "LOCAL_WORLD_SIZE" in message


def test_a_process_group_that_contradicts_the_environment_is_an_error_at_the_first_iteration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    with MDSWriter(tmp_path / "data", {"number": "int"}) as writer:
        for number in range(64):
            writer.write({"number": number})
    told = World.detect(environment=TASK | {"SLURM_TASKS_PER_NODE": "4(x2)"})
    early = [
        ElasticBatchSampler([64], global_batch_size=8),
        ElasticBatchSampler([64], global_batch_size=8, world=World.detect(replication=2, environment=TASK)),
        StreamingDataset(local=str(tmp_path / "data"), batch_size=2),
    ]
    right = [
        ElasticBatchSampler([64], global_batch_size=8, world=told),
        ElasticBatchSampler([64], global_batch_size=8, world=World()),
        ElasticBatchSampler([64], global_batch_size=8, world=World.detect(dp_rank=0, dp_size=1)),
    ]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        for each in early:
            with pytest.raises(OrderError, match=r"after init_process_group.* world="):
                next(iter(each))
        with pytest.raises(OrderError, match="rank 5 of 8"):
            next(iter(right.pop(0)))
    finally:
        torch.distributed.destroy_process_group()
    right.append(ElasticBatchSampler([64], global_batch_size=8, world=told))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        assert [len(next(iter(each))) for each in right] == [8, 8, 1]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("rank_five_of_eight")
def test_a_process_outside_the_mesh_is_an_error() -> None:
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    with pytest.raises(OrderError, match="not in the mesh"):
        World.detect(mesh=mesh)


def test_tensor_and_pipeline_peers_of_a_mesh_read_the_same_and_all_peers_together_the_global_batch() -> None:
    """Eight ranks as (replicate, pipeline, shard, tensor): data-parallel ranks that are not next to each other."""
    batches: dict[int, list[list[list[int]]]] = {}
    for rank in range(8):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            mesh = init_device_mesh("cpu", (2, 2, 1, 2), mesh_dim_names=("replicate", "pp", "shard", "tp"))
            world = World.detect(mesh=mesh["replicate", "shard"], environment={"LOCAL_WORLD_SIZE": "4"})
        finally:
            torch.distributed.destroy_process_group()
        assert (world.rank, world.ranks) == (rank // 4, 2)
        sampler = ElasticBatchSampler([500] * 4, global_batch_size=40, canonical_nodes=4, world=world)
        batches.setdefault(world.rank, []).append(list(sampler))
    for peers in batches.values():
        assert peers == [peers[0]] * 4
    single = ElasticBatchSampler([500] * 4, global_batch_size=40, canonical_nodes=4, world=World())
    shared = zip(batches[0][0], batches[1][0], strict=True)
    assert [sorted(a + b) for a, b in shared] == [sorted(batch) for batch in single]
