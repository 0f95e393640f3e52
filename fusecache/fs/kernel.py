"""Kernel settings of a live mount, written through sysfs: larger read-ahead, more requests in flight.

Read-ahead needs root. The other settings may be written by the user who mounted, up to max_user_bgreq of the fuse
module. They need the FUSE control file system (seen on 6.18), which only root can mount. libfuse has no mount option
for any of them. Refused settings are returned, not raised: the mount works without them, only slower.

Has the kernel drop what it caches and this node knows to be stale: names, and pages of evicted files.
"""

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import Node
from fusecache.fs.kept_files import KeptFiles
from fusecache.fuse.library import FuseSession
from fusecache.model.objects import MIB


class KernelCaches(Events):
    """The kernel's caches of one mount."""

    def __init__(self, kept: KeptFiles) -> None:
        self._kept = kept
        self._session: FuseSession | None = None

    def on_node_moved(self, node: Node) -> None:
        """Keep what a successor must know of an open file or a directory."""
        self._kept.on_moved(node)

    def on_content_changed(self, node: Node) -> None:
        """Keep what a successor must know of an open file."""
        self._kept.on_changed(node)

    def on_node_dropped(self, node: Node) -> None:
        """A successor need not know of it."""
        self._kept.on_forgotten([node.number])

    def attach(self, session: FuseSession) -> None:
        """Begin with a mount. Until then the kernel caches nothing."""
        self._session = session

    def on_name_lost(self, parent: Node, name: str) -> None:
        """Have the kernel forget a name. Returns at once."""
        if self._session is not None:
            self._session.invalidate_entry(parent.number, os.fsencode(name))

    async def on_evicted(self, inodes: list[int]) -> None:
        """Have the kernel drop its cached pages of clean files."""
        session = self._session
        if session is None:
            return

        def drop() -> None:
            for inode in inodes:
                with suppress(OSError):  # ENOENT: the kernel has already forgotten the inode
                    session.invalidate_inode(inode)

        # In a thread: the kernel may wait for a read of such a page, which the loop must answer.
        await trio.to_thread.run_sync(drop)


# The kernel's default is 128 KiB: eight times as many requests as with 1 MiB, at a third of the speed.
READ_AHEAD_KIB = 1024
# The kernel's default is 12: twelve waiting readers would block all others.
_BACKGROUND_MAX = 256
_BACKGROUND_MIN = 12
# What the kernel writes back may wait for space. Then so many bytes are left for writes that it does not bound.
_DIRECT_WRITE_BYTES = 16 * MIB


CONNECTIONS = Path("/sys/fs/fuse/connections")


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """Settings that were applied, those refused with the reason, and how root can apply them."""

    applied: tuple[str, ...]
    refused: tuple[str, ...]
    remedy: str = ""


def background_requests(request_bytes: int) -> int:
    """Return how many reads ahead and writes back the kernel may have in flight. request_bytes: what may wait."""
    return max(_BACKGROUND_MIN, min(_BACKGROUND_MAX, (request_bytes - _DIRECT_WRITE_BYTES) // MIB))


def tune(mountpoint: str, request_bytes: int) -> KernelSettings:
    """Apply the settings to a live mount. Blocking; the mount must be answering requests.

    request_bytes: that requests may hold which wait. If what the kernel writes back could hold all of them, a cache
    without space would stop every call on the mount.
    """
    background = background_requests(request_bytes)
    device = os.stat(mountpoint).st_dev
    major, minor = os.major(device), os.minor(device)
    connection = CONNECTIONS / str(minor)
    if not connection.exists():
        _mount_control_files()
    wanted = (
        (Path(f"/sys/class/bdi/{major}:{minor}/read_ahead_kb"), READ_AHEAD_KIB),
        (connection / "max_background", background),
        (connection / "congestion_threshold", background * 3 // 4),
    )
    applied, refused, commands = [], [], []
    for path, value in wanted:
        try:
            path.write_text(f"{value}\n")
            applied.append(f"{path.name}={value}")
        except OSError as exc:
            refused.append(f"{path.name}={value} ({exc.strerror})")
            commands.append(f"echo {value} > {path}")
    return KernelSettings(tuple(applied), tuple(refused), _remedy(commands))


def _remedy(commands: list[str]) -> str:
    """Return how to apply the refused settings, "" if none was refused."""
    if not commands:
        return ""
    if os.geteuid() == 0:
        return "the container's /sys is read-only: run it privileged, or on the host: " + "; ".join(commands)
    return "mount as root (as the systemd unit does, with --allow-other), or as root: " + "; ".join(commands)


def _mount_control_files() -> None:
    """Mount the FUSE control file system. Most distributions do so at boot."""
    if os.geteuid() == 0:
        command = ["mount", "-t", "fusectl", "fusectl", str(CONNECTIONS)]
        # Refused in containers; the caller reports it.
        subprocess.run(command, check=False, capture_output=True)
