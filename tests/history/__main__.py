"""`make fuzz`: random histories until one breaks a promise, or so many did not.

`python -m tests.history --histories 10000 --seed 1`; `--replay PROGRAM` runs what a failure printed.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from tests.history.programs import parse_program
from tests.history.runs import Findings, HistoryFailed, run_histories, run_program, seeds_from


def main() -> int:
    """Run; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="tests.history", description=__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="of the first program [the clock]")
    parser.add_argument("--slow-threads", action="store_true", help="what runs in threads takes time")
    parser.add_argument("--replay", type=Path, help="a file with the program that a failure printed")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.replay is not None:
        outcome = run_program(parse_program(options.replay.read_text()))
        print(outcome.why or "kept every promise")  # noqa: T201
        return 1 if outcome.why else 0
    seed = int(time.time()) % 1_000_000 * 1000 if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)  # noqa: T201
    findings = Findings()
    began = time.monotonic()
    try:
        run_histories(seeds_from(seed), options.histories, findings, slow_threads=options.slow_threads)
    except HistoryFailed as failure:
        print(failure)  # noqa: T201
        return 1
    finally:
        seconds = time.monotonic() - began
        print(  # noqa: T201
            f"histories {findings.histories}, programs {findings.clean}, requests {findings.requests}, "
            f"kinds of moments {len(findings.labels)}, seconds {seconds:.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
