"""The benchmarks' page shows the figures of the last run of the loader's benchmark, and no others."""

import json
from typing import Any

from benchmarks.figures import HERE, figures, with_figures

ROWS = [
    {"round": number, "case": "tokens-32 A", "competitor": name, "cpu_us": cpu}
    for name, values in (("fusecache", (4.0, 2.0, 3.0)), ("raw", (1.0, 2.0, 2.0)))
    for number, cpu in enumerate(values, 1)
]
CONTENT: dict[str, Any] = {
    "revision": "abc", "time": "2026-01-02T03:04:05+00:00", "machine": "2 CPUs", "rounds": 3, "rows": ROWS,
}  # fmt: skip


def test_the_page_is_up_to_date() -> None:
    page = (HERE / "README.md").read_text()
    content = json.loads((HERE / "results/loader.json").read_text())
    assert page == with_figures(page, content), "run: python -m benchmarks.figures"


def test_a_missed_bar_is_shown_as_missed() -> None:
    shown = figures(CONTENT)
    assert "| `fusecache` | 3.0 µs (2.0-4.0) |" in shown
    assert "| CPU a sample / raw | 1.5 times | ≤ 1.3 times | missed |" in shown
    assert "3 rounds, 2026-01-02, commit `abc`, 2 CPUs." in shown


def test_kept_cases_name_their_own_run() -> None:
    kept = {"cases": ["blobs A"], "revision": "old", "time": "2025-01-02", "machine": "2 CPUs", "rounds": 1}
    blob = {"round": 1, "case": "blobs A", "competitor": "raw", "cpu_us": 9.0}
    shown = figures({**CONTENT, "kept": [kept], "rows": [*ROWS, blob]})
    assert "- tokens, 32 a batch: 3 rounds" in shown
    assert "- 100 KB, 32 a batch, warm mount: 1 round, 2025-01-02, commit `old`" in shown
