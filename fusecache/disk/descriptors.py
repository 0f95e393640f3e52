"""The descriptors of staging files: bounded, the least recently used idle ones are closed.

Any number of files may be open for writing, or wait for their upload. A file without a descriptor is opened again when
it is used.
"""

import errno
import resource
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Protocol

# Of the limit of open files, the share that staging files may use, and the most that helps.
_SHARE = 4
_DESCRIPTORS_MAX = 1024
_LIMIT_WANTED = 1 << 20
NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}


class Closable(Protocol):
    """A file with a descriptor."""

    def close_if_idle(self) -> bool:
        """Close the descriptor if no call uses it; return whether it is closed. Never waits."""
        ...


class DescriptorPool:
    """The files that have a descriptor, in the order of their last use. Thread-safe."""

    def __init__(self, limit: int | None = None) -> None:
        """limit: of descriptors. More are open only while calls use all of them."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = min(_DESCRIPTORS_MAX, max(8, soft // _SHARE)) if limit is None else limit
        self._lock = threading.Lock()
        self._files: OrderedDict[Closable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def add(self, file: Closable) -> None:
        """Record that a file has a descriptor now, and close others above the limit."""
        with self._lock:
            self._files[file] = None
        if len(self._files) > self.limit:
            self.close_idle(len(self._files) - self.limit)

    def use(self, file: Closable) -> None:
        """Record that a file is used."""
        with self._lock, suppress(KeyError):
            self._files.move_to_end(file)

    def discard(self, file: Closable) -> None:
        """Record that a file has no descriptor any more."""
        with self._lock:
            self._files.pop(file, None)

    def close_idle(self, count: int) -> None:
        """Close up to `count` descriptors that no call uses, least recently used first."""
        with self._lock:
            files = list(self._files)
        for file in files:
            if count <= 0:
                return
            count -= file.close_if_idle()

    def close_all(self) -> None:
        """Close all descriptors that no call uses."""
        self.close_idle(len(self._files))


def raise_limit() -> int:
    """Raise this process's limit of open files as far as it may; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _LIMIT_WANTED if hard == resource.RLIM_INFINITY else min(hard, _LIMIT_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the system's own maximum may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
