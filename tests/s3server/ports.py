"""A port that stays its owner's while nothing listens on it."""

import socket


def reserve(port: int = 0) -> socket.socket:
    """Bind a port of loopback [any free one], and do not listen: connections are refused.

    The kernel gives it to nobody who asks for any port, as servers of other tests and every connection do. Who names
    it, and allows reuse, may listen there. OSError if somebody listens already.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
    except BaseException:
        held.close()
        raise
    return held
