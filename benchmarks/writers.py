"""What a program that writes files does, by ordinary system calls: `python -m benchmarks.writers '{"task": …}'`.

Prints one JSON object. Times `began` and `closed` are seconds since 1970, as in the request log of the test server.
Every file holds the same pattern from its start, so that its ETag is known.
"""

import functools
import hashlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PATTERN_BYTES = 4 << 20


@functools.cache
def pattern() -> bytes:
    """Return what every file holds, over and over."""
    return random.Random(4).randbytes(PATTERN_BYTES)


def pieces(offset: int, size: int) -> Iterator[memoryview]:
    """Yield what a file holds in [offset, offset + size)."""
    view, stop = memoryview(pattern()), offset + size
    while offset < stop:
        start = offset % PATTERN_BYTES
        piece = view[start : start + stop - offset]
        yield piece
        offset += len(piece)


@functools.cache
def _md5(start: int, size: int) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces(start, size):
        digest.update(piece)
    return digest.digest()


def expected_etag(size: int, part_sizes: Sequence[int]) -> str:
    """Return the ETag of a file of `size` bytes stored in parts of these sizes; without parts: by one PutObject."""
    if not part_sizes:
        return _md5(0, size).hex()
    digest = hashlib.md5(usedforsecurity=False)
    for start, part in zip(itertools.accumulate(part_sizes, initial=0), part_sizes, strict=False):
        # Equal bytes are hashed once: hashing 1 GiB takes longer than some of the uploads.
        digest.update(_md5(start % PATTERN_BYTES, part))
    return f"{digest.hexdigest()}-{len(part_sizes)}"


def sequential(path: str, size: int, step_bytes: int) -> dict[str, Any]:
    """Write one new file by `step_bytes` at a time, and close it."""
    pattern()  # is made before the clock starts
    began = time.time()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        for offset in range(0, size, step_bytes):
            for piece in pieces(offset, min(step_bytes, size - offset)):
                _write_all(descriptor, piece)
    finally:
        os.close(descriptor)
    closed = time.time()
    return {"bytes": size, "began": began, "closed": closed, "seconds": closed - began}


def many(folder: str, folders: int, files: int, size: int, duration: float) -> dict[str, Any]:
    """Write `files` new files, or as many as fit in `duration` seconds, one after the other, as tar and cp do.

    They are spread over folders that are there. files: how many were written.
    """
    view = memoryview(pattern())[:size]
    written = 0
    began = time.time()
    for index in range(files):
        if time.time() > began + duration:
            break
        path = os.path.join(folder, file_name(index, folders))
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            _write_all(descriptor, view)
        finally:
            os.close(descriptor)
        written += 1
    closed = time.time()
    return {"files": written, "began": began, "closed": closed, "seconds": closed - began}


def file_name(index: int, folders: int) -> str:
    """Return the path of a small file below its root."""
    return f"{folder_name(index % folders)}/sample-{index:06d}.bin"


def folder_name(index: int) -> str:
    """Return the name of a folder of small files."""
    return f"folder-{index:02d}"


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


TASKS: dict[str, Callable[..., dict[str, Any]]] = {task.__name__: task for task in (sequential, many)}


def main() -> None:
    """Do one task."""
    request = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(TASKS[request.pop("task")](**request)) + "\n")


if __name__ == "__main__":
    main()
