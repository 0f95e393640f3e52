"""Tells the kernel to forget what it caches: names and pages."""

import errno
import logging
import os
import queue
import threading

from fusecache.fuse.protocol import NOTIFY_INVAL_ENTRY_OUT, NOTIFY_INVAL_INODE_OUT, OUT_HEADER, Notify

log = logging.getLogger(__name__)
# The kernel knows no such name or inode (ENOENT), or the mount is gone.
_EXPECTED = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED, errno.EPERM}
)


class Notifier:
    """Sends notifications of one mount.

    Each may block: the kernel takes the directory's lock, and a process may hold that lock while it waits for the
    loop. So names go through a thread, and callers of `invalidate_inode` use one of their own.
    """

    def __init__(self, fd: int) -> None:
        """fd: the mount's. A copy is used, which the last call closes: its number must not become another file's."""
        self._fd = os.dup(fd)
        self._lock = threading.Lock()  # of the two below; never held during a call
        self._calls = 0
        self._is_closed = False
        self._names: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def invalidate_entry(self, parent_inode: int, name: bytes) -> None:
        """Make the kernel look a name up again. Returns at once; a name that the kernel does not know is no error."""
        if self._is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_names, name="fuse-notify", daemon=True)
            self._thread.start()
        self._names.put((parent_inode, name))

    def invalidate_inode(self, inode: int) -> None:
        """Make the kernel drop an inode's attributes and clean pages. Blocks.

        Raises OSError: ENOENT if the kernel does not know the inode, ENOTCONN after `close`.
        """
        self._send(Notify.INVAL_INODE, NOTIFY_INVAL_INODE_OUT.pack(inode, 0, 0))

    def close(self) -> None:
        """Stop sending. A call that the kernel blocks goes on."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._calls:
                os.close(self._fd)
        self._names.put(None)

    def _send_names(self) -> None:
        while (each := self._names.get()) is not None:
            parent, name = each
            try:
                self._send(
                    Notify.INVAL_ENTRY, NOTIFY_INVAL_ENTRY_OUT.pack(parent, len(name), 0) + name + b"\0"
                )
            except OSError as exc:
                if exc.errno not in _EXPECTED:
                    log.error(
                        "the kernel did not forget a name parent=%d name=%r error=%s", parent, name, exc
                    )

    def _send(self, code: Notify, payload: bytes) -> None:
        header = OUT_HEADER.pack(OUT_HEADER.size + len(payload), code, 0)
        with self._lock:
            if self._is_closed:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            self._calls += 1
        try:
            os.write(self._fd, header + payload)
        finally:
            with self._lock:
                self._calls -= 1
                if self._is_closed and not self._calls:
                    os.close(self._fd)
