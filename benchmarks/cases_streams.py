"""The cases in which whole objects are read: cold, four at once, again from the disk and from the kernel's pages."""

import hashlib
import json
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.bench import GIB, MIB, Bench, fetch, read
from benchmarks.lock_watch import watched_lock
from benchmarks.origins import Origin, Site
from benchmarks.peers import FUSECACHE, MOUNTED, Mount, Peer, mounted
from benchmarks.processes import BenchmarkError, drop_pages, run_command
from benchmarks.readers import PROOF_BYTES
from tests.s3server import synthetic_bytes

BUCKET = "sequential"
STREAMS_BUCKET = "streams"
STREAMS = 4
REQUESTS_BUCKET = "requests"
REQUEST_THREADS = (8, 16, 32, 64)
KEY = "object"
SEED = 1
PASSES = 3
DEPTH = 8  # requests in flight: what a sequential O_DIRECT reader needs to keep a disk busy


@dataclass(frozen=True, slots=True)
class EmptyFs:
    """`benchmarks.emptyfs` as a peer: nothing behind it but memory."""

    size: int
    name: str = "empty-fs"

    def command(self, site: Site, path: Path, cache: Path) -> list[str]:
        """Return the words that mount it."""
        return [sys.executable, "-m", "benchmarks.emptyfs", str(path), str(self.size)]

    def environment(self, site: Site) -> dict[str, str]:
        """Return its variables."""
        return site.environment()

    def is_ready(self, log: str) -> bool:
        """Return whether the kernel's settings are written."""
        return "ready" in log


def cold(bench: Bench, origin: Origin) -> None:
    """Read 1 GiB that nobody has; on B then again without kernel pages, and again with them."""
    size = bench.sizes.sequential_bytes
    if bench.origins.add_bucket(origin, BUCKET):
        bench.origins.control(origin).add_synthetic(KEY, size, SEED, bucket=BUCKET)
    case = f"cold {origin.name}"
    for name in bench.turn(["raw", "crt", *(peer.name for peer in MOUNTED)]):
        if name in ("raw", "crt"):
            bench.record(case, name, partial(_client, bench, origin, f"{name}_sequential"))
            continue
        peer = next(each for each in MOUNTED if each.name == name)
        try:
            with bench.mount(peer, origin, BUCKET) as mount:
                if bench.record(case, name, partial(_cold, bench, mount)) and origin.name == "B":
                    _again(bench, origin, peer, mount)
        except BenchmarkError as exc:
            bench.record_failure(case, name, exc)
    if origin.name == "B":
        _disk_bounds(bench, origin)


def streams(bench: Bench, origin: Origin) -> None:
    """Read four objects at once, none of which anybody has."""
    if bench.origins.add_bucket(origin, STREAMS_BUCKET):
        for index in range(STREAMS):
            bench.origins.control(origin).add_synthetic(
                f"{KEY}-{index}", bench.sizes.stream_bytes, index, bucket=STREAMS_BUCKET
            )
    case = f"streams {origin.name}"
    for peer in bench.turn(MOUNTED):
        try:
            with bench.mount(peer, origin, STREAMS_BUCKET) as mount:
                bench.record(case, peer.name, partial(_streams, mount))
        except BenchmarkError as exc:
            bench.record_failure(case, peer.name, exc)


def requests(bench: Bench, origin: Origin) -> None:
    """Read small objects, each by one GET, cold, from more and more threads: what one costs the daemon."""
    count = bench.sizes.request_files
    if bench.origins.add_bucket(origin, REQUESTS_BUCKET):
        bench.origins.control(origin).add_many(KEY + "-{:05}", count, size=MIB, bucket=REQUESTS_BUCKET)
    for threads in REQUEST_THREADS if bench.round % 2 else reversed(REQUEST_THREADS):
        case = f"requests{threads} {origin.name}"
        try:
            with bench.mount(FUSECACHE, origin, REQUESTS_BUCKET) as mount:
                bench.record(case, FUSECACHE.name, partial(_requests, mount, count, threads))
        except BenchmarkError as exc:
            bench.record_failure(case, FUSECACHE.name, exc)


def _requests(mount: Mount, count: int, threads: int) -> dict[str, float]:
    paths = [str(mount.path / f"{KEY}-{index:05}") for index in range(count)]
    cpu = mount.cpu_seconds()
    with watched_lock(mount.pid) as lock:
        answer = read("small_files", paths=paths, threads=threads)
    if answer["bytes"] != count * MIB:
        raise BenchmarkError(f"wrong size: {answer['bytes']} of {count * MIB}")
    return {
        "files_per_second": count / answer["seconds"],
        "cpu_us": (mount.cpu_seconds() - cpu) * 1e6 / count,
        **lock.figures("_us", count / 1e6),
    }


def _client(bench: Bench, origin: Origin, task: str) -> dict[str, float]:
    drop_pages()
    size = bench.sizes.sequential_bytes
    with bench.origins.answering(origin, BUCKET) as site:
        answer = fetch(task, site, key=KEY, size=size)
    _check(answer, size)
    return {"rate": answer["bytes"] / answer["seconds"], "seconds": answer["seconds"]}


def _cold(bench: Bench, mount: Mount) -> dict[str, float]:
    size = bench.sizes.sequential_bytes
    cpu = mount.cpu_seconds()
    mount.memory.take()
    with watched_lock(mount.pid) as lock:
        answer = read("sequential", path=str(mount.path / KEY))
    _check(answer, size)
    return {
        "rate": size / answer["seconds"],
        "seconds": answer["seconds"],
        "cpu_per_gib": (mount.cpu_seconds() - cpu) * GIB / size,
        **lock.figures("_per_gib", size / GIB),
        "memory_bytes": mount.memory.take(),
    }


def _check(answer: dict[str, float | str], size: int) -> None:
    expected = hashlib.sha256(synthetic_bytes(SEED, size - PROOF_BYTES, PROOF_BYTES)).hexdigest()
    if answer["bytes"] != size or answer["proof"] != expected:
        raise BenchmarkError(f"wrong bytes: {answer['bytes']} of {size}")


def _again(bench: Bench, origin: Origin, peer: Peer, mount: Mount) -> None:
    size = bench.sizes.sequential_bytes
    bench.drop(mount)
    bench.origins.control(origin).clear_log()

    def from_disk() -> dict[str, float]:
        with watched_lock(mount.pid) as lock:
            answer = read("sequential", path=str(mount.path / KEY))
        _check(answer, size)
        fetched = sum(entry.bytes_out for entry in bench.origins.control(origin).log("GetObject"))
        return {
            "rate": size / answer["seconds"],
            "seconds": answer["seconds"],
            "fetched_share": fetched / size,
            **lock.figures("_per_gib", size / GIB),
            "memory_bytes": mount.memory.take(),
        }

    if not bench.record(f"disk {origin.name}", peer.name, from_disk):
        return
    if peer is FUSECACHE:
        _pages_beside_bounds(bench, origin, mount)
    else:
        bench.record(f"pages {origin.name}", peer.name, partial(_pages, mount))


def _pages(mount: Mount) -> dict[str, float]:
    passes = [_pass(mount.path / KEY) for _ in range(PASSES)]
    return {"rate": statistics.median(passes), "memory_bytes": mount.memory.take()}


def _pages_beside_bounds(bench: Bench, origin: Origin, mount: Mount) -> None:
    """Take turns with the empty file system and a local file, pass by pass: they are compared to some percent."""
    case, size = f"pages {origin.name}", bench.sizes.sequential_bytes
    local = _local_file(bench)
    with ExitStack() as stack:
        site = Site("", "", "", None, "")
        try:
            empty = stack.enter_context(mounted(EmptyFs(size), site, bench.directory))
        except BenchmarkError as exc:
            bench.record_failure(case, "empty-fs", exc)
            bench.record(case, "fusecache", partial(_pages, mount))
            return
        paths = {"fusecache": mount.path / KEY, "empty-fs": empty.path / KEY, "native": local}
        rates: dict[str, list[float]] = {name: [] for name in paths}

        def passes() -> dict[str, float]:
            for number in range(bench.sizes.page_fillings):
                drop_pages()
                # Of two FUSE files, the one brought in first is read at two thirds of the other's speed, whichever
                # it is (seen on 6.18, with two copies of the empty file system too): each is first equally often.
                order = list(paths) if number % 2 else list(reversed(paths))
                for name in order:
                    _pass(paths[name])
                for name in order:
                    rates[name].append(statistics.median(_pass(paths[name]) for _ in range(PASSES)))
            return {**_mean_rate(rates["fusecache"]), "memory_bytes": mount.memory.take()}

        if bench.record(case, "fusecache", passes):
            for name in ("empty-fs", "native"):
                bench.record(case, name, partial(_mean_rate, rates[name]))


def _mean_rate(rates: list[float]) -> dict[str, float]:
    return {"rate": statistics.fmean(rates)}


def _pass(path: Path) -> float:
    """Return the bytes a second of reading, without the open: that one asks the bucket, by close-to-open."""
    answer = read("sequential", path=str(path))
    return float(answer["bytes"] / (answer["seconds"] - answer["open_seconds"]))


def _streams(mount: Mount) -> dict[str, float]:
    mount.memory.take()
    answer = read(
        "streams", paths=[str(mount.path / f"{KEY}-{index}") for index in range(STREAMS)], seconds=120
    )
    mean = sum(answer["shares"]) / STREAMS
    return {
        "rate": answer["bytes"] / answer["seconds"],
        "seconds": answer["seconds"],
        "unevenness": max(abs(share - mean) for share in answer["shares"]) / mean,
        "memory_bytes": mount.memory.take(),
    }


def _local_file(bench: Bench) -> Path:
    """Return a file of the same size on the same disk as the caches; written, as unwritten extents read for nothing."""
    path = bench.directory / "local"
    if not path.exists():
        with open(path, "wb") as file:
            for offset in range(0, bench.sizes.sequential_bytes, 16 * MIB):
                file.write(
                    synthetic_bytes(SEED, offset, min(16 * MIB, bench.sizes.sequential_bytes - offset))
                )
            os.fsync(file.fileno())
    return path


def _disk_bounds(bench: Bench, origin: Origin) -> None:
    def fio() -> dict[str, float]:
        path = _local_file(bench)
        drop_pages(bench.directory)
        words = [
            "fio",
            "--name=read",
            f"--filename={path}",
            "--readonly",
            "--rw=read",
            "--direct=1",
            "--bs=1M",
        ]
        words += ["--ioengine=libaio", f"--iodepth={DEPTH}", "--output-format=json"]
        job = json.loads(run_command(words, seconds=60))["jobs"][0]["read"]
        return {"rate": float(job["bw_bytes"])}

    bench.record(f"disk {origin.name}", "fio", fio)
