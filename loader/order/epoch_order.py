"""The ids of an epoch in order, by position: computed, or held in memory.

An `EpochOrder` covers all streams, or a single one. Its ids at positions below `length_of_any_world` are the same on
every world.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np

from loader.base.single_flight import SingleFlight
from loader.errors import OrderError
from loader.order.native import NativePartition, NativeRun, native_units
from loader.order.rank_partition import RankPartition
from loader.order.shuffles import shuffle_units
from loader.order.spec import NATIVE, Ids, OrderSpec, Stored
from loader.order.streams import CHUNK_SAMPLES, StreamTable, id_type, sampled_units


@dataclass(slots=True, eq=False, weakref_slot=True)
class StoredOrder:
    """An order in memory. ids: (samples,) in shuffled order, row after row."""

    ids: Stored
    canonical_nodes: int

    def at(self, positions: Ids, nodes: int = 1) -> Ids:
        """Return (positions,) int64, the ids at these positions, as partitioned for `nodes` nodes."""
        indices = RankPartition(self.ids.size, self.canonical_nodes, nodes).indices(positions)
        found: Ids = self.ids[indices].astype(np.int64)
        return found


EpochOrder = StoredOrder | NativePartition
"""The samples of an epoch, in order."""


class EpochOrders:
    """Makes the orders of a dataset's epochs, and keeps those of the epoch requested last.

    A copy has an epoch of its own, for another thread; an order that both use is made once and held once. A pickled
    copy shares nothing.
    """

    def __init__(self, table: StreamTable, spec: OrderSpec) -> None:
        self.table, self.spec = table, spec
        self._reset()

    def _reset(self) -> None:
        self._held: tuple[int, dict[int | None, EpochOrder]] = (-1, {})
        self._runs: dict[int | None, NativeRun] = {}
        # By epoch and stream: the orders that this object or a copy of it holds.
        self._stored: WeakValueDictionary[tuple[int, int | None], StoredOrder] = WeakValueDictionary()
        self._making: SingleFlight[StoredOrder] = SingleFlight()

    def __copy__(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._held = -1, {}
        return other

    def native_run(self, epoch: int, stream: int | None = None) -> NativeRun:
        """Return the fixed part of a native order; cached unless every epoch draws other samples."""
        if stream in self._runs:
            return self._runs[stream]
        run = NativeRun(native_units(self.table, self.spec, epoch, stream), self.spec)
        if self.table.is_whole or self.spec.sampling == "fixed":
            self._runs[stream] = run
        return run

    def get(self, epoch: int, stream: int | None = None) -> EpochOrder:
        """Return the order of one stream, or of all together."""
        if self._held[0] != epoch:
            self._held = epoch, {}
        epoch_orders = self._held[1]
        if stream not in epoch_orders:
            epoch_orders[stream] = self._make(epoch, stream)
        return epoch_orders[stream]

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table, "spec": self.spec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def samples(self, stream: int | None = None) -> int:
        """Return the number of samples of an epoch, of one stream or of all."""
        return self.table.samples if stream is None else self.table.choose[stream]

    def _make(self, epoch: int, stream: int | None) -> EpochOrder:
        spec = self.spec
        if spec.order == NATIVE:
            return NativePartition(self.native_run(epoch, stream), spec, epoch)
        return self._making.do((epoch, stream), partial(self._make_stored, epoch, stream))

    def _make_stored(self, epoch: int, stream: int | None) -> StoredOrder:
        spec, epoch_order = self.spec, self._stored.get((epoch, stream))
        if epoch_order is None:
            epoch_order = self._stored[epoch, stream] = StoredOrder(
                ordered_ids(self.table, spec, epoch, stream), spec.rows
            )
        return epoch_order


def ordered_ids(table: StreamTable, spec: OrderSpec, epoch: int, stream: int | None = None) -> Stored:
    """Return an epoch's ids in shuffled order, row after row (before `RankPartition` interleaves the rows).

    stream: one of them, else all. For every order but `native`, which has no such array. Raises OrderError if the
    order is undefined: py1e with fewer samples than canonical nodes, or a stream with too small a block.
    """
    if epoch < 0:
        raise OrderError(f"epoch {epoch} is negative")
    samples = table.samples if stream is None else table.choose[stream]
    out: Stored = np.empty(samples, id_type(int(table.sizes.sum())))
    _order_into(out, table, spec, epoch, stream)
    return out


def _order_into(out: Stored, table: StreamTable, spec: OrderSpec, epoch: int, stream: int | None) -> None:
    units, ids = sampled_units(table, spec, epoch, stream)
    if out.size == 0:
        return
    if not spec.is_shuffled:
        out[:] = np.arange(out.size) if ids is None else ids
        return
    block = spec.block_size
    if stream is not None:
        # Scale the block by the stream's share, so that all streams together keep about as many shards in use.
        block = int(block * table.proportions[stream])
    shuffle_units(spec.order, units, spec.rows, spec.seed, epoch, block, out)
    if ids is not None:
        for first in range(0, out.size, CHUNK_SAMPLES):
            part = out[first : first + CHUNK_SAMPLES]
            part[:] = ids[part]
