"""A local folder that belongs to a bucket: its checks, its lock, and its own files in `.fusecache/`.

    .fusecache/lock          held by the process that works on the folder, with its pid
    .fusecache/state.jsonl   what the folder has of the bucket (state.py)
    .fusecache/parts/        objects that a pull has begun to fetch (part_files.py)
    .fusecache/socket        of `pull --follow`: takes hints and requests of readers (follow.py)
    .fusecache/pull.log      of `pull --follow` in the background
    .fusecache/engine/       of push and watch: a cache directory (docs/on-disk.md)

Invariant: whatever keys and symlinks say, nothing outside the folder is read or written, and no object becomes a file
in `.fusecache/`.

What a folder holds now, and which of its files are closed.

A file counts as closed if no process has it open for writing. The kernel says so when it grants a read lease (fcntl(2),
F_SETLEASE); that also covers mappings, and needs no event, so nothing is missed while no process watches. Where there
are no leases (network file systems), a file counts as closed when it has not changed for QUIET_SECONDS.
"""

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fusecache.disk.beneath import open_folder
from fusecache.folder.state import FolderState, Stamp
from fusecache.model.errors import FolderError, NameTooLong
from fusecache.model.names import CONTROL_NAME, check_key, unusable_name
from fusecache.mount.mount_table import our_mountpoints, root_of

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
            self._own_status = os.lstat(self.own)
            for found in self.own.iterdir():
                if found.is_symlink():
                    raise FolderError(f"{found} is a symlink: remove it")
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

    @contextmanager
    def directory_of(self, name: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Hold the directory of a name open: yield its descriptor, and the name in it. create: make what is missing.

        Raises FolderError for a symlink or a file in the way; OSError.
        """
        above, _, last = name.rpartition("/")
        try:
            held = open_folder(str(self.root), above, create=create, barred=self._own_status)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENOTDIR, errno.EPERM):
                raise FolderError(f"{exc.filename}: {exc.strerror}") from exc
            raise
        try:
            yield held, last
        finally:
            os.close(held)

    def stat(self, name: str) -> os.stat_result | None:
        """Return what is under a name, following no symlink; None: nothing."""
        try:
            with self.directory_of(name) as (held, last):
                return os.stat(last, dir_fd=held, follow_symlinks=False)
        except (FileNotFoundError, FolderError):
            return None

    def open(self, name: str) -> int:
        """Open a file for reading, following no symlink; return its descriptor. Raises FolderError, OSError."""
        with self.directory_of(name) as (held, last):
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            return os.open(last, flags, dir_fd=held)

    def make_parent(self, name: str) -> None:
        """Make the directories above a name. Raises FolderError if a symlink or a file is in the way."""
        parent = name.rpartition("/")[0]
        if parent not in self._known_folders:
            with self.directory_of(name, create=True):
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


QUIET_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file or symlink. changed_ns: time of its last change, of its name too. target: of a symlink, else ""."""

    name: str
    stamp: Stamp
    changed_ns: int
    mode: int
    target: str = ""


@dataclass(slots=True)
class FolderScan:
    """What one pass over a folder found, by name. unusable: why a name cannot be published.

    begun_ns: what was closed before this time is in it.
    """

    begun_ns: int = field(default_factory=time.time_ns)
    files: dict[str, LocalFile] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)


def scan(folder: LocalFolder, prefix: str) -> FolderScan:
    """List the folder (blocking). prefix: of the keys."""
    found, mounts = FolderScan(), frozenset(our_mountpoints())
    for name, held, entry in _walk(folder, "", found, mounts):
        reason = next(filter(None, map(unusable_name, name.split("/"))), None)
        try:
            if reason is None:
                check_key(prefix + name)
            status = entry.stat(follow_symlinks=False)
            target = os.readlink(entry.name, dir_fd=held) if stat.S_ISLNK(status.st_mode) else ""
        except FileNotFoundError:
            continue
        except NameTooLong as exc:
            reason = str(exc)
        if reason is None and not (stat.S_ISREG(status.st_mode) or target):
            reason = "not a file"
        if reason is not None:
            found.unusable[name] = reason
            continue
        found.files[name] = LocalFile(
            name, Stamp.of(status), status.st_ctime_ns, stat.S_IMODE(status.st_mode), target
        )
    return found


def _walk(
    folder: LocalFolder, below: str, found: FolderScan, mounts: frozenset[str]
) -> Iterator[tuple[str, int, os.DirEntry[str]]]:
    """Yield what is below a directory: its name, a descriptor of its directory, and its entry there."""
    try:
        held = folder.open(f"{below}.")
    except FileNotFoundError:
        return
    except (OSError, FolderError) as exc:
        found.unusable[below] = f"the directory cannot be listed: {getattr(exc, 'strerror', exc)}"
        return
    try:
        with os.scandir(held) as listed:
            entries = list(listed)
        for entry in entries:
            name = below + entry.name
            if name == CONTROL_NAME:
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield name, held, entry
            elif f"{folder.root}/{name}" in mounts:
                found.unusable[name] = "a fusecache mount: its files are in their bucket already"
            else:
                yield from _walk(folder, f"{name}/", found, mounts)
    finally:
        os.close(held)


def is_closed(descriptor: int) -> bool:
    """Return whether no process has an open file open for writing. descriptor: opened for reading only."""
    try:
        # A writer that opens the file in this moment makes the kernel send a signal.
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as exc:
        if exc.errno == errno.EAGAIN:
            return False
        return time.time_ns() - os.fstat(descriptor).st_ctime_ns > QUIET_SECONDS * 1e9
    return True
