"""`python -m loader ls` and `verify`."""

from pathlib import Path

import pytest

from loader import MDSWriter
from loader.__main__ import main


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
    assert "python -m loader verify" not in told.err  # it is what runs
    assert "all is well" not in told.out


def test_a_directory_without_a_dataset_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(tmp_path)]) == 1
    assert "index.json does not exist" in capsys.readouterr().err
