"""The positions that global batches are cut from, and which of them a rank reads.

Canonical node c is row c of an epoch's samples; positions take one sample of each row in turn. Global batch b has the
positions `[b * GBS, (b + 1) * GBS)`, whatever the number of ranks; each rank takes its part. A change of world only
cuts the same batches differently. Pure arithmetic on positions: no ids, no random generator.

The tail is exactly StreamingDataset's. A row that is one sample short repeats its last sample, so there are
`ceil(samples / canonical_nodes) * canonical_nodes` positions. If the incomplete last global batch is wanted, samples
near the end are repeated until every rank has the same number. The padding ids of -1, which StreamingDataset uses
internally, do not exist here.
"""

from dataclasses import dataclass

import numpy as np

from loader.errors import OrderError
from loader.order.spec import Ids
from loader.world import World


@dataclass(frozen=True, slots=True)
class RankPartition:
    """Maps the positions that global batches are cut from to indices into the epoch's shuffled samples.

    samples: of the epoch. nodes: physical ones. Where they are not more than the canonical nodes, or the samples are
    more than these, they matter only beyond `length_of_any_world`: if nodes exceed canonical nodes, rows are padded
    there to a whole number of samples a node.
    """

    samples: int
    canonical_nodes: int
    nodes: int = 1

    @property
    def width(self) -> int:
        """The number of positions in a row."""
        return -(-self.samples // self.canonical_nodes)

    @property
    def length_of_any_world(self) -> int:
        """The number of positions whose samples do not depend on the number of nodes."""
        return self.width * self.canonical_nodes

    @property
    def padded_width(self) -> int:
        """The number of positions in a row, including the padding for `nodes`."""
        ratio = self.nodes // self.canonical_nodes
        if ratio <= 1 or self.nodes % self.canonical_nodes:
            return self.width
        return -(-self.width // ratio) * ratio

    @property
    def length(self) -> int:
        """The number of all positions."""
        return self.padded_width * self.canonical_nodes

    def indices(self, positions: Ids) -> Ids:
        """Return the indices into the epoch's samples at these positions, each < length."""
        rows = positions % self.canonical_nodes
        columns = positions // self.canonical_nodes
        if not self._rows_fill():
            # Fewer samples than rows: StreamingDataset tiles them over the rows, end to end.
            tiled: Ids = (rows * self.padded_width + columns) % self.samples
            return tiled
        padding = self.padded_width - self.width
        if padding:
            back = self.nodes // self.canonical_nodes - 1 + padding
            columns = np.where(columns < self.width, columns, columns - back)
            if columns.size and int(columns.min()) < 0:
                raise OrderError(f"{self.samples} samples are too few for {self.nodes} nodes")
        starts = rows * self.samples // self.canonical_nodes
        lengths = (rows + 1) * self.samples // self.canonical_nodes - starts
        found: Ids = starts + np.minimum(columns, lengths - 1)
        return found

    def _rows_fill(self) -> bool:
        if self.samples == self.canonical_nodes:
            return self.nodes <= self.canonical_nodes
        return self.samples > self.canonical_nodes


def samples_per_rank(length: int, world: World, drop_first: int = 0) -> int:
    """Return how many samples each rank reads from position `drop_first` on, including repeats at the end."""
    return -(-_per_node(length, world, drop_first) // world.ranks_per_node)


def rank_positions(length: int, world: World, first: int, stop: int, drop_first: int = 0) -> Ids:
    """Return (samples,) int64, the positions of a rank's samples [first, stop), in reading order.

    length: number of positions, a multiple of the nodes. drop_first: positions already consumed, a multiple of the
    nodes. Position p past `drop_first` belongs to node p % nodes, and there to rank (p // nodes) % ranks_per_node.
    Raises OrderError if a rank has no such samples.
    """
    if not 0 <= first <= stop <= samples_per_rank(length, world, drop_first):
        raise OrderError(
            f"samples {first}..{stop} are not in a rank's {samples_per_rank(length, world, drop_first)}"
        )
    of_node = np.arange(first, stop, dtype=np.int64) * world.ranks_per_node + world.rank_of_node
    of_node = repeated_at_the_end(of_node, _per_node(length, world, drop_first), world.ranks_per_node)
    return drop_first + of_node * world.nodes + world.node


def repeated_at_the_end(of_node: Ids, per_node: int, ranks: int) -> Ids:
    """Return indices among a node's `per_node` samples, with those past the end mapped to earlier ones.

    The last ranks repeat samples shortly before the end, chosen so that none is read twice in one step. With fewer
    samples than that, they repeat samples from the beginning.
    """
    missing = -per_node % ranks
    if not missing or not of_node.size or int(of_node.max()) < per_node:
        return of_node
    back = ranks + missing - 1
    repeated = of_node - back if back <= per_node else (of_node - per_node) % per_node
    found: Ids = np.where(of_node < per_node, of_node, repeated)
    return found


def _per_node(length: int, world: World, drop_first: int) -> int:
    remaining = length - drop_first
    if drop_first < 0 or remaining < 0 or drop_first % world.nodes or length % world.nodes:
        raise OrderError(f"{drop_first} of {length} positions cannot be dropped on {world.nodes} nodes")
    return remaining // world.nodes
