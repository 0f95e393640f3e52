"""Reports the state of the service to systemd: sd_notify(3) over its datagram socket."""

import os
import socket

from fusecache.model.format_text import printable


def notify(**fields: str | int) -> bool:
    """Send fields such as READY=1 or STATUS="…" without waiting; return False if the service manager did not take them.

    Without NOTIFY_SOCKET, do nothing.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return True
    text = "\n".join(f"{name}={printable(str(value))}" for name, value in fields.items())
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            # Without MSG_DONTWAIT, a manager that hangs would stop the event loop, and so the mount.
            channel.sendto(text.encode(), socket.MSG_DONTWAIT, address)
        except OSError:
            return False  # the mount continues even if the service manager does not listen
    return True
