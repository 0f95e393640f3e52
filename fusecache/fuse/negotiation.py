"""The first requests of a mount: FUSE_INIT tells what the kernel can do, and a self-test whether requests get through.

The self-test is one statfs(2), which goes through the kernel to this process, and its answer back. It finds out where
/dev/fuse is there and FUSE_INIT was agreed on, but requests or replies do not get through: sandboxes that imitate a
kernel, or security modules.
"""

import errno
import os
import select
import threading
import time
from dataclasses import dataclass

from fusecache.fuse.device import Device, RequestBuffer
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.protocol import FLAGS, IN_HEADER, INIT_IN, INIT_OUT, MAJOR, OLDEST_MINOR, Opcode
from fusecache.fuse.requests import packed_statfs
from fusecache.fuse.values import MountRefused, StatvfsData

# The kernel's limit without privileges (fs.fuse.max_pages_limit), and what one reply or request holds.
MAX_WRITE_BYTES = 1024 * 1024
# Without FUSE_MAX_PAGES.
_SMALL_PAGES = 32
# The kernel sends FUSE_INIT when it mounts.
_SECONDS = 20.0
_LOOK_SECONDS = 0.05
# Numbers that no other file system would show.
_SHOWN = StatvfsData(f_bsize=4096, f_frsize=4096, f_blocks=0x46555345, f_bfree=7, f_bavail=5, f_namemax=255)
# Asked for wherever the kernel offers it. Not ASYNC_DIO: with it, no signal ends a read with O_DIRECT.
_WANTED = (
    "ASYNC_READ", "ATOMIC_O_TRUNC", "BIG_WRITES", "AUTO_INVAL_DATA", "DO_READDIRPLUS", "PARALLEL_DIROPS",
    "MAX_PAGES", "INIT_EXT",
)  # fmt: skip
# 1: files for passthrough must lie on a plain file system. 2 would allow an overlay, but then the mount could not be a
# layer of an overlay.
_STACK_DEPTH = 1
# The oldest struct fuse_init_in: without flags2.
_SHORT_INIT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Negotiated:
    """What holds for a mount. minor: the kernel's protocol version; features: names of the flags in use."""

    minor: int
    max_write: int
    features: frozenset[str]

    @property
    def buffer_bytes(self) -> int:
        """Size of the largest request: a write, and a page for its headers."""
        return self.max_write + 4096


def negotiate(device: Device, operations: RequestHandlers) -> Negotiated:
    """Wait for FUSE_INIT, and answer it. Raises MountRefused if the kernel is too old or sends something else."""
    buffer = RequestBuffer(MAX_WRITE_BYTES + 4096)
    size = receive_soon(device, buffer)
    if size < IN_HEADER.size + _SHORT_INIT_BYTES:
        raise MountRefused("the kernel's first request is too short")
    _, opcode, unique, *_ = IN_HEADER.unpack_from(buffer.view)
    if opcode != Opcode.INIT:
        raise MountRefused(f"the kernel began with request {opcode} instead of FUSE_INIT")
    raw = bytes(buffer.view[IN_HEADER.size : size]).ljust(INIT_IN.size, b"\0")
    major, minor, readahead, offered, more, *_ = INIT_IN.unpack_from(raw)
    if offered & FLAGS["INIT_EXT"]:
        offered |= more << 32
    if major != MAJOR or minor < OLDEST_MINOR:
        device.send(unique, error=errno.EPROTO)
        raise MountRefused(
            f"the kernel speaks FUSE {major}.{minor}; {MAJOR}.{OLDEST_MINOR} (Linux 5.4) or a later "
            f"{MAJOR}.x is needed"
        )
    names = {name for name in _wanted(operations) if offered & FLAGS[name]}
    if "DO_READDIRPLUS" not in names:
        device.send(unique, error=errno.EPROTO)
        raise MountRefused("the kernel has no FUSE_READDIRPLUS")
    if "PASSTHROUGH" in names:
        names.discard("WRITEBACK_CACHE")  # the kernel takes one of them
    page = os.sysconf("SC_PAGE_SIZE")
    pages = MAX_WRITE_BYTES // page if "MAX_PAGES" in names else _SMALL_PAGES
    flags = sum(FLAGS[name] for name in names)
    low, high = flags & 0xFFFFFFFF, flags >> 32
    depth = _STACK_DEPTH if "PASSTHROUGH" in names else 0
    device.send(
        unique,
        INIT_OUT.pack(
            MAJOR, OLDEST_MINOR, readahead, low, 0, 0, pages * page, 1, pages, 0, high, depth, *[0] * 6
        ),
    )
    return Negotiated(minor, pages * page, frozenset(names))


def receive_soon(device: Device, buffer: RequestBuffer) -> int:
    """Wait for a request; return its size. Raises MountRefused if none comes, or the mount is gone."""
    poller = select.poll()
    poller.register(device.fd, select.POLLIN)
    while poller.poll(_SECONDS * 1000):
        try:
            size = device.receive(buffer, release=False)
        except OSError as exc:
            raise MountRefused(f"no request can be read from the kernel: {exc.strerror}") from exc
        if size < 0:
            raise MountRefused("the mount went away at once")
        if size:
            return size
    raise MountRefused(f"the kernel sent nothing in {_SECONDS:g} s")


def _wanted(operations: RequestHandlers) -> list[str]:
    names = [*_WANTED]
    if operations.enable_writeback_cache:
        names.append("WRITEBACK_CACHE")
    if operations.enable_passthrough:
        names.append("PASSTHROUGH")
    if operations.supports_dot_lookup:
        names.append("EXPORT_SUPPORT")
    return names


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
