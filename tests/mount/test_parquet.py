"""Parquet on a mount: written and read through it, in one order on every node, and fetched ahead of its use."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from loader import ElasticBatchSampler, Hints, ParquetDataset, ShardError, TemplarDataset, World
from loader.torch.collate import collate
from tests.mount.conftest import Place
from tests.support.mounts import Mount, wait_until
from tests.support.s3_buckets import Bucket

FILES = 6
ROWS = 200


def table(number: int) -> pa.Table:
    ids = np.arange(number * ROWS, (number + 1) * ROWS)
    tokens = np.random.default_rng(number).integers(0, 1 << 16, (ROWS, 512), np.int32)
    return pa.table({"id": ids, "tokens": list(tokens), "text": [f"text {one}" for one in ids]})


def write(root: Path) -> Path:
    (root / "web").mkdir(parents=True)
    for number in range(FILES):
        pq.write_table(table(number), root / f"web/{number}.parquet", row_group_size=64)
    return root / "web"


def put(bucket: Bucket, tmp_path: Path) -> int:
    """The dataset in the bucket, below `web`; its bytes."""
    paths = list(write(tmp_path).iterdir())
    for path in paths:
        bucket.put(f"web/{path.name}", path.read_bytes())
    return sum(path.stat().st_size for path in paths)


def test_a_run_moves_to_another_node_with_workers_and_goes_on(place: Place) -> None:
    write(place.path)
    shards = [
        {"path": f"a-bucket/{place.name}/web/{number}.parquet", "num_rows": ROWS} for number in range(FILES)
    ]
    (place.path / "_shard_sizes.json").write_text(json.dumps({"web": {"split": "train", "shards": shards}}))
    (place.path / "_metadata.yaml").write_text("configs: [{config_name: web}]")
    place.sync()
    here, there = ParquetDataset(place.path / "web"), ParquetDataset(place.second / "web")
    sampler = ElasticBatchSampler(here, global_batch_size=48, world=World())
    whole = list(ElasticBatchSampler(here, global_batch_size=48, world=World()))
    for ids in islice(sampler, 10):
        found = here.__getitems__(ids)
        assert [sample["id"] for sample in found] == ids
        sampler.record_step()
    moved = [ElasticBatchSampler(there, global_batch_size=48, world=World(rank, 2, 1)) for rank in range(2)]
    steps: list[list[int]] = [[] for _ in whole[10:]]
    for one in moved:
        one.load_state_dict(sampler.state_dict())
        loader = DataLoader(there, batch_sampler=one, num_workers=2, collate_fn=collate)
        for number, batch in enumerate(loader):
            steps[number] += batch["id"].tolist()
            assert batch["text"] == [f"text {one}" for one in batch["id"].tolist()]
    assert [sorted(step) for step in steps] == [sorted(step) for step in whole[10:]]
    first, second = TemplarDataset(place.path), TemplarDataset(place.second)
    pages = first.pages("run:1", 8)
    assert pages == second.pages("run:1", 8)
    assert [first.texts(page) for page in pages] == [second.texts(page) for page in pages]


@pytest.mark.s3server_only
def test_hinted_files_are_fetched_before_they_are_read(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    total = put(bucket, tmp_path)
    one = mount("--read-only")
    dataset = ParquetDataset(one.path / "web", columns=["id", "tokens"])
    sampler = ElasticBatchSampler(dataset, global_batch_size=48, world=World())
    with Hints(dataset, sampler, job="run") as hints:
        assert hints.is_sending
        wait_until(lambda: one.status()["cache"]["used_bytes"] >= total, "all files")
        wait_until(
            lambda: one.status()["hints"]["jobs"][0]["planned_steps"] >= len(sampler),
            "the epoch's whole plan",
        )
        demand = one.status()["cache"]["bytes_by_cause"]["demand"]
        for ids in sampler:
            assert [sample["id"] for sample in dataset.__getitems__(ids)] == ids
        assert one.status()["cache"]["bytes_by_cause"]["demand"] == demand
    wait_until(lambda: one.status()["hints"]["jobs"] == [], "the end of the hints")


@pytest.mark.s3server_only
def test_pages_of_batches_are_fetched_before_they_are_read(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    put(bucket, tmp_path)
    shards = [{"path": f"{number}.parquet", "num_rows": ROWS} for number in range(FILES)]
    bucket.put("web/_shard_sizes.json", json.dumps({"web": {"shards": shards}}).encode())
    bucket.put("web/_metadata.yaml", b"configs: [{config_name: web}]")
    one = mount("--read-only")
    dataset = TemplarDataset(one.path / "web", text_column="tokens", page_rows=16)
    batches = dataset.batches("peer:1", 12, 4, 1024, end_token=0)

    def jobs() -> list[dict[str, Any]]:
        return one.status()["hints"]["jobs"]

    assert jobs()[0]["job"].startswith("templar-")
    wait_until(lambda: jobs()[0]["fetched"] == [12], "all extents")
    gets, count = len(bucket.requests("GetObject")), 12 * 16 * 513 // 4096
    assert len(list(islice(batches, count - 1))) == count - 1
    assert jobs()[0]["missed_bytes"] == 0
    assert jobs()[0]["hit_bytes"] > 0
    assert jobs()[0]["step"] == 12
    assert len(list(batches)) == 1
    assert len(bucket.requests("GetObject")) == gets
    assert jobs() == []
    dropped = dataset.batches("peer:2", 2, 4, 1024, end_token=0)
    assert len(jobs()) == 1
    del dropped
    assert jobs() == []


def test_a_file_that_another_client_replaces_is_an_error_and_no_mixture(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    put(bucket, tmp_path)
    one = mount("--attribute-seconds", "0.3")
    dataset = ParquetDataset(one.path / "web", columns=["id"])
    before = (one.path / "web/3.parquet").stat().st_size
    pq.write_table(table(3).slice(0, 150), tmp_path / "new.parquet")
    bucket.put("web/3.parquet", (tmp_path / "new.parquet").read_bytes())
    wait_until(lambda: (one.path / "web/3.parquet").stat().st_size != before, "the new file")
    assert dataset[3 * ROWS - 1]["id"] == 3 * ROWS - 1
    with pytest.raises(ShardError, match=r"web/3.parquet, row group 0, samples 600 to 663: .*replaced"):
        dataset[3 * ROWS]
