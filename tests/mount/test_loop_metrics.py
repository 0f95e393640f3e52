"""The numbers of a training loop, on a real mount and on a plain directory."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from loader.metrics import Metrics
from tests.support.mounts import Mount, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only
KIB = 1024


def latest(metrics: Metrics, name: str) -> float:
    """Return a number once it is known."""
    found = wait_until(lambda: [value for key, value in metrics.read().items() if key == name], name)
    return float(found[0])


def test_a_loop_on_a_mount(mount: Callable[..., Mount], bucket: Bucket) -> None:
    for number in range(4):
        bucket.put(f"data/{number}.bin", os.urandom(100 * KIB))
    one = mount("--settle-seconds", "0")
    metrics = Metrics(one.path / "data", poll_seconds=0.1)
    assert latest(metrics, "mount/bytes_only_here") == 0
    paths = [one.path / f"data/{number}.bin" for number in range(4)]
    for data in metrics.batches(path.read_bytes() for path in paths):
        metrics.count(tokens=len(data) // 4)
    found = metrics.read()
    assert found["data/wait_seconds"] > 0
    assert 0 < found["data/wait_share"] <= 1
    assert found["data/tokens_per_second"] == pytest.approx(25 * KIB * found["data/batches_per_second"])
    assert metrics.read()["data/wait_seconds"] == 0
    json.dumps(found)

    with metrics.checkpoint(one.path / "checkpoints") as path:
        Path(path).mkdir()
        (Path(path) / "model.pt").write_bytes(os.urandom(300 * KIB))
    assert latest(metrics, "checkpoint/stall_seconds") > 0
    assert latest(metrics, "checkpoint/durable_seconds") > 0
    assert len(bucket.get("checkpoints/model.pt")) == 300 * KIB
    assert metrics.read()["checkpoint/pending"] == 0
    wait_until(lambda: metrics.read()["mount/bytes_only_here"] == 0, "nothing is only here")
    metrics.close()


def test_the_share_of_hits_is_that_of_the_reads_between_two_looks(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    bucket.put("data/0.bin", os.urandom(100 * KIB))
    one = mount()
    metrics = Metrics(one.path, poll_seconds=0.1)
    assert latest(metrics, "mount/bytes_only_here") == 0
    assert (one.path / "data/0.bin").read_bytes()
    assert latest(metrics, "cache/hit_share") <= 1
    wait_until(lambda: "cache/hit_share" not in metrics.read(), "no reads, no share")
    metrics.close()


def test_bytes_that_exist_only_here_and_a_checkpoint_that_the_bucket_lacks(
    mount: Callable[..., Mount], bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    one = mount("--settle-seconds", "600")
    metrics = Metrics(one.path, poll_seconds=0.1)
    with metrics.checkpoint(one.path / "model.pt") as path:
        Path(path).write_bytes(bytes(100 * KIB))
    wait_until(lambda: metrics.read().get("mount/bytes_only_here", 0) >= 100 * KIB, "the bytes")
    assert metrics.read()["checkpoint/pending"] == 1
    assert "checkpoint/durable_seconds" not in metrics.read()
    caplog.set_level(logging.WARNING, "loader.metrics")
    with metrics.checkpoint(one.path / "none/never.pt"):
        pass  # a path that was never written
    assert latest(metrics, "checkpoint/failed") == 1
    wait_until(lambda: "never.pt" in caplog.text, "the warning, which comes behind the number")
    metrics.close()


def test_a_plain_directory_has_no_numbers_of_a_mount(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    assert list(metrics.batches([1, 2])) == [1, 2]
    with metrics.checkpoint(tmp_path / "model.pt") as path:
        Path(path).write_bytes(b"1")
    wait_until(lambda: metrics.read()["checkpoint/pending"] == 0, "the end of the look")
    assert {name for name in metrics.read() if not name.startswith("data/")} == {
        "checkpoint/stall_seconds",
        "checkpoint/pending",
    }


def test_tensorboard_takes_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    metrics = Metrics(tmp_path)
    with SummaryWriter(str(tmp_path)) as writer:
        for name, value in metrics.read().items():
            writer.add_scalar(name, value, 1)
    assert list(tmp_path.glob("events.out.tfevents.*"))
