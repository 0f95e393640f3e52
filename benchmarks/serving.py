"""Loading model weights: `python -m benchmarks.serving`, or `make bench-serving`. README.md says what and how.

Prints a table and writes it with all rounds' figures to results/serving.json and results/serving.png. Exit status 1 if
a bar was missed or could not be measured, 2 if the run was interrupted.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bars import US, Bar, Judge, bars_of, best, ratio
from benchmarks.bench import GIB, LIMIT_SECONDS, Bench, fetch, read
from benchmarks.chart import Panels
from benchmarks.driver import Benchmark, Case, run
from benchmarks.origins import Origin
from benchmarks.peers import FUSECACHE, RCLONE_TUNED, S3FS, Mount, Peer, has_option
from benchmarks.processes import BenchmarkError, run_child, run_command
from benchmarks.results import Results
from benchmarks.tensors import header

TENSORS, SHARDS, RANKS, SAMPLES = 64, 8, 4, 200
MODEL, SHARDED, SAMPLED, AGAIN = "model", "sharded", "sampled", "again"
FILE = "model.safetensors"
SEQUENCE, FILE_ORDER, QUARTERS, UNGUESSED, NATIVE = (
    "sequence",
    "file-order",
    "quarters",
    "unguessed",
    "native",
)
READ_ONLY = replace(FUSECACHE, flags=("--read-only",))
WITHOUT = replace(FUSECACHE, flags=("--whole-files", ""))
PEERS = (RCLONE_TUNED, S3FS)


def model(bench: Bench, origin: Origin) -> None:
    """One file, cold: in sequence, and mapped in several orders. The others share a mount's code, not its cache."""
    _make(bench, origin, MODEL, [FILE], bench.sizes.stream_bytes)
    ways: dict[str, Callable[[str], dict[str, Any]]] = {
        US: lambda path: _tensors("load", paths=[path], seed=bench.round),
        SEQUENCE: lambda path: read("sequential", path=path),
        FILE_ORDER: lambda path: _tensors("load", paths=[path], seed=None),
        QUARTERS: lambda path: _tensors("ranks", path=path, count=RANKS),
    }
    # The driver takes turns among competitors; with `--alone`, all of these are ours too.
    for way in _turn(bench, list(ways)):
        _cold(bench, origin, f"model {origin.name}", way, FUSECACHE, MODEL, partial(_one, ways[way]))


def shards(bench: Bench, origin: Origin) -> None:
    """Eight shards with an index, loaded one after the other."""
    names = [f"model-{number + 1:05}-of-{SHARDS:05}.safetensors" for number in range(SHARDS)]
    _make(bench, origin, SHARDED, names, bench.sizes.sequential_bytes // SHARDS)
    case = f"shards {origin.name}"

    def load(path: Path) -> dict[str, Any]:
        return _tensors("load", paths=[str(path / name) for name in names], seed=bench.round)

    def without_mount(task: str) -> dict[str, float]:
        # One object of the same size.
        with bench.origins.answering(origin, SAMPLED) as site:
            return _rated(fetch(task, site, key="data.bin", size=bench.sizes.sequential_bytes))

    _make_data(bench, origin)
    mounts = {peer.name: peer for peer in (FUSECACHE, *([] if bench.alone else PEERS))}
    tasks = {"raw": "raw_sequential"} if bench.alone else {"raw": "raw_sequential", "crt": "crt_sequential"}
    for way in _turn(bench, [*mounts, *tasks]):
        if way in mounts:
            _cold(bench, origin, case, way, mounts[way], SHARDED, load)
        else:
            bench.record(case, way, partial(without_mount, tasks[way]))


def sampled(bench: Bench, origin: Origin) -> None:
    """A mapped data set of which single bytes are read: it must not be taken for weights."""
    _make_data(bench, origin)
    for way, peer in ((US, FUSECACHE), (UNGUESSED, WITHOUT)):
        if way == US or has_option("--whole-files"):
            task = partial(_tensors, "sampled", count=SAMPLES, seed=bench.round)
            one = partial(_one, partial(_mapped, task), name="data.bin")
            _cold(bench, origin, f"sampled {origin.name}", way, peer, SAMPLED, one)


def again(bench: Bench, origin: Origin) -> None:
    """The second time: mapped, from the disk, on a read-only mount, beside the cache's own file."""
    _make(bench, origin, AGAIN, [FILE], 2 * bench.sizes.sequential_bytes)
    case = f"model-again {origin.name}"
    try:
        with bench.mount(READ_ONLY, origin, AGAIN) as mount:
            words = [sys.executable, "-m", "fusecache", "warm", "--wait", str(mount.path)]
            run_command(words, seconds=LIMIT_SECONDS)
            paths = {US: mount.path / FILE, NATIVE: _largest(mount.cache)}
            _tensors("load", paths=[str(paths[US])], seed=None)  # the first open checks all of the file
            # A virtual disk gives blocks from its host's memory the second time: both are read from there.
            bench.drop(mount)
            _tensors("load", paths=[str(paths[NATIVE])], seed=None)
            for way in _turn(bench, [US, NATIVE]):
                bench.drop(mount)
                task = partial(_tensors, "load", paths=[str(paths[way])], seed=bench.round)
                bench.record(case, way, partial(_measured, task))
    except BenchmarkError as exc:
        bench.record_failure(case, US, exc)


def _turn(bench: Bench, ways: list[str]) -> list[str]:
    first = (bench.round - 1) % len(ways)
    return [*ways[first:], *ways[:first]]


def _one(task: Callable[[str], dict[str, Any]], folder: Path, name: str = FILE) -> dict[str, Any]:
    return task(str(folder / name))


def _tensors(task: str, **request: Any) -> dict[str, Any]:
    return run_child("benchmarks.tensors", {"task": task, **request}, seconds=LIMIT_SECONDS)


def _mapped(task: Callable[..., dict[str, Any]], path: str) -> dict[str, Any]:
    return task(path=path)


def _measured(task: Callable[[], dict[str, Any]]) -> dict[str, float]:
    return _rated(task())


def _rated(answer: dict[str, Any]) -> dict[str, float]:
    if "bytes" in answer:
        return {"rate": answer["bytes"] / answer["seconds"]}
    return {"seconds": answer["seconds"]}


def _cold(
    bench: Bench,
    origin: Origin,
    case: str,
    way: str,
    peer: Peer,
    bucket: str,
    task: Callable[[Path], dict[str, Any]],
) -> None:
    def measure(mount: Mount) -> dict[str, float]:
        control = bench.origins.control(origin)
        control.clear_log()
        cpu = mount.cpu_seconds()
        answer = task(mount.path)
        cpu = mount.cpu_seconds() - cpu
        fetched = sum(entry.bytes_out for entry in control.log("GetObject"))
        figures = {"fetched_bytes": float(fetched), "cpu_seconds": cpu, "memory_bytes": mount.memory.take()}
        if "bytes" in answer:
            figures["fetched_share"] = fetched / answer["bytes"]
        return {**_rated(answer), **figures}

    try:
        with bench.mount(peer, origin, bucket) as mount:
            bench.record(case, way, partial(measure, mount))
    except BenchmarkError as exc:
        bench.record_failure(case, way, exc)


def _make(bench: Bench, origin: Origin, bucket: str, names: list[str], size: int) -> None:
    """Put a model into its bucket: shards of equal size, with an index if they are several."""
    if not bench.origins.add_bucket(origin, bucket):
        return
    control = bench.origins.control(origin)
    start = header([size // TENSORS] * TENSORS)
    for name in names:
        data = start + os.urandom(size // TENSORS * TENSORS)
        control.put(name, data, bucket=bucket)
    if len(names) > 1:
        places = {f"{name}.layer.{number}": name for name in names for number in range(TENSORS)}
        index = b'{"metadata": {}, "weight_map": ' + repr(places).replace("'", '"').encode() + b"}"
        control.put("model.safetensors.index.json", index, bucket=bucket)


def _make_data(bench: Bench, origin: Origin) -> None:
    if bench.origins.add_bucket(origin, SAMPLED):
        size = bench.sizes.sequential_bytes
        bench.origins.control(origin).add_synthetic("data.bin", size, 3, bucket=SAMPLED)


def _largest(cache: Path) -> Path:
    files = [path for path in (cache / "cache" / "files").glob("??/*") if path.is_file()]
    return max(files, key=os.path.getsize)


def _model_bars(results: Results, case: str, origin: str) -> list[Bar]:
    sequence = results.median(case, SEQUENCE, "rate")

    def speed(way: str, words: str) -> Bar:
        return Bar(
            case,
            f"{words} / in sequence",
            ratio(results.median(case, way, "rate"), sequence),
            0.9,
            at_least=True,
        )

    return [
        speed(US, "mapped, random order"),
        speed(QUARTERS, "4 processes, a quarter of each tensor"),
        *(_fetched(results, case, way) for way in (US, FILE_ORDER, QUARTERS)),
    ]


def _fetched(results: Results, case: str, way: str) -> Bar:
    share = results.median(case, way, "fetched_share")
    return Bar(case, f"bytes from the bucket / size ({way})", share, 1.02, at_least=False)


def _shard_bars(results: Results, case: str, origin: str) -> list[Bar]:
    speed = results.median(case, US, "rate")
    share = ratio(speed, results.median(case, "raw", "rate"))
    peer = best(results, case, [each.name for each in PEERS], "rate")
    return [
        Bar(case, "speed / 32 connections", share, 0.6, at_least=True),
        Bar(case, "speed / the best mounted peer", ratio(speed, peer), 3.0, at_least=True),
        _fetched(results, case, US),
    ]


def _sampled_bars(results: Results, case: str, origin: str) -> list[Bar]:
    fetched, before = (results.median(case, way, "fetched_bytes") for way in (US, UNGUESSED))
    return [Bar(case, "bytes fetched / without whole_files", ratio(fetched, before), 1.0, at_least=False)]


def _again_bars(results: Results, case: str, origin: str) -> list[Bar]:
    share = ratio(results.median(case, US, "rate"), results.median(case, NATIVE, "rate"))
    return [Bar(case, "from the disk, read-only / native file", share, 0.95, at_least=True)]


JUDGES: Mapping[str, Judge] = {
    "model": _model_bars,
    "shards": _shard_bars,
    "sampled": _sampled_bars,
    "model-again": _again_bars,
}
CASES = (
    Case("model", model, "B", 30, 35),
    Case("shards", shards, "B", 45, 55),
    Case("sampled", sampled, "B", 20, 20),
    Case("model-again", again, "B", 15, 15),
)
PANELS: Panels = ((("cold, from the bucket (MB/s, more is better)", ("model B", "shards B")),),)


def serving_bars(results: Results) -> list[Bar]:
    """Return every bar of the cases that were measured."""
    return bars_of(results, JUDGES)


if __name__ == "__main__":
    sys.exit(run(Benchmark("serving", CASES, serving_bars, PANELS, GIB * 3), __doc__))
