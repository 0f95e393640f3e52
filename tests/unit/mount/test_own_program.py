"""A program that starts itself again finds its package, and no other one's successor is made to."""

import os
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.mounts import run

PROGRAM = """
import os, sys
sys.path[0] = os.getcwd()  # as `python -m` has it
from fusecache.mount.own_program import own_program
print(*own_program()[1:], os.environ.get("PYTHONPATH"))
"""
BASE = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize(("python", "path"), [(BASE, str(ROOT)), (Path(sys.executable), "None")])
def test_only_a_checkout_that_is_not_installed_is_named_to_children(python: Path, path: str) -> None:
    """Else an upgrade to another environment's program would import the checkout again."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert run(python, "-c", PROGRAM, cwd=ROOT, env=environment).stdout == f"-P -m fusecache {path}\n"
