"""A mount that outlives the process that serves it: its descriptor and its memory, which a keeper process holds too.

    first process          keeper                       second process
    KeptMount.new()
    OwnSession.mount(…)
    keep(…)          ---->  holds the descriptors
    is killed               starts the second one ---->  KeptMount.of_environment()
                                                        OwnSession.resume(…)

In between, system calls wait, and reads by passthrough go on. What the file system itself must know is in `table`.
"""

import os
import select
import socket
import sys
import threading
from contextlib import suppress

from fusecache.fuse.kept_requests import KeptRequests, LeftRequest, copied_requests, make_memory
from fusecache.fuse.kept_table import FORMAT, FormatUnknown, KeptTable
from fusecache.fuse.negotiation import Negotiated
from fusecache.keeper import KEEPER_VARIABLE, KEPT_VARIABLE, STANDBY_VARIABLE

_SESSION = "session"
# A little more than the keeper waits for another process.
_ANSWER_SECONDS = 28.0
_ANSWER_BYTES = 8192
_REASON_BYTES = 4000


def await_turn() -> None:
    """As a standby, wait until the keeper needs this process; else return at once.

    `KeptMount.of_environment` then has the predecessor's mount. Ends this process if the keeper has no need of it.
    """
    if os.environ.pop(STANDBY_VARIABLE, None) is None:
        return
    with socket.socket(fileno=os.dup(int(os.environ[KEEPER_VARIABLE]))) as keeper:
        with suppress(OSError):
            keeper.send(b"waiting")
        _, fds, _, _ = socket.recv_fds(keeper, 64, 8, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        sys.exit(0)
    os.environ[KEPT_VARIABLE] = ",".join(map(str, fds))


class KeptMount:
    """One mount's kept descriptors. table: rows of the file system; device_fd: -1 before it is mounted.

    is_resumed: a predecessor has served this mount.
    """

    def __init__(self, table_fd: int, requests_fd: int, device_fd: int = -1) -> None:
        """Raises FormatUnknown."""
        self.device_fd = device_fd
        self.is_resumed = device_fd >= 0
        self.table = KeptTable(table_fd)
        self._table_fd = table_fd
        self._requests_fd = requests_fd
        self._requests: KeptRequests | None = None
        self._left: list[LeftRequest] = []
        # Each answer is for one thread.
        self._naming = threading.Lock()
        if self.is_resumed:
            try:
                negotiated = self.negotiated()
            except (TypeError, ValueError, IndexError) as exc:
                raise FormatUnknown(f"damaged shared memory ({exc})") from exc
            if negotiated is None:
                raise FormatUnknown("shared memory without an agreement with the kernel")
            if self.table.format == FORMAT:
                self._left = self.requests(negotiated.buffer_bytes).left()
            else:
                # Until this process serves, the keeper holds the memory that the predecessor wrote, unchanged.
                old, self._table_fd = self.table, make_memory("fuse-table")
                self.table = KeptTable(self._table_fd)
                old.copy_into(self.table)
                self._requests_fd = make_memory("fuse-requests")
                self._left = copied_requests(requests_fd, self.requests(negotiated.buffer_bytes))

    @classmethod
    def new(cls) -> "KeptMount":
        """Make the memory for a mount that does not exist yet. Raises OSError."""
        return cls(make_memory("fuse-table"), make_memory("fuse-requests"))

    @classmethod
    def of_environment(cls) -> "KeptMount | None":
        """Return what the keeper gave to this process: a predecessor's mount, or memory for a new one.

        None: this process has no keeper. Raises FormatUnknown, OSError.
        """
        number = os.environ.get(KEEPER_VARIABLE)
        if number is None:
            return None
        os.set_inheritable(int(number), False)  # noqa: FBT003  # takes no keyword
        given = os.environ.pop(KEPT_VARIABLE, "")
        if not given:
            return cls.new()
        device, table, requests = map(int, given.split(","))
        for fd in (device, table, requests):
            os.set_inheritable(fd, False)  # noqa: FBT003
        return cls(table, requests, device)

    @property
    def unanswered(self) -> list[LeftRequest]:
        """The requests that the predecessor had not answered."""
        return [each for each in self._left if each.reply is None]

    def negotiated(self) -> Negotiated | None:
        """Return what a predecessor agreed on with the kernel."""
        row = self.table.get(_SESSION)
        return None if row is None else Negotiated(row[0], row[1], frozenset(row[2]))

    def keep_negotiated(self, negotiated: Negotiated) -> None:
        """Keep the agreement with the kernel, which is made once."""
        self.table.put(_SESSION, [negotiated.minor, negotiated.max_write, sorted(negotiated.features)])

    def requests(self, buffer_bytes: int) -> KeptRequests:
        """Return the places for requests of at most that size."""
        if self._requests is None:
            self._requests = KeptRequests(self._requests_fd, buffer_bytes)
        return self._requests

    def take_left(self) -> list[LeftRequest]:
        """Return all requests that the predecessor left, once."""
        left, self._left = self._left, []
        return left

    def keep(self, mountpoint: str, device_fd: int) -> None:
        """Have the keeper hold the descriptors. From now on it starts a successor when this process dies."""
        self.device_fd = device_fd
        # A keeper of the version before does not know that every program can stand by (`await_turn`).
        self._tell(b"standby", [])
        self._tell(b"keep " + os.fsencode(mountpoint), [device_fd, self._table_fd, self._requests_fd])

    def name_program(self, program: str) -> str:
        """Have the keeper start the next process with the program at this path. "": with the one of this process.

        Returns "" when that process waits for its turn, else why it does not; blocks.
        """
        if not program:
            return ""
        with self._naming:
            answer = self._tell(b"program " + os.fsencode(program), [], is_answered=True)
        return "" if answer == b"ready" else answer.removeprefix(b"no ").decode(errors="replace")

    @classmethod
    def tell_why(cls, reason: str) -> None:
        """If a keeper started this process, tell it why this process is about to end."""
        cls._tell(b"why " + " ".join(reason.split()).encode(errors="replace")[:_REASON_BYTES], [])

    def end(self) -> None:
        """The mount ends: the keeper lets go of it, and does not start a successor."""
        self._tell(b"end", [])

    @staticmethod
    def _tell(message: bytes, fds: list[int], *, is_answered: bool = False) -> bytes:
        number = os.environ.get(KEEPER_VARIABLE)
        if number is None:
            return b""
        # Without a keeper the mount goes on, and ends with this process.
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as keeper:
            socket.send_fds(keeper, [message], fds)
            if is_answered:
                answer = select.poll()  # select(2) knows no descriptor above 1023
                answer.register(keeper, select.POLLIN)
                answer.poll(_ANSWER_SECONDS * 1000)
                return keeper.recv(_ANSWER_BYTES, socket.MSG_DONTWAIT)
        return b"no answer from the keeper"
