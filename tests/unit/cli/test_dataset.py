"""`fusecache dataset`: the loader's command line, whatever the working directory holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loader import MDSWriter
from tests.support import ROOT

PROGRAMS = {
    "fusecache": [str(Path(sys.executable).parent / "fusecache")],
    "module": [sys.executable, "-P", "-m", "fusecache"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with modules of its own, whose names are those of packages that the command needs."""
    for name in ("loader.py", "numpy.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit(0)\n")
    with MDSWriter(tmp_path / "data", {"text": "str"}, hashes="xxh64") as writer:
        writer.write({"text": "a value"})
    return tmp_path


def run(program: str, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAMS[program], "dataset", *words],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_dataset_is_checked_whatever_modules_the_folder_has(folder: Path, program: str) -> None:
    done = run(program, folder, "verify", "data")
    assert (done.returncode, done.stdout) == (0, "1 shard, 1 sample: all is well\n")
    (folder / "data" / "shard.00000.mds").write_bytes(b"damaged")
    assert run(program, folder, "verify", "data").returncode == 1


def test_its_flags_and_its_help_are_the_loaders(folder: Path) -> None:
    assert run("fusecache", folder, "--help").stdout.startswith("usage: fusecache dataset ")
    assert run("fusecache", folder, "head", "-n", "1", "data").stdout.startswith(
        "sample 0\n  text: 'a value'\n"
    )
    wrong = run("fusecache", folder, "verify", "--no-such", "data")
    assert (wrong.returncode, "unrecognized arguments: --no-such" in wrong.stderr) == (2, True)
