"""What a run will ask of the bucket, before it asks."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from loader.__main__ import main
from loader.dataset import MDSDataset
from loader.sampler import ElasticBatchSampler
from loader.simulate import POLICIES, Life, downloads, in_use, lives
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
