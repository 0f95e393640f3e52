"""Settings of the kernel's side of the mount, written through sysfs: large read-ahead, many requests in flight.

The read-ahead needs root. The others may be set by whoever mounted, up to max_user_bgreq of the fuse module, where the
FUSE control file system is mounted (seen on 6.18); only root can mount that. libfuse lets the daemon ask for none of
them at the mount. What was refused is returned, not raised: a mount works without, only slower.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

# 128 KiB by default: eight times the requests of 1 MiB, at a third of the speed.
READ_AHEAD_KIB = 1024
# 12 by default: twelve waiting readers would hold up everybody else.
MAX_BACKGROUND = 256
CONGESTION_THRESHOLD = 192


CONNECTIONS = Path("/sys/fs/fuse/connections")


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """What was written, what was refused with the reason, and what root could do about that."""

    applied: tuple[str, ...]
    refused: tuple[str, ...]
    remedy: str = ""


def tune(mountpoint: str) -> KernelSettings:
    """Apply the settings to a live mount. Blocking; the mount must be answering."""
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
    """Return how to get what was refused."""
    if not commands:
        return ""
    if os.geteuid() == 0:
        return "the container's /sys is read-only: run it privileged, or on the host: " + "; ".join(commands)
    return "mount as root (as the systemd unit does, with --allow-other), or as root: " + "; ".join(commands)


def _mount_control_files() -> None:
    """Mount the file system in which FUSE connections are set up; most distributions do so at boot."""
    if os.geteuid() == 0:
        command = ["mount", "-t", "fusectl", "fusectl", str(CONNECTIONS)]
        subprocess.run(
            command, check=False, capture_output=True
        )  # refused in containers: reported by the caller
