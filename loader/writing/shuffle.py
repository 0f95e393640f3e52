"""Copies a dataset with all samples in a random order, in two passes over them.

The first pass reads shard after shard, and appends each sample to the scratch file of its place in the new order. The
second reads one scratch file after the other into memory, sorts it, and writes it. So both passes read and write in
sequence, and memory holds one scratch file.

Invariant: the result depends on the seed, the samples in their order and the pack options, and on nothing else.
"""

import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from loader.base.paths import check_is_local
from loader.errors import ArgumentError, LoaderError, WriterError
from loader.mds.index import Index, read_index
from loader.mds.shard_reader import ReadOptions, ShardReader
from loader.writing.resume_scan import check_no_shards, check_not_below
from loader.writing.shard_packer import PackOptions
from loader.writing.writer import MDSWriter

# Bytes of a scratch file, as far as their number allows.
SCRATCH_FILE_BYTES = 512 << 20
# They are open at the same time; well below the usual limit of 1 024 a process.
_MOST_FILES = 512
# The place of a sample in the new order, and its bytes.
_HEAD = struct.Struct("<QI")


def shuffle(
    source: str | Path,
    out: str | Path,
    options: PackOptions,
    *,
    seed: int,
    scratch: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
    scratch_file_bytes: int = SCRATCH_FILE_BYTES,
) -> int:
    """Write the samples of `source` into `out`, in an order that the seed gives; return their number.

    scratch: a folder with space for all raw samples [the system's for temporary files]; what is written there is
    removed. progress: called with the number of samples that a pass has moved since the last call. Memory: 8 bytes a
    sample, and one scratch file of about `scratch_file_bytes`, or of a 512th of the dataset. Raises DatasetError or
    ShardError for a source that cannot be read, and WriterError if its shards differ in their columns, if there is no
    space for the scratch files, or for an `out` that MDSWriter refuses.
    """
    check_is_local(out)
    if not 0 <= seed < 1 << 63:
        raise ArgumentError(f"seed {seed}: it is at least 0 and below 2**63")
    index = read_index(source)
    if len(index.schemas) > 1:
        raise WriterError(
            f"{source}: its shards have {len(index.schemas)} different sets of columns, and samples of two sets cannot "
            "share a shard: shuffle the parts one by one"
        )
    columns = (
        dict(zip(index.schemas[0].names, index.schemas[0].encodings, strict=True)) if index.schemas else {}
    )
    check_not_below(Path(out), source)
    check_no_shards(Path(out))
    with (
        MDSWriter(
            out,
            columns,
            compression=options.compression,
            hashes=options.hashes,
            size_limit=options.size_limit,
            align=options.align,
        ) as writer,
        ExitStack() as stack,
    ):
        count = min(_MOST_FILES, -(-int(index.raw_bytes.sum()) // scratch_file_bytes)) or 1
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shuffle-", dir=scratch))
            paths = [Path(folder) / f"{number:03}" for number in range(count)]
            _scatter(index, seed, paths, progress)
        except LoaderError:
            raise
        except OSError as problem:
            raise WriterError(
                f"{scratch or tempfile.gettempdir()}: {problem.strerror}; shuffling needs space for all samples there: "
                "name another folder (--scratch)"
            ) from problem
        for path in paths:
            rows = sorted(_read(path))
            path.unlink()
            for _, sample in rows:
                writer.write_encoded(sample)
            if progress is not None:
                progress(len(rows))
        return writer.samples


def _scatter(index: Index, seed: int, paths: list[Path], progress: Callable[[int], None] | None) -> None:
    """Append each sample to the file of its place."""
    samples = int(index.samples.sum())
    places = np.random.default_rng(seed).permutation(samples)
    reader = ShardReader(index, ReadOptions(decompressed_cache_bytes=0))
    first = 0
    with ExitStack() as stack:
        files: list[BinaryIO] = [stack.enter_context(open(path, "wb")) for path in paths]
        for shard in range(index.shards):
            found = reader.read_many(shard, list(range(int(index.samples[shard]))))
            for place, sample in zip(places[first : first + len(found)].tolist(), found, strict=True):
                file = files[place * len(files) // samples]
                file.write(_HEAD.pack(place, len(sample)))
                file.write(sample)
            first += len(found)
            if progress is not None:
                progress(len(found))


def _read(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        while head := file.read(_HEAD.size):
            place, size = _HEAD.unpack(head)
            yield place, file.read(size)
