"""The first request of a mount, FUSE_INIT: what the kernel can do, and what of it is used."""

import errno
import os
import select
from dataclasses import dataclass

from fusecache.fuse.device import Device, RequestBuffer
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.protocol import FLAGS, IN_HEADER, INIT_IN, INIT_OUT, MAJOR, OLDEST_MINOR, Opcode
from fusecache.fuse.values import MountRefused

# The kernel's limit without privileges (fs.fuse.max_pages_limit), and what one reply or request holds.
MAX_WRITE_BYTES = 1024 * 1024
# Without FUSE_MAX_PAGES.
_SMALL_PAGES = 32
# The kernel sends FUSE_INIT when it mounts.
_INIT_SECONDS = 20.0
# Asked for wherever the kernel offers it.
_WANTED = (
    "ASYNC_READ", "ATOMIC_O_TRUNC", "BIG_WRITES", "AUTO_INVAL_DATA", "DO_READDIRPLUS", "ASYNC_DIO", "PARALLEL_DIROPS",
    "MAX_PAGES", "INIT_EXT",
)  # fmt: skip
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
    size = 0
    while size == 0:
        poller = select.poll()
        poller.register(device.fd, select.POLLIN)
        if not poller.poll(_INIT_SECONDS * 1000):
            raise MountRefused(f"the kernel sent nothing in {_INIT_SECONDS:g} s")
        size = device.receive(buffer, release=False)
    if size < IN_HEADER.size + _SHORT_INIT_BYTES:
        raise MountRefused("the kernel's first request is too short")
    _, opcode, unique, *_ = IN_HEADER.unpack_from(buffer.view)
    if opcode != Opcode.INIT:
        raise MountRefused(f"the kernel began with request {opcode} instead of FUSE_INIT")
    raw = bytes(buffer.view[IN_HEADER.size : size]).ljust(INIT_IN.size, b"\0")
    major, minor, readahead, offered, *_ = INIT_IN.unpack_from(raw)
    if (major, minor) < (MAJOR, OLDEST_MINOR):
        device.send(unique, error=errno.EPROTO)
        raise MountRefused(f"the kernel speaks FUSE {major}.{minor}; Linux 5.4 (7.{OLDEST_MINOR}) is needed")
    names = {name for name in _wanted(operations) if offered & FLAGS[name]}
    if "DO_READDIRPLUS" not in names:
        device.send(unique, error=errno.EPROTO)
        raise MountRefused("the kernel has no FUSE_READDIRPLUS")
    page = os.sysconf("SC_PAGE_SIZE")
    pages = MAX_WRITE_BYTES // page if "MAX_PAGES" in names else _SMALL_PAGES
    flags = sum(FLAGS[name] for name in names)
    device.send(
        unique,
        INIT_OUT.pack(MAJOR, OLDEST_MINOR, readahead, flags, 0, 0, pages * page, 1, pages, 0, *[0] * 8),
    )
    return Negotiated(minor, pages * page, frozenset(names))


def _wanted(operations: RequestHandlers) -> list[str]:
    names = [*_WANTED]
    if operations.enable_writeback_cache:
        names.append("WRITEBACK_CACHE")
    if operations.supports_dot_lookup:
        names.append("EXPORT_SUPPORT")
    return names
