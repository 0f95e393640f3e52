"""What a folder holds now, and which of its files are closed.

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
from dataclasses import dataclass, field

from fusecache.folder.local_folder import LocalFolder
from fusecache.folder.state import Stamp
from fusecache.model.errors import FolderError, NameTooLong
from fusecache.model.names import CONTROL_NAME, check_key, unusable_name
from fusecache.mount.mount_table import our_mountpoints

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
