"""Rewrites a dataset with another compression, other hashes or alignment; samples and shards stay the same.

The same samples are in the same shards in the same order, so a sample order, which depends on the shards' sizes, stays
the same too. It does not copy files: every sample is read. Shards with different columns keep their columns.
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
from loader.mds.shard_reader import ReadOptions, ShardReader
from loader.writing.resume_scan import check_no_shards, check_not_below, make_directory
from loader.writing.shard_packer import PackOptions, ShardPacker
from loader.writing.writer import write_index, write_pieces


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
