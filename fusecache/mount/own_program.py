"""How the program starts itself again."""

import os
import sys
from pathlib import Path


def own_program() -> list[str]:
    """Return the words that start this program, whatever the working directory holds.

    If it was found there only (`python -m fusecache` in a checkout), PYTHONPATH names the place to all children.
    """
    root = str(Path(__file__).parents[2])
    if sys.path[0] == root and not sys.flags.safe_path:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return [sys.executable, "-P", "-m", "fusecache"]
