"""Whether the disk of a cache directory has room for what an option promises."""

import shutil
from pathlib import Path
from typing import Any

from fusecache.config.options import SMALLEST_CACHE_BYTES, MountOptions
from fusecache.engine.cache.block_cache import FREE_SPACE_FLOOR_BYTES
from fusecache.model.errors import MountError
from fusecache.model.format_text import size_text


def check_disk(options: MountOptions) -> None:
    """Raise MountError if nothing could ever be written on the disk of the cache directory."""
    total_bytes = _disk_of(options.cache_dir).total
    if not options.read_only and total_bytes < FREE_SPACE_FLOOR_BYTES + SMALLEST_CACHE_BYTES:
        raise MountError(
            f"the disk of {options.cache_dir} has {size_text(total_bytes)} in all, and the last "
            f"{size_text(FREE_SPACE_FLOOR_BYTES)} of a disk stay free for the journal: nothing could be written; "
            "choose another with --cache-dir"
        )


def shortage_text(options: MountOptions, usable_bytes: int) -> str:
    """Return what to know if the disk has less room than the cache may take, else ""."""
    if usable_bytes >= options.cache_size:
        return ""
    disk = _disk_of(options.cache_dir)
    return (
        f"the cache may take {size_text(options.cache_size)}, and the disk of {options.cache_dir} has "
        f"{size_text(disk.total)}, of which {size_text(disk.free)} are free: {size_text(usable_bytes)} will be used "
        f"(the last {size_text(FREE_SPACE_FLOOR_BYTES)} stay free); see --cache-size and --cache-dir"
    )


def _disk_of(path: Path) -> Any:
    """Return the sizes of the disk that a directory lies on, or will."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path)
