"""The order of an epoch by the sizes of its shards alone."""

from loader.order import OrderSpec, StreamTable, ordered_ids
from loader.order.spec import Ids, Stored


def epoch_ids(sizes: Ids, spec: OrderSpec, epoch: int) -> Stored:
    """Return what ordered_ids does for one stream. sizes: (shards,) samples of each; ids count through the shards."""
    return ordered_ids(StreamTable.of(sizes, [sizes.size], spec), spec, epoch)
