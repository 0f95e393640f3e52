"""`convert --resume` on one machine: it goes on with the same input, and refuses another one."""

import json
from pathlib import Path

import pytest

from loader import LoaderError, MDSDataset, convert

COLUMNS = {"id": "int"}
COUNT = 50


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of JSON lines. The second one ends with a line that is no JSON."""
    made = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for number, path in enumerate(made):
        path.write_text("".join(json.dumps({"id": COUNT * number + row}) + "\n" for row in range(COUNT)))
    made[1].write_text(made[1].read_text() + "{")
    return made


def begin(files: list[Path], out: Path, processes: int) -> None:
    """Convert up to the line that is no JSON, and mend it."""
    with pytest.raises(LoaderError, match="line 51 is not JSON"):
        convert("jsonl", files, out, columns=COLUMNS, processes=processes, size_limit=300)
    files[1].write_text(files[1].read_text()[:-1])


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("change", ["order", "another", "fewer"])
def test_other_inputs_or_another_order_are_refused(
    files: list[Path], tmp_path: Path, processes: int, change: str
) -> None:
    out = tmp_path / "out"
    begin(files, out, processes)
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (tmp_path / "c.jsonl").write_text(files[0].read_text())
    others = {"order": files[::-1], "another": [tmp_path / "c.jsonl", files[1]], "fewer": files[1:]}[change]
    how = {"columns": COLUMNS, "processes": processes, "size_limit": 300}
    with pytest.raises(
        LoaderError, match=rf"{out} holds a conversion of other files .* choose another directory"
    ):
        convert("jsonl", others, out, resume=True, **how)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
    assert convert("jsonl", files, out, resume=True, **how) == 2 * COUNT
    assert [sample["id"] for sample in MDSDataset(out)] == list(range(2 * COUNT))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_whole_dataset_has_no_record_of_its_inputs(
    files: list[Path], tmp_path: Path, processes: int
) -> None:
    begin(files, tmp_path / "out", processes)
    convert(
        "jsonl", files, tmp_path / "out", columns=COLUMNS, processes=processes, resume=True, size_limit=300
    )
    convert("jsonl", files, tmp_path / "plain", columns=COLUMNS, processes=processes, size_limit=300)
    names = [
        sorted(str(path.relative_to(tmp_path / root)) for path in (tmp_path / root).rglob("*"))
        for root in ("out", "plain")
    ]
    assert names[0] == names[1]
    assert not [name for name in names[0] if name.startswith("_")]


def test_files_that_were_moved_are_converted_on_once_the_record_is_removed(
    files: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    begin(files, out, 1)
    moved = [path.rename(tmp_path / f"moved-{path.name}") for path in files]
    with pytest.raises(LoaderError, match=r"_inputs\.json") as refusal:
        convert("jsonl", moved, out, columns=COLUMNS, resume=True, size_limit=300)
    assert f"remove {out / '_inputs.json'}" in str(refusal.value)
    (out / "_inputs.json").unlink()
    assert convert("jsonl", moved, out, columns=COLUMNS, resume=True, size_limit=300) == 2 * COUNT


def test_inputs_may_be_named_from_another_directory(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(files, tmp_path / "out", 1)
    monkeypatch.chdir(tmp_path)
    names = [path.name for path in files]
    assert convert("jsonl", names, "out", columns=COLUMNS, resume=True, size_limit=300) == 2 * COUNT
