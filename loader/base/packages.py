"""Packages that the loader needs, and packages that only some datasets need, which are imported at first use.

Without those of the extra `loader`, the import of this module fails, and says what installs them.
"""

import importlib
from importlib.util import find_spec
from typing import Any

from fusecache.installation import extra_command
from loader.errors import LoaderError

# Those of the extra `loader` in pyproject.toml.
for _name in ("msgspec", "numpy", "xxhash", "zstandard"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(f"the loader needs {_name}: {extra_command('loader')}", name=_name)


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
