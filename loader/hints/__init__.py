"""Hints: tell the daemon of a mount what this run reads next."""

from loader.hints.client import Hints

__all__ = ["Hints"]
