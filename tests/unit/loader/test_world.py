"""Finding out which rank this is."""

import pytest

from loader import OrderError, World


def test_a_lone_process_is_one_rank() -> None:
    assert World.detect(environment={}) == World(0, 1, 1)


def test_torchrun_tells_by_environment() -> None:
    world = World.detect(environment={"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (world.nodes, world.node, world.rank_of_node) == (2, 1, 1)


def test_without_a_local_size_all_ranks_are_one_node() -> None:
    assert World.detect(environment={"RANK": "5", "WORLD_SIZE": "8"}).nodes == 1


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
