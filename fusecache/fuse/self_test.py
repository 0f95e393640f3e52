"""A self-test of a fresh mount: one statfs(2) goes through the kernel to this process, and its answer back.

It finds out where /dev/fuse is there and FUSE_INIT was agreed on, but requests or replies do not get through: sandboxes
that imitate a kernel, or security modules.
"""

import os
import select
import threading
import time

from fusecache.fuse.device import Device, RequestBuffer
from fusecache.fuse.protocol import IN_HEADER, Opcode
from fusecache.fuse.requests import packed_statfs
from fusecache.fuse.values import MountRefused, StatvfsData

_SECONDS = 20.0
_LOOK_SECONDS = 0.05
# Numbers that no other file system would show.
_SHOWN = StatvfsData(f_bsize=4096, f_frsize=4096, f_blocks=0x46555345, f_bfree=7, f_bavail=5, f_namemax=255)


def pass_self_test(device: Device, mountpoint: str, buffer_bytes: int) -> list[tuple[RequestBuffer, int]]:
    """Ask for the mount's space in a thread, and answer it here. Blocks, for milliseconds.

    Returns the requests of other processes, and their sizes: they still need an answer. Raises
    MountRefused; then the descriptor must be closed, so that the thread ends. Raises OSError.
    """
    found: list[str] = []

    def ask() -> None:
        try:
            shown = os.statvfs(mountpoint)
        except OSError as exc:
            found.append(exc.strerror or str(exc))
        else:
            is_right = (shown.f_blocks, shown.f_bfree, shown.f_bavail) == (
                _SHOWN.f_blocks, _SHOWN.f_bfree, _SHOWN.f_bavail
            )  # fmt: skip
            found.append("" if is_right else "the kernel showed other numbers than were sent")

    thread = threading.Thread(target=ask, name="fuse-self-test", daemon=True)
    thread.start()
    others = _answer(device, thread, buffer_bytes)
    if thread.is_alive():
        raise MountRefused(f"the self-test failed: no answer in {_SECONDS:g} s")
    if found != [""]:
        raise MountRefused(f"the self-test failed: {found[0]}")
    return others


def _answer(device: Device, thread: threading.Thread, buffer_bytes: int) -> list[tuple[RequestBuffer, int]]:
    """Answer every statfs until the thread has ended, or it is too late; return other requests."""
    poller = select.poll()
    poller.register(device.fd, select.POLLIN)
    others: list[tuple[RequestBuffer, int]] = []
    end = time.monotonic() + _SECONDS
    while thread.is_alive() and time.monotonic() < end:
        if not poller.poll(_LOOK_SECONDS * 1000):
            continue
        buffer = RequestBuffer(buffer_bytes)
        size = device.receive(buffer, release=False)
        if size < 0:
            raise MountRefused("the self-test failed: the mount went away")
        if size < IN_HEADER.size:
            continue
        _, opcode, unique, *_ = IN_HEADER.unpack_from(buffer.view)
        if opcode != Opcode.STATFS:
            others.append((buffer, size))
            continue
        device.send(unique, packed_statfs(_SHOWN))
        thread.join(_LOOK_SECONDS)
    return others
