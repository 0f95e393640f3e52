"""Checks whether the disk of a cache directory has space for the cache size that the options ask for."""

import shutil
from pathlib import Path
from typing import Any

from fusecache.config.options import SMALLEST_CACHE_BYTES, MountOptions
from fusecache.engine.cache.block_cache import FREE_SPACE_FLOOR_BYTES
from fusecache.model.errors import MountError
from fusecache.model.format_text import size_text


def check_disk(options: MountOptions) -> None:
    """Raise MountError if the disk of the cache directory is too small for any write. A read-only mount passes."""
    total_bytes = _disk_of(options.cache_dir).total
    if not options.read_only and total_bytes < FREE_SPACE_FLOOR_BYTES + SMALLEST_CACHE_BYTES:
        raise MountError(
            f"the disk of {options.cache_dir} is too small for writes: it has {size_text(total_bytes)}, and "
            f"{size_text(FREE_SPACE_FLOOR_BYTES)} must stay free for the journal; choose another with --cache-dir"
        )


def shortage_text(options: MountOptions, usable_bytes: int) -> str:
    """Return a warning if the disk has less space than the cache may use, else ""."""
    if usable_bytes >= options.cache_size:
        return ""
    disk = _disk_of(options.cache_dir)
    return (
        f"the cache may use {size_text(options.cache_size)}, but the disk of {options.cache_dir} has "
        f"{size_text(disk.total)}, {size_text(disk.free)} of it free: the cache will use {size_text(usable_bytes)} "
        f"({size_text(FREE_SPACE_FLOOR_BYTES)} must stay free); see --cache-size and --cache-dir"
    )


def nearest_directory(path: Path) -> Path:
    """Return a directory, or its nearest existing parent if it does not exist yet."""
    while not path.exists():
        path = path.parent
    return path


def _disk_of(path: Path) -> Any:
    """Return the disk usage of the disk that a directory is on, or will be."""
    return shutil.disk_usage(nearest_directory(path))
