"""Turns future steps into planned reads: which shards when, and which of their bytes first.

Pure arithmetic over the index. Of a shard's bytes it needs only the offset table, where samples differ in size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loader.mds.index import Index
from loader.sampling.step_plan import StepPlan

# Extents of one shard and step with a smaller gap are joined: a separate request costs more than these bytes.
GAP_BYTES = 16 << 10

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedReads:
    """Byte extents, ordered by first step. All arrays: (extents,) int64. stop: 0 means the end of the file."""

    shard: Ids
    start: Ids
    stop: Ids
    first: Ids
    last: Ids


def shard_reads(step_plan: StepPlan, ends: Ids, first: int, count: int) -> PlannedReads:
    """Return the shards that a machine reads in steps first … first + count - 1 of one epoch, with their steps.

    ends: (shards,) one past the last sample id of each shard.
    """
    begins = np.full(ends.size, -1, np.int64)
    lasts = np.zeros(ends.size, np.int64)
    for step, ids in step_plan.ids(first, count):
        shards = np.searchsorted(ends, ids.ravel(), side="right")
        steps = np.repeat(np.arange(step, step + ids.shape[0]), ids.shape[1])
        order = np.argsort(shards, kind="stable")  # keeps the steps of a shard in order
        borders = np.flatnonzero(np.diff(shards[order], prepend=-1, append=ends.size))
        used = shards[order[borders[:-1]]]
        fresh = begins[used] < 0
        begins[used[fresh]] = steps[order[borders[:-1]]][fresh]
        lasts[used] = steps[order[borders[1:] - 1]]
    used = np.flatnonzero(begins >= 0)
    used = used[np.argsort(begins[used], kind="stable")]
    nothing = np.zeros(used.size, np.int64)
    return PlannedReads(used, nothing, nothing, begins[used], lasts[used])


def reads_from(reads: PlannedReads, step: int) -> PlannedReads:
    """Return the reads that remain once all steps before `step` are done; none begins before it."""
    first = np.maximum(reads.first, step)
    order = np.argsort(first, kind="stable")
    order = order[reads.last[order] >= step]
    return PlannedReads(
        reads.shard[order], reads.start[order], reads.stop[order], first[order], reads.last[order]
    )


def table_bytes(index: Index, shard: int) -> int:
    """Return the size of the offset table at a shard's beginning; 0 if the index alone gives the offsets."""
    return 0 if _fixed(index, shard) else 4 * (int(index.samples[shard]) + 2)


def _fixed(index: Index, shard: int) -> range | None:
    """Return the offsets of all samples and of the end if all samples have the same size, else None."""
    count, record = int(index.samples[shard]), index.schema(shard).record_bytes
    size = int(index.raw_bytes[shard])
    first = size - count * record
    return range(first, size + 1, record) if record and size and first >= 4 * (count + 2) else None


def sample_reads(
    step_plan: StepPlan,
    index: Index,
    ends: Ids,
    first: int,
    count: int,
    *,
    table_of: Callable[[int], NDArray[np.uint32] | None],
) -> PlannedReads:
    """Return the exact bytes of the samples of `count` steps, as small extents; neighbours of a step are joined.

    table_of: a shard's offset table, for shards that have one. None: unknown, which leaves out the shard.
    """
    rows: list[tuple[int, int, int, int]] = []
    for step, ids in step_plan.ids(first, count):
        for number, of_step in enumerate(ids):
            rows += _extents_of_step(index, ends, np.sort(of_step), step + number, table_of)
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return PlannedReads(columns[0], columns[1], columns[2], columns[3], columns[3])


def _extents_of_step(
    index: Index, ends: Ids, ids: Ids, step: int, table_of: Callable[[int], NDArray[np.uint32] | None]
) -> list[tuple[int, int, int, int]]:
    rows: list[tuple[int, int, int, int]] = []
    shards = np.searchsorted(ends, ids, side="right")
    offsets: Mapping[int, NDArray[np.uint32] | range | None] = {
        shard: None if index.compression(shard) else _fixed(index, shard) or table_of(shard)
        for shard in set(shards.tolist())
    }
    for sample, shard in zip(ids.tolist(), shards.tolist(), strict=True):
        table = offsets[shard]
        if table is None:
            continue
        within = sample - int(ends[shard]) + int(index.samples[shard])
        start, stop = int(table[within]), int(table[within + 1])
        if start == stop:
            continue
        before = rows[-1] if rows else None
        if before is not None and before[0] == shard and start - before[2] <= GAP_BYTES:
            rows[-1] = (shard, before[1], max(stop, before[2]), step)
        else:
            rows.append((shard, start, stop, step))
    return rows
