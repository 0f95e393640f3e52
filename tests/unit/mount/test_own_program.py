"""A program that starts itself again finds its package, and no other one's successor is made to."""

import os
import sys
from pathlib import Path

import pytest

from tests.support import BASE_PYTHON, ROOT
from tests.support.mounts import run

PROGRAM = """
import os, sys
sys.path[0] = os.getcwd()  # as `python -m` has it
from fusecache.mount.launch import own_program
print(*own_program()[1:], os.environ.get("PYTHONPATH"))
"""


@pytest.mark.parametrize(("python", "path"), [(BASE_PYTHON, str(ROOT)), (Path(sys.executable), "None")])
def test_only_a_checkout_that_is_not_installed_is_named_to_children(python: Path, path: str) -> None:
    """Else an upgrade to another environment's program would import the checkout again."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert run(python, "-c", PROGRAM, cwd=ROOT, env=environment).stdout == f"-P -m fusecache {path}\n"
