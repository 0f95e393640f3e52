"""Refuses to import without the packages that the loader needs, and says what installs them."""

from importlib.util import find_spec

# Those of the extra `loader` in pyproject.toml.
for _name in ("msgspec", "numpy", "xxhash", "zstandard"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(f"the loader needs {_name}: pip install 'fusecache[loader]'", name=_name)
