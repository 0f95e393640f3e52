"""Asks a mount's keeper why no daemon serves the mount. The keeper answers until one does (`keeper.py`)."""

import os
import socket
import struct

from fusecache.model.errors import MountError

# As `keeper.ADDRESS`, which commands need not import.
ADDRESS = "\0fusecache-keeper-"
_ANSWER_SECONDS = 2.0
_ANSWER_BYTES = 16384


class DaemonAway(MountError):
    """No daemon serves the mount, and a keeper tries to start one. keeper: its process."""

    def __init__(self, message: str, keeper: int) -> None:
        super().__init__(message)
        self.keeper = keeper


def check_served(root: str, device: str, owner: int | None) -> None:
    """Raise DaemonAway if a keeper says that no daemon serves the mount. Never waits for the mount.

    device: of the mount, major:minor. owner: the user of its daemon; None if unknown.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(ADDRESS + device.partition(":")[2])
            process, user, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            answer = connection.recv(_ANSWER_BYTES)
        except OSError:  # a daemon serves, or the mount has no keeper, or it is in another network namespace
            return
    if answer and user in {0, os.geteuid() if owner is None else owner}:
        raise DaemonAway(f"{root}: {answer.decode(errors='replace')}", process)
