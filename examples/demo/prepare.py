"""Real text as tokens, and tokens as MDS shards: the Python sources installed here, one token a byte."""

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from examples.demo.processes import StepError
from loader import MDSWriter

BLOCK_TOKENS = 2048
SHARD_BYTES = 8 * 2**20  # small for a dataset, so that this one has ten of them
# A generated table or a bundled parser of a megabyte would be most of what a small model sees.
LARGEST_SOURCE_BYTES = 256 * 1024


def source_files(roots: list[Path]) -> list[Path]:
    """Return the Python sources below `roots` in a mixed order that depends on their names alone."""
    found = {
        path for root in roots for path in root.rglob("*.py") if path.stat().st_size <= LARGEST_SOURCE_BYTES
    }
    files = sorted(found)
    random.Random(0).shuffle(files)
    return files


def token_blocks(files: list[Path], count: int) -> Iterator[NDArray[np.int32]]:
    """Yield `count` blocks, each (BLOCK_TOKENS,): the bytes of `files`, a zero after each file.

    Raises StepError if the files end first.
    """
    pending = bytearray()
    unread = iter(files)
    for number in range(count):
        while len(pending) < BLOCK_TOKENS:
            path = next(unread, None)
            if path is None:
                raise StepError(f"the Python sources here fill {number} blocks, {count} are needed")
            pending += path.read_bytes() + b"\0"
        yield np.frombuffer(bytes(pending[:BLOCK_TOKENS]), dtype=np.uint8).astype(np.int32)
        del pending[:BLOCK_TOKENS]


def write_dataset(folder: Path, roots: list[Path], samples: int) -> NDArray[np.uint32]:
    """Write `samples` blocks of the sources below `roots` as MDS shards to `folder`.

    Columns: `tokens`, (BLOCK_TOKENS,) int32, and `id`, the sample's number. Returns (samples,): the CRC-32 of
    each sample's tokens, for whoever wants to know later that the same bytes came back.
    """
    columns = {"tokens": f"ndarray:int32:{BLOCK_TOKENS}", "id": "int"}
    checksums = np.empty(samples, dtype=np.uint32)
    blocks = token_blocks(source_files(roots), samples)
    with MDSWriter(folder, columns=columns, size_limit=SHARD_BYTES, hashes=["xxh64"]) as writer:
        for number, tokens in enumerate(
            tqdm(blocks, total=samples, desc="tokenise and write", unit=" samples")
        ):
            writer.write({"tokens": tokens, "id": number})
            checksums[number] = zlib.crc32(tokens.tobytes())
    return checksums
