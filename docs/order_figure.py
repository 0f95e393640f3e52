"""Draws docs/order.svg from the orders themselves: `python docs/order_figure.py`.

16 shards of 12 samples, 4 canonical nodes (or lanes), global batches of 8, two nodes. Each cell is a sample, in
the colour of its shard; a column is a global batch. Node 0's shards are warm, node 1's are cool.
"""

import sys
from itertools import groupby
from pathlib import Path

import numpy as np

from loader.order import EpochOrders, OrderSpec, StreamTable, batch_plan
from loader.world import World

SHARDS, SHARD_SAMPLES = 16, 12
ROWS, NODES, GLOBAL_BATCH, BLOCK = 4, 2, 8, 24
SIZES = np.full(SHARDS, SHARD_SAMPLES, np.int64)
CELL, LEFT, TOP, GAP = 18, 130, 46, 62
PANELS = (
    ("sequential", "the shards as the index has them"),
    ("py1e", "py1e: StreamingDataset's default, block_size 24"),
    ("native", "native: block_size 24"),
)


def columns(order: str) -> list[list[list[int]]]:
    """The shards of each sample: global batches, of nodes, of samples."""
    spec = OrderSpec(order, canonical_nodes=ROWS, block_size=BLOCK)
    tracks = EpochOrders(StreamTable.of(SIZES, [SHARDS], spec), spec)
    plans = [batch_plan(tracks, World(node, NODES, 1), GLOBAL_BATCH, drop_last=True) for node in range(NODES)]
    return [
        [(plan.batch(0, 0, step) // SHARD_SAMPLES).tolist() for plan in plans]
        for step in range(plans[0].batches(0, drop_last=True))
    ]


def colours(steps: list[list[list[int]]]) -> dict[int, str]:
    """Warm colours for the shards that node 0 reads most of, cool ones for the others."""
    counts = np.zeros((SHARDS, NODES), np.int64)
    for step in steps:
        for node, shards in enumerate(step):
            np.add.at(counts[:, node], shards, 1)
    warm = np.flatnonzero(counts[:, 0] >= counts[:, 1]).tolist()
    cool = [shard for shard in range(SHARDS) if shard not in warm]
    found = {}
    for shards, first, span in ((warm, 0, 70), (cool, 175, 110)):
        for number, shard in enumerate(shards):
            hue = first + span * number // max(len(shards) - 1, 1)
            found[shard] = f"hsl({hue},75%,{(45, 65)[number % 2]}%)"
    return found


def panel(order: str, title: str, top: int) -> list[str]:
    """The elements of one order's picture."""
    steps = columns(order)
    fills = colours(steps)
    lines = [f'<text x="{LEFT}" y="{top - 12}" font-weight="bold">{title}</text>']
    for node in range(NODES):
        y = top + node * (GLOBAL_BATCH // NODES * CELL + 6)
        lines.append(f'<text x="{LEFT - 10}" y="{y + 2.3 * CELL:.0f}" text-anchor="end">node {node}</text>')
        for place in range(GLOBAL_BATCH // NODES):
            first = 0
            for shard, run in groupby(parts[node][place] for parts in steps):
                count = len(list(run))
                lines.append(
                    f'<rect x="{LEFT + first * CELL}" y="{y + place * CELL}" width="{count * CELL}" '
                    f'height="{CELL - 1}" fill="{fills[shard]}"/>'
                )
                first += count
    rules = "".join(f"M{LEFT + step * CELL} {top}v{GLOBAL_BATCH * CELL + 6}" for step in range(len(steps)))
    lines.append(f'<path d="{rules}" stroke="white"/>')
    bottom = top + GLOBAL_BATCH * CELL + 24
    lines.append(f'<text x="{LEFT}" y="{bottom}">global batch 0, 1, 2, … →</text>')
    return lines


def figure() -> str:
    """The whole picture, as SVG."""
    height = GLOBAL_BATCH * CELL + GAP
    parts = [
        line
        for number, (order, title) in enumerate(PANELS)
        for line in panel(order, title, TOP + number * height)
    ]
    width = LEFT + SHARDS * SHARD_SAMPLES // GLOBAL_BATCH * CELL + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + len(PANELS) * height}" '
            f'font-family="sans-serif" font-size="14"><rect width="100%" height="100%" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "order.svg"
    target.write_text(figure())
