"""What a program that loads a model does with its files: `python -m benchmarks.tensors '{"task": …}'`.

The files are safetensors, mapped into memory; each tensor is copied out of the mapping. Prints one JSON object. Only
the reading is timed, not this interpreter's start.
"""

import json
import mmap
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Tensors = list[tuple[int, int]]


def header(sizes: Sequence[int]) -> bytes:
    """Return the start of a safetensors file with one tensor of each size."""
    tensors, start = {}, 0
    for number, size in enumerate(sizes):
        tensors[f"layer.{number}.weight"] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [start, start + size],
        }
        start += size
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@contextmanager
def mapped(path: str) -> Iterator[tuple[mmap.mmap, Tensors]]:
    """Map a file as safetensors does: the descriptor is closed at once; yield it with the place of each tensor."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with memory:
        (length,) = struct.unpack("<Q", memory[:8])
        tensors = json.loads(memory[8 : 8 + length])
        places = [each["data_offsets"] for name, each in tensors.items() if name != "__metadata__"]
        yield memory, [(8 + length + start, 8 + length + stop) for start, stop in places]


_BUFFER = memoryview(bytearray(1 << 20))


def copy(memory: mmap.mmap, start: int, stop: int) -> int:
    """Copy bytes out of a mapping into one buffer, as `readers.sequential` does with read(2); return how many."""
    with memoryview(memory) as view:
        for offset in range(start, stop, len(_BUFFER)):
            piece = view[offset : min(stop, offset + len(_BUFFER))]
            _BUFFER[: len(piece)] = piece
            piece.release()
    return stop - start


def load(paths: list[str], seed: int | None) -> dict[str, Any]:
    """Copy all tensors of files, one file after the other. seed: of the order within a file; None: the file's own."""
    total, began = 0, time.monotonic()
    for path in paths:
        with mapped(path) as (memory, places):
            if seed is not None:
                random.Random(seed).shuffle(places)
            for start, stop in places:
                total += copy(memory, start, stop)
    return {"bytes": total, "seconds": time.monotonic() - began}


def ranks(path: str, count: int) -> dict[str, Any]:
    """Load with several processes at once, each its part of each tensor, as tensor parallelism does."""
    ready, go = os.pipe(), os.pipe()
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            os.write(ready[1], b"r")
            os.close(go[1])
            os.read(go[0], 1)  # ends when the parent closes it
            with mapped(path) as (memory, places):
                for start, stop in places:
                    size = stop - start
                    copy(memory, start + size * rank // count, start + size * (rank + 1) // count)
            os._exit(0)
        children.append(child)
    for _ in children:
        os.read(ready[0], 1)
    os.close(go[0])
    began = time.monotonic()
    os.close(go[1])
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit("a rank failed")
    return {"bytes": os.path.getsize(path), "seconds": time.monotonic() - began}


def sampled(path: str, count: int, seed: int) -> dict[str, Any]:
    """Read single bytes at random places of a mapping, as a data set does that is larger than memory."""
    places = random.Random(seed)
    began = time.monotonic()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        for _ in range(count):
            _ = memory[places.randrange(len(memory))]
    return {"reads": count, "seconds": time.monotonic() - began}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {task.__name__: task for task in (load, ranks, sampled)}


def main() -> None:
    """Do one task."""
    request = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(TASKS[request.pop("task")](**request)) + "\n")


if __name__ == "__main__":
    main()
