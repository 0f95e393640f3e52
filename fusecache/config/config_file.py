"""The configuration file of a mount: TOML with the options at the top level, and tables of places."""

import tomllib
from collections.abc import Collection
from pathlib import Path

from fusecache.model.errors import ConfigError
from fusecache.model.format_text import nearest_text


def read_config(path: Path) -> str:
    """Return the text of a configuration file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read the configuration file {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc


def parse_config(path: Path, text: str, known: Collection[str], tables: Collection[str]) -> dict[str, object]:
    """Return the values of a configuration file by key. known: all keys; tables: the keys of tables.

    path: of the file, for errors. Raises ConfigError.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc
    for name, value in content.items():
        if name in tables:
            continue
        if name not in known and isinstance(value, dict):
            raise ConfigError(
                f'{path}: [{name}] is a table; write the options at the top level of the file (source = "s3://…")'
            )
        if name not in known:
            nearest = nearest_text(name, list(known)) or f": known are {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key {name!r}{nearest}")
    return content
