"""Decides which samples make global batch b, and which of them this rank reads.

`random` cuts batches from the order of all streams. `stratified` gives each stream a fixed share of every global
batch. `per_stream` takes each global batch from one stream. Both use a separate order for each stream.
`device_per_stream` gives each rank's batch to one stream. Its batches depend on the number of ranks: not elastic.

A plan knows lengths without ordering anything. It asks `EpochOrders` for ids only when a batch is requested.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from loader.errors import OrderError
from loader.order.epoch_order import EpochOrders
from loader.order.rank_partition import RankPartition, rank_positions, repeated_at_the_end, samples_per_rank
from loader.order.spec import NATIVE, Ids, OrderSpec
from loader.world import World

# Computing this many ids of a rank at once costs little more than one small batch.
AHEAD_SAMPLES = 4096


class BatchPlan(ABC):
    """Cuts an epoch into global batches, and these into the ranks' parts. One plan for one rank."""

    def __init__(self, epoch_orders: EpochOrders, world: World, global_batch_size: int) -> None:
        self._orders, self._world, self._global = epoch_orders, world, global_batch_size

    @property
    @abstractmethod
    def length(self) -> int:
        """The positions of an epoch that belong to batches, on any world."""

    @abstractmethod
    def batch(self, epoch: int, start: int, number: int) -> Ids:
        """Return (samples,) int64, this rank's ids in a global batch, counted from position `start`."""

    def batches(self, start: int, *, drop_last: bool) -> int:
        """Return the number of global batches from position `start`; drop_last: only the complete ones."""
        complete, rest = divmod(self.length - start, self._global)
        return complete + (rest > 0 and not drop_last)


def batch_plan(
    epoch_orders: EpochOrders, world: World, global_batch_size: int, *, drop_last: bool
) -> BatchPlan:
    """Return the plan for one rank. global_batch_size: in samples, a multiple of the number of ranks.

    Raises OrderError if settings, streams and world do not fit together.
    """
    spec = epoch_orders.spec
    if spec.batching == "stratified":
        return StratifiedPlan(epoch_orders, world, global_batch_size)
    if spec.batching == "per_stream":
        return PerStreamPlan(epoch_orders, world, global_batch_size)
    if spec.batching == "device_per_stream":
        if not drop_last:
            raise OrderError("device_per_stream leaves ranks uneven at the end: it needs drop_last=True")
        return DevicePlan(epoch_orders, world, global_batch_size)
    plan = NativePlan if spec.order == NATIVE else RandomPlan
    return plan(epoch_orders, world, global_batch_size, drop_last=drop_last)


def even_world(world: World, rows: int) -> World:
    """Return the world that divides the rows evenly; all ranks on one node if its nodes would share rows unevenly.

    The global batches are the same either way.
    """
    most, least = max(world.nodes, rows), min(world.nodes, rows)
    return world if most % least == 0 else World(world.rank, world.ranks)


class RandomPlan(BatchPlan):
    """Batches from the order of all streams, cut as StreamingDataset cuts them."""

    def __init__(
        self, epoch_orders: EpochOrders, world: World, global_batch_size: int, *, drop_last: bool
    ) -> None:
        rows, samples = epoch_orders.spec.rows, epoch_orders.samples()
        if samples <= rows < world.nodes:
            # StreamingDataset then repeats the samples to another length, so the epoch would depend on the nodes.
            world = World(world.rank, world.ranks)
        super().__init__(epoch_orders, even_world(world, rows), global_batch_size)
        self._partition = RankPartition(samples, rows, self._world.nodes)
        self._cache = _BatchCache()

    @property
    def length(self) -> int:
        """The positions whose samples are the same on any world."""
        return self._partition.length_of_any_world

    def batch(self, epoch: int, start: int, number: int) -> Ids:
        """Return this rank's ids; an incomplete last batch is padded with repeats to the same number on each rank."""
        held = self._cache.held((epoch, start), number)
        if held is not None:
            return held
        length, world = self._partition.length, self._world
        size = self._global // world.ranks
        samples = samples_per_rank(length, world, start)

        def make(first: int, stop: int) -> Ids:
            positions = rank_positions(length, world, first * size, min(stop * size, samples), start)
            return self._orders.get(epoch).at(positions, world.nodes)

        if (number + 1) * size > samples:
            return make(number, number + 1)
        return self._cache.get((epoch, start), number, samples // size, size, make)


class NativePlan(BatchPlan):
    """Batches from the native order of all streams, which ends exactly where the samples end.

    An incomplete last global batch is dealt out without padding: some ranks get one sample more than others.
    """

    def __init__(
        self, epoch_orders: EpochOrders, world: World, global_batch_size: int, *, drop_last: bool
    ) -> None:
        super().__init__(epoch_orders, even_world(world, epoch_orders.spec.rows), global_batch_size)
        rest = self.length % global_batch_size
        if not drop_last and 0 < rest < world.ranks:
            raise OrderError(
                f"the last global batch would have {rest} samples for {world.ranks} ranks, and the native order "
                f"repeats none: set drop_last=True, or another global_batch_size or epoch_size"
            )
        epoch_orders.native_run(epoch=0)
        self._cache = _BatchCache()

    @property
    def length(self) -> int:
        """All samples of the epoch."""
        return self._orders.samples()

    def batch(self, epoch: int, start: int, number: int) -> Ids:
        """Return this rank's ids; none occurs twice in an epoch that takes each sample once."""
        # Counted from the epoch's beginning, so that cached ids stay valid after a resume.
        before, first = divmod(start, self._global)
        held = self._cache.held((epoch, first), number + before)
        if held is not None:
            return held
        places = first + _interleaved(self._world, self._global)
        number += before

        def make(begin: int, stop: int) -> Ids:
            return self._orders.get(epoch).at(_repeated(places, self._global, begin, stop))

        complete = (self.length - first) // self._global
        if number < complete:
            return self._cache.get((epoch, first), number, complete, places.size, make)
        positions = places + number * self._global
        return self._orders.get(epoch).at(positions[positions < self.length])


class StratifiedPlan(BatchPlan):
    """Batches with a fixed share of each stream; the epoch ends when the first stream is used up."""

    def __init__(self, epoch_orders: EpochOrders, world: World, global_batch_size: int) -> None:
        super().__init__(epoch_orders, world, global_batch_size)
        self._portions = stratified_portions(epoch_orders.table.proportions, global_batch_size)
        # StreamingDataset partitions for one node here, whatever the number of nodes.
        self._partitions = [
            FilledPartition(
                epoch_orders.samples(stream), epoch_orders.spec, (1, epoch_orders.spec.tail_layout[1])
            )
            for stream in range(epoch_orders.table.streams)
        ]
        self._batches = min(
            partition.length // portion
            for partition, portion in zip(self._partitions, self._portions, strict=True)
        )
        self._cache = [_BatchCache() for _ in self._partitions]

    @property
    def length(self) -> int:
        """The positions of the complete batches; there are no others."""
        return self._batches * self._global

    def batch(self, epoch: int, start: int, number: int) -> Ids:
        """Return this rank's ids: consecutive positions of the batch, in which streams follow each other."""
        size = self._global // self._world.ranks
        first = self._world.rank * size
        number += start // self._global
        found = [np.empty(0, np.int64)]
        begin = 0
        for stream, portion in enumerate(self._portions):
            low, high = max(first - begin, 0), min(first + size - begin, portion)
            if low < high:
                make = self._maker(epoch, stream, np.arange(low, high))
                found.append(self._cache[stream].get((epoch,), number, self._batches, high - low, make))
            begin += portion
        return np.concatenate(found)

    def _maker(self, epoch: int, stream: int, places: Ids) -> Callable[[int, int], Ids]:
        partition, portion = self._partitions[stream], self._portions[stream]
        return lambda first, stop: partition.ids(
            self._orders, epoch, stream, _repeated(places, portion, first, stop)
        )


class PerStreamPlan(BatchPlan):
    """Batches of one stream each, in random stream order; an incomplete batch of a stream is dropped."""

    def __init__(self, epoch_orders: EpochOrders, world: World, global_batch_size: int) -> None:
        spec = epoch_orders.spec
        super().__init__(epoch_orders, even_world(world, spec.rows), global_batch_size)
        self._partitions = [
            FilledPartition(epoch_orders.samples(stream), spec, spec.tail_layout)
            for stream in range(epoch_orders.table.streams)
        ]
        self._counts = [partition.length // global_batch_size for partition in self._partitions]
        _refuse_empty_streams(self._counts, f"global batch of {global_batch_size}")
        self._cache = [_BatchCache() for _ in self._partitions]
        self._sequence: tuple[int, Ids, Ids] = (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    @property
    def length(self) -> int:
        """The positions of the complete batches; there are no others."""
        return sum(self._counts) * self._global

    def batch(self, epoch: int, start: int, number: int) -> Ids:
        """Return this rank's ids."""
        if self._sequence[0] != epoch:
            generator = np.random.default_rng(self._orders.spec.epoch_seed(epoch))
            self._sequence = (epoch, *_shuffled_batches(self._counts, generator))
        _, origins, numbers = self._sequence
        number += start // self._global
        stream = int(origins[number])
        places = _interleaved(self._world, self._global)

        def make(first: int, stop: int) -> Ids:
            positions = _repeated(places, self._global, first, stop)
            return self._partitions[stream].ids(self._orders, epoch, stream, positions)

        return self._cache[stream].get(
            (epoch,), int(numbers[number]), self._counts[stream], places.size, make
        )


class DevicePlan(BatchPlan):
    """Batches in which each rank's part comes from one stream. They depend on the world, so this is not elastic."""

    def __init__(self, epoch_orders: EpochOrders, world: World, global_batch_size: int) -> None:
        spec, ranks = epoch_orders.spec, world.ranks_per_node
        if spec.order == NATIVE:
            raise OrderError("device_per_stream is StreamingDataset's; the native order has per_stream")
        if spec.rows % world.nodes:
            raise OrderError(
                f"device_per_stream needs as many whole canonical nodes on each node: {spec.rows} canonical "
                f"nodes do not divide by {world.nodes} nodes"
            )
        for stream, share in enumerate(epoch_orders.table.proportions):
            if spec.is_shuffled and spec.block_size * share < 1:
                raise OrderError(
                    f"stream {stream} has a proportion of {share:.3g}, less than a sample of a block of "
                    f"{spec.block_size}: raise block_size or the stream's weight"
                )
        super().__init__(epoch_orders, world, global_batch_size)
        self._size = global_batch_size // world.ranks
        self._rows_of_node = spec.rows // world.nodes
        self._widths = [
            RankPartition(epoch_orders.samples(stream), spec.rows).width
            for stream in range(epoch_orders.table.streams)
        ]
        self._counts = [
            -(-width // ranks) * ranks * self._rows_of_node // self._size for width in self._widths
        ]
        _refuse_empty_streams(self._counts, f"batch of {self._size} for each rank")
        self._sequence: tuple[int, list[tuple[Ids, Ids]]] = (-1, [])

    @property
    def length(self) -> int:
        """The positions of the complete batches; there are no others."""
        return sum(self._counts) // self._world.ranks_per_node * self._global

    def batch(self, epoch: int, start: int, number: int) -> Ids:
        """Return this rank's ids: all of one stream."""
        world, ranks = self._world, self._world.ranks_per_node
        if self._sequence[0] != epoch:
            generator = np.random.default_rng(self._orders.spec.epoch_seed(epoch))
            self._sequence = epoch, [_shuffled_batches(self._counts, generator) for _ in range(world.nodes)]
        # Single-rank batches in StreamingDataset's order: one of each node in turn, although consecutive ranks
        # read them.
        step, node = divmod((start // self._global + number) * world.ranks + world.rank, world.nodes)
        origins, numbers = self._sequence[1][node]
        stream = int(origins[step])
        places = int(numbers[step]) * self._size + np.arange(self._size, dtype=np.int64)
        row = node * self._rows_of_node + places // ranks % self._rows_of_node
        column = places // (ranks * self._rows_of_node) * ranks + places % ranks
        column = repeated_at_the_end(column, self._widths[stream], ranks)
        rows = self._orders.spec.rows
        return self._orders.get(epoch, stream).at(column * rows + row, rows)


class FilledPartition:
    """The positions of one stream, padded with repeats to the same number for each rank of a layout.

    samples: of the stream in an epoch. layout: (nodes, ranks a node). (1, 1) and the native order pad nothing.
    """

    def __init__(self, samples: int, spec: OrderSpec, layout: tuple[int, int]) -> None:
        self._nodes, self._ranks = layout
        if max(spec.rows, self._nodes) % min(spec.rows, self._nodes):
            raise OrderError(
                f"tail_layout: {self._nodes} nodes and {spec.rows} canonical nodes do not divide each other: name the "
                "nodes of the run that it continues"
            )
        partition = RankPartition(samples, spec.rows, self._nodes)
        self._of_node = (samples if spec.order == NATIVE else partition.length) // self._nodes

    @property
    def length(self) -> int:
        """The number of positions, including repeats."""
        return -(-self._of_node // self._ranks) * self._ranks * self._nodes

    def ids(self, epoch_orders: EpochOrders, epoch: int, stream: int, positions: Ids) -> Ids:
        """Return the ids at these positions, each < length."""
        of_node, node = np.divmod(positions, self._nodes)
        of_node = repeated_at_the_end(of_node, self._of_node, self._ranks)
        return epoch_orders.get(epoch, stream).at(of_node * self._nodes + node, self._nodes)


class _BatchCache:
    """Caches a rank's ids of several consecutive batches, which are computed together."""

    def __init__(self) -> None:
        self._of: tuple[int, ...] = ()
        self._first = 0
        self._held: Ids = np.empty((0, 0), np.int64)

    def get(
        self, of: tuple[int, ...], number: int, count: int, size: int, make: Callable[[int, int], Ids]
    ) -> Ids:
        """Return the ids of one batch. of: the sequence that it belongs to. make: ids of batches first up to stop."""
        found = self.held(of, number)
        if found is None:
            stop = min(number + max(AHEAD_SAMPLES // size, 1), count)
            self._of, self._first = of, number
            self._held = make(number, stop).reshape(stop - number, size)
            found = self._held[0].copy()
        return found

    def held(self, of: tuple[int, ...], number: int) -> Ids | None:
        """Return the ids of one batch if they are cached; of: as for `get`."""
        place = number - self._first
        return self._held[place].copy() if of == self._of and 0 <= place < len(self._held) else None


def stratified_portions(proportions: tuple[float, ...], global_batch_size: int) -> tuple[int, ...]:
    """Return how many samples of each stream a global batch has.

    Rounded down; the missing samples go to the streams with the largest rounding loss, the later stream first among
    equal losses. Raises OrderError if a stream gets none.
    """
    portions = np.array([int(share * global_batch_size) for share in proportions], np.int64)
    missing = global_batch_size - int(portions.sum())
    lost = global_batch_size * np.array(proportions) - portions
    portions[np.flip(np.argsort(lost, kind="stable"))[:missing]] += 1
    for stream, portion in enumerate(portions.tolist()):
        if portion == 0:
            raise OrderError(
                f"stream {stream} has a proportion of {proportions[stream]:.3g}, which gives no sample in a global "
                f"batch of {global_batch_size}: raise global_batch_size or the stream's weight"
            )
    return tuple(portions.tolist())


def _shuffled_batches(counts: list[int], generator: np.random.Generator) -> tuple[Ids, Ids]:
    """Shuffle the batches of all streams. Returns (batches,) stream of each, and its number within the stream."""
    origins = np.repeat(np.arange(len(counts)), counts)
    generator.shuffle(origins)
    numbers = np.empty_like(origins)
    numbers[np.argsort(origins, kind="stable")] = np.concatenate([np.arange(count) for count in counts])
    return origins, numbers


def _interleaved(world: World, samples: int) -> Ids:
    """Return this rank's positions in a global batch of `samples`: dealt to nodes in turn, then to their ranks."""
    return np.arange(world.rank_of_node * world.nodes + world.node, samples, world.ranks, dtype=np.int64)


def _repeated(places: Ids, step: int, first: int, stop: int) -> Ids:
    """Return the same positions in batches first up to stop, `step` positions apart, batch after batch."""
    batches = np.arange(first, stop, dtype=np.int64)[:, None]
    found: Ids = (batches * step + places).ravel()
    return found


def _refuse_empty_streams(counts: list[int], what: str) -> None:
    for stream, count in enumerate(counts):
        if count == 0:
            raise OrderError(
                f"stream {stream} of {len(counts)} has too few samples in an epoch for a single {what}: raise its "
                f"weight, or lower global_batch_size"
            )
