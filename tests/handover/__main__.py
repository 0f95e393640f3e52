"""Runs histories with a kill at every moment: `python -m tests.handover --length 2`, or `--random 500 --seed 1`."""

import argparse
import logging
import random
import sys
import time

from tests.handover.histories import all_histories, random_history, run_with_kills, shortest


def main() -> int:
    """Run; return 1 if a history went wrong."""
    parser = argparse.ArgumentParser(prog="tests.handover", description=__doc__)
    parser.add_argument("--length", type=int, default=2, help="steps of each history after its beginning")
    parser.add_argument("--random", type=int, default=0, help="so many histories at random instead of all")
    parser.add_argument("--kills", type=int, default=None, help="in each history [at every moment]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="0/1", help="every n-th history from the k-th on, as k/n")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rng = random.Random(options.seed)
    first, step = map(int, options.share.split("/"))
    histories = (
        [random_history(rng, options.length) for _ in range(options.random)]
        if options.random
        else all_histories(options.length)
    )
    began, runs, count, seen = time.monotonic(), 0, 0, 0
    for index, steps in enumerate(histories):
        if index % step != first:
            continue
        ran, found = run_with_kills(steps, options.kills, rng)
        runs, count = runs + ran, count + 1
        if found:
            seen += 1
            short = shortest(found[0], rng)
            print(f"{short.why}\n  killed {short.moment}\n  {list(short.steps)}", flush=True)  # noqa: T201
    seconds = time.monotonic() - began
    print(f"seed {options.seed}, histories {count}, runs {runs}, wrong {seen}, seconds {seconds:.0f}")  # noqa: T201
    return int(seen > 0)


if __name__ == "__main__":
    sys.exit(main())
