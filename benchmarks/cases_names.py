"""The cases about names and small files: ls, find, 200 small files, a directory of a million."""

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, fetch, read
from benchmarks.origins import Origin
from benchmarks.peers import FUSECACHE, MOUNTED, Mount, Peer
from benchmarks.processes import BenchmarkError, run_command

LS_BUCKET = "names"
FIND_BUCKET = "tree"
SMALL_BUCKET = "small"
MILLION_BUCKET = "million"
THREADS = 8
FIND_SECONDS = 60.0
PAGE_NAMES = 1000


def ls(bench: Bench, origin: Origin) -> None:
    """`ls` of one directory, and again."""
    if bench.origins.add_bucket(origin, LS_BUCKET):
        bench.origins.control(origin).add_many(
            "sample-{:06d}.bin", bench.sizes.names, size=1000, bucket=LS_BUCKET
        )
    for peer in bench.turn(MOUNTED):
        measure = partial(_command, "ls", count=bench.sizes.names)
        _twice(bench, origin, peer, LS_BUCKET, "ls", measure)


def find(bench: Bench, origin: Origin) -> None:
    """`find -size +0`, which asks for the attributes of every file, and again."""
    folders, files = bench.sizes.find_folders, bench.sizes.find_files_a_folder
    if bench.origins.add_bucket(origin, FIND_BUCKET):
        for index in range(folders):
            pattern = f"folder-{index:02d}/sample-{{:06d}}.bin"
            bench.origins.control(origin).add_many(pattern, files, size=1000, bucket=FIND_BUCKET)
    # Some peers take a minute, and no bar compares with them: once is enough.
    for peer in bench.turn(MOUNTED if bench.round == 1 else (FUSECACHE,)):
        measure = partial(_command, "find", "-type", "f", "-size", "+0", count=folders * files)
        _twice(bench, origin, peer, FIND_BUCKET, "find", measure)


def small_files(bench: Bench, origin: Origin) -> None:
    """Read small files, all different, in random order from 8 threads."""
    count = bench.sizes.small_files
    names = [f"sample-{index:06d}.bin" for index in range(count)]
    if bench.origins.add_bucket(origin, SMALL_BUCKET):
        bench.origins.control(origin).add_many(
            "sample-{:06d}.bin", count, size=bench.sizes.small_bytes, bucket=SMALL_BUCKET
        )
    random.Random(bench.round).shuffle(names)
    case = f"small {origin.name}"

    def measure(mount: Mount) -> dict[str, float]:
        mount.memory.take()
        answer = read("small_files", paths=[str(mount.path / name) for name in names], threads=THREADS)
        if answer["bytes"] != count * bench.sizes.small_bytes:
            raise BenchmarkError(f"{answer['bytes']} bytes came")
        counts = bench.origins.control(origin).counts()
        return {
            "seconds": answer["seconds"],
            "files": answer["files"],
            "gets": counts.get("GetObject", 0),
            "heads": counts.get("HeadObject", 0),
            "lists": counts.get("ListObjectsV2", 0),
            "memory_bytes": mount.memory.take(),
        }

    for peer in bench.turn(MOUNTED):
        _once(bench, origin, peer, SMALL_BUCKET, case, measure)


def million(bench: Bench, origin: Origin) -> None:
    """One directory of a million: the first name, one file opened, and all names beside LIST without a mount."""
    count = bench.sizes.million
    pattern = "sample-{:08d}.bin"
    if bench.origins.add_bucket(origin, MILLION_BUCKET):
        bench.origins.control(origin).add_many(pattern, count, size=1000, bucket=MILLION_BUCKET)

    def first(mount: Mount) -> dict[str, float]:
        answer = read("first_name", path=str(mount.path))
        return {"first_seconds": answer["first_seconds"], "memory_bytes": mount.memory.take()}

    def opening(mount: Mount) -> dict[str, float]:
        bench.origins.control(origin).clear_log()
        known = pattern.format(random.Random(bench.round).randrange(count))
        answer = read("opening", path=str(mount.path / known))
        lists = bench.origins.control(origin).log("ListObjectsV2")
        asked = sum(int(entry.query.get("max-keys", PAGE_NAMES)) for entry in lists)
        return {
            "open_seconds": answer["open_seconds"],
            "read_seconds": answer["read_seconds"],
            "lists": len(lists),
            "list_names": asked,
        }

    def all_names(mount: Mount) -> dict[str, float]:
        mount.memory.take()
        answer = read("names", path=str(mount.path), seconds=300)
        return {**_speed(answer, count), "memory_bytes": mount.memory.take()}

    def raw() -> dict[str, float]:
        with bench.origins.answering(origin, MILLION_BUCKET) as site:
            return _speed(fetch("raw_names", site, seconds=300), count)

    _once(bench, origin, FUSECACHE, MILLION_BUCKET, f"million-open {origin.name}", opening)
    _once(bench, origin, FUSECACHE, MILLION_BUCKET, f"million-first {origin.name}", first)
    case = f"million-all {origin.name}"
    # A minute or two each, of a thousand requests, so that one round is a good mean already.
    if bench.round == 1:
        bench.record(case, "raw", raw)
        _once(bench, origin, FUSECACHE, MILLION_BUCKET, case, all_names)


def _speed(answer: dict[str, float], count: int) -> dict[str, float]:
    if answer["names"] < count:
        raise BenchmarkError(f"{answer['names']} of {count} names came")
    return {"names_per_second": answer["names"] / answer["seconds"], "seconds": answer["seconds"]}


def _command(*words: str, path: Path, count: int) -> dict[str, float]:
    """Time a command over a directory, which prints a line a file. Raises BenchmarkError if files are missing."""
    began = time.monotonic()
    output = run_command([words[0], str(path), *words[1:]], seconds=FIND_SECONDS)
    seconds = time.monotonic() - began
    if (lines := output.count("\n")) < count:
        raise BenchmarkError(f"{words[0]} showed {lines} of {count} names")
    return {"seconds": seconds}


def _once(
    bench: Bench,
    origin: Origin,
    peer: Peer,
    bucket: str,
    case: str,
    measure: Callable[[Mount], dict[str, float]],
) -> None:
    try:
        with bench.mount(peer, origin, bucket) as mount:
            bench.record(case, peer.name, partial(measure, mount))
    except BenchmarkError as exc:
        bench.record_failure(case, peer.name, exc)


def _twice(
    bench: Bench,
    origin: Origin,
    peer: Peer,
    bucket: str,
    name: str,
    measure: Callable[..., dict[str, float]],
) -> None:
    """Measure on a fresh mount, and again at once."""

    def with_memory(mount: Mount) -> dict[str, float]:
        mount.memory.take()
        figures = measure(path=mount.path)
        counts = bench.origins.control(origin).counts()
        figures["lists"], figures["heads"] = counts.get("ListObjectsV2", 0), counts.get("HeadObject", 0)
        return {**figures, "memory_bytes": mount.memory.take()}

    try:
        with bench.mount(peer, origin, bucket) as mount:
            if bench.record(f"{name} {origin.name}", peer.name, partial(with_memory, mount)):
                bench.record(f"{name}-again {origin.name}", peer.name, partial(with_memory, mount))
    except BenchmarkError as exc:
        bench.record_failure(f"{name} {origin.name}", peer.name, exc)
