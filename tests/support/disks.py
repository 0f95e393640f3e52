"""A disk of its own under a cache directory, that can lose its power, be full, read-only, or fail.

An image file as a loop device with ext4. At the cut the image is copied as it is: what the kernel had written back by
then is in it, and what was still in the page cache is not.
"""

import fcntl
import os
import subprocess
from contextlib import suppress
from pathlib import Path

# Sparse. A mount keeps room for twice what the kernel may hold of dirty pages.
IMAGE_BYTES = 16 << 30
# linux/ext4: EXT4_IOC_SHUTDOWN, without flushing its log.
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, b"\2\0\0\0"


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
        _run("mount", "-o", "loop,commit=600,errors=remount-ro", self._image, self.path)
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "--lazy", self.path)

    def fill(self) -> None:
        """Take all space that is free, and what is free after the next commit: another test may cause one any time."""
        with open(self.path / "filler", "ab") as file:
            for step in (1 << 30, 1 << 20, 1 << 12, 1 << 12):
                os.sync()  # what was removed is free only once that is committed
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, step)

    def empty(self) -> None:
        """Give back what `fill` took."""
        (self.path / "filler").unlink()

    def make_read_only(self) -> None:
        """Have each write fail with EROFS, as after an error that the file system has found."""
        (Path("/sys/fs/ext4") / self._device() / "trigger_fs_error").write_text("by a test")

    def written_bytes(self) -> int:
        """Return how many bytes the kernel has written to the device since it was attached."""
        statistics = (Path("/sys/block") / self._device() / "stat").read_text().split()
        return int(statistics[6]) * 512

    def _device(self) -> str:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return next(Path(line.split(" ")[0]).name for line in mounts if line.split(" ")[1] == str(self.path))

    def shut_down(self) -> None:
        """Have each call fail with EIO, for good."""
        folder = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(folder, _SHUTDOWN, _NO_LOG_FLUSH)
        os.close(folder)

    def break_device(self) -> None:
        """Lose what the device holds: reads of it fail, and what the kernel has in memory can be read."""
        os.truncate(self._image, 0)

    def cut(self, image: Path, mountpoint: Path) -> "Disk":
        """Return the disk as it would be found if the power failed now; this one goes on."""
        _run("cp", "--sparse=always", self._image, image)
        return Disk(image, mountpoint)


def has_disks() -> bool:
    """Return whether disks can be made here."""
    return os.geteuid() == 0 and Path("/dev/loop-control").exists()


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, capture_output=True)
