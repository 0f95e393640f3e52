"""Refuses to import without the packages that the loader needs, and says what installs them."""

from importlib.util import find_spec

from fusecache.installation import extra_command

# Those of the extra `loader` in pyproject.toml.
for _name in ("msgspec", "numpy", "xxhash", "zstandard"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(f"the loader needs {_name}: {extra_command('loader')}", name=_name)
