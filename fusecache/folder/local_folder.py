"""A local folder that belongs to a bucket: its checks, its lock, and its own files in `.fusecache/`.

    .fusecache/lock          held by the process that works on the folder, with its pid
    .fusecache/state.jsonl   what the folder has of the bucket (state.py)
    .fusecache/parts/        objects that a pull has begun to fetch (part_files.py)
    .fusecache/socket        of `pull --follow`: takes hints and requests of readers (follow.py)
    .fusecache/pull.log      of `pull --follow` in the background
    .fusecache/engine/       of push and watch: a cache directory (docs/on-disk.md)

Invariant: nothing is written outside the folder, whatever keys and symlinks say.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Self

from fusecache.folder.state import FolderState
from fusecache.model.errors import FolderError
from fusecache.model.names import CONTROL_NAME
from fusecache.mount.mount_table import root_of

STATE_NAME = "state.jsonl"
_LONGEST_LOCK_BYTES = 200


class LocalFolder:
    """A locked folder; a context manager. root: without symlinks; own: its `.fusecache`."""

    def __init__(self, path: Path, identity: str, command: str, *, create: bool) -> None:
        """command: that works on it, for the error of another process. create: make the folder if it is missing.

        Raises FolderError, StateError.
        """
        check_folder(path, create=create)
        self.root = Path(os.path.realpath(path))
        self.own = self.root / CONTROL_NAME
        self._known_folders: set[str] = set()
        try:
            if create:
                self.root.mkdir(parents=True, exist_ok=True)
            self.own.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(
                self.own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as exc:
            raise FolderError(f"{path} cannot be used: {exc.strerror}: {exc.filename}") from exc
        try:
            self._acquire(path, command)
            self.state = FolderState(self.own / STATE_NAME, identity)
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.state.close()
        os.close(self._lock)

    def _acquire(self, path: Path, command: str) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno != errno.EWOULDBLOCK:
                raise FolderError(f"{self.own}/lock cannot be locked: {exc.strerror}") from exc
            other = os.pread(self._lock, _LONGEST_LOCK_BYTES, 0).decode(errors="replace").split()
            words, pid = (other[0], other[1]) if len(other) == 2 else ("another command", "unknown")
            raise FolderError(
                f"{path} is in use by `fusecache {words}` (pid {pid}): wait until it has ended, or end it with "
                f"`kill {pid}`; it can be started again at any time"
            ) from exc
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{command} {os.getpid()}\n".encode(), 0)

    def path_of(self, name: str) -> str:
        """Return the path of a file of the folder."""
        return f"{self.root}/{name}"

    def stat(self, name: str) -> os.stat_result | None:
        """Return what is under a name, not following a symlink there; None: nothing."""
        try:
            return os.lstat(self.path_of(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def make_parent(self, name: str) -> None:
        """Make the directories above a name. Raises FolderError if they would lie outside, or a file is in the way."""
        parent = name.rpartition("/")[0]
        if parent in self._known_folders:
            return
        path = self.path_of(parent)
        # Of the part that exists: what does not exist yet cannot lead anywhere.
        real = os.path.realpath(path)
        if real != str(self.root) and not real.startswith(f"{self.root}/"):
            raise FolderError(f"{parent} is a symlink, or below one, that leads out of the folder, to {real}")
        try:
            os.makedirs(path, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as exc:
            raise FolderError(f"a file is in the way of the directory {parent}: rename or remove it") from exc
        self._known_folders.add(parent)


def check_folder(path: Path, *, create: bool) -> None:
    """Raise FolderError unless the path is, or can become, a folder that a bucket's objects may be in."""
    mount = root_of(path)
    if mount is not None:
        raise FolderError(
            f"{path} lies in the fusecache mount {mount}, whose files are in the bucket already; choose a folder "
            "outside of it"
        )
    if path.exists() and not path.is_dir():
        raise FolderError(f"{path} is a file: give a folder")
    if not create and not path.exists():
        raise FolderError(f"{path} does not exist: give an existing folder")
    if (path / CONTROL_NAME).is_symlink() or (path / CONTROL_NAME).is_file():
        raise FolderError(f"{path / CONTROL_NAME} is not a directory of fusecache: rename it")
    for parent in Path(os.path.realpath(path)).parents:
        if (parent / CONTROL_NAME / STATE_NAME).is_file():
            raise FolderError(
                f"{path} lies in {parent}, which belongs to a bucket as a whole; choose a folder outside"
            )
