"""Hints for plain files: `python -m benchmarks.file_hints`, or `make bench-file-hints`. README.md says what and how.

Prints a table and writes it with all rounds' figures to results/file_hints.json and results/file_hints.png. Exit
status 1 if a bar was missed or could not be measured, 2 if the run was interrupted.
"""

import sys
from collections.abc import Mapping

from benchmarks import cases_files
from benchmarks.bars import US, Bar, Judge, bars_of, ratio
from benchmarks.bench import GIB
from benchmarks.chart import Panels
from benchmarks.driver import Benchmark, Case, run
from benchmarks.results import Results

CASES = (
    Case("images-epoch", cases_files.images, "B", 100, 160),
    Case("tars-epoch", cases_files.tars, "B", 80, 120),
)
PANELS: Panels = (
    (("seconds waited for batches of an epoch (log scale)", ("images-epoch B", "tars-epoch B")),),
)
MOST_WAITED = 0.10


def _waited(results: Results, case: str, origin: str) -> list[Bar]:
    waited = results.median(case, US, "waited_seconds")
    share = ratio(waited, results.median(case, cases_files.BARE, "waited_seconds"))
    return [Bar(case, "seconds waited with hints / without", share, MOST_WAITED, at_least=False)]


JUDGES: Mapping[str, Judge] = {"images-epoch": _waited, "tars-epoch": _waited}


def file_hint_bars(results: Results) -> list[Bar]:
    """Return every bar of the cases that were measured."""
    return bars_of(results, JUDGES)


if __name__ == "__main__":
    sys.exit(run(Benchmark("file_hints", CASES, file_hint_bars, PANELS, GIB * 2), __doc__))
