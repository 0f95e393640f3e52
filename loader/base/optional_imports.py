"""Imports packages that only some datasets need, at first use."""

import importlib
from typing import Any

from loader.errors import LoaderError


def optional_module(name: str, *, why: str, package: str = "") -> Any:
    """Import a module. Raises LoaderError with what needs it and the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        wheel = package or name.partition(".")[0]
        raise LoaderError(f"{why} needs the package {wheel}: pip install {wheel}") from None
