"""Reads parts of files into the kernel's page cache: a child process of the daemon, which runs this file by its path.

A read of a mount waits for the mount's daemon, so the daemon must not read it: its thread could never end. This
process knows nothing, writes nothing, can be killed at any moment, and ends when the daemon does.

Each line of its input is a JSON list: path, inode, offset, bytes. It answers each with an empty line.
"""

import json
import os
import sys

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


def main() -> None:
    """Read what the daemon asks for, until it closes the pipe."""
    sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for line in sys.stdin:
        path, inode, start, nbytes = json.loads(line)
        try:
            read(path, inode, start, nbytes, sink)
        except OSError as exc:  # a program that reads these bytes gets the error
            sys.stderr.write(f"{exc}\n")
        os.write(sys.stdout.fileno(), b"\n")


if __name__ == "__main__":
    main()
