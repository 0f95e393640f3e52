"""A Python that is too old, as Ubuntu 22.04's: `make install` and `make setup` say so at once, and make nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

OLD = """#!/bin/sh
# A Python 3.10, as far as a question for its version goes.
exec {python} -c 'import sys; sys.version_info = (3, 10, 12, "final", 0); exec(sys.argv[2])' "$@"
"""


def make(target: str, folder: Path, python: str) -> "subprocess.CompletedProcess[str]":
    words = ["make", "-C", str(ROOT), target, f"PYTHON={python}", "APT=", f"VENV={folder}/venv"]
    words += [f"DESTDIR={folder}/root", "PIP_INSTALL=--no-index"]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture
def old_python(tmp_path: Path) -> str:
    program = tmp_path / "python3.10"
    program.write_text(OLD.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("target", ["install", "setup"])
def test_an_old_python_is_named_with_the_way_out(tmp_path: Path, old_python: str, target: str) -> None:
    done = make(target, tmp_path, old_python)
    assert done.returncode == 2
    assert f"{old_python} is Python 3.10.12, and fusecache needs Python 3.11 or newer" in done.stderr
    assert f"make {target} PYTHON=python3.12" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["python3.10"]
