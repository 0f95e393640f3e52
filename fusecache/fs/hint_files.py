"""The directory `.fusecache/hints`: jobs write what they will read there, as files that exist only in the daemon.

A message is accepted when its file is closed, as a whole or not at all. close fails with EINVAL if the message is
invalid, and with EPERM if it may be accepted later. Reading a file back shows what the daemon understood. Removing one
of a job's files withdraws all of the job's hints.

Invariants:
1. Nothing written here reaches the bucket or the disk.
2. Memory is bounded by MOST_BYTES in files that are being written, and MOST_NAMES names.

Hints with owners: the user who first sends a plan of a job owns it. Other users cannot replace, move or withdraw it.

Root and the owners of the mount may, for every job. Invariant: at most one row for each job that has a plan, or whose
plan is being read.
"""

import errno
import json
import stat
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from fusecache.engine.prefetch.hint_service import HintService, job_of
from fusecache.fs.kept_files import HANDLES_OF_START
from fusecache.fuse.values import EntryAttributes, FileInfo, FUSEError
from fusecache.model.errors import NotPermitted
from fusecache.model.hints import CURSOR, LONGEST_MESSAGE_BYTES, PLAN, HintError, encode_cursor


class OwnedHints:
    """The hint service, as one user may use it."""

    def __init__(self, service: HintService, owners: frozenset[int]) -> None:
        """owners: ids of the users who may change the hints of every job."""
        self.service = service
        self._owners = owners
        self._users: dict[str, int] = {}
        # Plans that are being read, which takes a while: until the last is, the job may have no plan yet.
        self._receiving: Counter[str] = Counter()

    async def receive(self, file: str, message: bytes | bytearray, *, user: int, pid: int = 0) -> None:
        """Receive a hint file's content. Raises NotPermitted for another user's job, and as the service does."""
        job = job_of(file)[0]
        self._check(job, user)
        self._users.setdefault(job, user)
        self._receiving[job] += 1
        try:
            await self.service.receive(file, message, pid)
        finally:
            self._receiving[job] -= 1
            self._receiving = +self._receiving
            known = {*self.service.jobs(), *self._receiving}
            self._users = {name: each for name, each in self._users.items() if name in known}

    def forget(self, file: str, *, user: int) -> None:
        """Withdraw all hints of a hint file's job. Raises HintError, NotPermitted."""
        job = job_of(file)[0]
        self._check(job, user)
        self.service.forget(job)

    def _check(self, job: str, user: int) -> None:
        if job not in self._receiving and job not in self.service.jobs():
            self._users.pop(job, None)  # forgotten after a silence: the name is free
        owner = self._users.get(job, user)
        if owner != user and user not in self._owners:
            raise NotPermitted(f"{job}: user {owner} owns the hints of this job; use another job name")


DIRECTORY = 5
FIRST_INODE = 1 << 56
FIRST_HANDLE = 1 << 49
MOST_BYTES = 4 * LONGEST_MESSAGE_BYTES
MOST_NAMES = 4096


@dataclass(eq=False, slots=True)
class _Open:
    """An open file. content: at open, for readers; written: by this handle, None if it was discarded as too large.

    user, pid: the user and the thread that opened it. too_large: this message alone exceeds the limit, rather than all
    messages together. is_new: something was written since the last close.
    """

    name: str
    content: bytes
    user: int
    pid: int
    written: bytearray | None = field(default_factory=bytearray)
    too_large: bool = False
    is_new: bool = False


class HintFiles:
    """Answers the kernel's requests about the hints directory and its files."""

    def __init__(self, hints: OwnedHints, uid: int, gid: int, start: int) -> None:
        """start: how many daemons have served the mount before: their inodes and handles are not used again."""
        self._hints = hints
        self._hint_service = hints.service
        self._uid, self._gid = uid, gid
        # Inode number of each name looked up, least recently used first.
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._names: dict[int, str] = {}
        self._next_number = FIRST_INODE + start * HANDLES_OF_START
        self._open: dict[int, _Open] = {}
        self._next_handle = FIRST_HANDLE + start * HANDLES_OF_START
        self._written_bytes = 0
        self._since = time.time_ns()

    def owns(self, inode: int) -> bool:
        """Return whether an inode is the directory or a file in it, existing or not."""
        return inode == DIRECTORY or inode >= FIRST_INODE

    def owns_handle(self, handle: int) -> bool:
        """Return whether a file handle was issued here."""
        return handle in self._open

    def lookup(self, name: str) -> int | None:
        """Return the inode of a name, None if it does not exist."""
        return self._number(name) if name in self._shown() else None

    def entries(self) -> list[tuple[str, int]]:
        """Return names and inodes."""
        return [(name, self._number(name)) for name in self._shown()]

    def attributes(self, inode: int) -> EntryAttributes:
        """Return what stat shows. Every user of the mount may write hints of own jobs: they are only advice."""
        entry = EntryAttributes()
        entry.st_ino = inode
        is_directory = inode == DIRECTORY
        entry.st_mode = stat.S_IFDIR | 0o777 if is_directory else stat.S_IFREG | 0o666
        entry.st_nlink = 2 if is_directory else 1
        entry.st_uid, entry.st_gid = self._uid, self._gid
        entry.st_size = 0 if is_directory else len(self._content(self._name(inode)))
        entry.st_atime_ns = entry.st_ctime_ns = entry.st_mtime_ns = self._since
        entry.entry_timeout = 60 if is_directory else 0
        entry.attr_timeout = 0
        return entry

    def create(self, name: str, user: int, pid: int) -> tuple[FileInfo, EntryAttributes]:
        """Create and open a file. Raises HintError if the name is not that of a hint file."""
        job_of(name)
        number = self._number(name)
        return self.open(number, user, pid), self.attributes(number)

    def open(self, inode: int, user: int, pid: int) -> FileInfo:
        """Open a file, to write a message or to read the current state. user, pid: of the calling thread."""
        name = self._name(inode)
        handle = self._next_handle
        self._next_handle += 1
        self._open[handle] = _Open(name, self._content(name), user, pid)
        return FileInfo(fh=handle, direct_io=True, keep_cache=False)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Return bytes of an open file."""
        return self._open[handle].content[offset : offset + size]

    def write(self, handle: int, offset: int, data: bytes) -> int:
        """Accept bytes of a message. A message that becomes too large is rejected at close."""
        file = self._open[handle]
        file.is_new = True
        file.too_large |= offset + len(data) > LONGEST_MESSAGE_BYTES
        if file.written is None:
            return len(data)
        grown = max(0, offset + len(data) - len(file.written))
        if file.too_large or self._written_bytes + grown > MOST_BYTES:
            self._drop(file)
            return len(data)
        self._written_bytes += grown
        file.written.extend(bytes(max(0, offset - len(file.written))))
        file.written[offset : offset + len(data)] = data
        return len(data)

    async def flush(self, handle: int) -> None:
        """Handle one close(2): process the message. Raises HintError, NotFound, NotPermitted."""
        file = self._open[handle]
        if not file.is_new:
            return
        file.is_new = False
        if file.written is None and not file.too_large:
            raise NotPermitted(
                f"{file.name}: all jobs together may be writing {MOST_BYTES} bytes of hints; try again later"
            )
        if file.written is None:
            raise HintError(
                f"{file.name}: the message is longer than {LONGEST_MESSAGE_BYTES} bytes; use more windows"
            )
        await self._hints.receive(file.name, file.written, user=file.user, pid=file.pid)

    def release(self, handle: int) -> None:
        """Close a file."""
        self._drop(self._open.pop(handle))

    def unlink(self, name: str, user: int) -> None:
        """Withdraw all hints of the job that the file belongs to. Raises NotPermitted if it is another user's."""
        if name not in self._shown():
            raise FUSEError(errno.ENOENT)
        self._hints.forget(name, user=user)

    # ---- private

    def _shown(self) -> list[str]:
        return [job + kind for job in self._hint_service.jobs() for kind in (PLAN, CURSOR)]

    def _content(self, name: str) -> bytes:
        job, kind = job_of(name)
        step = self._hint_service.step(job)
        if step is None:
            return b""
        if kind == CURSOR:
            return encode_cursor(step)
        return json.dumps(self._hint_service.as_dict(job), indent=1).encode() + b"\n"

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._next_number
            self._names[number] = name
            self._next_number += 1
        self._numbers.move_to_end(name)
        while len(self._numbers) > MOST_NAMES:
            del self._names[self._numbers.popitem(last=False)[1]]
        return number

    def _name(self, inode: int) -> str:
        name = self._names.get(inode)
        if name is None:
            raise FUSEError(errno.ESTALE)
        return name

    def _drop(self, file: _Open) -> None:
        if file.written is not None:
            self._written_bytes -= len(file.written)
            file.written = None
