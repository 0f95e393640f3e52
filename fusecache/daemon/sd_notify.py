"""Reports the state of the service to systemd: sd_notify(3) over its datagram socket."""

import os
import socket


def notify(**fields: str | int) -> None:
    """Send fields such as READY=1 or STATUS="…". Without NOTIFY_SOCKET, do nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    text = "\n".join(f"{name}={str(value).replace(chr(10), ' ')}" for name, value in fields.items())
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto(text.encode(), address)
        except OSError:
            return  # the mount continues even if the service manager does not listen
