"""What a program that reads files does, by ordinary system calls: `python -m benchmarks.readers '{"task": …}'`.

Prints one JSON object. Only the reading is timed, not this interpreter's start.
"""

import hashlib
import json
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_BYTES = 1 << 20
PROOF_BYTES = 1 << 16
SAMPLE_STEPS = 8  # a sample each 8 MiB: 20 ms at the speed of a fast bucket


def read_file(path: str, buffer: mmap.mmap, count: Callable[[int], None] = lambda _: None) -> int:
    """Read a file from start to end into one buffer; return its bytes. `count` is told of each piece."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _read_descriptor(descriptor, buffer, count)
    finally:
        os.close(descriptor)


def sequential(path: str) -> dict[str, Any]:
    """Read one file; `proof` is a digest of its last bytes, which were read within the time.

    seconds: from before the open, which may ask the bucket; open_seconds: of these until it returned.
    """
    buffer = mmap.mmap(-1, STEP_BYTES)
    began = time.monotonic()
    descriptor = os.open(path, os.O_RDONLY)
    opened = time.monotonic()
    total = _read_descriptor(descriptor, buffer, lambda _: None)
    ended = time.monotonic()
    os.close(descriptor)
    last = total % STEP_BYTES or STEP_BYTES
    proof = hashlib.sha256(buffer[max(0, last - PROOF_BYTES) : last]).hexdigest()
    return {"bytes": total, "seconds": ended - began, "open_seconds": opened - began, "proof": proof}


def _read_descriptor(descriptor: int, buffer: mmap.mmap, count: Callable[[int], None]) -> int:
    offset = 0
    with memoryview(buffer) as view:
        while got := os.preadv(descriptor, [view], offset):
            offset += got
            count(got)
    return offset


def streams(paths: list[str]) -> dict[str, Any]:
    """Read all files at once. `shares`: the bytes of each when the first one ended."""
    counts = [0] * len(paths)
    shares: list[int] = []
    together = threading.Barrier(len(paths) + 1)
    failures: list[OSError] = []

    def read(index: int) -> None:
        buffer = mmap.mmap(-1, STEP_BYTES)

        def count(got: int) -> None:
            counts[index] += got

        together.wait()
        try:
            read_file(paths[index], buffer, count)
        except OSError as exc:
            failures.append(exc)
        if not shares:
            shares.extend(counts)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(paths))]
    for thread in threads:
        thread.start()
    together.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    if failures:
        raise failures[0]
    return {"bytes": sum(counts), "seconds": seconds, "shares": shares}


def timeline(path: str, duration: float, stop: str) -> dict[str, Any]:
    """Read one file from its start for `duration` seconds, or until a file `stop` is there.

    samples: [seconds since 1970, bytes so far].
    """
    buffer = mmap.mmap(-1, STEP_BYTES)
    total = 0
    samples = [[time.time(), 0.0]]
    deadline = samples[0][0] + duration
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while samples[-1][0] < deadline and not (stop and os.path.exists(stop)):
            for _ in range(SAMPLE_STEPS):
                total += os.preadv(descriptor, [buffer], total)
            samples.append([time.time(), float(total)])
    finally:
        os.close(descriptor)
    return {"samples": samples}


def scattered(
    path: str, size: int, read_bytes: int, threads: int, count: int, duration: float, seed: int
) -> dict[str, Any]:
    """Read `count` pieces at random aligned places, no place twice, or as many as fit in `duration` seconds."""
    places = random.Random(seed).sample(range(size // read_bytes), count)
    took: list[float] = []
    lock = threading.Lock()
    deadline = time.monotonic() + duration
    failures: list[Exception] = []
    descriptor = os.open(path, os.O_RDONLY)
    began = time.monotonic()

    def read() -> None:
        view = memoryview(mmap.mmap(-1, read_bytes))
        try:
            while time.monotonic() < deadline:
                with lock:
                    if not places:
                        return
                    place = places.pop()
                start = time.monotonic()
                if os.preadv(descriptor, [view], place * read_bytes) != read_bytes:
                    raise EOFError(f"short read at {place * read_bytes}")
                took.append(time.monotonic() - start)
        except (OSError, EOFError) as exc:
            failures.append(exc)

    workers = [threading.Thread(target=read) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed = time.monotonic() - began
    os.close(descriptor)
    if failures:
        raise failures[0]
    return {"reads": len(took), "seconds": elapsed, "mean_seconds": sum(took) / len(took)}


def small_files(paths: list[str], threads: int) -> dict[str, Any]:
    """Open, read and close every file, from several threads."""
    waiting = list(reversed(paths))
    totals: list[int] = []
    failures: list[OSError] = []
    began = time.monotonic()

    def read() -> None:
        buffer = mmap.mmap(-1, STEP_BYTES)
        while True:
            try:
                path = waiting.pop()
            except IndexError:
                return
            try:
                totals.append(read_file(path, buffer))
            except OSError as exc:
                failures.append(exc)

    workers = [threading.Thread(target=read) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.monotonic() - began
    if failures:
        raise failures[0]
    return {"files": len(totals), "bytes": sum(totals), "seconds": seconds}


def names(path: str) -> dict[str, Any]:
    """List one directory: seconds to the first name, and to the last."""
    began = time.monotonic()
    count, first = 0, 0.0
    with os.scandir(path) as entries:
        for _ in entries:
            if not count:
                first = time.monotonic() - began
            count += 1
    return {"names": count, "first_seconds": first, "seconds": time.monotonic() - began}


def first_name(path: str) -> dict[str, Any]:
    """Begin to list a directory; seconds to the first name."""
    began = time.monotonic()
    with os.scandir(path) as entries:
        name = next(entries).name
    return {"name": name, "first_seconds": time.monotonic() - began}


def opening(path: str) -> dict[str, Any]:
    """Open one file whose directory nobody has listed, then read it."""
    began = time.monotonic()
    descriptor = os.open(path, os.O_RDONLY)
    opened = time.monotonic()
    size = len(os.read(descriptor, STEP_BYTES))
    read = time.monotonic()
    os.close(descriptor)
    return {"open_seconds": opened - began, "read_seconds": read - opened, "bytes": size}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    task.__name__: task
    for task in (sequential, streams, timeline, scattered, small_files, names, first_name, opening)
}


def main() -> None:
    """Do one task."""
    request = json.loads(Path(sys.argv[1][1:]).read_text() if sys.argv[1].startswith("@") else sys.argv[1])
    sys.stdout.write(json.dumps(TASKS[request.pop("task")](**request)) + "\n")


if __name__ == "__main__":
    main()
