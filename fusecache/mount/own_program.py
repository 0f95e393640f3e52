"""How the program starts itself again."""

import os
import subprocess
import sys
from pathlib import Path


def own_program() -> list[str]:
    """Return the words that start this program, whatever the working directory holds.

    If it is not installed (`python -m fusecache` in a checkout), PYTHONPATH names its place to all children.
    """
    root, python = str(Path(__file__).parents[2]), [sys.executable, "-P"]
    if sys.path[0] == root and not _imports_us(python):
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return [*python, "-m", "fusecache"]


def _imports_us(python: list[str]) -> bool:
    """Return whether a new interpreter finds the package by itself."""
    return (
        subprocess.run([*python, "-c", "import fusecache"], check=False, capture_output=True).returncode == 0
    )
