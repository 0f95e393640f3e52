"""Splits a plan by mount, and encodes each part with the mount's own paths, up to one message in length.

Turns future steps into planned reads: which shards when, and which of their bytes first.

Pure arithmetic over the index. Of a shard's bytes it needs only the offset table, where samples differ in size.
"""

import os
import posixpath
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusecache.model import hints
from loader.base.mount_endpoint import MountEndpoint
from loader.mds.index import Index
from loader.sampling.sampler import StepPlan

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
    return 0 if index.fixed_offsets(shard) else 4 * (int(index.samples[shard]) + 2)


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
        shard: None if index.compression(shard) else index.fixed_offsets(shard) or table_of(shard)
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


# In a message, an extent takes one number in each of five columns; one line of JSON precedes them.
EXTENT_BYTES = 5 * 8
HEADER_BYTES = 4096


class FileRow(NamedTuple):
    """Bytes of a file that one item stands for. path: below the root of its mount."""

    path: str
    start: int
    length: int
    step: int


def plan_message(rows: list[FileRow], window: int, step: int) -> bytes:
    """Encode a plan. Raises HintError."""
    paths = sorted({row.path for row in rows})
    number = {path: place for place, path in enumerate(paths)}
    return hints.encode_plan(
        window=window,
        step=step,
        paths=paths,
        path=[number[row.path] for row in rows],
        start=[row.start for row in rows],
        length=[row.length for row in rows],
        first=[row.step for row in rows],
        span=[0] * len(rows),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PlanMessage:
    """The part of a plan for one mount: extents, and the path of each. is_cut: it did not fit into one message."""

    endpoint: MountEndpoint
    reads: PlannedReads
    names: list[str]
    is_cut: bool

    def message(self, *, window: int, step: int, is_exact: bool) -> bytes:
        """Encode this part as a message."""
        reads = self.reads
        paths = sorted(set(self.names))
        number = {path: place for place, path in enumerate(paths)}
        length = np.where(reads.stop > 0, reads.stop - reads.start, hints.TO_THE_END)
        return hints.encode_plan(
            window=window,
            step=step,
            is_exact=is_exact,
            paths=paths,
            path=array("q", [number[name] for name in self.names]),
            start=_column(reads.start),
            length=_column(length),
            first=_column(reads.first),
            span=_column(reads.last - reads.first),
        )


class MountMap:
    """Maps shards of an index to paths on mounts. places: for each of its directories, the mount and the path there."""

    def __init__(self, index: Index, places: Sequence[tuple[MountEndpoint, str] | None]) -> None:
        self._index = index
        self._places = places
        self.endpoints = {place[0] for place in places if place is not None}

    def __str__(self) -> str:
        return repr([place and (str(place[0].root), place[1]) for place in self._places])

    def parts(self, reads: PlannedReads) -> list[PlanMessage]:
        """Split extents by mount; each mount gets the first of its extents, as many as one message can contain."""
        streams = np.searchsorted(self._index.borders, reads.shard, side="right") - 1
        parts = []
        for endpoint in self.endpoints:
            here = np.array([place is not None and place[0] == endpoint for place in self._places])
            parts.append(self._part(endpoint, choose(reads, here[streams])))
        return parts

    def _part(self, endpoint: MountEndpoint, reads: PlannedReads) -> PlanMessage:
        room = hints.LONGEST_MESSAGE_BYTES - HEADER_BYTES
        paths: dict[int, str | None] = {}
        known: set[str] = set()
        names: list[str] = []
        rows: list[int] = []
        is_cut = False
        for row, shard in enumerate(reads.shard.tolist()):
            path = paths[shard] if shard in paths else paths.setdefault(shard, self._path(shard))
            if path is None:
                continue
            room -= EXTENT_BYTES
            if path not in known:
                known.add(path)
                room -= len(path.encode()) + 1
            if room < 0:
                is_cut = True
                break
            names.append(path)
            rows.append(row)
        return PlanMessage(endpoint, choose(reads, np.array(rows, np.intp)), names, is_cut)

    def _path(self, shard: int) -> str | None:
        """Return the path of a shard's file below its mount's root; None if a plan cannot name it."""
        index = self._index
        place = self._places[int(np.searchsorted(index.borders, shard, side="right")) - 1]
        assert place is not None
        return path_on_mount(place[1] + (index.zip_names[shard] or index.raw_names[shard]))

    def raw_file(self, shard: int) -> str | None:
        """Return the file that samples are read from singly; None for a compressed shard, which is read as a whole."""
        index = self._index
        if index.zip_names[shard]:
            return None
        return os.path.join(index.directory(shard), index.raw_names[shard])


def choose(reads: PlannedReads, which: NDArray[np.bool_] | NDArray[np.intp]) -> PlannedReads:
    """Return the selected extents."""
    return PlannedReads(
        reads.shard[which], reads.start[which], reads.stop[which], reads.first[which], reads.last[which]
    )


def path_on_mount(name: str) -> str | None:
    """Return a path below a mount's root as the daemon spells it; None if a plan cannot name it."""
    path = posixpath.normpath(name)
    try:
        path.encode()
    except UnicodeEncodeError:  # a directory name that is not UTF-8
        return None
    first = path.split("/", 1)[0]
    return None if first in ("", ".", "..", ".fusecache") or "\0" in path else path


def _column(numbers: Ids) -> "array[int]":
    return array("q", numbers.astype("=i8").tobytes())
