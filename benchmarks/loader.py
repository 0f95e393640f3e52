"""The loader's benchmarks: `python -m benchmarks.loader`, or `make bench-loader`. README.md says what and how.

Prints a table and writes it with all rounds' figures to results/loader.json and results/loader.png. Exit status 1 if
a bar was missed or could not be measured, 2 if the run was interrupted.
"""

import sys
from functools import partial

from benchmarks import cases_loader
from benchmarks.bars_loader import loader_bars
from benchmarks.bench import GIB
from benchmarks.chart import LOADER_PANELS
from benchmarks.driver import Benchmark, Case, run

CASES = (
    Case("tokens-local", partial(cases_loader.local, "tokens"), "A", 240, 340),
    Case("tokens-32", cases_loader.small_batches, "A", 80, 80),
    Case("tokens", partial(cases_loader.mounted, "tokens"), "A", 70, 80),
    Case("blobs-local", partial(cases_loader.local, "blobs"), "A", 100, 130),
    Case("blobs", partial(cases_loader.mounted, "blobs"), "A", 50, 60),
    Case("cold-start", cases_loader.cold_start, "B", 0, 480),
    Case("steady-50", partial(cases_loader.steady, "steady-50", 50, 1), "B", 150, 380),
    Case("steady-25", partial(cases_loader.steady, "steady-25", 25, 1), "B", 0, 380),
    Case("ranks-50", partial(cases_loader.steady, "ranks-50", 50, 8), "B", 150, 380),
    Case("order", cases_loader.orders, "A", 10, 10),
    Case("index", cases_loader.index, "A", 8, 15),
    Case("import", cases_loader.imports, "A", 30, 30),
)
# Tokens and blobs in two formats each, and the datasets of the cold start and of the small cache.
BUCKET_BYTES = 6 * GIB

if __name__ == "__main__":
    sys.exit(run(Benchmark("loader", CASES, loader_bars, LOADER_PANELS, BUCKET_BYTES), __doc__))
