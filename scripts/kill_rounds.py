"""`make kill-rounds`: 200 rounds of kill -9, uniform in two seconds after a close, while the bucket is slow.

Prints files closed / found / wrong, and exits with 1 if a file was lost or wrong, or if fewer than half of the files
were unpublished at the kill.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.rounds import run_rounds

MIB = 2**20


def main() -> int:
    """Run; return 1 if anything was lost or wrong."""
    parser = argparse.ArgumentParser(prog="scripts.kill_rounds", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="[the clock]")
    parser.add_argument("--lanes", type=int, default=3, help="daemons at once")
    parser.add_argument("--largest", type=int, default=300_000, help="bytes of the largest file")
    options = parser.parse_args()
    seed = int(time.time()) % 1_000_000 if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory(prefix="fusecache-rounds-") as name:
        findings = run_rounds(Path(name), options.rounds, seed, lanes=options.lanes, largest=options.largest)
    for line in findings.wrong[:50]:
        print(line)  # noqa: T201
    print(findings.text())  # noqa: T201
    is_half = findings.unpublished * 2 >= findings.closed
    return 1 if findings.wrong or findings.found != findings.closed or not is_half else 0


if __name__ == "__main__":
    sys.exit(main())
