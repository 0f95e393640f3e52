"""A dataset written anew with another compression, other hashes or alignment; samples and shards stay as they are.

The same samples are in the same shards in the same order, so a sample order made of the shards' sizes is the
same too. Not a copy of files: every sample is read, and shards that differ in their columns keep them.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from loader.base.paths import check_is_local
from loader.errors import WriterError
from loader.mds.index import INDEX_NAME, Index, read_index
from loader.mds.resume_scan import left_over_shards, make_directory
from loader.mds.shard_packer import PackOptions, ShardPacker
from loader.mds.shard_reader import ReadOptions, ShardReader
from loader.mds.writer import write_index


def recompress(
    source: str | Path,
    out: str | Path,
    options: PackOptions,
    *,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write the dataset in `source` into `out`; return how many shards it has.

    threads: that compress at a time, each with a shard in memory. progress: called with the shards done so
    far. Raises DatasetError or ShardError for a source that cannot be read, WriterError if `out` has a
    dataset or shards already or is within source.
    """
    check_is_local(out)
    index = read_index(source)
    target = Path(out)
    if (target / INDEX_NAME).exists():
        raise WriterError(f"{target} holds a dataset already: choose another directory, or remove it")
    if f"{target.resolve()}/".startswith(f"{Path(source).resolve()}/"):
        raise WriterError(f"{target} lies in {source}, to which nothing is written: choose another directory")
    packers = [ShardPacker(schema, options) for schema in index.schemas]
    make_directory(target)
    if left_over := left_over_shards(target):
        raise WriterError(
            f"{target} holds {left_over[0]}, which a run left that did not finish: choose another directory, or "
            f"remove it"
        )
    shards: list[dict[str, Any]] = []
    for entry in _in_order(index, packers, target, threads or os.cpu_count() or 1):
        shards.append(entry)
        if progress is not None:
            progress(len(shards))
    write_index(target, shards)
    return len(shards)


def _in_order(
    index: Index, packers: list[ShardPacker], target: Path, threads: int
) -> Iterator[dict[str, Any]]:
    """Write shards side by side, and yield their entries in order."""
    reader = ShardReader(index, ReadOptions(decompressed_cache_bytes=0))

    def work(shard: int) -> dict[str, Any]:
        packer = packers[index.schema_number(shard)]
        entry, data = packer.pack(shard, reader.read_many(shard, list(range(int(index.samples[shard])))))
        (target / packer.file_name(shard)).write_bytes(data)
        return entry

    with ThreadPoolExecutor(threads) as pool:
        rest = iter(range(index.shards))
        # As many as there are threads: each holds a shard, raw and packed.
        waiting: list[Future[dict[str, Any]]] = [pool.submit(work, shard) for shard in islice(rest, threads)]
        try:
            while waiting:
                yield waiting.pop(0).result()
                waiting += [pool.submit(work, shard) for shard in islice(rest, 1)]
        finally:
            pool.shutdown(cancel_futures=True)
