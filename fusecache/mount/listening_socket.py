"""Makes a unix socket that listens from the moment it can be seen.

bind(2) makes the file, but the socket refuses connections until listen(2). So it is bound under another name and then
renamed: a program that waits for the file may connect at once, and only the socket of a killed process refuses.
"""

import os
import socket
from pathlib import Path

_BACKLOG = 128


def listen_at(path: Path, *, mode: int) -> socket.socket:
    """Return a socket that listens at a path of any length, in place of one that is there. Raises OSError.

    mode: who may connect. No two processes may do this for one path at a time.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_name(f"{path.name}.new")
    folder = -1
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        new.unlink(missing_ok=True)
        listener.bind(f"/proc/self/fd/{folder}/{new.name}")  # an address has 108 bytes at most
        new.chmod(mode)
        listener.listen(_BACKLOG)
        new.rename(path)
    except BaseException:
        listener.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return listener
