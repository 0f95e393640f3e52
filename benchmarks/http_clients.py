"""HTTP clients beside the daemon's own: `python -m benchmarks.http_clients`, or `make bench-http`.

Each sends the same GETs and PUTs to one origin on loopback, without and with TLS. Clients take turns in one process,
in another order each round. Prints a table and writes results/http.json: MB/s, CPU seconds a GiB of the
clients' process, CPU milliseconds a small GET, all medians.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import note
from benchmarks.http_ways import GIB, KIB, MIB, WAYS
from benchmarks.processes import ROOT
from benchmarks.report import columns, write_json
from benchmarks.results import Results, Row

OUTPUT = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one kind: `count` of `size` bytes, `threads` at once. origin: its name in the URLs."""

    name: str
    origin: str
    size: int
    count: int
    threads: int
    is_put: bool = False


# 32 GETs in flight, as `clients.py`. 2 PUTs: some clients hold whole bodies in memory.
CASES = tuple(
    Case(f"{name} {where}", where, size, count, threads, is_put)
    for name, origins, size, count, threads, is_put in (
        ("GET 8 MiB", ("http", "https", "https, paced"), 8 * MIB, 64, 32, False),
        ("GET 8 KiB", ("http", "https"), 8 * KIB, 2048, 32, False),
        ("PUT 256 MiB", ("http", "https"), 256 * MIB, 4, 2, True),
    )
    for where in origins
)


@contextmanager
def origin(folder: str) -> Iterator[dict[str, str]]:
    """Start the origin; give its URLs and its certificate's path."""
    command = [sys.executable, "-m", "benchmarks.http_origin", folder]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()


def measured(case: Case, ways: Sequence[str], rounds: int, urls: dict[str, str], path: Path) -> Iterator[Row]:
    """Yield a row for each round and client, as soon as it is measured."""
    request: dict[str, Any] = {
        "ways": ways,
        "rounds": rounds,
        "url": urls[case.origin],
        "ca_path": urls["ca_path"],
        "threads": case.threads,
        "size": case.size,
        "count": case.count,
        "path": str(path) if case.is_put else None,
    }
    command = [sys.executable, "-m", "benchmarks.http_ways", json.dumps(request)]
    with subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *command], cwd=ROOT, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            found = json.loads(line)
            if "error" in found:
                note(f"{case.name}: {found['way']}: {found['error']}")
                yield Row(found["round"], case.name, found["way"], error=found["error"])
                continue
            figures = {
                "rate": found["bytes"] / found["seconds"],
                "cpu_per_gib": found["cpu_seconds"] * GIB / found["bytes"],
                "cpu_ms_per_request": found["cpu_seconds"] * 1e3 / case.count,
                "load": found["load"],
            }
            yield Row(found["round"], case.name, found["way"], figures)


def table(results: Results, ways: Sequence[str]) -> str:
    """Return the medians."""
    rows = [["median", *ways]]
    for title, figure, form in (
        ("MB/s", "rate", lambda value: f"{value / 1e6:,.0f}"),
        ("CPU s a GiB", "cpu_per_gib", lambda value: f"{value:.2f}"),
        ("CPU ms a request", "cpu_ms_per_request", lambda value: f"{value:.2f}"),
    ):
        for case in results.cases():
            if (figure == "cpu_ms_per_request") != ("KiB" in case):
                continue
            values = [results.median(case, way, figure) for way in ways]
            rows.append(
                [f"{case}, {title}", *("failed" if value is None else form(value) for value in values)]
            )
    return columns(rows)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_clients", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", metavar="CASE;…", help="; ".join(case.name for case in CASES))
    parser.add_argument("--ways", default="", metavar="CLIENT;…", help="; ".join(WAYS))
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the JSON goes")
    options = parser.parse_args()
    ways = [way for way in WAYS if not options.ways or way in options.ways.split(";")]
    cases = [case for case in CASES if case.name.startswith(tuple(options.only.split(";")))]
    results = Results()
    options.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="fusecache-bench-", dir="/var/tmp") as folder,
        origin(folder) as urls,
    ):
        path = Path(folder) / "part"
        path.write_bytes(os.urandom(max([case.size for case in cases if case.is_put], default=0)))
        for case in cases:
            note(f"{options.rounds} rounds: {case.name}")
            for row in measured(case, ways, options.rounds, urls, path):
                results.add(row)
            write_json(options.output / "http.json", results, (), quick=False, rounds=options.rounds)
    sys.stdout.write(table(results, ways))
    return 0


if __name__ == "__main__":
    sys.exit(main())
