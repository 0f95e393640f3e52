"""The ordered samples of an epoch, by their position on the line: computed, held in memory, or mapped from a file.

A `Track` is one line with its samples: of all streams, or of a single one. Its ids below
`length_of_any_world` are the same on every world.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from loader.errors import OrderError
from loader.order.cache import OrderCache
from loader.order.lines import Line
from loader.order.native import NativeLine, NativeRun, native_units
from loader.order.shuffles import shuffle_units
from loader.order.spec import NATIVE, Ids, OrderSpec, Stored
from loader.order.streams import CHUNK_SAMPLES, StreamTable, id_type, sampled_units


class Track(Protocol):
    """The samples of an epoch, in the order of the line."""

    def at(self, positions: Ids, nodes: int = 1) -> Ids:
        """Return the ids at these positions of the line, as it is for so many nodes."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredTrack:
    """ids: (samples,) in shuffled order, row after row."""

    ids: Stored
    canonical_nodes: int

    def at(self, positions: Ids, nodes: int = 1) -> Ids:
        """Return the ids at these positions of the line, as it is for so many nodes."""
        found: Ids = self.ids[Line(self.ids.size, self.canonical_nodes, nodes).indices(positions)].astype(
            np.int64
        )
        return found


@dataclass(frozen=True, slots=True, eq=False)
class NativeTrack:
    """A native line, which is the same for any number of nodes."""

    line: NativeLine

    def at(self, positions: Ids, nodes: int = 1) -> Ids:
        """Return the ids at these positions."""
        return self.line.at(positions)


class Tracks:
    """Makes the tracks of a dataset's epochs, and keeps those of the epoch asked for last.

    cache: where stored orders lie in files that the processes of a machine share; None for memory.
    """

    def __init__(self, table: StreamTable, spec: OrderSpec, cache: OrderCache | None = None) -> None:
        self.table, self.spec = table, spec
        self._cache = cache
        self._held: tuple[int, dict[int | None, Track]] = (-1, {})
        self._runs: dict[int | None, NativeRun] = {}

    def native_run(self, epoch: int, stream: int | None = None) -> NativeRun:
        """The native order of shards: made once, unless every epoch draws other samples of them."""
        if stream in self._runs:
            return self._runs[stream]
        run = NativeRun(native_units(self.table, self.spec, epoch, stream), self.spec)
        if self.table.is_whole or self.spec.sampling == "fixed":
            self._runs[stream] = run
        return run

    def get(self, epoch: int, stream: int | None = None) -> Track:
        """The track of one stream, or of all together."""
        if self._held[0] != epoch:
            self._held = epoch, {}
        tracks = self._held[1]
        if stream not in tracks:
            tracks[stream] = self._make(epoch, stream)
        return tracks[stream]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": (-1, {}), "_runs": {}}

    def samples(self, stream: int | None = None) -> int:
        """Samples an epoch takes, of one stream or of all."""
        return self.table.samples if stream is None else self.table.choose[stream]

    def _make(self, epoch: int, stream: int | None) -> Track:
        spec = self.spec
        if spec.order == NATIVE:
            return NativeTrack(NativeLine(self.native_run(epoch, stream), spec, epoch))
        if self._cache is None:
            return StoredTrack(ordered_ids(self.table, spec, epoch, stream), spec.rows)
        ids = self._cache.get(
            f"{epoch}-{'all' if stream is None else stream}",
            self.samples(stream),
            id_type(int(self.table.sizes.sum())),
            lambda out: _order_into(out, self.table, spec, epoch, stream),
        )
        return StoredTrack(ids, spec.rows)


def ordered_ids(table: StreamTable, spec: OrderSpec, epoch: int, stream: int | None = None) -> Stored:
    """Return an epoch's ids in shuffled order, row after row (not yet in the order of the line).

    stream: one of them, else all. Any order but `native`, which has no such array. Raises OrderError where an
    order is not defined: py1e with fewer samples than canonical nodes, a stream with too small a block.
    """
    if epoch < 0:
        raise OrderError(f"epoch {epoch} is negative")
    samples = table.samples if stream is None else table.choose[stream]
    out: Stored = np.empty(samples, id_type(int(table.sizes.sum())))
    _order_into(out, table, spec, epoch, stream)
    return out


def epoch_ids(
    sizes: Ids, spec: OrderSpec, epoch: int, shards_per_stream: Sequence[int] | None = None
) -> Stored:
    """Like ordered_ids of all streams. sizes: (shards,) samples of each; ids count through the shards in order."""
    return ordered_ids(StreamTable.of(sizes, shards_per_stream or [sizes.size], spec), spec, epoch)


def _order_into(out: Stored, table: StreamTable, spec: OrderSpec, epoch: int, stream: int | None) -> None:
    units, ids = sampled_units(table, spec, epoch, stream)
    if out.size == 0:
        return
    if not spec.is_shuffled:
        out[:] = np.arange(out.size) if ids is None else ids
        return
    block = spec.block_size
    if stream is not None:
        # A stream has its part of the samples that are mixed, so that all have about as many shards open.
        block = int(block * table.proportions[stream])
    shuffle_units(spec.order, units, spec.rows, spec.seed, epoch, block, out)
    if ids is not None:
        for first in range(0, out.size, CHUNK_SAMPLES):
            part = out[first : first + CHUNK_SAMPLES]
            part[:] = ids[part]
