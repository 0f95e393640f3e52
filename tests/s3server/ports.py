"""A port that stays its owner's while nothing listens on it."""

import socket


def reserve(port: int = 0) -> socket.socket:
    """Bind a port of loopback [any free one], and do not listen: connections are refused.

    The kernel does not give this port to a socket that asks for any free port. A socket that names the port and sets
    SO_REUSEADDR can listen on it. Raises OSError if another socket listens there.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
    except BaseException:
        held.close()
        raise
    return held
