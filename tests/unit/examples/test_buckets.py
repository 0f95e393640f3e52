"""The scripts of examples/buckets end well, and check what they say."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.parametrize(("name", "checks"), [("isolation.sh", 5), ("cleaning.sh", 7)])
def test_script_finds_all_as_it_should(name: str, checks: int) -> None:
    done = subprocess.run(
        [ROOT / "examples" / "buckets" / name],
        env={**os.environ, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("ok      ") for line in done.stdout.splitlines()) == checks
