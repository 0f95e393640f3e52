"""What a run will ask of the bucket, before it asks."""

import random
import re
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from loader.__main__ import main
from loader.dataset import MDSDataset
from loader.sampler import ElasticBatchSampler
from loader.simulate import POLICIES, Life, downloads, in_use, lives, report
from loader.world import World
from loader.writer import MDSWriter


def reshuffled(shards: int, epochs: int) -> Life:
    """One shard a step, each epoch in another order."""
    orders = [random.Random(epoch).sample(range(shards), shards) for epoch in range(epochs)]
    steps = np.arange(shards * epochs)
    return Life(np.array(orders).ravel(), steps, steps)


def test_downloads_of_reshuffled_epochs_are_those_that_theory_gives() -> None:
    shards = 512
    life, sizes = reshuffled(shards, 4), np.full(shards, 10)
    least, known = (
        [each / (10 * shards) for each in downloads(life, sizes, 10 * shards // 2, policy, shards)]
        for policy in (POLICIES[0], POLICIES[2])
    )
    kept = [each / (10 * shards) for each in downloads(life, sizes, 10 * shards // 2, POLICIES[1], shards)]
    assert least[0] == known[0] == kept[0] == 1.0
    assert np.mean(least[1:]) == pytest.approx(0.85, abs=0.04)
    assert np.mean(known[1:]) == pytest.approx(0.5, abs=0.01)
    assert np.mean(kept[1:]) == pytest.approx(0.5, abs=0.01)


def test_a_cache_for_all_downloads_once_and_none_each_time() -> None:
    life, sizes = reshuffled(20, 3), np.full(20, 10)
    for policy in POLICIES:
        assert downloads(life, sizes, 200, policy, 20) == [200, 0, 0]
        assert downloads(life, sizes, 0, policy, 20) == [200, 200, 200]


def fewest_downloads(life: Life, room: int) -> int:
    """Of all ways to choose what goes when there is no room, the one with the fewest downloads; sizes are all 1."""
    events: list[tuple[int, int, bool]] = []  # (step, shard, comes into use)
    ending: list[tuple[int, int]] = []
    for shard, first, last in zip(life.shard.tolist(), life.first.tolist(), life.last.tolist(), strict=True):
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
def test_no_choice_of_what_goes_downloads_less_than_the_known_order(order: str, canonical_nodes: int) -> None:
    shards, differing = 7, 0
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
        life = lives(sampler.course, np.cumsum(sizes), 3)
        for room in range(shards + 1):
            totals = [
                sum(downloads(life, np.ones(shards, np.int64), room, policy, sampler.course.steps))
                for policy in POLICIES
            ]
            assert totals[2] == fewest_downloads(life, room) <= min(totals), (seed, room)
            differing += totals[2] < min(totals[:2])
    assert differing


def test_shards_in_use_are_counted_step_by_step() -> None:
    life = Life(np.array([0, 1, 2, 0]), np.array([0, 0, 2, 4]), np.array([1, 3, 2, 5]))
    counts, nbytes = in_use(life, np.array([1, 10, 100]), 4)
    assert counts.tolist() == [2, 2, 2, 1]
    assert nbytes.tolist() == [11, 11, 110, 10]


def test_the_tool_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(tmp_path / "data", {"number": "int"}, size_limit=1024) as writer:
        for number in range(2000):
            writer.write({"number": number})
    arguments = ["simulate", str(tmp_path / "data"), "--global-batch-size", "100", "--cache-bytes", "12e3"]
    assert main([*arguments, "--png", str(tmp_path / "run.png")]) == 0
    shown = capsys.readouterr().out
    dataset = MDSDataset(tmp_path / "data")
    sampler = ElasticBatchSampler(dataset, global_batch_size=100, world=World())
    first = lives(sampler.course, np.cumsum(dataset.index.samples), 1)
    assert re.search(rf"^first batch, shards +{int((first.first == 0).sum())}$", shown, re.MULTILINE)
    assert all(policy in shown for policy in POLICIES)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", str(tmp_path), *arguments[2:]]) == 1
    assert main([*arguments, "--epochs", "0"]) == 1
    for size in ("nan", "inf", "-5"):
        assert main([*arguments[:-2], f"--cache-bytes={size}"]) == 1
        assert f"--cache-bytes {size} is no number of bytes" in capsys.readouterr().err
    assert main([*arguments, "--png", str(tmp_path / "nowhere" / "run.png")]) == 1
    assert "nowhere" in capsys.readouterr().err


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
    for name, value in report(dataset, sampler, 12_000, 3)[0].items():
        told = "  ".join(f"{one:,}" for one in value) if isinstance(value, list) else f"{value:,.3f}"
        told = told.rstrip("0").rstrip(".") if "." in told else told
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
