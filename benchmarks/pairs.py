"""This tree beside an older commit: `python -m benchmarks.pairs --against COMMIT`, or `make bench-pairs AGAINST=…`.

Both run this tree's benchmarks in turns, so a machine that becomes slower affects both. Prints, for each case, the
median over the rounds of new / old. Wanted is at least 0.97 for rates, and at most 1.03 for seconds.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.driver import DIRECTORY
from benchmarks.processes import ROOT, remove_folder
from benchmarks.report import PER_GIB, SHOWN

# What a benchmark needs of this tree; the packages under test are each commit's own.
HARNESS = ("benchmarks", "tests", "pyproject.toml")
PACKAGES = ("fusecache", "loader")
# Figures of which more is better; of all others that a case is shown by, less is.
RATES = ("rate", "reads_per_second", "names_per_second", "files_per_second")
NEW, OLD = "new", "old"


def main() -> int:
    """Measure, print the table, and return 1 if some pair has no figures."""
    options = _parser().parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fusecache-pairs-", dir=options.directory))
    found: dict[str, dict[str, list[float]]] = {}
    try:
        trees = {NEW: _tree(directory / NEW, ""), OLD: _tree(directory / OLD, options.against)}
        for number in range(options.rounds):
            for name in (NEW, OLD) if number % 2 else (OLD, NEW):
                for case, figure in _round(trees[name], options).items():
                    found.setdefault(case, {}).setdefault(name, []).append(figure)
    finally:
        remove_folder(directory)
    return _print(found, options.rounds)


def _tree(path: Path, commit: str) -> Path:
    """Return a folder with this tree's benchmarks, and the packages of a commit; empty: as they lie here."""
    path.mkdir()
    for name in (*HARNESS, *(() if commit else PACKAGES)):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, path / name)
    if commit:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit, *PACKAGES], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "--extract", "--directory", str(path)], input=archive, check=True)
    return path


def _round(tree: Path, options: argparse.Namespace) -> dict[str, float]:
    """Run each benchmark once in a tree; return, by case, the figure that it is shown by."""
    figures: dict[str, float] = {}
    for benchmark in options.benchmarks.split(","):
        cases = [case.name for case in importlib.import_module(f"benchmarks.{benchmark}").CASES]
        only = [case for case in cases if case.startswith(tuple(options.only.split(",")))]
        if not only:
            continue
        command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--rounds", "1", "--alone"]
        command += ["--only", ",".join(only), "--directory", str(options.directory), "--output", str(tree)]
        command += ["--quick"] if options.quick else []
        # The commands beside this interpreter import the packages of the tree, too.
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=False)
        with open(tree / f"{benchmark}.json", encoding="utf-8") as file:
            rows = json.load(file)["rows"]
        for row in rows:
            shown = SHOWN.get(row["case"].partition(" ")[0])
            if row["competitor"].startswith("fusecache") and shown is not None:
                for figure in {shown.figure, *PER_GIB.values()} & row.keys():
                    figures[f"{row['case']}, {figure}"] = row[figure]
    return figures


def _print(found: dict[str, dict[str, list[float]]], rounds: int) -> int:
    complete = True
    for case, figures in found.items():
        pairs = list(zip(figures.get(NEW, []), figures.get(OLD, []), strict=False))
        complete = complete and len(pairs) == rounds
        if not pairs:
            sys.stdout.write(f"{case:50} no pair\n")
            continue
        ratios = sorted(new / old for new, old in pairs)
        better = "more" if case.endswith(RATES) else "less"
        sys.stdout.write(
            f"{case:50} new / old {statistics.median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"{better} is better; medians {statistics.median(row[0] for row in pairs):,.4g} "
            f"and {statistics.median(row[1] for row in pairs):,.4g}\n"
        )
    return 0 if complete and found else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__)
    parser.add_argument("--against", required=True, metavar="COMMIT", help="what this tree is compared with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--benchmarks", default="read,write", metavar="NAME,…", help="read, write, loader")
    parser.add_argument(
        "--only", default="", metavar="CASE,…", help="cases, as for the benchmarks themselves"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it: the ratios mean little")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where trees and caches are made")
    return parser


if __name__ == "__main__":
    sys.exit(main())
