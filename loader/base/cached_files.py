"""Opens files of a mount where they lie in the cache of its daemon: reads then come neither to it nor to the mount.

The daemon gives a descriptor of a file that it has as a whole (`fusecache/fs/passthrough.py`). It keeps the file while
any process has that open. Elsewhere, and on a mount whose files the kernel reads by itself, there is nothing to gain,
and callers open the path.
"""

import contextlib
import os
import time
import weakref
from dataclasses import dataclass

from loader.base.mount_endpoint import MountEndpoint, find_endpoint
from loader.base.paths import HOLD_FLAGS

# After a request that failed: the daemon is being started again, or has too much to do.
_PAUSE_SECONDS = 10.0
# A request that took so long, for nothing, waited for a check of the file: let the daemon go on with that.
_SLOW_SECONDS = 0.1
_SLOW_PAUSE_SECONDS = 1.0
# The daemon gives no smaller files: a request costs more than their reads.
_LEAST_BYTES = 1 << 20
_MOST_FOLDERS = 1024


class HeldMount:
    """Keeps a mount from being unmounted while it is referenced, as a file that is open through it does."""

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, endpoint: MountEndpoint) -> None:
        """Raises OSError."""
        self._fd = -1
        self._fd = os.open(endpoint.root, HOLD_FLAGS)

    def __del__(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)


@dataclass(slots=True)
class _AskedMount:
    """A mount that gives files. held: while a file of it is in use; ask_after: monotonic time."""

    endpoint: MountEndpoint
    device: int
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
        # Mount -> what is known of it, None if it gives no files; directory -> its mount, None if it lies on none.
        self._mounts: dict[MountEndpoint, _AskedMount | None] = {}
        self._folders: dict[str, MountEndpoint | None] = {}

    def open(self, path: str, *, unless_open: bool = False) -> tuple[int, HeldMount] | None:
        """Return a descriptor for reading, which the caller closes, and what to keep as long; None if there is none.

        unless_open: none if any program has the file open through the mount.
        """
        try:
            mount = self._mount_of(os.path.dirname(path))
            began = time.monotonic()
            if mount is None or began < mount.ask_after:
                return None
            held = mount.hold()
            file = os.stat(path)
        except OSError:  # opening the path says what is wrong
            return None
        if file.st_dev != mount.device:  # mounted again, or a link leads elsewhere
            self._mounts.pop(mount.endpoint, None)
            self._folders.clear()
            return None
        if file.st_size < _LEAST_BYTES:
            return None
        try:
            fd = mount.endpoint.open_cached(file, unless_open=unless_open)
        except PermissionError:
            self._mounts[mount.endpoint] = None
        except OSError:
            mount.ask_after = time.monotonic() + _PAUSE_SECONDS
        else:
            if fd >= 0:
                return fd, held
            if (now := time.monotonic()) > began + _SLOW_SECONDS:
                mount.ask_after = now + _SLOW_PAUSE_SECONDS
        return None

    def _mount_of(self, folder: str) -> _AskedMount | None:
        """Return the mount that a directory lies on, None if it lies on none that gives files. Raises OSError."""
        if folder not in self._folders:
            found = find_endpoint(folder or ".")
            endpoint = None if found is None or found[0].is_folder else found[0]
            if endpoint is not None and endpoint not in self._mounts:
                self._mounts[endpoint] = _AskedMount(endpoint, os.stat(endpoint.root).st_dev)
            if len(self._folders) >= _MOST_FOLDERS:
                self._folders.clear()
            self._folders[folder] = endpoint
        endpoint = self._folders.get(folder)
        return None if endpoint is None else self._mounts.get(endpoint)
