"""Folders on the node's disk."""

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk, as its files' own syncs do not say. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
