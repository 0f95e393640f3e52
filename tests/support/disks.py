"""A disk of its own under a cache directory, that can lose its power.

An image file as a loop device with ext4. At the cut the image is copied as it is: what the kernel had written back by
then is in it, and what was still in the page cache is not.
"""

import os
import subprocess
from pathlib import Path

# Sparse. A mount keeps room for twice what the kernel may hold of dirty pages.
IMAGE_BYTES = 16 << 30


class Disk:
    """A mounted ext4. Needs root and a free loop device. Use as a context manager."""

    def __init__(self, image: Path, mountpoint: Path) -> None:
        self._image = image
        self.path = mountpoint

    @classmethod
    def new(cls, image: Path, mountpoint: Path) -> "Disk":
        """Make an empty disk."""
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-N", "4096", image)
        return cls(image, mountpoint)

    def __enter__(self) -> "Disk":
        self.path.mkdir(parents=True, exist_ok=True)
        # No commit of the file system's own journal by the clock: only what is synced is sure to be there.
        _run("mount", "-o", "loop,commit=600", self._image, self.path)
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "--lazy", self.path)

    def cut(self, image: Path, mountpoint: Path) -> "Disk":
        """Return the disk as it would be found if the power failed now; this one goes on."""
        _run("cp", "--sparse=always", self._image, image)
        return Disk(image, mountpoint)


def has_disks() -> bool:
    """Return whether disks can be made here."""
    return os.geteuid() == 0 and Path("/dev/loop-control").exists()


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, capture_output=True)
