"""The read benchmarks: `python -m benchmarks.read`, or `make bench-read`. README.md says what is measured and how.

Prints a table and writes it with all rounds' figures to results/read.json and results/read.png. Exit status 1 if a
bar was missed or could not be measured, 2 if the run was interrupted.
"""

import sys

from benchmarks import cases_endpoints, cases_names, cases_random, cases_streams
from benchmarks.bars_read import read_bars
from benchmarks.chart import READ_PANELS
from benchmarks.driver import Benchmark, Case, run

CASES = (
    Case("cold", cases_streams.cold, "ABC", 45, 45),
    Case("streams", cases_streams.streams, "B", 40, 40),
    Case("requests", cases_streams.requests, "B", 30, 30),
    Case("random128k", cases_random.large, "B", 30, 30),
    Case("random8k", cases_random.small, "B", 20, 50),
    Case("ls", cases_names.ls, "B", 10, 10),
    Case("find", cases_names.find, "B", 5, 140),
    Case("small", cases_names.small_files, "B", 20, 20),
    Case("endpoints", cases_endpoints.endpoints, "EF", 45, 45),
    Case("million", cases_names.million, "B", 8, 230),
)

if __name__ == "__main__":
    sys.exit(run(Benchmark("read", CASES, read_bars, READ_PANELS), __doc__))
