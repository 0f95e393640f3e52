"""Reads parts of files into the kernel's page cache, in a process of its own (`kernel_pages.py` starts it).

A read of a mount waits for the mount's daemon, so the daemon must not read it: its thread could never end. This
process knows nothing, writes nothing, can be killed at any moment, and ends when the daemon does.

Each message is a JSON list: path, inode, and the parts, each as its start and stop. It answers each with a byte.
"""

import json
import os
import socket
from contextlib import suppress

_JOB_BYTES = 64 * 1024
# The kernel reads no more than its read-ahead window for one advice: 1 MiB on a mount (fs/kernel.py).
_ADVICE_BYTES = 2**20


def read(path: str, inode: int, parts: list[list[int]], sink: int) -> None:
    """Read parts of a file, unless the name has come to mean another one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_ino != inode:
            return
        _advise(descriptor, parts[:1])
        for number, (start, stop) in enumerate(parts, 1):
            _advise(descriptor, parts[number : number + 1])  # the daemon may have to load it from its disk
            with suppress(OSError):  # a program that reads these bytes gets the error
                # Wait until it is there: no more is asked for than the kernel takes at a time. This copies nothing.
                while start < stop and (sent := os.sendfile(sink, descriptor, start, stop - start)):
                    start += sent
    finally:
        os.close(descriptor)


def _advise(descriptor: int, parts: list[list[int]]) -> None:
    for start, stop in parts:
        for offset in range(start, stop, _ADVICE_BYTES):
            os.posix_fadvise(descriptor, offset, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)


def main(jobs: int) -> None:
    """Read what the daemon asks for, until it closes its end of the socket."""
    sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    daemon = socket.socket(fileno=jobs)
    while message := daemon.recv(_JOB_BYTES):
        with suppress(OSError):  # there is no such file any more
            path, inode, parts = json.loads(message)
            read(path, inode, parts, sink)
        daemon.send(b"\n")
