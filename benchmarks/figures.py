"""Writes the loader's figures from results/loader.json into README.md: `python -m benchmarks.figures`.

A test compares the two, so README.md quotes nothing that a run did not measure.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bars_loader import loader_bars
from benchmarks.report import ORDER, SHOWN, bar_cells, cell
from benchmarks.results import Results, Row

HERE = Path(__file__).parent
BEGIN, END = "<!-- figures: python -m benchmarks.figures -->\n", "<!-- end of figures -->\n"
TITLES = {
    "tokens-local": "tokens, 512 a batch",
    "tokens-32": "tokens, 32 a batch",
    "blobs-local": "100 KB, 32 a batch",
    "tokens": "tokens, 512 a batch, warm mount",
    "blobs": "100 KB, 32 a batch, warm mount",
}


def figures(content: Mapping[str, Any]) -> str:
    """Return the tables of the CPU a sample and of its bars, as Markdown. content: of results/loader.json."""
    results = Results(Row.from_json(row) for row in content["rows"])
    cases = [case for kind in TITLES for case in results.cases() if _kind(case) == kind]
    names = [name for name in ORDER if any(name in results.competitors_of(case) for case in cases)]
    rows = [["CPU a sample", *(TITLES[_kind(case)] for case in cases)]]
    rows += [
        [f"`{name}`", *(cell(results, case, name, SHOWN[_kind(case)]) for case in cases)] for name in names
    ]
    bars = [["bar", "what", "figure", "limit", "verdict"]]
    bars += [
        [TITLES[_kind(bar.case)], bar.what, *bar_cells(bar)]
        for bar in loader_bars(results)
        if bar.case in cases
    ]
    return f"{_table(rows)}\n{_table(bars)}\n{_runs(content, cases)}"


def _kind(case: str) -> str:
    return case.partition(" ")[0]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def _runs(content: Mapping[str, Any], cases: Sequence[str]) -> str:
    """Return a line for each run that measured some of the cases: which, when, where, in how many rounds."""
    kept = content.get("kept", [])
    older = {case for run in kept for case in run["cases"]}
    own = {**content, "cases": [case for case in cases if case not in older]}
    lines = []
    for run in (own, *kept):
        titles = [TITLES[_kind(case)] for case in cases if case in run["cases"]]
        if titles:
            rounds = f"{run['rounds']} round{'s' if run['rounds'] > 1 else ''}"
            day = run["time"][:10]
            lines.append(
                f"- {'; '.join(titles)}: {rounds}, {day}, commit `{run['revision']}`, {run['machine']}."
            )
    return "\n".join(lines) + "\n"


def with_figures(page: str, content: Mapping[str, Any]) -> str:
    """Return the page with the figures between its two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{figures(content)}\n{END}{tail}"


def main() -> int:
    """Write the figures into README.md."""
    path = HERE / "README.md"
    path.write_text(with_figures(path.read_text(), json.loads((HERE / "results/loader.json").read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
