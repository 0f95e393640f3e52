"""Tokenizers that transformers knows by name, in `fusecache dataset convert text`."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from loader import MDSDataset
from loader.__main__ import main


@pytest.mark.parametrize(("end", "expected"), [([], [2, 3, 4, 0]), (["--end", "w3"], [2, 3, 4, 4])])
def test_a_named_tokenizer_brings_its_end_token(tmp_path: Path, end: list[str], expected: list[int]) -> None:
    words = ["<end>", "<unk>", "w1", "w2", "w3"]
    made = tokenizers.Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = Whitespace()
    named = tmp_path / "named"
    named.mkdir()
    made.save(str(named / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    (named / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "in.txt").write_text("w1 w2 w3")
    how = ["--tokenizer", str(named), "--length", "4", *end, str(tmp_path / "in.txt"), str(tmp_path / "out")]
    assert main(["convert", "text", *how]) == 0
    assert MDSDataset(tmp_path / "out")[0]["tokens"].tolist() == expected


def test_a_tokenizer_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("w1")
    (tmp_path / "nothing").mkdir()
    how = [
        "--tokenizer",
        str(tmp_path / "nothing"),
        "--length",
        "4",
        str(tmp_path / "in.txt"),
        str(tmp_path / "out"),
    ]
    assert main(["convert", "text", *how]) == 1
    assert "there is no tokenizer" in capsys.readouterr().err
