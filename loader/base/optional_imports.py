"""Packages that only some datasets need, imported when they are."""

import importlib
from typing import Any

from loader.errors import LoaderError


def optional_module(name: str, *, why: str, package: str = "") -> Any:
    """Import a module. Raises LoaderError saying what it is for and how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        wheel = package or name.partition(".")[0]
        raise LoaderError(f"{why} needs the package {wheel}: pip install {wheel}") from None
