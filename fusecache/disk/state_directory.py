"""The cache directory as a whole: which bucket it belongs to, and a lock so that one daemon uses it.

Layout in docs/on-disk.md. `fusecache.json` records the bucket and the format version; `lock` is held by flock. The
path is held as well, as an abstract socket: a directory may be emptied, or removed and made again, while it is used.
"""

import errno
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from fusecache.disk.native import replace_synced
from fusecache.model.errors import LocalDiskError, StateError
from fusecache.model.format_text import count_text, size_text
from fusecache.model.mount_rows import mount_rows

FORMAT_VERSION = 1
# What lies in a cache directory (docs/on-disk.md).
_FOLDERS = frozenset({"journal", "staging", "orphans", "suspect", "cache", "names"})
_OWN_NAMES = _FOLDERS | {"fusecache.json", "fusecache.new", "fusecache.log", "lock", "empty", "lost+found"}
_MOUNT_TABLE = Path("/proc/self/mountinfo")
# Whose word counts that a directory is in use.
_TRUSTED = frozenset({0, os.geteuid()})
_LONGEST_LOCK_BYTES = 8192  # a pid, and a path of at most 4096 bytes


class StateDirectory:
    """A locked cache directory; a context manager."""

    def __init__(self, directory: Path, identity: str | None, *, mountpoint: Path | None = None) -> None:
        """Create or open the directory. Raises StateError if it is in use or another bucket's; LocalDiskError.

        identity: endpoint, bucket and prefix; "" if the bucket has not answered yet. None: only inspect an existing
        directory, of any bucket.
        mountpoint: where it is going to be mounted; named in the error of other processes that find it in use.
        """
        self.directory = directory
        self.identity = ""
        if identity is None and not (directory / "fusecache.json").exists():
            raise StateError(
                f"{directory} is not a cache directory: it has no fusecache.json; check the path"
            )
        try:
            # Readable by the owner only: it holds object names and written data.
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_own_mounts(directory)
            if identity is not None:
                _make_private(directory)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise LocalDiskError(
                f"the cache directory {directory} cannot be used: {exc.strerror}; choose another with --cache-dir"
            ) from exc
        self._name: socket.socket | None = None
        try:
            self._acquire(mountpoint, only_looks=identity is None)
            self._check_identity(identity)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._lock)
        if self._name is not None:
            self._name.close()

    def _acquire(self, mountpoint: Path | None, *, only_looks: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno != errno.EWOULDBLOCK:
                raise LocalDiskError(f"{self.directory}/lock cannot be locked: {exc.strerror}") from exc
            raise StateError(self._in_use_text(only_looks=only_looks)) from exc
        self._hold_name()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode() + os.fsencode(mountpoint or ""), 0)

    def _hold_name(self) -> None:
        """Raise StateError if a daemon whose `lock` is gone uses the path."""
        path = os.fsencode(self.directory.resolve())
        address = b"\0fusecache-cache-" + hashlib.sha256(path).hexdigest().encode()
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(address)
            name.listen()
        except OSError:
            name.close()
            holder = _holder(address)
            if holder is not None:
                raise StateError(
                    f"the cache directory {self.directory} was emptied or removed while a daemon (pid {holder}) uses "
                    "it; unmount that one, or choose another with --cache-dir"
                ) from None
        else:
            self._name = name

    def _in_use_text(self, *, only_looks: bool) -> str:
        number, _, place = os.fsdecode(os.pread(self._lock, _LONGEST_LOCK_BYTES, 0)).partition("\n")
        number = number or "unknown"
        if not only_looks:
            where = f", mounted at {place}" if place else ""
            return (
                f"the cache directory {self.directory} is in use by another daemon (pid {number}{where}); "
                "unmount that one, or choose another with --cache-dir"
            )
        if place:
            return (
                f"the cache directory {self.directory} is in use, mounted at {place} (pid {number}): ask the mount, "
                f"with `fusecache recover {shlex.quote(place)}`"
            )
        return (
            f"the cache directory {self.directory} is in use (pid {number}): if it is mounted, ask the mount, with "
            "`fusecache recover MOUNTPOINT`; else wait for that process"
        )

    def add(self, identity: str) -> None:
        """Record whose the directory is: the bucket has answered. Raises LocalDiskError, StateError."""
        if identity != self.identity:
            self._check_identity(identity)

    def record_conditions(self, identity: str, found: str) -> None:
        """Record what a bucket's store does with the conditions of writes; "": forget it. Raises LocalDiskError."""
        path = self.directory / "fusecache.json"
        known = recorded_conditions(self.directory)
        if known.pop(identity, "") != found:
            row = json.loads(path.read_text())
            self._record(path, {**row, "conditions": {**known, **({identity: found} if found else {})}})

    def _record(self, path: Path, row: dict[str, object]) -> None:
        try:
            row.setdefault("free_bytes", shutil.disk_usage(self.directory).free)
            self.identity = str(row["identity"] or "")
            # Synced, else a power cut may leave an empty file, and no daemon could start here again.
            replace_synced(path, (json.dumps(row), "\n"))
        except OSError as exc:
            raise LocalDiskError(
                f"the cache directory {self.directory} cannot be written: {exc.strerror}; "
                f"free space there, or choose another with --cache-dir"
            ) from exc

    def _check_identity(self, identity: str | None) -> None:
        path = self.directory / "fusecache.json"
        try:
            row = json.loads(path.read_text())
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
        except FileNotFoundError:
            self._record(path, {"format": FORMAT_VERSION, "identity": identity})
            return
        except (OSError, ValueError) as exc:
            raise StateError(
                f"{path} cannot be read ({exc}); nothing was changed. Choose another --cache-dir and keep this one: "
                f"it may hold files that the bucket does not have"
            ) from exc
        if row.get("format") != FORMAT_VERSION:
            raise StateError(
                f"{self.directory} has format {row.get('format')}, but this fusecache supports {FORMAT_VERSION}; "
                f"mount with the version that created it, or choose another --cache-dir"
            )
        self.identity = str(row.get("identity", ""))
        if identity and not self.identity:
            self._record(path, {**row, "identity": identity})
        elif identity is not None and self.identity != identity:
            other = f"not to {_one_line(identity)}" if identity else "not to the source of this mount"
            raise StateError(
                f"the cache directory {self.directory} belongs to {_one_line(self.identity)}, {other}; "
                f"choose another with --cache-dir{_pending_text(self.directory)}"
            )


def _holder(address: bytes) -> int | None:
    """Return the process that listens at an abstract socket; None if it is another user's: any user can take a name."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(address)
        except OSError:
            return None  # it has ended
        pid, user, _ = struct.unpack(
            "3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
    return pid if user in _TRUSTED else None


def _one_line(identity: str) -> str:
    return identity.replace("\n", ", ")


def recorded_identity(directory: Path) -> str:
    """Return the identity of a cache directory, written once its bucket answered; "" if there is none."""
    return str(_recorded(directory).get("identity", ""))


def recorded_conditions(directory: Path) -> dict[str, str]:
    """Return what a cache directory's store does with the conditions of writes, by identity."""
    found = _recorded(directory).get("conditions")
    return dict(found) if isinstance(found, dict) else {}


def _recorded(directory: Path) -> dict[str, object]:
    try:
        row = json.loads((directory / "fusecache.json").read_text())
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def _pending_text(directory: Path) -> str:
    """Return what to do about files in the directory that may not be in the bucket yet, or ""."""
    staging = directory / "staging"
    sizes = [path.stat().st_size for path in staging.iterdir()] if staging.is_dir() else []
    if not sizes:
        return ""
    return (
        f". It holds {count_text(len(sizes), 'file')}, {size_text(sum(sizes))}, not in the bucket yet: "
        f"mount that bucket with it again to upload them"
    )


def _make_private(directory: Path) -> None:
    """Take away other users' access to the daemon's files there, also if another program made the directory.

    A directory that holds anything else too, such as a disk's root, keeps its mode; only the daemon's folders change.
    """
    names = set(os.listdir(directory))
    private = [directory / name for name in names & _FOLDERS]
    if names <= _OWN_NAMES:
        private.append(directory)
    for path in private:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & 0o077:
            # Of another user: what this daemon makes in it is private by its umask.
            with suppress(PermissionError):
                path.chmod(0o700)


def _refuse_own_mounts(directory: Path) -> None:
    """Raise StateError if the directory lies in a fusecache mount: the cache would fill its own bucket."""
    mounts = {row.point: row.kind for row in mount_rows(_MOUNT_TABLE.read_bytes())}
    for folder in (directory.resolve(), *directory.resolve().parents):
        if str(folder) in mounts:
            if mounts[str(folder)] == "fuse.fusecache":
                raise StateError(
                    f"the cache directory {directory} lies in a fusecache mount; choose a local disk"
                )
            return
