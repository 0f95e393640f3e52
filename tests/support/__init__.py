"""Helpers of the tests: nodes, mounts, stores, servers, processes. No tests here."""

from pathlib import Path

# The checkout.
ROOT = Path(__file__).resolve().parents[2]
