"""The default of a mount's cache directory, and the free space there."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fusecache.model.errors import ConfigError


def default_cache_dir(
    source: str, endpoint: str, *, environment: Mapping[str, str], home: Path, user_id: int
) -> Path:
    """Return the cache directory of one source: stable for the same endpoint, bucket and prefix, and unique to them."""
    inner = source.partition("://")[2].rstrip("/")
    bucket = inner.partition("/")[0]
    digest = hashlib.sha256("\n".join((endpoint.rstrip("/"), inner)).encode()).hexdigest()[:12]
    if user_id == 0:
        base = Path("/var/cache/fusecache")
    else:
        base = Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "fusecache"
    return base / f"{bucket}-{digest}"


def free_bytes_at(path: Path) -> int:
    """Return the free bytes of a cache directory's disk, as recorded when the directory was made; else as of now.

    The recorded value keeps a limit in percent from shrinking while the cache fills. Raises ConfigError.
    """
    try:
        with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            return int(json.loads((path / "fusecache.json").read_text())["free_bytes"])
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free
    except OSError as exc:
        raise ConfigError(f"cache_dir = {path}: {exc.strerror}; choose another directory") from exc
