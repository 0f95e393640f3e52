"""Folders on the node's disk."""

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names in it are on disk; syncing a file does not do that. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
