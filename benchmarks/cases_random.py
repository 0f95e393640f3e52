"""The cases in which pieces are read at random places of one large object."""

from functools import partial
from typing import Any

from benchmarks.bench import Bench, fetch, read
from benchmarks.origins import Origin
from benchmarks.peers import FUSECACHE, MOUNTED, Mount, Peer
from benchmarks.processes import BenchmarkError

BUCKET = "random"
KEY = "object"
SEED = 7
LARGE_BYTES = 128 * 1024
SMALL_BYTES = 8 * 1024
THREADS = 64


def large(bench: Bench, origin: Origin) -> None:
    """Read 128 KiB at a time, one after the other."""
    _add_object(bench, origin)
    case = f"random128k {origin.name}"
    for peer in bench.turn(MOUNTED):
        _measure(bench, origin, case, peer, LARGE_BYTES, threads=1)

    def first_byte() -> dict[str, float]:
        with bench.origins.answering(origin, BUCKET) as site:
            size, count = bench.sizes.random_object_bytes, bench.sizes.first_bytes
            return fetch(
                "first_byte", site, key=KEY, size=size, read_bytes=LARGE_BYTES, count=count, seed=bench.round
            )

    bench.record(case, "first-byte", first_byte)


def small(bench: Bench, origin: Origin) -> None:
    """Read 8 KiB at a time from 64 threads."""
    _add_object(bench, origin)
    case = f"random8k {origin.name}"

    def raw() -> dict[str, float]:
        with bench.origins.answering(origin, BUCKET) as site:
            return _figures(fetch("raw_scattered", site, key=KEY, **_request(bench, SMALL_BYTES, THREADS)))

    # The peers are of interest, but no bar asks for them and they take long: once is enough.
    peers = MOUNTED if bench.round == 1 else (FUSECACHE,)
    for peer in bench.turn([None, *peers]):
        if peer is None:
            bench.record(case, "raw", raw)
        else:
            _measure(bench, origin, case, peer, SMALL_BYTES, threads=THREADS)


def _add_object(bench: Bench, origin: Origin) -> None:
    if bench.origins.add_bucket(origin, BUCKET):
        size = bench.sizes.random_object_bytes
        bench.origins.control(origin).add_synthetic(KEY, size, SEED, bucket=BUCKET)


def _request(bench: Bench, read_bytes: int, threads: int) -> dict[str, Any]:
    return {
        "size": bench.sizes.random_object_bytes,
        "read_bytes": read_bytes,
        "threads": threads,
        "count": 300 if threads == 1 else 20_000,
        "duration": bench.sizes.random_seconds,
        "seed": bench.round,
    }


def _measure(bench: Bench, origin: Origin, case: str, peer: Peer, read_bytes: int, *, threads: int) -> None:
    try:
        with bench.mount(peer, origin, BUCKET) as mount:
            request = _request(bench, read_bytes, threads)
            bench.record(case, peer.name, partial(_read, bench, origin, mount, request))
    except BenchmarkError as exc:
        bench.record_failure(case, peer.name, exc)


def _read(bench: Bench, origin: Origin, mount: Mount, request: dict[str, Any]) -> dict[str, float]:
    control = bench.origins.control(origin)
    # What opening costs is another case's figure, and the first read of a whole-file cache prepares its file.
    control.clear_log()
    mount.memory.take()
    cpu = mount.cpu_seconds()
    answer = read("scattered", path=str(mount.path / KEY), **request)
    figures = _figures(answer)
    asked = answer["reads"] * request["read_bytes"]
    fetched = sum(entry.bytes_out for entry in control.log("GetObject"))
    return {
        **figures,
        "amplification": fetched / asked,
        "cpu_seconds": mount.cpu_seconds() - cpu,
        "memory_bytes": mount.memory.take(),
    }


def _figures(answer: dict[str, float]) -> dict[str, float]:
    return {**answer, "reads_per_second": answer["reads"] / answer["seconds"]}
