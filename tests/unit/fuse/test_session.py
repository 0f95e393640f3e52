"""The session against a played kernel: replies, lengths, interrupts, features."""

import errno
import os
import random
import signal
import struct
import time
from collections.abc import Iterator, Sequence

import pytest
import trio
import trio.lowlevel
import trio.testing

from fusecache.fuse import session as session_module
from fusecache.fuse import waiting
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.kept_mount import KeptMount
from fusecache.fuse.kept_requests import make_memory
from fusecache.fuse.protocol import (
    ATTR_OUT,
    BATCH_FORGET_IN,
    CREATE_IN,
    DIRENT,
    ENTRY_OUT,
    FATTR_FH,
    FATTR_MTIME,
    FATTR_SIZE,
    FIELDS,
    FLAGS,
    FOPEN_PASSTHROUGH,
    FORGET_ONE,
    IN_HEADER,
    INTERRUPT_IN,
    OPEN_IN,
    OPEN_OUT,
    READ_IN,
    RENAME2_IN,
    SETATTR_IN,
    WRITE_IN,
    WRITE_OUT,
    Opcode,
)
from fusecache.fuse.session import OwnSession
from fusecache.fuse.values import (
    EntryAttributes,
    FileInfo,
    FUSEError,
    MountRefused,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
)
from fusecache.fuse.waiting import is_ending, shows_end
from tests.unit.fuse.kernel import EVERYTHING, PlayedKernel, served

# More than keeps the interpreter's lock, and less than a socket takes.
LARGE = session_module.RELEASE_BYTES + 4096
NAMES = [b"one", b"a-longer-name", b"x" * 255]


class Recorded(RequestHandlers):
    """Remembers what it was called with. `gate`: what slow handlers wait for."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.gate = trio.Event()
        self.begun: list[str] = []
        self.cancelled: list[str] = []

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        self.calls.append(("getattr", inode, ctx.uid, ctx.pid))
        entry = EntryAttributes()
        entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.attr_timeout = inode, 5, -1, 1.5
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name == b"absent":
            raise FUSEError(errno.ENOENT)
        if name == b"broken":
            raise RuntimeError("a bug")
        if name.startswith(b"slow"):
            await self._wait(name.decode())
        return await self.getattr(9, ctx)

    async def _wait(self, what: str) -> None:
        self.begun.append(what)
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.cancelled.append(what)
            raise

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self.calls.append(("forget", list(inode_list)))

    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        self.calls.append(("setattr", attr.st_size, attr.st_mtime_ns, fields, fh))
        return await self.getattr(inode, ctx)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        self.calls.append(("create", name, mode, flags, ctx.umask))
        return FileInfo(fh=7, direct_io=True), await self.getattr(8, ctx)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        self.calls.append(("rename", parent_inode_old, name_old, parent_inode_new, name_new, flags))

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        await self._wait("open")
        return FileInfo(fh=inode)

    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:
        if fh == 1:
            await self._wait("read")
        return memoryview(bytes(range(256)) * 4096)[off:]

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        if fh == 1:
            await self._wait("write")
        self.calls.append(("write", off, bytes(buf)))
        return len(buf)

    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        for index, name in list(enumerate(NAMES, 1))[start_id:]:
            entry = EntryAttributes()
            entry.st_ino = 10 + index
            if not token.add(name, entry, index):
                return
            if fh == 1:
                await self._wait("readdir")


@pytest.fixture
def operations() -> Recorded:
    return Recorded()


def read_in(fh: int, offset: int, size: int) -> bytes:
    return READ_IN.pack(fh, offset, size, 0, 0, 0, 0)


def write_in(fh: int, data: bytes, size: int | None = None) -> bytes:
    return WRITE_IN.pack(fh, 0, len(data) if size is None else size, 0, 0, 0, 0) + data


# ---- replies


async def test_attributes_as_the_kernel_reads_them(operations: Recorded) -> None:
    async with served(operations) as kernel:
        error, payload = await kernel.ask(Opcode.GETATTR, bytes(16), nodeid=4)
    names = [field.partition(":")[0] for field in FIELDS["attr_out"].split()]
    seen = dict(zip(names, ATTR_OUT.unpack(payload), strict=True))
    assert error == 0
    assert (seen["attr.ino"], seen["attr.size"], seen["attr_valid"], seen["attr_valid_nsec"]) == (
        4,
        5,
        1,
        5 * 10**8,
    )
    # One nanosecond before 1970.
    assert (seen["attr.mtime"], seen["attr.mtimensec"]) == (2**64 - 1, 999_999_999)
    assert operations.calls == [("getattr", 4, 1000, os.getpid())]


async def test_errors_and_unknown_requests(operations: Recorded) -> None:
    async with served(operations) as kernel:
        assert await kernel.ask(Opcode.LOOKUP, b"absent\0") == (errno.ENOENT, b"")
        assert await kernel.ask(Opcode.STATFS) == (errno.ENOSYS, b"")  # a handler that is not there
        assert await kernel.ask(4095) == (errno.ENOSYS, b"")
        assert (await kernel.ask(Opcode.LOOKUP, b"x\0"))[0] == 0


async def test_a_bug_of_a_handler_fails_its_request_alone(
    operations: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(operations) as kernel:
        assert await kernel.ask(Opcode.LOOKUP, b"broken\0") == (errno.EIO, b"")
        assert (await kernel.ask(Opcode.LOOKUP, b"x\0"))[0] == 0
    assert "RuntimeError: a bug" in caplog.text


async def test_arguments_of_requests_with_several_parts(operations: Recorded) -> None:
    async with served(operations) as kernel:
        error, payload = await kernel.ask(
            Opcode.CREATE, CREATE_IN.pack(os.O_RDWR, 0o100644, 0o22, 0) + b"new\0"
        )
        assert error == 0
        assert OPEN_OUT.unpack_from(payload, ENTRY_OUT.size) == (7, 3, 0)  # direct_io and keep_cache
        assert await kernel.ask(Opcode.RENAME2, RENAME2_IN.pack(5, 1, 0) + b"old\0new\0") == (0, b"")
        seconds = 2**64 - 2  # two before 1970
        body = SETATTR_IN.pack(
            FATTR_SIZE | FATTR_MTIME | FATTR_FH, 0, 3, 100, 0, 0, seconds, 0, 0, 1, 0, 0, 0, 0, 0, 0
        )
        assert (await kernel.ask(Opcode.SETATTR, body))[0] == 0
    fields = SetattrFields(update_size=True, update_mtime=True)
    assert [call for call in operations.calls if call[0] != "getattr"] == [
        ("create", b"new", 0o100644, os.O_RDWR, 0o22),
        ("rename", 1, b"old", 5, b"new", 1),
        ("setattr", 100, -2 * 10**9 + 1, fields, 3),
    ]


@pytest.mark.parametrize("size", [1, 4096, session_module.RELEASE_BYTES - 16, LARGE])
async def test_reads_of_every_size(operations: Recorded, size: int) -> None:
    """Small replies keep the interpreter's lock, large ones release it: other system calls."""
    async with served(operations) as kernel:
        error, payload = await kernel.ask(Opcode.READ, read_in(2, 3, size))
    assert (error, payload) == (0, (bytes(range(256)) * 4097)[3 : 3 + size])


async def test_a_reply_that_the_kernel_refuses_becomes_an_error(
    operations: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(operations) as kernel:
        assert await kernel.ask(Opcode.READ, read_in(2, 0, 2**20)) == (
            errno.EIO,
            b"",
        )  # too long for a socket
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0
    assert "the kernel refused a reply" in caplog.text


async def test_writes_in_a_row_of_every_size(operations: Recorded) -> None:
    """A large one makes the session expect more of them, and read with another system call."""
    datas = [os.urandom(size) for size in (1, LARGE, LARGE, 5, LARGE)]
    async with served(operations) as kernel:
        for data in datas:
            error, payload = await kernel.ask(Opcode.WRITE, write_in(2, data))
            assert (error, WRITE_OUT.unpack(payload)[0]) == (0, len(data))
    assert [call[2] for call in operations.calls] == datas


async def test_a_write_that_waits_keeps_its_bytes(operations: Recorded) -> None:
    async with served(operations) as kernel:
        first = kernel.send(Opcode.WRITE, write_in(1, b"waits"))
        assert (await kernel.ask(Opcode.WRITE, write_in(2, b"other")))[0] == 0
        operations.gate.set()
        assert (await kernel.reply(first))[0] == 0
    assert operations.calls == [("write", 0, b"other"), ("write", 0, b"waits")]


def listed(payload: bytes) -> list[tuple[int, bytes, int]]:
    """The entries of a readdirplus reply: inode, name, cookie."""
    found, at = [], 0
    while at < len(payload):
        nodeid = ENTRY_OUT.unpack_from(payload, at)[0]
        inode, cookie, length, kind = DIRENT.unpack_from(payload, at + ENTRY_OUT.size)
        name_at = at + ENTRY_OUT.size + DIRENT.size
        assert (inode, kind) == (nodeid, 8)
        found.append((nodeid, payload[name_at : name_at + length], cookie))
        at = -(-(name_at + length) // 8) * 8
    assert at == len(payload)
    return found


async def test_directories_in_replies_of_any_size(operations: Recorded) -> None:
    everything = [(10 + index, name, index) for index, name in enumerate(NAMES, 1)]
    async with served(operations) as kernel:
        assert listed((await kernel.ask(Opcode.READDIRPLUS, read_in(2, 0, 4096)))[1]) == everything
        _, payload = await kernel.ask(Opcode.READDIRPLUS, read_in(2, 0, 340))
        assert listed(payload) == everything[:2]
        assert listed((await kernel.ask(Opcode.READDIRPLUS, read_in(2, 2, 4096)))[1]) == everything[2:]
        assert await kernel.ask(Opcode.READDIRPLUS, read_in(2, 0, 10)) == (0, b"")


async def test_forgets_have_no_reply(operations: Recorded) -> None:
    rows = [(5, 1), (6, 2**40)]
    body = BATCH_FORGET_IN.pack(2, 0) + b"".join(FORGET_ONE.pack(*row) for row in rows)
    async with served(operations) as kernel:
        kernel.send(Opcode.BATCH_FORGET, body)
        kernel.send(Opcode.FORGET, struct.pack("<Q", 3), nodeid=8)
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0
        assert not kernel.has_reply()
    assert operations.calls[:2] == [("forget", rows), ("forget", [(8, 3)])]


# ---- many at once


async def test_handlers_that_wait_block_no_other(operations: Recorded) -> None:
    async with served(operations) as kernel:
        slow = [kernel.send(Opcode.LOOKUP, b"slow\0") for _ in range(100)]
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0
        operations.gate.set()
        assert {(await kernel.any_reply())[0] for _ in slow} == set(slow)


OTHER = {"pid": os.getppid()}


async def test_a_program_with_too_many_requests_waits_and_others_do_not(
    operations: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "OF_A_PROCESS", 3)
    async with served(operations) as kernel:
        slow = [kernel.send(Opcode.LOOKUP, b"slow\0") for _ in range(3)]
        parked = [kernel.send(Opcode.GETATTR, bytes(16)) for _ in range(50)]
        for _ in range(2):  # in the order of the kernel's queue, so the ones before are taken
            assert (await kernel.ask(Opcode.GETATTR, bytes(16), **OTHER))[0] == 0
        # What others may wait for is done: a close frees what an open wants.
        assert (await kernel.ask(Opcode.WRITE, write_in(2, b"1")))[0] == 0
        assert await kernel.ask(Opcode.RELEASE, bytes(24)) == (errno.ENOSYS, b"")
        assert len(operations.calls) == 2 + 1
        operations.gate.set()
        answered = [(await kernel.any_reply())[0] for _ in (*slow, *parked)]
        assert sorted(answered) == [*slow, *parked]
        in_turn = [each for each in answered if each in parked]
        assert all(abs(in_turn.index(each) - parked.index(each)) < 3 for each in parked), "three at a time"
        # It has its whole share again.
        operations.gate = trio.Event()
        slow = [kernel.send(Opcode.LOOKUP, b"slow\0") for _ in range(2)]
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0
        operations.gate.set()
        assert {(await kernel.any_reply())[0] for _ in slow} == set(slow)


async def test_programs_that_cannot_be_told_apart_have_no_share(
    operations: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container of its own, the daemon sees no process of the others."""
    monkeypatch.setattr(waiting, "OF_A_PROCESS", 1)
    unseen = {"pid": 2**22 + 1}  # above the kernel's largest
    async with served(operations) as kernel:
        slow = [kernel.send(Opcode.LOOKUP, b"slow\0", **unseen) for _ in range(3)]
        assert (await kernel.ask(Opcode.GETATTR, bytes(16), **unseen))[0] == 0
        operations.gate.set()
        assert {(await kernel.any_reply())[0] for _ in slow} == set(slow)


async def test_a_signal_ends_a_request_that_has_not_begun(
    operations: Recorded, monkeypatch: pytest.MonkeyPatch, ending: list[bool]
) -> None:
    monkeypatch.setattr(waiting, "OF_A_PROCESS", 1)
    # Of three signals the first is harmless, the kernel does not tell of the second, and that is Ctrl-C.
    ending[:] = [False, True, False, True]
    async with served(operations) as kernel:
        first = kernel.send(Opcode.LOOKUP, b"slow first\0")
        parked = [kernel.send(Opcode.LOOKUP, b"slow\0") for _ in range(4)]
        kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(parked[1]))
        assert await kernel.reply(parked[1]) == (errno.EINTR, b"")
        # The last is fatal, so all threads end that wait.
        kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(parked[2]))
        answers = [await kernel.any_reply() for _ in range(4)]
        assert sorted(answers) == [(each, errno.EINTR, b"") for each in (first, parked[0], *parked[2:])]
    assert operations.begun == operations.cancelled == ["slow first"]


async def test_no_more_requests_are_read_than_may_wait(operations: Recorded) -> None:
    async with served(operations, max_requests=3) as kernel:
        slow = [kernel.send(Opcode.LOOKUP, b"slow\0") for _ in range(5)]
        quick = kernel.send(Opcode.GETATTR, bytes(16))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not kernel.has_reply()
        assert len(operations.begun) == 3
        operations.gate.set()
        assert {(await kernel.any_reply())[0] for _ in range(6)} == {*slow, quick}


async def test_no_more_bytes_are_read_than_may_wait(operations: Recorded) -> None:
    data, one = bytes(LARGE), IN_HEADER.size + WRITE_IN.size + LARGE
    async with served(operations, max_bytes=2**20 + 4096 + 2 * one) as kernel:
        # Beside two of them the largest request fits, beside three it does not.
        writes = [kernel.send(Opcode.WRITE, write_in(1, data)) for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked(0.01)
        behind = kernel.send(Opcode.GETATTR, bytes(16))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not kernel.has_reply()
        assert len(operations.begun) == 3
        operations.gate.set()
        assert {(await kernel.any_reply())[0] for _ in range(4)} == {*writes, behind}
    assert operations.calls[:2] == [("write", 0, data)] * 2


async def test_a_signal_ends_a_wait_also_while_nothing_is_read(
    operations: Recorded, ending: list[bool]
) -> None:
    async with served(operations, max_requests=1) as kernel:
        lookup = kernel.send(Opcode.LOOKUP, b"slow\0")
        # It stands in the queue, and the kernel's word of the signal behind it.
        unread = kernel.send(Opcode.GETATTR, bytes(16))
        assert await kernel.reply(lookup) == (errno.EINTR, b"")
        assert (await kernel.reply(unread))[0] == 0


async def test_other_tasks_get_their_turn_between_requests_that_are_all_there(operations: Recorded) -> None:
    operations.statfs = at_work  # type: ignore[method-assign]
    async with served(operations) as kernel:
        for _ in range(100):
            kernel.send(Opcode.STATFS)
        await kernel.any_reply()
        answered = 1
        while kernel.has_reply():
            await kernel.any_reply()
            answered += 1
        assert answered < 10


async def at_work(ctx: RequestContext) -> StatvfsData:
    """Takes two milliseconds of the loop."""
    time.sleep(0.002)  # noqa: ASYNC251  # work, not a wait
    return StatvfsData()


# ---- wrong lengths


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (Opcode.LOOKUP, b""),
        (Opcode.LOOKUP, b"\0"),
        (Opcode.LOOKUP, b"no-end"),
        (Opcode.RENAME2, RENAME2_IN.pack(5, 0, 0) + b"only-one\0"),
        (Opcode.SYMLINK, b"name\0target-without-end"),
        (Opcode.CREATE, b"short"),
        (Opcode.READ, read_in(1, 0, 1)[:-1]),
        (Opcode.WRITE, write_in(2, b"1234", size=5)),
        (Opcode.WRITE, write_in(2, b"1234", size=3)),
        (Opcode.SETATTR, bytes(SETATTR_IN.size - 1)),
        (Opcode.OPEN, b""),
    ],
)
async def test_malformed_requests_are_refused(operations: Recorded, opcode: Opcode, body: bytes) -> None:
    async with served(operations) as kernel:
        assert await kernel.ask(opcode, body) == (errno.EINVAL, b"")
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0


async def test_a_header_that_lies_about_the_length(operations: Recorded) -> None:
    async with served(operations) as kernel:
        unique = kernel.send(Opcode.LOOKUP, b"name\0", length=4000)
        assert await kernel.reply(unique) == (errno.EINVAL, b"")
        kernel.send_raw(b"\x01" * 17)  # not even a header: nothing that could be answered
        kernel.send(Opcode.BATCH_FORGET, BATCH_FORGET_IN.pack(2**32 - 1, 0) + bytes(16))
        kernel.send(Opcode.INTERRUPT, b"")
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0


@pytest.fixture(params=[False, True], ids=["own memory", "kept memory"])
def kept_memory(request: pytest.FixtureRequest) -> Iterator[tuple[int, int] | None]:
    """Descriptors of memory for the table and the requests, or None."""
    if not request.param:
        yield None
        return
    table, requests = make_memory("table"), make_memory("requests")
    yield table, requests
    os.close(table)
    os.close(requests)


async def test_random_requests_never_end_the_session(
    operations: Recorded, kept_memory: tuple[int, int] | None
) -> None:
    """The seed changes with every run; a failure shows it."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    operations.gate.set()
    async with served(operations, kept=kept_memory and KeptMount(*kept_memory)) as kernel:
        for _ in range(1500):
            body = chance.randbytes(chance.choice([0, 1, 8, 16, 40, 88, 100, chance.randrange(5000)]))
            if chance.random() < 0.5:
                body = body.replace(b"\0", b"a") + b"\0"
            opcode = chance.choice([*Opcode, chance.randrange(2**32)])
            length = None if chance.random() < 0.8 else chance.randrange(2**32)
            if chance.random() < 0.05:
                kernel.send_raw(chance.randbytes(chance.randrange(1, 200)))
            else:
                kernel.send(opcode, body, nodeid=chance.randrange(2**64), length=length)
            while kernel.has_reply():
                kernel.receive()
            await trio.lowlevel.checkpoint()
        unique = kernel.send(Opcode.LOOKUP, b"last\0")
        while (await kernel.any_reply(f"seed {seed}"))[0] != unique:
            pass
    assert kept_memory is None or KeptMount(*kept_memory, device_fd=0).take_left() == [], f"seed {seed}"


# ---- interrupts


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The answers to whether a signal ends the process, one a question; the last is repeated."""
    answers = [True]

    def is_ending(thread: int, *, by_hand: bool = False) -> bool:
        assert thread == os.getpid()
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(waiting, "is_ending", is_ending)
    return answers


@pytest.mark.parametrize(
    ("opcode", "body", "what"),
    [
        (Opcode.LOOKUP, b"slow\0", "slow"),
        (Opcode.READ, read_in(1, 0, 10), "read"),
        (Opcode.OPEN, OPEN_IN.pack(os.O_RDONLY, 0), "open"),
    ],
)
async def test_a_signal_ends_a_wait(
    operations: Recorded, ending: list[bool], opcode: Opcode, body: bytes, what: str
) -> None:
    async with served(operations) as kernel:
        unique = kernel.send(opcode, body)
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0  # by now the other one waits
        kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(unique))
        assert await kernel.reply(unique) == (errno.EINTR, b"")
        assert operations.cancelled == [what]
        # The task goes on to serve.
        operations.gate.set()
        assert (await kernel.ask(Opcode.LOOKUP, b"slow\0"))[0] == 0


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (Opcode.WRITE, write_in(1, b"1")),
        (Opcode.OPEN, OPEN_IN.pack(os.O_WRONLY | os.O_TRUNC, 0)),
    ],
)
async def test_what_changes_something_runs_to_its_end(
    operations: Recorded, ending: list[bool], opcode: Opcode, body: bytes
) -> None:
    async with served(operations) as kernel:
        unique = kernel.send(opcode, body)
        kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(unique))
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0
        operations.gate.set()
        assert (await kernel.reply(unique))[0] == 0
    assert operations.cancelled == []


async def test_an_interrupted_directory_tells_of_the_entries_that_it_counted(
    operations: Recorded, ending: list[bool]
) -> None:
    async with served(operations) as kernel:
        unique = kernel.send(Opcode.READDIRPLUS, read_in(1, 0, 4096))
        kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(unique))
        error, payload = await kernel.reply(unique)
    assert (error, listed(payload)) == (0, [(11, NAMES[0], 1)])


async def test_a_harmless_signal_is_no_end_but_a_later_one_is(
    operations: Recorded, ending: list[bool]
) -> None:
    ending[:] = [False, False, True]
    async with served(operations) as kernel:
        unique = kernel.send(Opcode.LOOKUP, b"slow\0")
        kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(unique))
        assert await kernel.reply(unique) == (errno.EINTR, b"")
    assert ending == [True]


async def test_an_interrupt_of_an_unknown_request_is_ignored(
    operations: Recorded, ending: list[bool]
) -> None:
    async with served(operations) as kernel:
        unique = kernel.send(Opcode.GETATTR, bytes(16))
        kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(unique))
        assert (await kernel.reply(unique))[0] == 0
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0


async def test_the_end_of_the_mount_answers_what_waits(operations: Recorded) -> None:
    """`serve` returns only when every handler has returned."""
    async with served(operations) as kernel:
        kernel.send(Opcode.LOOKUP, b"slow\0")
        assert (await kernel.ask(Opcode.GETATTR, bytes(16)))[0] == 0
        kernel.close()
        await trio.sleep(0.05)
        operations.gate.set()
    assert operations.cancelled == []


# ---- features


@pytest.mark.parametrize(
    ("missing", "writeback", "pages"),
    [
        ((), True, 256),
        (("MAX_PAGES", "INIT_EXT", "PARALLEL_DIROPS"), True, 32),  # an old kernel
        (("WRITEBACK_CACHE",), True, 256),
        ((), False, 256),
    ],
)
def test_features_are_what_both_know(missing: tuple[str, ...], writeback: bool, pages: int) -> None:  # noqa: FBT001
    operations = RequestHandlers()
    operations.enable_writeback_cache = writeback
    kernel = PlayedKernel()
    kernel.send_init(flags=EVERYTHING & ~sum(FLAGS[name] for name in missing))
    session = OwnSession(operations, kernel.theirs.detach())
    major, minor, readahead, flags, _, _, max_write, granularity, max_pages, *_ = kernel.read_init()
    expected = (
        FLAGS.keys()
        - set(missing)
        - {"EXPORT_SUPPORT", "PASSTHROUGH"}
        - (set() if writeback else {"WRITEBACK_CACHE"})
    )
    assert session.negotiated.features == expected
    assert flags == sum(FLAGS[name] for name in expected)
    page = os.sysconf("SC_PAGE_SIZE")
    assert (major, minor, readahead, max_write, max_pages) == (7, 31, 131072, pages * page, pages)
    assert granularity == 1
    session.close()
    kernel.close()


# What Linux 6.18 offers.
OFFERED = 0x5FD_73FFFFFB


@pytest.mark.parametrize(
    ("minor", "newest"),
    [
        pytest.param(31, 26, id="Linux 5.4"),
        pytest.param(34, 29, id="Linux 5.15"),
        pytest.param(37, 33, id="Linux 6.1"),
        pytest.param(39, 36, id="Linux 6.8"),
        pytest.param(45, 42, id="Linux 6.18"),
    ],
)
@pytest.mark.parametrize("is_read_only", [True, False])
def test_what_a_mount_has_on_each_kernel(minor: int, newest: int, is_read_only: bool) -> None:  # noqa: FBT001
    """The table in docs/decisions/0007. newest: the last bit of the flags of this minor version in <linux/fuse.h>."""
    operations = RequestHandlers()
    operations.enable_writeback_cache, operations.enable_passthrough = True, is_read_only
    kernel = PlayedKernel()
    offered = OFFERED & (1 << newest + 1) - 1
    kernel.send_init(minor=minor, flags=offered & EVERYTHING, more=offered >> 32)
    session = OwnSession(operations, kernel.theirs.detach())
    _, _, _, low, _, _, max_write, _, _, _, high, *_ = kernel.read_init()
    passes = minor >= 40 and is_read_only
    assert session.negotiated.features == {
        "ASYNC_READ", "ATOMIC_O_TRUNC", "BIG_WRITES", "AUTO_INVAL_DATA", "DO_READDIRPLUS", "PARALLEL_DIROPS",
        "MAX_PAGES", *(["INIT_EXT"] if minor >= 36 else []), "PASSTHROUGH" if passes else "WRITEBACK_CACHE",
    }  # fmt: skip
    assert (low | high << 32) & ~offered == 0
    assert max_write == 2**20
    session.close()
    kernel.close()


@pytest.mark.parametrize("is_wanted", [True, False])
@pytest.mark.parametrize("more", [0, FLAGS["PASSTHROUGH"] >> 32, EVERYTHING])
def test_passthrough_excludes_the_writeback_cache(is_wanted: bool, more: int) -> None:  # noqa: FBT001
    operations = RequestHandlers()
    operations.enable_writeback_cache, operations.enable_passthrough = True, is_wanted
    kernel = PlayedKernel()
    kernel.send_init(more=more)
    session = OwnSession(operations, kernel.theirs.detach())
    _, _, _, flags, _, _, _, _, _, _, high, depth, *_ = kernel.read_init()
    can_pass = is_wanted and more > 0
    assert session.can_pass_through is can_pass
    assert (high, depth) == ((FLAGS["PASSTHROUGH"] >> 32, 1) if can_pass else (0, 0))
    assert bool(flags & FLAGS["WRITEBACK_CACHE"]) is not can_pass
    session.close()
    kernel.close()


async def test_an_open_names_the_file_that_the_kernel_reads() -> None:
    class Passed(Recorded):
        async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
            return FileInfo(fh=3, keep_cache=True, backing_id=inode)

    async with served(Passed()) as kernel:
        _, payload = await kernel.ask(Opcode.OPEN, OPEN_IN.pack(0, 0), nodeid=12)
        assert OPEN_OUT.unpack(payload) == (3, FOPEN_PASSTHROUGH, 12)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ((7, 30), "FUSE 7.30; 7.31 .Linux 5.4. or"),
        ((6, 99), "FUSE 6.99"),
        ((8, 0), "FUSE 8.0"),
        ((7, 31), ""),
    ],
)
def test_kernels_that_are_too_old(version: tuple[int, int], said: str) -> None:
    kernel = PlayedKernel()
    kernel.send_init(major=version[0], minor=version[1])
    if said:
        with pytest.raises(MountRefused, match=said):
            OwnSession(RequestHandlers(), kernel.theirs.fileno())
        assert kernel.receive()[1] == errno.EPROTO
    else:
        OwnSession(RequestHandlers(), os.dup(kernel.theirs.fileno())).close()
    kernel.theirs.close()
    kernel.close()


@pytest.mark.parametrize("message", [b"short", bytes(60)])
def test_a_first_request_that_is_no_init(message: bytes) -> None:
    kernel = PlayedKernel()
    kernel.send_raw(message)
    with pytest.raises(MountRefused):
        OwnSession(RequestHandlers(), kernel.theirs.fileno())
    kernel.theirs.close()
    kernel.close()


# ---- which signals end a process


@pytest.mark.parametrize(
    ("number", "is_caught", "by_hand", "expected"),
    [
        (signal.SIGKILL, False, False, True),
        (signal.SIGTERM, False, False, True),
        (signal.SIGTERM, True, True, False),  # a handler saves a checkpoint: its reads must not fail
        (signal.SIGINT, True, True, True),
        (signal.SIGINT, True, False, False),
        (signal.SIGCHLD, False, True, False),
        (signal.SIGURG, True, True, False),
    ],
)
def test_signals_that_end_a_process(number: int, is_caught: bool, by_hand: bool, expected: bool) -> None:  # noqa: FBT001
    bit = 1 << (number - 1)
    for pending in ("SigPnd", "ShdPnd"):
        masks = {
            "SigPnd": 0,
            "ShdPnd": 0,
            "SigBlk": 0,
            "SigIgn": 0,
            "SigCgt": bit if is_caught else 0,
            pending: bit,
        }
        assert status_shows_end(masks, by_hand=by_hand) == expected
        # Blocked or ignored: the process goes on.
        for mask in ("SigBlk", "SigIgn"):
            assert not status_shows_end({**masks, mask: bit, "SigCgt": 0}, by_hand=False)


def status_shows_end(masks: dict[str, int], *, by_hand: bool) -> bool:
    rows = "".join(f"{name}:\t{mask:016x}\n" for name, mask in masks.items())
    return shows_end(f"Name:\tpython\n{rows}", by_hand=by_hand)


def test_a_process_without_signals_or_none_at_all_goes_on() -> None:
    assert not is_ending(os.getpid())
    assert not is_ending(0)
