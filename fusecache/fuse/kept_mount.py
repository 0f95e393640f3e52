"""A mount that outlives the process that serves it: its descriptor and its memory, which a keeper process holds too.

    first process          keeper                       second process
    KeptMount.new()
    OwnSession.mount(…)
    keep(…)          ---->  holds the descriptors
    is killed               starts the second one ---->  KeptMount.of_environment()
                                                        OwnSession.resume(…)

In between, system calls wait, and reads by passthrough go on. What the file system itself must know is in `table`.

A table in shared memory: what a successor must know of a process that was killed.

An append-only log of rows, in a file of memfd_create(2). Every `put` and `remove` is one copy and one store of the
log's end, so a process that is killed at any moment leaves a whole table. Values are small and few: open files,
directories.
"""

import json
import mmap
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fusecache.fuse.kept_requests import KeptRequests, LeftRequest, copied_requests, make_memory
from fusecache.fuse.negotiation import Negotiated
from fusecache.keeper import KEEPER_VARIABLE, KEPT_VARIABLE, STANDBY_VARIABLE

_MAGIC = b"fusekept"
# Changes with the meaning of rows, and with the places of requests (`kept_requests`): a process does not take over the
# memory of another format, but that of the one before.
FORMAT = 2
_HEADER = struct.Struct("<8sQ")  # magic, format
_ACTIVE = 16  # where the index of the region in use is
_REGIONS = (24, 40)  # where each region's start and end are
_REGION = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_ROW = struct.Struct("<II")  # bytes of the key and of the value, or _REMOVED
_REMOVED = 0xFFFFFFFF
_FIRST = 4096
# Below this size the log is not worth rewriting.
_LEAST_REWRITE_BYTES = 1024 * 1024
_GROWTH_BYTES = 256 * 1024


class FormatUnknown(Exception):  # what is found, not an error of the program
    """The memory holds the table of another version of the program, or none, or is damaged."""


class KeptTable:
    """Rows by key. A value is any JSON value. Owned by one process and one thread at a time.

    format: of what a predecessor wrote, FORMAT or the one before.
    """

    def __init__(self, fd: int) -> None:
        """fd: of an empty memory file, or of a predecessor's. It stays the caller's. Raises FormatUnknown."""
        self._fd = fd
        self._rows: dict[str, bytes] = {}
        self._row_bytes = 0
        size = os.fstat(fd).st_size
        is_new = size == 0
        if is_new:
            size = _FIRST + _GROWTH_BYTES
            os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        if is_new:
            _HEADER.pack_into(self._memory, 0, _MAGIC, FORMAT)
            for place in _REGIONS:
                self._store(place, _REGION.pack(_FIRST, _FIRST))
        try:
            magic, self.format = _HEADER.unpack_from(self._memory, 0)
            if magic != _MAGIC or self.format not in {FORMAT, FORMAT - 1}:
                raise FormatUnknown(f"shared memory of another version of the program ({size} bytes)")
            self._region = _REGIONS[_NUMBER.unpack_from(self._memory, _ACTIVE)[0]]
            self._start, self._end = _REGION.unpack_from(self._memory, self._region)
            if not _FIRST <= self._start <= self._end <= size:
                raise FormatUnknown(f"damaged shared memory ({self._start}..{self._end} of {size} bytes)")
            self._read()
        except (struct.error, IndexError, UnicodeDecodeError) as exc:
            raise FormatUnknown(f"damaged shared memory ({exc})") from exc

    def copy_into(self, other: "KeptTable") -> None:
        """Put all rows into another table, as they are."""
        for key, value in self.items(""):
            other.put(key, value)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str) -> Any:
        """Return a row's value, None if there is no such row."""
        value = self._rows.get(key)
        return None if value is None else json.loads(value)

    def items(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Yield the rows whose keys begin so: the rest of the key, and the value; None if that is damaged."""
        for key, value in list(self._rows.items()):
            if key.startswith(prefix):
                try:
                    yield key[len(prefix) :], json.loads(value)
                except ValueError:
                    yield key[len(prefix) :], None

    def put(self, key: str, value: Any) -> None:
        """Set a row."""
        text = json.dumps(value, separators=(",", ":")).encode()
        if self._rows.get(key) != text:
            self._forget(key)
            self._rows[key] = text
            self._row_bytes += _ROW.size + len(key) + len(text)
            self._append(key, text)

    def remove(self, key: str) -> None:
        """Remove a row, if it is there."""
        if key in self._rows:
            self._forget(key)
            self._append(key, None)

    # ---- inside

    def _forget(self, key: str) -> None:
        old = self._rows.pop(key, None)
        if old is not None:
            self._row_bytes -= _ROW.size + len(key) + len(old)

    def _append(self, key: str, value: bytes | None) -> None:
        row = _packed(key, value)
        if self._end + len(row) > len(self._memory):
            if self._end - self._start > max(_LEAST_REWRITE_BYTES, 4 * self._row_bytes):
                self._rewrite()
                return
            self._grow(self._end + len(row))
        self._memory[self._end : self._end + len(row)] = row
        self._end += len(row)
        # The row counts from this store on.
        self._store(self._region + _NUMBER.size, _NUMBER.pack(self._end))

    def _rewrite(self) -> None:
        """Write all rows into a new log, where they fit: before the log, else behind it."""
        log = b"".join(_packed(key, value) for key, value in self._rows.items())
        start = _FIRST if _FIRST + len(log) <= self._start else self._end
        self._grow(start + len(log))
        self._memory[start : start + len(log)] = log
        other = _REGIONS[self._region == _REGIONS[0]]
        self._store(other, _REGION.pack(start, start + len(log)))
        self._store(_ACTIVE, _NUMBER.pack(_REGIONS.index(other)))
        self._region, self._start, self._end = other, start, start + len(log)

    def _store(self, at: int, number: bytes) -> None:
        # Not `pack_into`: that writes zeros first, then one byte after the other, and may be killed in between.
        self._memory[at : at + len(number)] = number

    def _grow(self, size: int) -> None:
        if size > len(self._memory):
            size += max(_GROWTH_BYTES, size // 4)
            os.ftruncate(self._fd, size)
            self._memory.resize(size)

    def _read(self) -> None:
        at = self._start
        while at < self._end:
            key_bytes, value_bytes = _ROW.unpack_from(self._memory, at)
            at += _ROW.size
            key = self._memory[at : at + key_bytes].decode()
            at += key_bytes
            self._forget(key)
            if value_bytes != _REMOVED:
                self._rows[key] = self._memory[at : at + value_bytes]
                self._row_bytes += _ROW.size + key_bytes + value_bytes
                at += value_bytes


def _packed(key: str, value: bytes | None) -> bytes:
    name = key.encode()
    if value is None:
        return _ROW.pack(len(name), _REMOVED) + name
    return _ROW.pack(len(name), len(value)) + name + value


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
        fds: list[int] = []
        with suppress(OSError):  # a keeper that ends without having read this is no error
            keeper.send(b"waiting")
            _, fds, _, _ = socket.recv_fds(keeper, 64, 8, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        sys.exit(0)
    os.environ[KEPT_VARIABLE] = ",".join(map(str, fds))


def _become_standby(connection: int, report: int | None) -> None:
    """Have this socket to the keeper, and nothing of the process that this one is a copy of."""
    number = int(os.environ[KEEPER_VARIABLE])
    os.dup2(connection, number, inheritable=False)
    given = os.environ.pop(KEPT_VARIABLE, "")
    for fd in [*map(int, filter(None, given.split(","))), *([] if report is None else [report])]:
        os.close(fd)
    os.environ[STANDBY_VARIABLE] = "1"


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

    @classmethod
    def leave_standby(cls, report: int | None) -> bool:
        """Leave a copy of this process to the keeper; return whether this is the copy, which is to `await_turn`.

        Call it before anything is opened and while there is one thread. report: a descriptor that the copy closes.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            try:
                copy = os.fork()
            except OSError:  # too many processes, or no memory: the keeper starts a standby later
                return False
            if copy:
                cls._tell(b"standby %d" % copy, [ours.fileno()])
            else:
                _become_standby(theirs.fileno(), report)
        return not copy

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
