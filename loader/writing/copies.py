"""Copies datasets: with another compression, or with all samples in a random order.

`recompress` changes compression, hashes or alignment. The same samples are in the same shards in the same order, so a
sample order, which depends on the shards' sizes, stays the same too. It does not copy files: every sample is read.
Shards with different columns keep their columns.

`shuffle` makes two passes over the samples. The first reads shard after shard, and appends each sample to the scratch
file of its place in the new order. The second reads one scratch file after the other into memory, sorts it, and writes
it. So both passes read and write in sequence, and memory holds one scratch file.

Invariant: the result of `shuffle` depends on the seed, the samples in their order and the pack options alone.
"""

import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from loader.base.paths import check_is_local
from loader.errors import ArgumentError, LoaderError, WriterError
from loader.mds.index import INDEX_NAME, Index, read_index
from loader.mds.shard_reader import ReadOptions, ShardReader
from loader.writing.resume_scan import check_no_shards, check_not_below, make_directory
from loader.writing.shard_packer import PackOptions, ShardPacker
from loader.writing.writer import MDSWriter, write_index, write_pieces


def recompress(
    source: str | Path,
    out: str | Path,
    options: PackOptions,
    *,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write the dataset in `source` into `out`; return the number of shards.

    threads: number of shards compressed concurrently, each of them in memory. progress: called with the number of
    shards done so far. Raises DatasetError or ShardError for a source that cannot be read, and WriterError if `out`
    has a dataset or shards already or lies within source.
    """
    check_is_local(out)
    index = read_index(source)
    target = Path(out)
    if (target / INDEX_NAME).exists():
        raise WriterError(f"{target} holds a dataset already: choose another directory, or remove it")
    check_not_below(target, source)
    packers = [ShardPacker(schema, options) for schema in index.schemas]
    make_directory(target)
    check_no_shards(target)
    shards: list[dict[str, Any]] = []
    for entry in _in_order(index, packers, target, threads or os.cpu_count() or 1):
        shards.append(entry)
        if progress is not None:
            progress(len(shards))
    write_index(os.path.realpath(target), shards)
    return len(shards)


def _in_order(
    index: Index, packers: list[ShardPacker], target: Path, threads: int
) -> Iterator[dict[str, Any]]:
    """Write shards concurrently, and yield their entries in order."""
    reader, folder = ShardReader(index, ReadOptions(decompressed_cache_bytes=0)), os.path.realpath(target)

    def work(shard: int) -> dict[str, Any]:
        packer = packers[index.schema_number(shard)]
        samples = reader.read_many(shard, list(range(int(index.samples[shard]))))
        entry, data = packer.pack(shard, [len(sample) for sample in samples], samples)
        write_pieces(f"{folder}/{packer.file_name(shard)}", data)
        return entry

    with ThreadPoolExecutor(threads) as pool:
        rest = iter(range(index.shards))
        # At most one shard a thread, because each is in memory, raw and compressed.
        waiting: list[Future[dict[str, Any]]] = [pool.submit(work, shard) for shard in islice(rest, threads)]
        try:
            while waiting:
                yield waiting.pop(0).result()
                waiting += [pool.submit(work, shard) for shard in islice(rest, 1)]
        finally:
            pool.shutdown(cancel_futures=True)


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
