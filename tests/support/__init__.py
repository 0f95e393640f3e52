"""Helpers of the tests: nodes, mounts, stores, servers, processes. No tests here."""

import sys
from pathlib import Path

# The checkout.
ROOT = Path(__file__).resolve().parents[2]
# The interpreter below the virtual environment, without its packages.
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
