"""What a run will ask of the bucket, before it asks."""

import random
import re
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from loader.__main__ import main
from loader.hints.plan_messages import Ids
from loader.mds.dataset import MDSDataset
from loader.sampling.sampler import ElasticBatchSampler
from loader.tools.simulate import (
    UseIntervals,
    downloads,
    gets_of,
    in_use,
    index_costs,
    report,
    use_intervals,
)
from loader.world import World
from loader.writing.writer import MDSWriter


def reshuffled(shards: int, epochs: int) -> list[list[int]]:
    """One shard a step, each epoch in another order."""
    return [random.Random(epoch).sample(range(shards), shards) for epoch in range(epochs)]


def downloads_of(orders: list[list[int]], sizes: Ids, room: int) -> list[int]:
    """What is downloaded in each epoch, for one shard a step."""
    steps = np.arange(sum(map(len, orders)))
    intervals = UseIntervals(np.array([shard for order in orders for shard in order]), steps, steps)
    return downloads(intervals, sizes, room, len(orders[0]), len(orders))


def test_downloads_of_reshuffled_epochs_are_those_that_theory_gives() -> None:
    shards = 512
    found = downloads_of(reshuffled(shards, 4), np.full(shards, 10), 10 * shards // 2)
    assert found[0] == 10 * shards
    assert np.mean(found[1:]) == pytest.approx(0.5 * 10 * shards, rel=0.02)


def test_a_cache_for_all_downloads_once_and_none_each_time() -> None:
    orders, sizes = reshuffled(20, 3), np.full(20, 10)
    assert downloads_of(orders, sizes, 200) == [200, 0, 0]
    assert downloads_of(orders, sizes, 0) == [200, 200, 200]


def test_shards_in_use_that_exceed_the_cache_come_once_an_epoch() -> None:
    """48 shards mixed, room for 16."""
    samples = np.full(48, 100)
    sampler = ElasticBatchSampler(
        samples, global_batch_size=24, order="py1b", canonical_nodes=1, block_size=4800, world=World()
    )
    sizes, steps = np.full(48, 10), sampler.step_plan.steps
    uses = use_intervals(sampler.step_plan, np.cumsum(samples), 2)
    most = int(in_use(uses, sizes, steps)[1].max())
    assert most > 160
    assert downloads(uses, sizes, 160, steps, 2)[1] <= sizes.sum()
    assert downloads(uses, sizes, most, steps, 2)[0] == sizes.sum()


def told_as(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if value >= 1 else f"{value:.3g}"


@pytest.mark.parametrize(
    ("nbytes", "shards", "gets"), [(30_400_000, 100_000, 16), (122_000_000, 400_000, 30)]
)
def test_an_index_costs_what_was_measured_on_a_mount_or_a_little_less(
    nbytes: int, shards: int, gets: int
) -> None:
    """The measured figures stand in docs/how-to/scale.md."""
    foretold = index_costs(nbytes, shards)
    assert gets <= foretold.gets <= gets + 3
    assert (foretold.memory_bytes, foretold.cpu_seconds) == (165 * shards, pytest.approx(3e-6 * shards))
    assert index_costs(2000, 7).gets == 1


def test_shards_cost_a_get_for_each_part_that_a_mount_fetches() -> None:
    sizes = np.array([3 << 20, 20 << 20, 1])
    assert gets_of(int(sizes.sum()), sizes) == 1 + 3 + 1
    assert gets_of(0, sizes) == 0
    assert gets_of(2 * int(sizes.sum()), sizes) == 10


def test_requests_and_dollars_are_those_of_the_downloads_and_of_all_nodes(tmp_path: Path) -> None:
    with MDSWriter(tmp_path, {"number": "int"}, size_limit=1024) as writer:
        for number in range(4000):
            writer.write({"number": number})
    dataset = MDSDataset(tmp_path)
    sampler = ElasticBatchSampler(dataset, global_batch_size=40, world=World())
    figures = report(dataset, sampler, 1 << 20, 2, nodes=1000)
    shards = dataset.index.shards
    assert figures["index of a node, bytes"] == (tmp_path / "index.json").stat().st_size
    assert figures["GETs an epoch of a node"] == [shards, 0]
    assert figures["dollars an epoch of all nodes"] == [pytest.approx(1000 * shards * 0.36e-6), 0]
    assert figures["index, dollars of all nodes"] == pytest.approx(1000 * 0.36e-6)


def fewest_downloads(intervals: UseIntervals, room: int) -> int:
    """Of all ways to choose what goes when there is no room, the one with the fewest downloads; sizes are all 1."""
    events: list[tuple[int, int, bool]] = []  # (step, shard, comes into use)
    ending: list[tuple[int, int]] = []
    for shard, first, last in zip(
        intervals.shard.tolist(), intervals.first.tolist(), intervals.last.tolist(), strict=True
    ):
        done = sorted(end for end in ending if end[0] < first)
        events += [(step, other, False) for step, other in done]
        events.append((first, shard, True))
        ending = [end for end in ending if end[0] >= first] + [(last, shard)]

    @cache
    def fewest(number: int, in_use: int, kept: frozenset[int]) -> int:
        if number == len(events):
            return 0
        _, shard, comes = events[number]
        missed = comes and shard not in kept
        in_use += 1 if comes else -1
        now = kept - {shard} if comes else kept | {shard}
        fitting = max(0, min(len(now), room - in_use))
        return missed + min(
            fewest(number + 1, in_use, frozenset(left)) for left in combinations(sorted(now), fitting)
        )

    return fewest(0, 0, frozenset())


@pytest.mark.parametrize(("order", "canonical_nodes"), [("py1e", 1), ("py1e", 4), ("naive", 1), ("py1s", 2)])
def test_no_choice_of_what_goes_downloads_less(order: str, canonical_nodes: int) -> None:
    shards = 7
    sizes = np.full(shards, 24)
    for seed in range(5):
        sampler = ElasticBatchSampler(
            sizes,
            global_batch_size=8,
            order=order,
            seed=seed,
            canonical_nodes=canonical_nodes,
            block_size=48,
            world=World(),
        )
        intervals = use_intervals(sampler.step_plan, np.cumsum(sizes), 3)
        for room in range(shards + 1):
            found = downloads(intervals, np.ones(shards, np.int64), room, sampler.step_plan.steps, 3)
            assert sum(found) == fewest_downloads(intervals, room), (seed, room)


def test_shards_in_use_are_counted_step_by_step() -> None:
    intervals = UseIntervals(np.array([0, 1, 2, 0]), np.array([0, 0, 2, 4]), np.array([1, 3, 2, 5]))
    counts, nbytes = in_use(intervals, np.array([1, 10, 100]), 4)
    assert counts.tolist() == [2, 2, 2, 1]
    assert nbytes.tolist() == [11, 11, 110, 10]


def test_the_tool_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(tmp_path / "data", {"number": "int"}, size_limit=1024) as writer:
        for number in range(2000):
            writer.write({"number": number})
    arguments = ["simulate", str(tmp_path / "data"), "--global-batch-size", "100", "--cache-bytes", "12e3"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    dataset = MDSDataset(tmp_path / "data")
    sampler = ElasticBatchSampler(dataset, global_batch_size=100, world=World())
    first = use_intervals(sampler.step_plan, np.cumsum(dataset.index.samples), 1)
    assert re.search(rf"^first batch, shards +{int((first.first == 0).sum())}$", shown, re.MULTILINE)
    assert main(["simulate", str(tmp_path), *arguments[2:]]) == 1
    assert main([*arguments, "--epochs", "0"]) == 1
    assert "warning" not in capsys.readouterr().err
    shown = []
    for size in ("1KiB", "1024", "1.024KB", "1.024e3"):
        assert main([*arguments[:-2], f"--cache-bytes={size}"]) == 0
        told = capsys.readouterr()
        shown.append(told.out)
        assert "and the cache has 1,024. Without hints, shards are downloaded repeatedly" in told.err
    assert len(set(shown)) == 1
    for size in ("nan", "inf", "-5", "1e999", "5 XB", "5iB"):
        assert main([*arguments[:-2], f"--cache-bytes={size}"]) == 1
        assert f"--cache-bytes {size} is not a number of bytes" in capsys.readouterr().err


def test_the_tool_shows_the_run_of_the_samplers_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MDSWriter(tmp_path, {"number": "int"}, size_limit=1024) as writer:
        for number in range(4000):
            writer.write({"number": number})
    dataset = MDSDataset(tmp_path)

    def shown(*options: str) -> str:
        arguments = [
            "simulate",
            str(tmp_path),
            "--global-batch-size=120",
            "--cache-bytes=12e3",
            "--nodes=3",
            *options,
        ]
        assert main(arguments) == 0
        return capsys.readouterr().out

    pinned = ["--order=py1br", "--canonical-nodes=4", "--block-size=256", "--seed=7", "--ranks-per-node=2"]
    sampler = ElasticBatchSampler(
        dataset,
        global_batch_size=120,
        order="py1br",
        canonical_nodes=4,
        block_size=256,
        seed=7,
        world=World(0, 6, 2),
    )
    found = shown(*pinned)
    for name, value in report(dataset, sampler, 12_000, 3, nodes=3).items():
        told = "  ".join(map(told_as, value)) if isinstance(value, list) else told_as(value)
        assert re.search(rf"^{name} +{re.escape(told)}$", found, re.MULTILINE), name
    without = [shown(*pinned[:number], *pinned[number + 1 :]) for number in range(len(pinned))]
    assert len({found, *without}) == 1 + len(pinned)  # none of them is without effect
    for wrong in (
        "--canonical-nodes=0",
        "--block-size=1",
        "--seed=-1",
        "--ranks-per-node=0",
        "--ranks-per-node=7",
    ):
        assert main(["simulate", str(tmp_path), "--global-batch-size=120", "--cache-bytes=0", wrong]) == 1
        name = wrong.split("=")[0][2:].replace("-", "[-_]")
        assert re.search(
            "does not divide by 7 ranks" if wrong.endswith("7") else name, capsys.readouterr().err
        )
