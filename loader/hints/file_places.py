"""Finds the mounts of files by their paths: each directory is looked at once, whatever the number of its files.

Not here: how the mount of a directory is found (`mount_endpoint`).
"""

import os
import stat

from loader.base.mount_endpoint import MountEndpoint, find_endpoint
from loader.hints.plan_messages import path_on_mount

# Directories that are remembered: 600 bytes each, 60 MB. With more, all are looked at again: one lstat(2) each.
MOST_DIRECTORIES = 100_000
# Symbolic links from one file to the next, as in Linux.
_MOST_LINKS = 40


class FilePlaces:
    """Finds the mount of each file, and its path there; remembers that of each directory.

    A data set may have a million files. So a file costs a look into a dictionary, and a new directory one lstat(2).
    Outside all mounts, a directory's first file tells whether its files are symbolic links, and only then each is read.
    has_missing: whether a file was in no mount. A mount may come later: see `forget`.
    """

    def __init__(self) -> None:
        self.has_missing = False
        self._places: dict[str, tuple[MountEndpoint, str] | None] = {}
        # Directories in no mount whose files are symbolic links.
        self._linked: set[str] = set()
        # Of absolute directories: the real one, and its device.
        self._real: dict[str, tuple[str, int]] = {}
        # The known mounts, each with its device. A mount below another has another device.
        self._devices: dict[MountEndpoint, int] = {}

    def find(self, path: str) -> tuple[MountEndpoint, str] | None:
        """Return the mount of a file, and its path there; None if no plan can name it."""
        path = path.removeprefix("file://").removeprefix("file:")
        for _ in range(_MOST_LINKS):
            folder, name = os.path.split(path)
            if folder not in self._places:
                self._add(folder, path)
            place = self._places[folder]
            if place is not None:
                inner = path_on_mount(place[1] + name)
                return None if inner is None else (place[0], inner)
            if folder not in self._linked:
                break
            try:
                path = os.path.join(folder, os.readlink(path))
            except OSError:  # an ordinary file, or none
                break
        self.has_missing = True
        return None

    def forget(self) -> None:
        """Look at all directories again."""
        self.has_missing = False
        for memory in (self._places, self._linked, self._real):
            memory.clear()

    def _add(self, folder: str, file: str) -> None:
        """Look at a directory; file: one in it."""
        if len(self._places) >= MOST_DIRECTORIES:
            has_missing = self.has_missing
            self.forget()
            self.has_missing = has_missing
        place = self._places[folder] = self._look(os.path.abspath(folder))
        if place is None and os.path.islink(file):
            self._linked.add(folder)

    def _look(self, folder: str) -> tuple[MountEndpoint, str] | None:
        """Return the mount of a directory, and its path there with a slash at the end; None if it is on no mount."""
        real, device = self._resolve(folder)
        for endpoint, its_device in self._devices.items():
            root = os.fspath(endpoint.root)
            if device == its_device and real.startswith(root + "/"):
                return endpoint, real[len(root) + 1 :] + "/"
        place = find_endpoint(real)
        if place is not None:
            self._devices[place[0]] = device
        return place

    def _resolve(self, folder: str) -> tuple[str, int]:
        """Return a directory without symbolic links, and its device. One that is missing is on that of its parent."""
        if folder in self._real:
            return self._real[folder]
        above, name = os.path.split(folder)
        if not name:
            found = folder, os.lstat(folder).st_dev
        else:
            parent, device = self._resolve(above)
            real = os.path.join(parent, name)
            try:
                status = os.lstat(real)
                if stat.S_ISLNK(status.st_mode):
                    found = self._resolve(os.path.realpath(real, strict=True))
                else:
                    found = real, status.st_dev
            except OSError:  # it is missing, or a link that leads nowhere
                found = real, device
        self._real[folder] = found
        return found
