"""Chooses what serves a mount: the own session, or pyfuse3."""

import logging
from importlib.util import find_spec
from typing import Protocol

from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.kept_mount import KeptMount
from fusecache.fuse.movers import MoverPlan
from fusecache.fuse.session import OwnSession
from fusecache.fuse.values import MountPlan, MountRefused
from fusecache.installation import extra_command

log = logging.getLogger(__name__)

LIBRARIES = ("auto", "own", "pyfuse3")


class FuseSession(Protocol):
    """One mount. library: `own` or `pyfuse3`."""

    library: str

    @property
    def can_pass_through(self) -> bool:
        """Whether kernel and handlers agreed on passthrough."""
        ...

    async def serve(self, max_bytes: int = ...) -> None:
        """Answer requests until the mount is gone, or this is cancelled. max_bytes: of requests that wait."""
        ...

    def invalidate_entry(self, parent_inode: int, name: bytes) -> None:
        """Make the kernel look a name up again. Returns at once, before it happens."""
        ...

    def invalidate_inode(self, inode: int) -> None:
        """Make the kernel drop an inode's attributes and clean pages. Blocks. Raises OSError."""
        ...

    def open_backing(self, fd: int) -> int:
        """Return the kernel's number for an open regular file. `open` may answer with it: the kernel reads that file.

        Raises OSError: EPERM without CAP_SYS_ADMIN, ELOOP for a file on a stacked file system, EOPNOTSUPP.
        """
        ...

    def close_backing(self, backing_id: int) -> None:
        """Give a number back. Files that are open with it stay readable."""
        ...

    def close(self) -> None:
        """Unmount, unless that has happened. `serve` must have ended."""
        ...


def open_session(
    operations: RequestHandlers,
    plan: MountPlan,
    library: str = "auto",
    kept: KeptMount | None = None,
    movers: MoverPlan | None = None,
) -> FuseSession:
    """Mount a file system; return its session. The log says once which library serves it.

    library: one of LIBRARIES. auto takes the own session, and pyfuse3, if it is installed, where the own one cannot
    mount, the kernel is too old, or the self-test of the mount fails (`negotiation`). kept: what outlives this process;
    with pyfuse3 nothing does. movers: processes that send large replies of the own session.
    Raises MountRefused, and leaves nothing mounted then.
    """
    if library == "pyfuse3":
        return _pyfuse3(operations, plan)
    try:
        session = OwnSession.mount(operations, plan, kept, movers)
    except MountRefused as exc:
        if library == "own" or find_spec("pyfuse3") is None or (kept is not None and kept.is_resumed):
            raise
        try:
            other = _pyfuse3(operations, plan)
        except MountRefused:
            raise exc from None  # the same cause, in plainer words
        log.warning("the own FUSE session cannot serve this mount, pyfuse3 does: %s", exc)
        return other
    agreed = session.negotiated
    log.info("fuse library=own protocol=7.%d features=%s", agreed.minor, ",".join(sorted(agreed.features)))
    if movers is not None and movers.count:
        log.info("fuse movers=%d", movers.count)
    return session


def _pyfuse3(operations: RequestHandlers, plan: MountPlan) -> FuseSession:
    try:
        from fusecache.fuse.pyfuse3_session import Pyfuse3Session
    except ModuleNotFoundError as exc:
        raise MountRefused(f"{exc.name} is not installed: {extra_command('pyfuse3')}") from exc
    except ImportError as exc:  # libfuse3.so.3 is missing
        raise MountRefused(f"pyfuse3 cannot be loaded: {exc}") from exc
    session = Pyfuse3Session(operations, plan)
    log.info("fuse library=pyfuse3")
    return session
