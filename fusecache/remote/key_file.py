"""Reads files that hold keys: only if no other user may access them."""

import os
import stat
from pathlib import Path

from fusecache.model.errors import ConfigError

# Longer files hold no keys.
_BYTES_MAX = 1 << 20


def read_key_file(option: str, path: Path) -> tuple[bytes, os.stat_result]:
    """Return the bytes of a file and its facts. Raises ConfigError. option: the one that names the file."""
    try:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            data = file.read(_BYTES_MAX)
    except OSError as exc:
        raise ConfigError(f"{option} = {path}: {exc.strerror}") from exc
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(f"{option} = {path}: other users may access the keys in it; run `chmod 600 {path}`")
    return data, facts
