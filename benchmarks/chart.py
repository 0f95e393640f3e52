"""The bar chart of a run."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from benchmarks.report import SHOWN
from benchmarks.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Ours stands out; relatives look alike; bounds are grey.
COLOURS = {
    "fusecache": "#d1495b",
    "fusecache-remote": "#e79aa5",
    "one-endpoint": "#e79aa5",
    "rclone": "#30638e",
    "rclone-tuned": "#7ba7cc",
    "s3fs": "#edae49",
    "s3fs-tuned": "#f3cf93",
    "crt": "#66a182",
    "raw": "#9a9a9a",
    "raw-dataloader": "#6f6f6f",
    "fio": "#6f6f6f",
    "empty-fs": "#b5b5b5",
    "native": "#d0d0d0",
    "first-byte": "#3d3d3d",
    "discard-fs": "#b5b5b5",
    "local": "#d0d0d0",
    "undisturbed": "#d0d0d0",
    "fusecache-loader": "#e79aa5",
    "replay": "#c0576b",
    "no-hints": "#e79aa5",
    "cached": "#d0d0d0",
    "streaming": "#30638e",
    "litdata": "#edae49",
    "webdataset": "#66a182",
    "datasets": "#8d6a9f",
    "ray": "#4fb0ae",
    "energon": "#a98467",
    "whole": "#9a9a9a",
    "lru": "#7ba7cc",
    "ideal": "#d0d0d0",
    "sequence": "#6f6f6f",
    "file-order": "#e79aa5",
    "quarters": "#c0576b",
    "unguessed": "#d0d0d0",
}
TITLES = {
    "fusecache-remote": "fusecache, fsync remote",
    "one-endpoint": "fusecache, one of the two endpoints",
    "rclone": "rclone mount",
    "rclone-tuned": "rclone mount, tuned",
    "crt": "CRT client, no mount",
    "raw": "raw boto3, or raw pread",
    "raw-dataloader": "raw pread in a DataLoader",
    "fio": "fio O_DIRECT",
    "empty-fs": "empty pyfuse3 mount",
    "native": "local file",
    "first-byte": "origin's first byte",
    "s3fs-tuned": "s3fs, tuned",
    "discard-fs": "pyfuse3 mount, bytes thrown away",
    "local": "local disk",
    "undisturbed": "no upload meanwhile",
    "fusecache-loader": "fusecache, its own Loader",
    "replay": "fusecache, a recording replayed",
    "no-hints": "fusecache without hints",
    "cached": "fusecache, all cached before",
    "streaming": "StreamingDataset",
    "litdata": "LitData",
    "webdataset": "WebDataset",
    "datasets": "Hugging Face datasets",
    "ray": "Ray Data",
    "energon": "Megatron-Energon",
    "whole": "the shards read whole",
    "lru": "least recently used, counted",
    "ideal": "the least possible",
    "sequence": "fusecache, in sequence",
    "file-order": "fusecache, mapped, the file's order",
    "quarters": "fusecache, 4 processes, quarters",
    "unguessed": "fusecache, without whole_files",
}
Panels = Sequence[Sequence[tuple[str, tuple[str, ...]]]]
# Rows of panels, each with its title and its cases; a panel is as wide as it has bars.
READ_PANELS: Panels = (
    (("cold, from the bucket (MB/s, more is better)", ("cold A", "cold B", "cold C", "streams B")),),
    (
        ("again (MB/s, log scale, more is better)", ("disk B", "pages B")),
        ("cold (reads/s, log scale, more is better)", ("random8k B",)),
        ("two endpoints (MB/s, more is better)", ("endpoints E", "endpoints F")),
    ),
    (
        (
            "seconds on origin B (log scale, less is better)",
            ("random128k B", "ls B", "find B", "small B"),
        ),
    ),
)


WRITE_PANELS: Panels = (
    (("write and close (MB/s, more is better)", ("write A", "write B", "write4k A")),),
    (
        (
            "seconds until the trainer goes on, origin B (less is better)",
            ("torch B", "dcp B", "dcp-async B"),
        ),
        ("first write to durable (seconds, less is better)", ("durable B", "durable C")),
    ),
    (
        ("small files durable (files/s, log scale, more is better)", ("files D",)),
        ("reading beside an upload (MB/s)", ("train B",)),
        ("start (seconds, less is better)", ("recover B",)),
    ),
)


LOADER_PANELS: Panels = (
    (
        (
            "CPU µs a sample of 2 048 tokens (log scale, less is better)",
            ("tokens-local A", "tokens-32 A", "tokens A"),
        ),
    ),
    (("CPU µs a sample of 100 KB (log scale, less is better)", ("blobs-local A", "blobs A")),),
    (
        ("seconds waited (log scale)", ("cold-start B",)),
        ("share of the data fetched an epoch (less is better)", ("steady-50 B", "ranks-50 B", "steady-25 B")),
        ("import, s (log scale)", ("import A",)),
    ),
)


def draw(path: Path, results: Results, panels: Panels) -> None:
    """Draw what was measured; nothing is written if nothing was."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    rows = [row for each in panels if (row := _measured(each, results))]
    if not rows:
        return
    figure = plt.figure(figsize=(11, 3.2 * len(rows) + 0.6), layout="constrained")
    used: set[str] = set()
    grid = figure.add_gridspec(len(rows), 1)
    for index, row in enumerate(rows):
        widths = [sum(len(_bars(results, case)) + 1.5 for case in cases) for _, cases in row]
        cells = grid[index].subgridspec(1, len(row), width_ratios=widths)
        for column, (title, cases) in enumerate(row):
            used |= _panel(figure.add_subplot(cells[0, column]), title, cases, results)
    names = [name for name in COLOURS if name in used]
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
    labels = [TITLES.get(name, name) for name in names]
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _measured(panels: Sequence[tuple[str, tuple[str, ...]]], results: Results) -> list[tuple[str, list[str]]]:
    found = [(title, [case for case in cases if _bars(results, case)]) for title, cases in panels]
    return [(title, cases) for title, cases in found if cases]


def _bars(results: Results, case: str) -> list[tuple[str, float, bool]]:
    """Return (competitor, height, whether it was cut off there) in the order of the legend."""
    shown = SHOWN[case.partition(" ")[0]]
    scale = 1e-6 if shown.figure == "rate" else 1.0
    found = []
    for name in COLOURS:
        value, limit = results.median(case, name, shown.figure), results.limit(case, name)
        if value is not None:
            found.append((name, value * scale, False))
        elif limit is not None:
            found.append((name, limit, True))
    return found


def _panel(axis: "Axes", title: str, cases: Sequence[str], results: Results) -> set[str]:
    place, ticks, drawn = 0.0, [], set()
    heights: list[float] = []
    for case in cases:
        kind, _, origin = case.partition(" ")
        bars = _bars(results, case)
        for offset, (name, height, cut) in enumerate(bars):
            hatch = "///" if cut else None
            axis.bar(place + offset, height, 0.9, color=COLOURS[name], hatch=hatch, edgecolor="white")
            label = (">" if cut else "") + _label(height)
            axis.annotate(label, (place + offset, height), ha="center", va="bottom", fontsize=8)
            drawn.add(name)
            heights.append(height)
        named = fill(SHOWN[kind].title, 6 * max(3, len(bars)))
        ticks.append((place + (len(bars) - 1) / 2, f"{named}\norigin {origin}"))
        place += len(bars) + 1.5
    axis.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
    axis.set_xlim(-1, place - 1.5)
    axis.set_title(title, fontsize=10, loc="left")
    if "log scale" in title:
        axis.set_yscale("log")
        axis.set_ylim(min(heights) / 2.5, max(heights) * 2.5)
        axis.yaxis.set_major_formatter("{x:g}")
    else:
        axis.set_ylim(top=max(heights) * 1.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", length=0)
    return drawn


def _label(height: float) -> str:
    if height >= 10:
        return f"{height:,.0f}".replace(",", "\N{THIN SPACE}")
    return f"{height:.2g}"
