"""What every benchmark's command does: rounds over cases, then the table, the JSON and the chart.

Exit status 1 if a bar was missed or could not be measured, 2 if the run was interrupted.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from benchmarks.bars import Bar
from benchmarks.bench import QUICK, Bench, Sizes, note
from benchmarks.chart import Panels, draw
from benchmarks.origins import ORIGINS, Origin, Origins
from benchmarks.processes import remove_folder
from benchmarks.report import in_shown_order, kept_runs, table, write_json
from benchmarks.results import Results

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


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set of cases with their bars. name: of the results' files; memory_bytes: what the bucket holds at most."""

    name: str
    cases: Sequence[Case]
    judge: Callable[[Results], list[Bar]]
    panels: Panels
    memory_bytes: int = 0


def run(benchmark: Benchmark, description: str | None) -> int:
    """Measure as the command line says, and return the exit status."""
    options = _parser(benchmark, description).parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    plan = _plan(benchmark.cases, options.only, options.origin)
    rounds = options.rounds or (1 if options.quick else 3)
    directory = Path(tempfile.mkdtemp(prefix="fusecache-bench-", dir=options.directory))
    interrupted = False
    try:
        with Origins(memory_bytes=benchmark.memory_bytes * options.times) as origins:
            sizes = QUICK if options.quick else Sizes()
            sizes = replace(
                sizes,
                sequential_bytes=sizes.sequential_bytes * options.times,
                stream_bytes=sizes.stream_bytes * options.times,
            )
            bench = Bench(origins, directory, sizes, alone=options.alone)
            try:
                _measure(bench, plan, rounds)
            except KeyboardInterrupt:
                interrupted = True
                note("interrupted: what was measured so far follows")
    finally:
        remove_folder(directory)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{benchmark.name}.json"
    kept = kept_runs(path, bench.results.cases()) if options.keep else []
    results = in_shown_order([*(row for run in kept for row in run.rows), *bench.results.rows])
    bars = benchmark.judge(results)
    sys.stdout.write(table(results, bars))
    write_json(path, results, bars, quick=options.quick, rounds=bench.rounds_done, kept=kept)
    draw(path.with_suffix(".png"), results, benchmark.panels)
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
        bench.rounds_done = number


def _plan(cases: Sequence[Case], only: str, origins: str) -> list[tuple[Case, Origin]]:
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if not any(case.name.startswith(name) for case in cases):
            raise SystemExit(f"no case is called {name!r}: {', '.join(case.name for case in cases)}")
    chosen = [case for case in cases if not wanted or any(case.name.startswith(name) for name in wanted)]
    return [(case, ORIGINS[name]) for case in chosen for name in case.origins if name in origins]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser(benchmark: Benchmark, description: str | None) -> argparse.ArgumentParser:
    cases = benchmark.cases
    letters = "".join(sorted(ORIGINS))
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark.name}", description=description)
    parser.add_argument("--rounds", type=int, default=None, help="default 3, with --quick 1")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to try the harness: bars mean little"
    )
    parser.add_argument(
        "--times",
        type=int,
        default=1,
        metavar="N",
        help="files that are read in sequence, and models: N times the size",
    )
    parser.add_argument(
        "--alone", action="store_true", help="without competitors; most bars are not measured"
    )
    parser.add_argument("--only", default="", metavar="CASE,…", help=", ".join(case.name for case in cases))
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the cases of the last results that this run does not measure; the JSON says which",
    )
    parser.add_argument("--origin", default=letters, help="letters of the origins to measure on")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where caches are made")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON and the chart go")
    return parser
