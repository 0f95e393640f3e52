"""Opens files of a mount where they lie in the cache of its daemon: reads then come neither to it nor to the mount.

The daemon gives a descriptor of a file that it has as a whole (`fusecache/fs/handed_files.py`). It keeps the file while
any process has that open. Elsewhere, and on a mount whose files the kernel reads by itself, there is nothing to gain,
and callers open the path.
"""

import contextlib
import os
import time
import weakref
from dataclasses import dataclass

from loader.base.mount_endpoint import MountEndpoint, find_endpoint

# After a request that failed: the daemon is being started again, or has too much to do.
_PAUSE_SECONDS = 10.0
# A request that took so long, for nothing, waited for a check of the file: let the daemon go on with that.
_SLOW_SECONDS = 0.1
_SLOW_PAUSE_SECONDS = 1.0
_MOST_FOLDERS = 1024
_HOLD = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class HeldMount:
    """Keeps a mount from being unmounted while it is referenced, as a file that is open through it does."""

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, endpoint: MountEndpoint) -> None:
        """Raises OSError."""
        self._fd = -1
        self._fd = os.open(endpoint.root, _HOLD)

    def __del__(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)


@dataclass(slots=True)
class _AskedMount:
    """A mount that gives files. held: while a file of it is in use; ask_after: monotonic time."""

    endpoint: MountEndpoint
    held: "weakref.ref[HeldMount] | None" = None
    ask_after: float = 0.0

    def hold(self) -> HeldMount:
        """Return what holds the mount. Raises OSError."""
        held = None if self.held is None else self.held()
        if held is None:
            held = HeldMount(self.endpoint)
            self.held = weakref.ref(held)
        return held


class CachedFiles:
    """Opens files for one reader. Safe for threads and for fork."""

    def __init__(self) -> None:
        # Mount -> what is known of it, None if it gives no files; directory -> its mount, and its path there.
        self._mounts: dict[MountEndpoint, _AskedMount | None] = {}
        self._folders: dict[str, tuple[MountEndpoint, str] | None] = {}

    def open(self, path: str, *, unless_open: bool = False) -> tuple[int, HeldMount] | None:
        """Return a descriptor for reading, which the caller closes, and what to keep as long; None if there is none.

        unless_open: none if any program has the file open through the mount.
        """
        folder, name = os.path.split(path)
        found = self._found(folder)
        mount = None if found is None else self._mounts.get(found[0])
        began = time.monotonic()
        if found is None or mount is None or began < mount.ask_after:
            return None
        try:
            held = mount.hold()
            fd = mount.endpoint.open_cached(found[1] + name, unless_open=unless_open)
        except PermissionError:
            self._mounts[found[0]] = None
        except OSError:
            mount.ask_after = time.monotonic() + _PAUSE_SECONDS
        else:
            if fd >= 0:
                return fd, held
            if (now := time.monotonic()) > began + _SLOW_SECONDS:
                mount.ask_after = now + _SLOW_PAUSE_SECONDS
        return None

    def _found(self, folder: str) -> tuple[MountEndpoint, str] | None:
        """Return a directory's mount and its path there, None if it lies on none."""
        with contextlib.suppress(KeyError):
            return self._folders[folder]
        found = find_endpoint(folder or ".")
        if found is not None and found[0] not in self._mounts:
            self._mounts[found[0]] = None if found[0].is_folder else _AskedMount(found[0])
        if len(self._folders) >= _MOST_FOLDERS:
            self._folders.clear()
        self._folders[folder] = found
        return found
