"""A training loop over a mount: a harmed shard is an error that names it within seconds, and a wait is told of."""

import contextlib
import gc
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from loader import DatasetError, ElasticBatchSampler, MDSDataset, MDSWriter, ShardError, World
from loader.fast import Loader
from tests.mount.conftest import ExpectedLog, Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only

SECONDS = 45.0  # until a harm is told, on a busy machine too; torch's workers have up to 5 s of it to end
SAMPLES = 300
HARMED = 3
BATCH = 16
LARGE_SAMPLES = 16
Harm = Callable[[Bucket, str, bytes], None]


def write(out: Path, text: str = "str", **options: Any) -> dict[str, bytes]:
    """Return the files of a dataset of some 10 shards."""
    with MDSWriter(out, {"id": "int", "x": text}, size_limit=1024, hashes=["xxh64"], **options) as writer:
        for number in range(SAMPLES):
            writer.write({"id": number, "x": "some text" if text == "str" else number})
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A dataset's files, as the bucket shall hold them."""
    return write(tmp_path_factory.mktemp("data") / "raw")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same with columns of fixed sizes, of which many samples are read by one call."""
    return write(tmp_path_factory.mktemp("data") / "fixed", text="int32")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The first, compressed."""
    return write(tmp_path_factory.mktemp("data") / "packed", compression="zstd")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """One shard of which the first read leaves most in the bucket."""
    out = tmp_path_factory.mktemp("data") / "large"
    rng = np.random.default_rng(1)
    with MDSWriter(out, {"x": "bytes"}, size_limit=None) as writer:
        for _ in range(LARGE_SAMPLES):
            writer.write({"x": rng.bytes(1 << 20)})
    return {path.name: path.read_bytes() for path in out.iterdir()}


def upload(bucket: Bucket, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        bucket.put(f"data/{name}", data)


def remove(bucket: Bucket, name: str, _data: bytes) -> None:
    bucket.delete(name)


def truncate(bucket: Bucket, name: str, data: bytes) -> None:
    bucket.put(name, data[: len(data) // 2])


def put_a_longer_one(bucket: Bucket, name: str, data: bytes) -> None:
    bucket.put(name, data + b"more")


def change_a_byte(bucket: Bucket, name: str, data: bytes) -> None:
    bucket.put(name, data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])


def damage_the_frame(bucket: Bucket, name: str, data: bytes) -> None:
    bucket.put(name, bytes(8) + data[8:])


def refuse(bucket: Bucket, name: str, _data: bytes) -> None:
    fault = Fault(FaultAction.ANSWER, operation="GetObject", status=400, code="InvalidRequest")
    bucket.control.faults(replace(fault, key=bucket.prefix + name))


def read(batches: Iterable[Any]) -> tuple[list[Any], str]:
    """Return the batches that came and how they ended: an error's words, or none.

    torch's frames and the error keep each other, and with them the workers, and these their shards: they are let go.
    """
    seen = []
    try:
        for batch in batches:
            seen.append(batch)
    except ShardError as problem:
        traceback.clear_frames(problem.__traceback__)
        return seen, str(problem)
    return seen, ""


def train(dataset: MDSDataset, way: int | str) -> tuple[list[int], str]:
    """Read an epoch, with so many workers or with a Loader; return the ids that came, and the error that ended it."""
    sampler = ElasticBatchSampler(
        dataset, global_batch_size=BATCH, canonical_nodes=1, drop_last=False, world=World()
    )
    if isinstance(way, int):
        batches, said = read(DataLoader(dataset, batch_sampler=sampler, num_workers=way))
    else:
        batches, said = read(Loader(dataset, sampler))
    return [number for batch in batches for number in batch["id"].tolist()], said


def is_let_go(folder: Path) -> bool:
    """Return whether this process has no file open there; what only errors and their frames hold does not count."""
    gc.collect()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed just now
            if os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/"):
                return False
    return True


def assert_names_the_shard(said: str, dataset: MDSDataset, path: Path) -> None:
    """The error has the file, a range of bytes, and samples that are the shard's."""
    found = re.search(
        rf"{re.escape(str(path))} \(shard {HARMED}\): bytes (\d+) to (\d+), samples? (\d+)(?: to (\d+))?: ",
        said,
    )
    assert found, said
    start, stop, first, last = (int(each or found[3]) for each in found.groups())
    begin, end = np.cumsum(dataset.shard_sizes)[[HARMED - 1, HARMED]].tolist()
    assert start < stop
    assert begin <= first <= last < end


HARMS: dict[Harm, str] = {
    remove: "the file is missing",
    truncate: r"the file has \d+ bytes, the index says \d+; it was truncated",
    put_a_longer_one: r"the file has \d+ bytes, the index says \d+; it was replaced",
    change_a_byte: "its xxh64 is not that of the index",
    refuse: r"Input/output error\. The mount /.* or its bucket failed to deliver it: run `fusecache status /",
    damage_the_frame: "it does not decompress",
}
CASES = [
    pytest.param(kind, harm, id=f"{kind}-{harm.__name__}")
    for kind in ("raw", "fixed", "packed")
    for harm in HARMS
    if harm is not damage_the_frame or kind == "packed"
]


@pytest.mark.parametrize("way", [0, 2, "Loader"])
@pytest.mark.parametrize(("kind", "harm"), CASES)
def test_a_harm_in_the_bucket_ends_the_training_loop_within_seconds_and_names_the_shard(
    place: Place,
    expect_log: ExpectedLog,
    request: pytest.FixtureRequest,
    kind: str,
    harm: Harm,
    way: int | str,
) -> None:
    files: dict[str, bytes] = request.getfixturevalue(kind)
    upload(place.bucket, files)
    (name,) = [name for name in files if name.startswith(f"shard.{HARMED:05d}.")]
    harm(place.bucket, f"data/{name}", files[name])
    if harm is refuse:
        expect_log("InvalidRequest")
    dataset = MDSDataset(place.path / "data", check_hashes=harm is change_a_byte)
    began = time.monotonic()
    seen, said = train(dataset, way)
    assert time.monotonic() - began < SECONDS
    assert len(seen) < SAMPLES
    assert re.search(HARMS[harm], said), said
    assert_names_the_shard(said, dataset, place.path / "data" / name)
    del dataset
    if way == "Loader":  # whose threads end by themselves
        wait_until(lambda: is_let_go(place.path), "the end of the threads, and of their files")


def test_a_mount_whose_daemon_is_gone_is_no_damaged_shard(
    mount: Callable[..., Mount], bucket: Bucket, raw: dict[str, bytes]
) -> None:
    upload(bucket, raw)
    first = mount()
    dataset = MDSDataset(first.path / "data")
    _ = dataset[0]
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: not first.is_alive(), "the daemon's end")
    told = rf"(not connected|connection abort)\. The daemon of the mount {re.escape(str(first.path))} is gone: run"
    with pytest.raises(ShardError, match=told):
        _ = dataset[SAMPLES - 1]
    with pytest.raises(DatasetError, match=told):
        MDSDataset(first.path / "data")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_replaced_while_it_is_open_is_an_error_not_a_mixture(
    place: Place, large: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    upload(place.bucket, large)
    name = "shard.00000.mds"
    first = max(workers, 1)

    class Batches:
        """The first samples, one for each worker; once they are read, the shard is another, and its end is wanted."""

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0] for _ in range(first))
            # torch asks for the next batch when the first one is there: another worker may be at its own still.
            wait_until(lambda: len(list(tmp_path.iterdir())) == first, "the first sample of each worker")
            place.bucket.put(f"data/{name}", large[name][::-1])
            yield from ([LARGE_SAMPLES - 1] for _ in range(first))

    def told(samples: list[Any]) -> list[Any]:
        """Tell by a file that this process has read its samples."""
        (tmp_path / str(os.getpid())).touch()
        return samples

    dataset = MDSDataset(place.path / "data")
    options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 1} if workers else {}
    began = time.monotonic()
    seen, said = read(DataLoader(dataset, batch_sampler=Batches(), collate_fn=told, **options))  # type: ignore[arg-type]
    assert time.monotonic() - began < SECONDS
    assert len(seen) == first
    assert re.search(rf"{name} \(shard 0\): bytes 1\d+ to \d+, sample {LARGE_SAMPLES - 1}: ", said), said
    assert "Stale file handle; it was replaced" in said
