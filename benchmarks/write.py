"""The write benchmarks: `python -m benchmarks.write`, or `make bench-write`. README.md says what is measured and how.

Prints a table and writes it with all rounds' figures to results/write.json and results/write.png. Exit status 1 if a
bar was missed or could not be measured, 2 if the run was interrupted.
"""

import sys

from benchmarks import cases_checkpoints, cases_uploads, cases_writes
from benchmarks.bars_write import write_bars
from benchmarks.bench import GIB
from benchmarks.chart import WRITE_PANELS
from benchmarks.driver import Benchmark, Case, run

CASES = (
    Case("write", cases_writes.large, "ABC", 40, 40),
    Case("write4k", cases_writes.small, "A", 12, 35),
    Case("torch", cases_checkpoints.torch_save, "B", 25, 40),
    Case("dcp", cases_checkpoints.dcp, "B", 50, 90),
    Case("files", cases_uploads.files, "D", 60, 140),
    Case("rsync", cases_uploads.rsync, "D", 100, 100),
    Case("train", cases_uploads.train, "B", 40, 40),
    Case("recover", cases_uploads.recover, "B", 15, 80),
)
# Two checkpoints of 4 GiB, and what a server keeps beside them.
BUCKET_BYTES = 10 * GIB

if __name__ == "__main__":
    sys.exit(run(Benchmark("write", CASES, write_bars, WRITE_PANELS, BUCKET_BYTES), __doc__))
