"""The read benchmarks: `python -m benchmarks.read`, or `make bench-read`. README.md says what is measured and how.

Prints a table and writes it with all rounds' figures to results/read.json and results/read.png. Exit status 1 if a
bar was missed or could not be measured, 2 if the run was interrupted.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks import cases_names, cases_random, cases_streams
from benchmarks.bars import read_bars
from benchmarks.bench import QUICK, Bench, Sizes, note
from benchmarks.chart import draw_read
from benchmarks.origins import ORIGINS, Origin, Origins
from benchmarks.processes import remove_folder
from benchmarks.report import table, write_json

RESULTS = Path(__file__).parent / "results"
# The disk under test must not be memory, which /tmp often is.
DIRECTORY = Path("/var/tmp")


@dataclass(frozen=True, slots=True)
class Case:
    """One case: how it is measured, on which origins, and how long its rounds took once, for the estimate."""

    name: str
    measure: Callable[[Bench, Origin], None]
    origins: str
    seconds: float
    first_seconds: float


CASES = (
    Case("cold", cases_streams.cold, "ABC", 45, 45),
    Case("streams", cases_streams.streams, "B", 40, 40),
    Case("random128k", cases_random.large, "B", 30, 30),
    Case("random8k", cases_random.small, "B", 20, 50),
    Case("ls", cases_names.ls, "B", 10, 10),
    Case("find", cases_names.find, "B", 5, 140),
    Case("small", cases_names.small_files, "B", 20, 20),
    Case("million", cases_names.million, "B", 8, 230),
)


def main() -> int:
    """Measure, and return the exit status."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    plan = _plan(options.only, options.origin)
    rounds = options.rounds or (1 if options.quick else 3)
    directory = Path(tempfile.mkdtemp(prefix="fusecache-bench-", dir=options.directory))
    interrupted = False
    try:
        with Origins() as origins:
            bench = Bench(origins, directory, QUICK if options.quick else Sizes())
            try:
                _measure(bench, plan, rounds)
            except KeyboardInterrupt:
                interrupted = True
                note("interrupted: what was measured so far follows")
    finally:
        remove_folder(directory)
    bars = read_bars(bench.results)
    sys.stdout.write(table(bench.results, bars))
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / "read.json", bench.results, bars, quick=options.quick, rounds=rounds)
    draw_read(options.output / "read.png", bench.results)
    if interrupted:
        return 2
    return 0 if all(bar.verdict == "met" for bar in bars) else 1


def _measure(bench: Bench, plan: list[tuple[Case, Origin]], rounds: int) -> None:
    began = time.monotonic()
    total = sum(case.first_seconds + case.seconds * (rounds - 1) for case, _ in plan)
    done = 0.0
    for number in range(1, rounds + 1):
        bench.round = number
        for case, origin in plan:
            elapsed = time.monotonic() - began
            estimate = elapsed * total / done if done else total
            note(
                f"[{elapsed:4.0f} s of about {estimate:4.0f}] round {number} of {rounds}: "
                f"{case.name} on {origin.name} ({origin.title})"
            )
            case.measure(bench, origin)
            done += case.first_seconds if number == 1 else case.seconds


def _plan(only: str, origins: str) -> list[tuple[Case, Origin]]:
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if not any(case.name.startswith(name) for case in CASES):
            raise SystemExit(f"no case is called {name!r}: {', '.join(case.name for case in CASES)}")
    chosen = [case for case in CASES if not wanted or any(case.name.startswith(name) for name in wanted)]
    return [(case, ORIGINS[name]) for case in chosen for name in case.origins if name in origins]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.read", description=__doc__)
    parser.add_argument("--rounds", type=int, default=None, help="default 3, with --quick 1")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to try the harness: bars mean little"
    )
    parser.add_argument("--only", default="", metavar="CASE,…", help=", ".join(case.name for case in CASES))
    parser.add_argument("--origin", default="ABC", help="letters of the origins to measure on")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where caches are made")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where read.json and read.png go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
