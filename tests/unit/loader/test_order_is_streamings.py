"""The sample order is that of MosaicML StreamingDataset 0.13, bit by bit: golden values, and the library."""

import hashlib
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loader.errors import OrderError
from loader.order import Line, OrderSpec, epoch_ids, rank_positions, samples_per_rank, shuffle_units
from loader.world import World
from tests.real_streaming import import_streaming

# First 16 hex digits of the sha256 of the order as int64, little-endian.
GOLDEN = {
    "naive": "fff30de686178ad3",
    "py1s": "2ccc8801d7b1d148",
    "py2s": "46b69cc981b70cea",
    "py1b": "27b8bcb8f815a76a",
    "py1br": "393010286324fc1c",
    "py1e": "4c05fcb52b9cb01a",
}
CONFIGURATIONS = 200


@pytest.mark.parametrize("order", GOLDEN)
def test_golden_orders(order: str) -> None:
    sizes = np.array([(shard * 7919) % 500 + 1 for shard in range(200)], np.int64)
    ids = shuffle_units(order, sizes, canonical_nodes=4, seed=9176, epoch=3, block_size=4096)
    assert hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:16] == GOLDEN[order]


@pytest.fixture(scope="module")
def library() -> Any:
    """The parts of the real library that make an order."""
    import_streaming()
    logging.getLogger("streaming").setLevel(logging.ERROR)
    from streaming.base.batching import generate_work
    from streaming.base.dataset import StreamingDataset
    from streaming.base.stream import Stream
    from streaming.base.world import World as LibraryWorld

    return SimpleNamespace(work=generate_work, dataset=StreamingDataset, stream=Stream, world=LibraryWorld)


def library_work(
    library: Any, sizes: np.ndarray[Any, Any], spec: OrderSpec, epoch: int, **layout: int
) -> np.ndarray[Any, Any]:
    """What the library would read: (nodes, ranks a node, workers, batches a worker, batch)."""
    dataset = library.dataset.__new__(library.dataset)  # without files, processes and shared memory
    stream = library.stream.__new__(library.stream)
    shuffled = spec.order != "sequential"
    dataset.__dict__.update(
        streams=[stream],
        num_streams=1,
        shard_offset_per_stream=np.zeros(1, np.int64),
        shards_per_stream=np.array([sizes.size]),
        samples_per_shard=sizes,
        sample_offset_per_shard=sizes.cumsum() - sizes,
        sampling_method="balanced",
        sampling_granularity=1,
        epoch_seed_change=shuffled,
        num_canonical_nodes=spec.canonical_nodes,
        batch_size=layout["batch_size"],
        partition_algo="relaxed",
        initial_physical_nodes=None,
        shuffle=shuffled,
        shuffle_algo=spec.order,
        shuffle_seed=spec.seed,
        shuffle_block_size=spec.block_size,
    )
    for name in ("proportion", "repeat", "choose"):
        stream.__dict__.pop(name, None)
    total = np.array([sizes.sum()])
    dataset.epoch_size = library.stream.apply_weights([stream], total, spec.epoch_size, spec.seed)
    world = library.world(layout["nodes"], layout["ranks_per_node"], layout["workers"], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of shards larger than a block, and of zero divisions
        work: np.ndarray[Any, Any] = library.work("random", dataset, world, epoch, layout["drop_first"])
    return work


def random_configuration(
    number: int, order: str
) -> tuple[np.ndarray[Any, Any], OrderSpec, int, dict[str, int]]:
    """Sizes, order, epoch and layout; some with fewer canonical nodes than nodes, some tiny."""
    rng = np.random.default_rng([number, len(order)])
    canonical = int(rng.choice([1, 2, 3, 4, 8]))
    nodes = int(rng.choice([n for n in (1, 2, 3, 4, 8, 16) if canonical % n == 0 or n % canonical == 0]))
    sizes = rng.integers(1, int(rng.choice([3, 40, 300])), int(rng.integers(1, 40)))
    # py1e needs a sample for each canonical node, streaming's partition some for each node.
    sizes[0] += 4 * max(nodes, canonical)
    total = int(sizes.sum())
    epoch_size = int(rng.choice([0, total // 2 + 1, total * 3 // 2, total * 2, total])) or None
    if epoch_size is not None:
        epoch_size = max(epoch_size, 4 * max(nodes, canonical))
    block = int(rng.choice([2, 64, 1000, 1 << 18]))
    spec = OrderSpec(order, int(rng.integers(0, 10_000)), canonical, block, epoch_size)
    layout = {
        "nodes": nodes,
        "ranks_per_node": int(rng.choice([1, 2, 3, 8])),
        "workers": int(rng.choice([1, 2, 3])),
        "batch_size": int(rng.choice([1, 3, 8])),
    }
    layout["drop_first"] = int(rng.integers(0, (epoch_size or total) // 2 + 1)) * int(rng.integers(0, 2))
    return sizes.astype(np.int64), spec, int(rng.integers(0, 5)), layout


def assert_every_rank_reads_what_the_library_gives_it(library: Any, number: int, order: str) -> None:
    sizes, spec, epoch, layout = random_configuration(number, order)
    work = library_work(library, sizes, spec, epoch, **layout)
    nodes, ranks = layout["nodes"], layout["ranks_per_node"]
    drop_first = layout["drop_first"] - layout["drop_first"] % nodes
    ids = epoch_ids(sizes, spec, epoch)
    line = Line(ids.size, spec.canonical_nodes, nodes)
    for rank in range(nodes * ranks):
        world = World(rank, nodes * ranks, ranks)
        # (workers, batches a worker, batch) -> in the order in which a DataLoader delivers the workers'
        # batches
        theirs = work[world.node, world.rank_of_node].transpose(1, 0, 2).ravel()
        count = samples_per_rank(line.length, world, drop_first)
        positions = rank_positions(line.length, world, 0, count, drop_first)
        assert (theirs[count:] == -1).all()
        assert np.array_equal(ids[line.indices(positions)], theirs[:count]), (
            sizes,
            spec,
            epoch,
            layout,
            rank,
        )


@pytest.mark.parametrize("tens", range(CONFIGURATIONS // 10))
def test_py1e_equals_the_library(library: Any, tens: int) -> None:
    for number in range(10 * tens, 10 * tens + 10):
        assert_every_rank_reads_what_the_library_gives_it(library, number, "py1e")


@pytest.mark.parametrize("order", ["naive", "py1s", "py2s", "py1br", "sequential"])
def test_the_other_orders_equal_the_library(library: Any, order: str) -> None:
    for number in range(15):
        assert_every_rank_reads_what_the_library_gives_it(library, number, order)


def test_an_order_is_a_permutation() -> None:
    sizes = np.array([5, 0, 17, 100, 3], np.int64)
    for order in (*GOLDEN, "sequential"):
        ids = epoch_ids(sizes, OrderSpec(order, canonical_nodes=3, block_size=16), epoch=1)
        assert sorted(ids.tolist()) == list(range(125))


def test_epochs_and_seeds_give_different_orders() -> None:
    sizes = np.full(20, 50, np.int64)
    orders = [epoch_ids(sizes, OrderSpec(seed=seed), epoch) for seed in (1, 50) for epoch in (0, 1)]
    assert len({ids.tobytes() for ids in orders}) == 4


def test_no_block_crosses_a_canonical_node() -> None:
    ids = epoch_ids(np.full(40, 25, np.int64), OrderSpec(canonical_nodes=4, block_size=100), epoch=0)
    same_rows = epoch_ids(np.full(40, 25, np.int64), OrderSpec(canonical_nodes=4, block_size=100), epoch=1)
    for row in range(4):
        share = slice(row * 250, row * 250 + 250)
        assert set(ids[share].tolist()) == set(same_rows[share].tolist())


def test_fewer_samples_than_canonical_nodes_is_an_error() -> None:
    with pytest.raises(OrderError, match="Lower canonical_nodes"):
        epoch_ids(np.array([3], np.int64), OrderSpec(canonical_nodes=8), epoch=0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"order": "py9"}, "py9"),
        ({"seed": -1}, "seed"),
        ({"canonical_nodes": 0}, "canonical_nodes"),
        ({"block_size": 1}, "block_size"),
        ({"epoch_size": 0}, "epoch_size"),
    ],
)
def test_settings_out_of_range_are_errors(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(OrderError, match=told):
        OrderSpec(**settings)
