"""Reads parts of files into the kernel's page cache, in a process of its own (`kernel_pages.py` starts it).

A read of a mount waits for the mount's daemon, so the daemon must not read it: its thread could never end. This
process knows nothing, writes nothing, can be killed at any moment, and ends when the daemon does.

Each message is a JSON list: path, inode, offset, bytes. It answers each with a byte.
"""

import json
import os
import socket
from contextlib import suppress

_JOB_BYTES = 64 * 1024
# The kernel reads no more than its read-ahead window for one advice: 1 MiB on a mount (fs/kernel.py).
_ADVICE_BYTES = 2**20


def read(path: str, inode: int, start: int, nbytes: int, sink: int) -> None:
    """Read a part of a file, unless the name has come to mean another one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_ino != inode:
            return
        for offset in range(start, start + nbytes, _ADVICE_BYTES):
            os.posix_fadvise(descriptor, offset, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
        # Wait until it is there, so that no more is asked for than the kernel takes at a time. This copies nothing.
        while nbytes > 0 and (sent := os.sendfile(sink, descriptor, start, nbytes)):
            start, nbytes = start + sent, nbytes - sent
    finally:
        os.close(descriptor)


def main(jobs: int) -> None:
    """Read what the daemon asks for, until it closes its end of the socket."""
    sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    daemon = socket.socket(fileno=jobs)
    while message := daemon.recv(_JOB_BYTES):
        with suppress(OSError):  # a program that reads these bytes gets the error
            path, inode, start, nbytes = json.loads(message)
            read(path, inode, start, nbytes, sink)
        daemon.send(b"\n")
