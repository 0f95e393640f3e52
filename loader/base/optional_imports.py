"""Imports packages that only some datasets need, at first use."""

import importlib
from typing import Any

from fusecache.installation import extra_command
from loader.errors import LoaderError


def optional_module(name: str, *, why: str, package: str = "", extra: str = "") -> Any:
    """Import a module. Raises LoaderError with what needs it and the command that installs it.

    package: what pip installs, if its name is another. extra: of this project, if that brings it.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        wheel = package or name.partition(".")[0]
        command = extra_command(extra) if extra else f"pip install {wheel}"
        raise LoaderError(f"{why} needs the package {wheel}: {command}") from None
