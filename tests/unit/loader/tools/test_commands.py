"""`fusecache dataset ls`, `head`, `stats`, `verify`, `merge`."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loader import MDSDataset, MDSWriter
from loader.__main__ import main
from tests.support import ROOT


@pytest.fixture(params=[None, "zstd"])
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    with MDSWriter(
        tmp_path, {"text": "str"}, size_limit=500, compression=request.param, hashes=["sha1", "xxh64"]
    ) as writer:
        for number in range(100):
            writer.write({"text": f"sample {number}"})
    return tmp_path


def test_ls_tells_columns_shards_and_totals(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "text (str)" in out
    assert "shard.00000.mds" in out
    assert "100 samples" in out


def test_verify_finds_nothing_in_a_sound_dataset(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(directory)]) == 0
    assert "all is well" in capsys.readouterr().out


def test_verify_names_every_damaged_shard(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harmed, missing = sorted(directory.glob("shard.*"))[1:3]
    data = bytearray(harmed.read_bytes())
    data[-1] ^= 1
    harmed.write_bytes(data)
    missing.unlink()
    assert main(["verify", str(directory)]) == 1
    told = capsys.readouterr()
    assert harmed.name in told.err
    assert "sha1" in told.err
    assert f"{missing} (shard 2): " in told.err
    assert "the file is missing. Restore the shard.\n" in told.err
    assert "fusecache dataset verify" not in told.err  # it is what runs
    assert "all is well" not in told.out


def test_verify_counts_a_shard_once_whatever_is_wrong_with_it(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = sorted(directory.glob("shard.*"))[1]
    cut.write_bytes(cut.read_bytes()[:-7])
    assert main(["verify", str(directory)]) == 1
    told = capsys.readouterr()
    assert "100 samples: 1 damaged" in told.out
    assert told.err.count(cut.name) == 1
    assert "bytes" in told.err  # what is wrong is its length, not only its hash


def test_one_of_a_thing_is_said_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(tmp_path / "part", {"text": "str"}) as writer:
        writer.write({"text": "alone"})
    for command in (["merge"], ["ls"], ["stats"], ["verify"], ["head"]):
        assert main([*command, str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "1 shard in one index" in told
    assert "1 shard, 1 sample: structure is well" in told
    assert "1 of 1 sample\n" in told
    assert not re.search(r"\b1 (shard|sample|byte)s", told)


@pytest.mark.parametrize(
    ("encoding", "data", "told"),
    [
        ("json", b"[" * 200_000, "column 'a' does not decode: "),
        ("pkl", b"cno_such_module\nThing\n.", "no_such_module"),
        ("str", None, "the sample has 2 bytes, its values' sizes alone take 4"),
    ],
    ids=["nested", "class", "cut"],
)
def test_a_value_that_does_not_decode_is_told_of_by_each_tool_that_decodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], encoding: str, data: bytes | None, told: str
) -> None:
    sample = b"no" if data is None else struct.pack("<I", len(data)) + data
    shard = write_by_hand(tmp_path, encoding, sample)
    for command in ("head", "verify"):
        assert main([command, "--allow-pickle", str(tmp_path)]) == 1
        said = capsys.readouterr().err
        assert f"{shard} (shard 0): sample 0, number 0 of the shard: " in said
        assert told in said
        assert ("The shard is damaged" in said) == (encoding != "pkl")


def write_by_hand(directory: Path, encoding: str, sample: bytes) -> Path:
    """A dataset of one sample with one column, `a`; the index does not say how many bytes there are."""
    shard = {
        "samples": 1, "raw_data": {"basename": "shard.00000.mds"}, "zip_data": None,
        "column_names": ["a"], "column_encodings": [encoding], "column_sizes": [None],
    }  # fmt: skip
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    path = directory / "shard.00000.mds"
    path.write_bytes(struct.pack("<III", 1, 12, 12 + len(sample)) + sample)
    return path


def test_stats_name_a_sample_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = write_by_hand(tmp_path, "str", b"no")
    assert main(["stats", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{shard} (shard 0): sample 0: the sample has 2 bytes, its values' sizes alone take 4" in said
    assert "fusecache dataset verify" in said


def test_head_takes_no_negative_count(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["head", "-n", "-3", str(directory)]) == 1
    told = capsys.readouterr()
    assert "--samples -3 is negative" in told.err
    assert told.out == ""


def test_verify_names_the_shard_of_a_hash_that_is_unknown(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = (directory / "index.json").read_text()
    (directory / "index.json").write_text(index.replace('"sha1": ', '"no_such": '))
    assert main(["verify", str(directory)]) == 1
    said = capsys.readouterr().err
    shard = min(directory.glob("shard.*"))
    assert (
        f"{shard} (shard 0): the index has a hash that cannot be checked: the hash 'no_such' is unknown"
        in said
    )
    assert "--quick" in said


def test_verify_claims_no_more_than_it_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(tmp_path, {"text": "str"}) as writer:
        writer.write({"text": "a value"})
    shard = tmp_path / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes().replace(b"a value", b"another"))
    assert main(["verify", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "structure is well; contents not checked: the index has no hash" in said
    assert "all is well" not in said


def test_a_quick_verify_looks_at_sizes_alone(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = sorted(directory.glob("shard.*"))
    shards[0].write_bytes(bytes(shards[0].stat().st_size))
    assert main(["verify", "--quick", str(directory)]) == 0
    shards[1].write_bytes(b"")
    shards[2].unlink()
    assert main(["verify", "--quick", str(directory)]) == 1
    told = capsys.readouterr()
    assert "100 samples: 2 damaged" in told.out
    assert f"{shards[1]} (shard 1)" in told.err
    assert f"{shards[2]} (shard 2)" in told.err


def test_stats_tell_shards_bytes_and_columns(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(directory)]) == 0
    out = capsys.readouterr().out
    stored = sum(path.stat().st_size for path in directory.glob("shard.*"))
    assert "100 samples" in out
    assert f"{stored} stored" in out
    assert "column text (str): 8 to 9 bytes, mean 8.9" in out


def test_stats_of_an_empty_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(tmp_path, {"text": "str"}):
        pass
    assert main(["stats", str(tmp_path)]) == 0
    assert "0 shards, 0 samples" in capsys.readouterr().out


def test_head_shows_values_of_every_kind_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = Image.new("L", (3, 2))
    columns = {
        "array": "ndarray",
        "image": "png",
        "images": "list[png]",
        "long": "str",
        "number": "float32",
        "p": "pkl",
    }
    with MDSWriter(tmp_path, columns) as writer:
        for number in range(9):
            value = {
                "image": image,
                "images": [image] * 2,
                "long": "y" * 999,
                "number": number,
                "p": {number},
            }
            writer.write(value | {"array": np.arange(20, dtype=np.int16).reshape(4, 5)})
    assert main(["head", "-n", "2", str(tmp_path), "--allow-pickle"]) == 0
    told = capsys.readouterr().out
    assert told.count("sample ") == 2
    assert "array: int16 (4, 5) [0, 1, 2, 3, 4, 5, 6, 7, ...]" in told
    assert "image: image PNG L 3x2" in told
    assert "images: 2 images, the first image PNG L 3x2" in told
    assert "(999 long)" in told
    assert "2 of 9 samples" in told
    assert main(["head", str(tmp_path)]) == 1
    assert "allow_pickle" in capsys.readouterr().err


def test_merge_writes_one_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("2", "10"):
        with MDSWriter(tmp_path / part, {"text": "str"}) as writer:
            writer.write({"text": part})
    assert main(["merge", str(tmp_path)]) == 0
    assert "2 shards in one index" in capsys.readouterr().out
    assert [sample["text"] for sample in MDSDataset(tmp_path)] == ["2", "10"]
    assert main(["merge", str(tmp_path)]) == 1
    assert "--replace" in capsys.readouterr().err
    assert main(["merge", "--replace", str(tmp_path), "10", "2"]) == 0
    assert [sample["text"] for sample in MDSDataset(tmp_path)] == ["10", "2"]


def test_the_module_runs_and_a_closed_pipe_is_no_error(directory: Path) -> None:
    command = f"{sys.executable} -m loader ls {directory} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "columns: text (str)\n"
    assert done.stderr == ""


def test_a_directory_without_a_dataset_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(tmp_path)]) == 1
    assert "index.json does not exist" in capsys.readouterr().err
