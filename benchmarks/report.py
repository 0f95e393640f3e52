"""A run as text and JSON: every figure of every competitor, and the bars beside them."""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar
from benchmarks.processes import ROOT
from benchmarks.results import Results, Row


@dataclass(frozen=True, slots=True)
class Shown:
    """The figure by which a kind of case is shown, and how."""

    title: str
    figure: str
    show: Callable[[float], str]


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.0f} MB/s"


def _megabytes_in_all(value: float) -> str:
    return f"{value / 1e6:,.0f} MB"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _a_second(value: float) -> str:
    return f"{value:,.0f} /s"


def _microseconds(value: float) -> str:
    return f"{value:.1f} µs"


def _share(value: float) -> str:
    return f"{value:.0%} of the data"


SHOWN = {
    "cold": Shown("cold sequential", "rate", _megabytes),
    "streams": Shown("four cold streams", "rate", _megabytes),
    **{
        f"requests{threads}": Shown(f"CPU a file of 1 MiB, {threads} threads", "cpu_us", _microseconds)
        for threads in (8, 16, 32, 64)
    },
    "disk": Shown("again, from the disk", "rate", _megabytes),
    "pages": Shown("again, from kernel pages", "rate", _megabytes),
    "random128k": Shown("cold random 128 KiB", "mean_seconds", _seconds),
    "random8k": Shown("cold random 8 KiB, 64 threads", "reads_per_second", _a_second),
    "ls": Shown("ls of 1 000 names", "seconds", _seconds),
    "ls-again": Shown("ls again", "seconds", _seconds),
    "find": Shown("find -size +0, 20 000 files", "seconds", _seconds),
    "find-again": Shown("find again", "seconds", _seconds),
    "small": Shown("200 small files, 8 threads", "seconds", _seconds),
    "endpoints": Shown("many files from two endpoints, 8 readers", "rate", _megabytes),
    "million-open": Shown("1 000 000: opening one", "open_seconds", _seconds),
    "million-first": Shown("1 000 000: first name", "first_seconds", _seconds),
    "million-all": Shown("1 000 000: all names", "names_per_second", _a_second),
    "write": Shown("write + close 1 GiB by 4 MiB", "rate", _megabytes),
    "write4k": Shown("write + close 256 MiB by 4 KiB", "rate", _megabytes),
    "durable": Shown("1 GiB, first write to durable", "whole_seconds", _seconds),
    "torch": Shown("torch.save 2 GiB, blocked", "blocked_seconds", _seconds),
    "dcp": Shown("DCP 2 GiB, 2 ranks, blocked", "blocked_seconds", _seconds),
    "dcp-async": Shown("DCP async 2 GiB, blocked", "blocked_seconds", _seconds),
    "files": Shown("small files, durable", "files_per_second", _a_second),
    "rsync": Shown("rsync of small files, durable", "files_per_second", _a_second),
    "train": Shown("reading while 4 GiB upload", "rate", _megabytes),
    "recover": Shown("start with 10 000 journaled", "seconds", _seconds),
    "tokens-local": Shown("CPU a sample, 2 048 tokens, local", "cpu_us", _microseconds),
    "tokens-32": Shown("CPU a sample, 2 048 tokens, batches of 32, local", "cpu_us", _microseconds),
    "tokens": Shown("CPU a sample, 2 048 tokens, warm mount", "cpu_us", _microseconds),
    "blobs-local": Shown("CPU a sample, 100 KB, local", "cpu_us", _microseconds),
    "blobs": Shown("CPU a sample, 100 KB, warm mount", "cpu_us", _microseconds),
    "cold-start": Shown("waited for data, 100 cold batches", "waited_seconds", _seconds),
    "steady-50": Shown("fetched an epoch, cache 50 %", "fetched_share", _share),
    "steady-25": Shown("fetched an epoch, cache 25 %", "fetched_share", _share),
    "ranks-50": Shown("the same by 8 ranks of one node", "fetched_share", _share),
    "order-py1e": Shown("order of 10 000 000, py1e", "seconds", _seconds),
    "order-native": Shown("first batch of 1 000 000 000, native", "batch_seconds", _seconds),
    "index": Shown("index of 1 000 000 shards", "seconds", _seconds),
    "import": Shown("import", "seconds", _seconds),
    "model": Shown("cold 512 MiB of weights", "rate", _megabytes),
    "shards": Shown("cold 1 GiB in 8 shards", "rate", _megabytes),
    "sampled": Shown("fetched for 200 bytes of a mapping", "fetched_bytes", _megabytes_in_all),
    "model-again": Shown("weights again, from the disk", "rate", _megabytes),
    "images-epoch": Shown("waited for batches of single files", "waited_seconds", _seconds),
    "tars-epoch": Shown("waited for batches of tars", "waited_seconds", _seconds),
}
ORDER = (
    "fusecache",
    "fusecache-remote",
    "one-endpoint",
    "rclone",
    "rclone-tuned",
    "s3fs",
    "s3fs-tuned",
    "crt",
    "raw",
    "raw-dataloader",
    "first-byte",
    "fio",
    "empty-fs",
    "discard-fs",
    "native",
    "local",
    "undisturbed",
    "fusecache-loader",
    "replay",
    "no-hints",
    "cached",
    "whole",
    "streaming",
    "litdata",
    "webdataset",
    "datasets",
    "ray",
    "energon",
    "lru",
    "ideal",
    "sequence",
    "file-order",
    "quarters",
    "unguessed",
)
# Shown besides, where they were measured.
PER_GIB = {"CPU s a GiB": "cpu_per_gib", "interpreter's lock s a GiB": "lock_per_gib"}
# What a results file says about a run.
_RUN = ("revision", "time", "machine", "rounds")
# What a competitor lacks: no failure.
NOT_AVAILABLE = "n/a"


def table(results: Results, bars: Sequence[Bar]) -> str:
    """Return what a person reads: figures, CPU and memory, bars."""
    names = [name for name in ORDER if name in results.competitors()]
    rows = [["case, median (lowest-highest of the rounds)", *names]]
    for case in results.cases():
        kind, _, origin = case.partition(" ")
        shown = SHOWN[kind]
        rows.append([f"{shown.title}, {origin}", *(cell(results, case, name, shown) for name in names)])
    for case in results.cases():
        for title, figure in PER_GIB.items():
            values = [results.median(case, name, figure) for name in names]
            if any(value is not None for value in values):
                rows.append(
                    [f"{title}, {case}", *("" if value is None else f"{value:.2f}" for value in values)]
                )
    highest = (results.highest(name, "memory_bytes") for name in names)
    rows.append(["most memory", *("" if value is None else f"{value / 1e6:,.0f} MB" for value in highest)])
    figures = [["bar", "what", "figure", "limit", ""]]
    figures += [[bar.case, bar.what, *bar_cells(bar)] for bar in bars]
    return f"\n{columns(rows)}\n{columns(figures)}\n"


@dataclass(frozen=True, slots=True)
class KeptRun:
    """The rows of `cases` from an older results file, with the machine, time and revision of their run."""

    cases: tuple[str, ...]
    run: Mapping[str, Any]
    rows: tuple[Row, ...]


def kept_runs(path: Path, measured: Collection[str]) -> list[KeptRun]:
    """Return what a results file has beyond the cases that were `measured` now, by run; [] if there is no file."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    rows = [Row.from_json(row) for row in content["rows"]]
    runs = [*content.get("kept", [])]
    older = {case for run in runs for case in run["cases"]}
    own = [case for case in Results(rows).cases() if case not in older]
    runs.append({"cases": own, **{name: content[name] for name in _RUN}})
    found = []
    for run in runs:
        cases = tuple(case for case in run["cases"] if case not in measured)
        of_cases = tuple(row for row in rows if row.case in cases)
        if cases:
            found.append(KeptRun(cases, {name: run[name] for name in _RUN}, of_cases))
    return found


def in_shown_order(rows: Iterable[Row]) -> Results:
    """Return results whose cases are in the order of SHOWN, whichever run they are of."""
    order = {kind: number for number, kind in enumerate(SHOWN)}
    return Results(sorted(rows, key=lambda row: order[row.case.partition(" ")[0]]))


def write_json(
    path: Path,
    results: Results,
    bars: Sequence[Bar],
    *,
    quick: bool,
    rounds: int,
    kept: Sequence[KeptRun] = (),
) -> None:
    """Write everything that was measured. kept: which of the cases are an older run's, and of which."""
    content: dict[str, Any] = {
        "benchmark": path.stem,
        "revision": revision(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "quick": quick,
        "rounds": rounds,
        **({"kept": [{"cases": each.cases, **each.run} for each in kept]} if kept else {}),
        "bars": [{**asdict(bar), "verdict": bar.verdict} for bar in bars],
        "rows": [row.as_json() for row in results.rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def revision() -> str:
    """Return the commit that was measured, marked if files were changed."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """Return what it ran on."""
    model = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.machine(),
    )  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} CPUs {model}, {memory:.0f} GiB, {system}"


def cell(results: Results, case: str, name: str, shown: Shown) -> str:
    """Return the median and the range of a competitor in a case, or why there is none."""
    value = results.median(case, name, shown.figure)
    if value is not None:
        return shown.show(value) + _range(results.range(case, name, shown.figure), shown)
    limit = results.limit(case, name)
    if limit is not None:
        return f"> {limit:g} s"
    error = results.error(case, name)
    if error == NOT_AVAILABLE:
        return error
    return "failed" if error else ""


def _range(found: tuple[float, float] | None, shown: Shown) -> str:
    """Return the lowest and highest of the rounds in parentheses, with the unit only where the two differ in it."""
    if found is None:
        return ""
    (low, low_unit), (high, high_unit) = (shown.show(value).split(" ", 1) for value in found)
    return f" ({low}-{high})" if low_unit == high_unit else f" ({low} {low_unit}-{high} {high_unit})"


def bar_cells(bar: Bar) -> list[str]:
    """Return a bar's figure, its limit and its verdict."""
    sign = "≥" if bar.at_least else "≤"
    figure = "" if bar.figure is None else f"{_number(bar.figure)} {bar.unit}".strip()
    limit = "" if bar.limit is None else f"{sign} {_number(bar.limit)} {bar.unit}".strip()
    return [figure, limit, bar.verdict]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a text table; the first one is its head."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines) + "\n"
