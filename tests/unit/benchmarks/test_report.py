"""The results file of a run of some cases keeps the other cases of the run before, and says so."""

import json
from pathlib import Path

from benchmarks.report import in_shown_order, kept_runs, write_json
from benchmarks.results import Results, Row


def written(path: Path, rows: list[Row], *, keep: bool = False) -> dict[str, object]:
    """Write a results file as the driver does; return its content."""
    measured = Results(rows)
    kept = kept_runs(path, measured.cases()) if keep else []
    together = in_shown_order([*(row for run in kept for row in run.rows), *rows])
    write_json(path, together, [], quick=False, rounds=3, kept=kept)
    content: dict[str, object] = json.loads(path.read_text())
    return content


def test_a_row_survives_the_file() -> None:
    for row in (
        Row(2, "tokens A", "raw", {"cpu_us": 1.5}),
        Row(1, "find B", "rclone", error="> 60 s", limit_seconds=60.0),
    ):
        assert Row.from_json(row.as_json()) == row


def test_cases_that_were_measured_again_replace_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "loader.json"
    written(path, [Row(1, "tokens A", "raw", {"cpu_us": 1.0}), Row(1, "import A", "raw", {"seconds": 2.0})])
    content = written(path, [Row(1, "tokens A", "raw", {"cpu_us": 3.0})], keep=True)
    assert content["rows"] == [
        {"round": 1, "case": "tokens A", "competitor": "raw", "cpu_us": 3.0},
        {"round": 1, "case": "import A", "competitor": "raw", "seconds": 2.0},
    ]
    (kept,) = content["kept"]  # type: ignore[misc]  # a list of one
    assert kept["cases"] == ["import A"]
    assert kept["rounds"] == 3


def test_each_kept_case_names_the_run_that_measured_it(tmp_path: Path) -> None:
    path = tmp_path / "loader.json"
    written(path, [Row(1, "import A", "raw", {"seconds": 2.0})])
    written(path, [Row(1, "tokens A", "raw", {"cpu_us": 1.0})], keep=True)
    content = written(path, [Row(1, "blobs A", "raw", {"cpu_us": 1.0})], keep=True)
    runs = content["kept"]
    assert [run["cases"] for run in runs] == [["import A"], ["tokens A"]]  # type: ignore[attr-defined]


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    assert kept_runs(tmp_path / "loader.json", []) == []
