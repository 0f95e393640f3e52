"""Kernel settings of a live mount, written through sysfs: larger read-ahead, more requests in flight.

Read-ahead needs root. The other settings may be written by the user who mounted, up to max_user_bgreq of the fuse
module. They need the FUSE control file system (seen on 6.18), which only root can mount. libfuse has no mount option
for any of them. Refused settings are returned, not raised: the mount works without them, only slower.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

# The kernel's default is 128 KiB: eight times as many requests as with 1 MiB, at a third of the speed.
READ_AHEAD_KIB = 1024
# The kernel's default is 12: twelve waiting readers would block all others.
MAX_BACKGROUND = 256
CONGESTION_THRESHOLD = 192


CONNECTIONS = Path("/sys/fs/fuse/connections")


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """Settings that were applied, those refused with the reason, and how root can apply them."""

    applied: tuple[str, ...]
    refused: tuple[str, ...]
    remedy: str = ""


def tune(mountpoint: str) -> KernelSettings:
    """Apply the settings to a live mount. Blocking; the mount must be answering requests."""
    device = os.stat(mountpoint).st_dev
    major, minor = os.major(device), os.minor(device)
    connection = CONNECTIONS / str(minor)
    if not connection.exists():
        _mount_control_files()
    wanted = (
        (Path(f"/sys/class/bdi/{major}:{minor}/read_ahead_kb"), READ_AHEAD_KIB),
        (connection / "max_background", MAX_BACKGROUND),
        (connection / "congestion_threshold", CONGESTION_THRESHOLD),
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
