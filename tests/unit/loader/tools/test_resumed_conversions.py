"""`convert --resume` on one machine: it goes on with the same input, and refuses another one."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from loader import LoaderError, MDSDataset, TokenOptions, convert, write_parallel
from loader.__main__ import main
from loader.tools.row_sources import JsonLines
from loader.tools.tokens import TokenSource
from loader.writing.clusters import ENGINES, write_attempt

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


def check_all_converted(files: list[Path], out: Path, **how: Any) -> None:
    """Convert, and check that each sample comes once, in its order."""
    assert convert("jsonl", files, out, **how) == 2 * COUNT
    assert [sample["id"] for sample in MDSDataset(out)] == list(range(2 * COUNT))


def begin(files: list[Path], out: Path, processes: int) -> None:
    """Convert up to the line that is no JSON, and mend it."""
    with pytest.raises(LoaderError, match="line 51 is not JSON"):
        convert("jsonl", files, out, columns=COLUMNS, processes=processes, size_limit=300)
    files[1].write_text(files[1].read_text()[:-1])


@pytest.mark.parametrize(("processes", "change"), [(1, "order"), (2, "order"), (1, "another"), (1, "fewer")])
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
    check_all_converted(files, out, resume=True, **how)


def test_a_whole_dataset_has_no_record_of_its_inputs(files: list[Path], tmp_path: Path) -> None:
    begin(files, tmp_path / "out", 2)
    convert("jsonl", files, tmp_path / "out", columns=COLUMNS, processes=2, resume=True, size_limit=300)
    convert("jsonl", files, tmp_path / "plain", columns=COLUMNS, processes=2, size_limit=300)
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


@pytest.mark.parametrize(
    ("processes", "change"), [(1, {"columns": {"id": "json"}}), (2, {"hashes": ["sha1"]})], ids=str
)
def test_other_columns_or_options_are_refused_and_named_with_the_way_out(
    files: list[Path], tmp_path: Path, processes: int, change: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    begin(files, out, processes)
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    how = {"columns": COLUMNS, "processes": processes, "size_limit": 300, "resume": True}
    with pytest.raises(LoaderError, match=rf"{out}.* other (columns|settings|options).*remove it"):
        convert("jsonl", files, out, **(how | change))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
    check_all_converted(files, out, **how)


def test_a_part_that_has_nothing_yet_gets_no_other_columns_than_the_finished_ones(
    files: list[Path], tmp_path: Path
) -> None:
    """As `use --columns x:json` advises, because a column is null in the second file only."""
    files[1].write_text('{"id": null}\n')
    how = {"processes": 2, "size_limit": 300}
    with pytest.raises(LoaderError, match="use --columns id:json"):
        convert("jsonl", files, tmp_path / "out", **how)
    with pytest.raises(
        LoaderError, match=r'other columns, \{"id": "int"\}: continue with these, .* begin again'
    ):
        convert("jsonl", files, tmp_path / "out", columns={"id": "json"}, resume=True, **how)
    assert not list((tmp_path / "out").glob("00001/shard.*"))


def test_a_finished_part_of_other_columns_is_refused_before_any_part_goes_on(
    files: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    begin(files, out, 2)
    (out / "_inputs.json").unlink()
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(LoaderError, match=rf"{out}/00000 was written with other settings .*column_encodings"):
        write_parallel(out, {"id": "json"}, [JsonLines(str(path), {"id": "json"}) for path in files],
            processes=2, resume=True, options={"size_limit": 300})  # fmt: skip
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept


def test_before_anything_is_written_columns_may_change(files: list[Path], tmp_path: Path) -> None:
    for path in files:
        path.write_text('{"id": null}\n')
    with pytest.raises(LoaderError, match="id is null"):
        convert("jsonl", files, tmp_path / "out", columns=COLUMNS, resume=True)
    assert convert("jsonl", files, tmp_path / "out", columns={"id": "json"}, resume=True) == 2


def test_the_command_and_the_function_continue_each_other(files: list[Path], tmp_path: Path) -> None:
    begin(files, tmp_path / "out", 2)
    words = ["--columns", "id:int", "--size-limit", "300", "--processes", "2", "--resume"]
    assert main(["convert", "jsonl", *words, *map(str, files), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_one_process_and_several_do_not_continue_each_other(
    files: list[Path], tmp_path: Path, processes: int
) -> None:
    out = tmp_path / "out"
    begin(files, out, processes)
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    how = {"columns": COLUMNS, "size_limit": 300, "resume": True}
    told = {1: "one process: .*--processes 1", 2: "several processes: .*--processes 2"}[processes]
    with pytest.raises(LoaderError, match=rf"{out} holds a conversion by {told}"):
        convert("jsonl", files, out, processes=3 - processes, **how)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
    assert convert("jsonl", files, out, processes=processes, **how) == 2 * COUNT


def test_a_file_whose_samples_are_all_written_may_not_change(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    begin(files, out, 1)
    whole = files[0].read_text()
    how = {"columns": COLUMNS, "size_limit": 300, "resume": True}
    for changed in (whole + '{"id": 777}\n', whole[: whole.rindex("{")], whole.replace("49", "4")):
        files[0].write_text(changed)
        with pytest.raises(LoaderError, match=rf"{out}.*changed"):
            convert("jsonl", files, out, **how)
    files[0].write_text(whole)
    check_all_converted(files, out, **how)


def test_a_file_that_had_no_samples_may_not_get_some_once_its_part_is_finished(
    files: list[Path], tmp_path: Path
) -> None:
    files[0].write_text("")
    files[1].write_text("{")
    how = {"columns": COLUMNS, "processes": 2}
    with pytest.raises(LoaderError, match="line 1 is not JSON"):
        convert("jsonl", files, tmp_path / "out", **how)
    assert (tmp_path / "out/00000/index.json").exists()
    for number, file in enumerate(files):
        file.write_text(f'{{"id": {number}}}\n')
    with pytest.raises(LoaderError, match=rf"{files[0]}, which changed since"):
        convert("jsonl", files, tmp_path / "out", resume=True, **how)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_that_is_mended_before_the_place_where_the_conversion_goes_on_is_refused(
    files: list[Path], tmp_path: Path, processes: int
) -> None:
    """Its samples would move: as many as before are skipped."""
    out = tmp_path / "out"
    begin(files, out, processes)
    whole = files[1].read_text()
    files[1].write_text(whole.partition("\n")[2])
    how = {"columns": COLUMNS, "processes": processes, "size_limit": 300, "resume": True}
    with pytest.raises(LoaderError, match=r"shard\.\d+\.mds .*input changed"):
        convert("jsonl", files, out, **how)
    files[1].write_text(whole)
    check_all_converted(files, out, **how)


def save_tokenizer(path: Path, words: list[str]) -> None:
    """Write a tokenizer that numbers these words in their order."""
    made = tokenizers.Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    path.parent.mkdir(exist_ok=True)
    made.save(str(path))


@pytest.mark.parametrize("how", [{"processes": 1}, {"processes": 2}, {"engine": "here"}], ids=str)
def test_another_tokenizer_of_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    monkeypatch.setitem(ENGINES, "here", lambda: lambda tasks: map(write_attempt, tasks))
    tokenizer, out = tmp_path / "tokenizer.json", tmp_path / "out"
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text('{"text": "a b a b"}\n' * 9)
    files[1].write_text(files[0].read_text() + "{")

    def run(*, resume: bool) -> int:
        tokens = TokenOptions(str(tokenizer), 4, end="")
        return convert("text", files, out, tokens=tokens, size_limit=200, resume=resume, **how)

    save_tokenizer(tokenizer, ["?", "a", "b"])
    with pytest.raises(LoaderError, match="line 10 is not JSON"):
        run(resume=False)
    files[1].write_text(files[0].read_text())
    save_tokenizer(tokenizer, ["?", "b", "a"])
    with pytest.raises(LoaderError, match=rf"{out} holds (a|another) conversion"):
        run(resume=True)
    save_tokenizer(tokenizer, ["?", "a", "b"])
    assert run(resume=True) == 18
    assert {tuple(sample["tokens"].tolist()) for sample in MDSDataset(out)} == {(1, 2, 1, 2)}


def test_the_files_of_a_folder_are_those_of_its_tokenizer(tmp_path: Path) -> None:
    """A model's weights stay unread."""
    source = TokenSource("a.jsonl", TokenOptions(str(tmp_path / "model"), 4))
    save_tokenizer(tmp_path / "model/tokenizer.json", ["?", "a"])
    before = source.settings
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    assert source.settings == before
    (tmp_path / "model/merges.txt").write_text("a b")
    assert source.settings != before
