"""The cases of the loader: CPU a sample, the cold start, epochs with a small cache, orders, indices, the import."""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bars_loader import JUDGES
from benchmarks.bench import Bench
from benchmarks.loader_index import write_index
from benchmarks.origins import Origin
from benchmarks.peers import FUSECACHE, Fusecache, Mount
from benchmarks.processes import BenchmarkError, remove_folder, run_child, run_command
from tests.s3server import Control, boto_client
from tests.s3server.client import Endpoint

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CopySourceTypeDef

LIBRARIES = ("fusecache", "fusecache-loader", "streaming", "litdata", "raw", "raw-dataloader")
PEERS = ("webdataset", "datasets", "ray", "energon")
# A pass of these libraries takes minutes, so one is measured. Of the others three are, and the figure is their median.
SLOW = ("streaming", "webdataset", "ray", "energon")
# Of the others the format is MDS.
OWN_FORMAT = ("litdata", *PEERS)
BATCH = {"tokens": 512, "blobs": 32}
SMALL_BATCH = 32
PASSES = 3
COLD_BATCH = 512
STEADY_BATCH = 256
TOKEN_SAMPLE_BYTES = 8192
WRITE_SECONDS = 300.0
SPEED_SECONDS = 240.0
COLD_SECONDS = 500.0


def load(task: str, *, seconds: float = SPEED_SECONDS, **request: Any) -> dict[str, Any]:
    """Run one task of `benchmarks.loading`. Raises BenchmarkError."""
    return run_child("benchmarks.loading", {"task": task, **request}, seconds=seconds)


def local(kind: str, bench: Bench, origin: Origin) -> None:
    """CPU a sample and samples a second from a local directory. kind: tokens or blobs."""
    _local(f"{kind}-local {origin.name}", kind, BATCH[kind], (*LIBRARIES, *PEERS), bench)


def small_batches(bench: Bench, origin: Origin) -> None:
    """The same for tokens in small batches, where what a batch costs shows."""
    _local(f"tokens-{SMALL_BATCH} {origin.name}", "tokens", SMALL_BATCH, LIBRARIES, bench)


def mounted(kind: str, bench: Bench, origin: Origin) -> None:
    """The same from a mount that has everything already, in the kernel's pages as far as they reach."""
    bucket = f"loader-{kind}"
    if bench.origins.add_bucket(origin, bucket):
        for library in ("fusecache", "litdata"):
            path = _dataset(bench, library, kind, _samples(bench, kind))
            _upload(bench, origin, bucket, library, path)
    try:
        with bench.mount(FUSECACHE, origin, bucket) as mount:
            for file in sorted(mount.path.rglob("*")):
                if file.is_file() and ".fusecache" not in file.parts:
                    _read_whole(file)
            for library in bench.turn(LIBRARIES):
                path = mount.path / ("litdata" if library == "litdata" else "fusecache")
                bench.record(
                    f"{kind} {origin.name}", library, partial(_speed, bench, library, kind, path, BATCH[kind])
                )
    except BenchmarkError as exc:
        bench.record_failure(f"{kind} {origin.name}", "fusecache", exc)


def cold_start(bench: Bench, origin: Origin) -> None:
    """Begin to train on a far bucket; the same shards downloaded whole are the measure. Takes minutes: one round."""
    if bench.round > 1:
        return
    bucket, sizes = "loader-cold", bench.sizes
    if bench.origins.add_bucket(origin, bucket):
        path = _dataset(bench, "fusecache", "tokens", sizes.cold_shard_samples)
        with bench.origins.answering(origin, bucket) as site:
            control = bench.origins.control(origin)
            upload_often(control, site, bucket, "data", path, sizes.cold_shards)
    for library in bench.turn(("fusecache", "no-hints", "whole", "streaming")):
        case = f"cold-start {origin.name}"
        try:
            with _cold_place(bench, origin, bucket, library) as (path, remote, environment):
                bench.record(case, library, partial(_cold, bench, origin, library, path, remote, environment))
        except BenchmarkError as exc:
            bench.record_failure(case, library, exc)


def steady(case: str, share: int, ranks: int, bench: Bench, origin: Origin) -> None:
    """Epoch after epoch with a cache of `share` percent of the data; what is fetched is counted from the second on.

    ranks: of one node, that share each step's batch.
    """
    bucket, sizes = "loader-steady", bench.sizes
    path = _dataset(bench, "fusecache", "tokens", sizes.steady_samples, sizes.steady_shard_bytes)
    total = sum(file.stat().st_size for file in path.iterdir())
    if bench.origins.add_bucket(origin, bucket):
        _upload(bench, origin, bucket, "data", path)
    cache = f"{total * share // 100}"
    peer = Fusecache(flags=("--cache-size", cache, "--memory", str(64 << 20)))
    counted = load(
        "policies", path=str(path), batch=STEADY_BATCH, epochs=sizes.steady_epochs, share=share / 100
    )
    for policy in ("lru", "ideal"):
        bench.record(f"{case} {origin.name}", policy, partial(_fetched_share, counted, policy))
    for library in bench.turn(("fusecache", "no-hints")):
        if bench.round > 1 and (library == "no-hints" or case not in JUDGES):
            continue  # it takes minutes, and is no bar's
        try:
            with bench.mount(peer, origin, bucket) as mount:
                measure = partial(_steady, bench, origin, library, mount, total, counted["ideal"], ranks)
                bench.record(f"{case} {origin.name}", library, measure)
        except BenchmarkError as exc:
            bench.record_failure(f"{case} {origin.name}", library, exc)


def orders(bench: Bench, origin: Origin) -> None:
    """Orders of 10**7 samples (py1e) and 10**9 (native), and how soon the first batch is there."""
    for case, name, samples in (("order-py1e", "py1e", 10**7), ("order-native", "native", 10**9)):
        bench.record(f"{case} {origin.name}", "fusecache", partial(_order, name, samples))


def index(bench: Bench, origin: Origin) -> None:
    """Open an index of a million shards."""
    folder = bench.directory / "index"
    if not folder.exists():
        folder.mkdir()
        write_index(folder, bench.sizes.million, packed=False)
    bench.record(
        f"index {origin.name}", "fusecache", lambda: _only(load("index", path=str(folder)), "seconds", "memory_bytes")
    )  # fmt: skip


def imports(bench: Bench, origin: Origin) -> None:
    """Import the libraries, each in a fresh interpreter; an empty one's time is taken off."""
    words = {
        "fusecache": "import loader",
        "streaming": "from tests.support.real_streaming import import_streaming; import_streaming()",
        "litdata": "import litdata",
    }
    for library in bench.turn(tuple(words)):
        bench.record(f"import {origin.name}", library, partial(_import, words[library]))


def _local(case: str, kind: str, batch: int, libraries: tuple[str, ...], bench: Bench) -> None:
    for library in bench.turn(libraries):
        try:
            path = _dataset(bench, library, kind, _samples(bench, kind))
        except BenchmarkError as exc:
            bench.record_failure(case, library, exc)
        else:
            bench.record(case, library, partial(_speed, bench, library, kind, path, batch))


def _samples(bench: Bench, kind: str) -> int:
    return bench.sizes.token_samples if kind == "tokens" else bench.sizes.blob_samples


def _dataset(bench: Bench, library: str, kind: str, samples: int, shard_bytes: int = 64 << 20) -> Path:
    """Return the folder of a dataset, written once."""
    form = library if library in OWN_FORMAT else "mds"
    path = bench.directory / f"{form}-{kind}-{samples}-{shard_bytes}"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        remove_folder(unfinished)
        load(
            "write", seconds=WRITE_SECONDS, library=form, kind=kind, path=str(unfinished), samples=samples,
            shard_bytes=shard_bytes,
        )  # fmt: skip
        unfinished.rename(path)
    return path


def _upload(bench: Bench, origin: Origin, bucket: str, prefix: str, path: Path) -> None:
    for file in sorted(path.iterdir()):
        bench.origins.control(origin).put(f"{prefix}/{file.name}", file.read_bytes(), bucket=bucket)


def upload_often(control: Control, site: Endpoint, bucket: str, prefix: str, path: Path, shards: int) -> None:
    """Make a dataset of so many shards with the bytes of one: the server keeps them once."""
    written = json.loads((path / "index.json").read_text())
    (shard,) = written["shards"]
    names = [f"shard.{number:05}.mds" for number in range(shards)]
    control.put(f"{prefix}/{names[0]}", (path / shard["raw_data"]["basename"]).read_bytes(), bucket=bucket)
    written["shards"] = [{**shard, "raw_data": {**shard["raw_data"], "basename": name}} for name in names]
    control.put(f"{prefix}/index.json", json.dumps(written, sort_keys=True).encode(), bucket=bucket)
    client = boto_client(site, max_pool_connections=16)
    source: CopySourceTypeDef = {"Bucket": bucket, "Key": f"{prefix}/{names[0]}"}
    with ThreadPoolExecutor(16) as pool:
        for answer in [
            pool.submit(client.copy_object, Bucket=bucket, Key=f"{prefix}/{name}", CopySource=source)
            for name in names[1:]
        ]:
            answer.result()
    client.close()


def _read_whole(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while file.readinto(buffer):
            pass


def _only(answer: dict[str, Any], *names: str) -> dict[str, float]:
    return {name: float(answer[name]) for name in names}


def _speed(bench: Bench, library: str, kind: str, path: Path, batch: int) -> dict[str, float]:
    answer = load(
        "speed", library=library, kind=kind, path=str(path), batch=batch, passes=1 if library in SLOW else PASSES,
        samples=_samples(bench, kind),
    )  # fmt: skip
    return _only(answer, "cpu_us", "samples_per_second")


@contextmanager
def _cold_place(
    bench: Bench, origin: Origin, bucket: str, library: str
) -> Iterator[tuple[Path, str, dict[str, str] | None]]:
    """Where a library finds the dataset: on a fresh mount, or (folder for downloads, URL, variables)."""
    if library != "streaming":
        with bench.mount(FUSECACHE, origin, bucket) as mount:
            yield mount.path / "data", "", None
        return
    folder = bench.directory / f"downloads-{bench.round}"
    try:
        with bench.origins.answering(origin, bucket) as site:
            yield folder, f"s3://{bucket}/data", {**site.environment(), "S3_ENDPOINT_URL": site.endpoint_url}
    finally:
        remove_folder(folder)


def _cold(
    bench: Bench, origin: Origin, library: str, path: Path, remote: str, environment: dict[str, str] | None
) -> dict[str, float]:
    request = {
        "task": "cold", "library": library, "path": str(path), "batch": COLD_BATCH, "steps": bench.sizes.cold_steps,
        "step_seconds": bench.sizes.cold_step_seconds, "remote": remote,
    }  # fmt: skip
    answer = run_child("benchmarks.loading", request, environment=environment, seconds=COLD_SECONDS)
    if library == "whole":
        return _only(answer, "seconds", "bytes")
    fetched = bench.origins.control(origin).log("GetObject")
    first = sum(entry.bytes_out for entry in fetched if entry.time < answer["first"])
    return {
        **_only(answer, "first_seconds", "waited_seconds"),
        "first_bytes_share": first / (COLD_BATCH * TOKEN_SAMPLE_BYTES),
        "bytes": float(sum(entry.bytes_out for entry in fetched)),
    }


def _steady(
    bench: Bench, origin: Origin, library: str, mount: Mount, total: int, ideal: float, ranks: int
) -> dict[str, float]:
    answer = load(
        "steady", library=library, path=str(mount.path / "data"), batch=STEADY_BATCH,
        epochs=bench.sizes.steady_epochs, step_seconds=bench.sizes.steady_step_seconds, ranks=ranks,
    )  # fmt: skip
    fetched = bench.origins.control(origin).log("GetObject")
    times = answer["times"]
    epochs = [
        sum(entry.bytes_out for entry in fetched if begin <= entry.time < end)
        for begin, end in pairwise(times[1:])
    ]
    # What is fetched in an epoch's last seconds may be the next one's: their mean evens it out.
    mean = statistics.fmean(epochs)
    return {"fetched_share": mean / total, "of_ideal": mean / (total * ideal)}


def _fetched_share(counted: dict[str, Any], policy: str) -> dict[str, float]:
    return {"fetched_share": counted[policy]}


def _order(name: str, samples: int) -> dict[str, float]:
    answer = load("order", name=name, samples=samples, shard_samples=8190)
    return _only(answer, "seconds", "batch_seconds", "memory_bytes")


def _import(words: str) -> dict[str, float]:
    def seconds(what: str) -> float:
        began = time.monotonic()
        run_command([sys.executable, "-W", "ignore", "-c", what], seconds=60)
        return time.monotonic() - began

    run_command([sys.executable, "-W", "ignore", "-c", words], seconds=60)  # its files are in memory now
    return {"seconds": statistics.median(seconds(words) - seconds("pass") for _ in range(3))}
