"""How requests, the session and its notifications end: each request gets one answer."""

import errno
import os
import random
import threading
from collections.abc import Callable  # noqa: TC003

import pytest
import trio

from fusecache.fuse import waiting
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.notifier import Notifier
from fusecache.fuse.protocol import INTERRUPT_IN, OPEN_IN, READ_IN, WRITE_IN, Opcode
from fusecache.fuse.session import OwnSession
from fusecache.fuse.values import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext
from tests.unit.fuse.kernel import PlayedKernel, served
from tests.unit.fuse.test_session import listed


class Slow(RequestHandlers):
    """Its handlers wait for `gate`, in the way that a name says."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.unmounted = trio.Event()

    def on_unmounted(self) -> None:
        self.unmounted.set()

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name == b"nursery":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.gate.wait)
                await self.gate.wait()
        if name == b"failing nursery":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.gate.wait)
                try:
                    await self.gate.wait()
                finally:
                    raise RuntimeError("while it was cancelled")
        if name == b"slow":
            await self.gate.wait()
        entry = EntryAttributes()
        entry.st_ino = 5
        return entry

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        await self.gate.wait()
        return FileInfo(fh=1)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        if fh:
            await self.gate.wait()
        return bytes(size)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        await self.gate.wait()
        return len(buf)

    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        if start_id == 0:
            entry = EntryAttributes()
            entry.st_ino = 11
            token.add(b"one", entry, 1)
        if fh:
            await self.gate.wait()
        raise FUSEError(errno.EIO)


def read_in(fh: int, offset: int = 0) -> bytes:
    return READ_IN.pack(fh, offset, 4096, 0, 0, 0, 0)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every signal ends its process."""
    monkeypatch.setattr(waiting, "is_ending", lambda thread, *, by_hand=False: True)


@pytest.mark.parametrize("name", [b"slow", b"nursery", b"failing nursery"])
async def test_a_signal_ends_a_wait_in_a_nursery_too(killed: None, name: bytes) -> None:
    operations = Slow()
    async with served(operations) as kernel:
        unique = kernel.send(Opcode.LOOKUP, name + b"\0")
        kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(unique))
        assert await kernel.reply(unique) == (errno.EINTR, b"")
        assert (await kernel.ask(Opcode.LOOKUP, b"quick\0"))[0] == 0


async def test_a_directory_that_fails_tells_of_the_entries_that_it_counted() -> None:
    """Each of them holds a reference, which the kernel must know of to give it back."""
    async with served(Slow()) as kernel:
        error, payload = await kernel.ask(Opcode.READDIRPLUS, read_in(0))
        assert (error, listed(payload)) == (0, [(11, b"one", 1)])
        assert await kernel.ask(Opcode.READDIRPLUS, read_in(0, 1)) == (errno.EIO, b"")


async def test_the_end_of_serve_answers_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without an answer could keep a page locked for ever, and with it who wants to drop that page."""
    kernel = PlayedKernel()
    kernel.send_init()
    monkeypatch.setattr(waiting, "OF_A_PROCESS", 1)
    session = OwnSession(Slow(), kernel.theirs.detach())
    kernel.read_init()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.serve)
        bodies = [(Opcode.READ, read_in(1))] * 3 + [(Opcode.WRITE, WRITE_IN.pack(1, 0, 1, 0, 0, 0, 0) + b"1")]
        unanswered = {kernel.send(opcode, body) for opcode, body in bodies}
        assert (await kernel.ask(Opcode.LOOKUP, b"quick\0", pid=os.getppid()))[0] == 0
        nursery.cancel_scope.cancel()
    answers = [kernel.receive() for _ in unanswered]
    assert {(unique, error) for unique, error, _ in answers} == {
        (each, errno.ENOTCONN) for each in unanswered
    }
    session.close()
    kernel.close()


async def test_the_file_system_hears_of_the_mounts_end_while_a_handler_still_waits() -> None:
    operations = Slow()
    async with served(operations) as kernel:
        kernel.send(Opcode.WRITE, WRITE_IN.pack(1, 0, 1, 0, 0, 0, 0) + b"1")
        assert (await kernel.ask(Opcode.LOOKUP, b"quick\0"))[0] == 0
        assert not operations.unmounted.is_set()
        kernel.close()
        with trio.fail_after(30):
            await operations.unmounted.wait()
        operations.gate.set()


async def test_the_file_system_hears_that_the_mount_is_no_longer_served() -> None:
    operations, kernel = Slow(), PlayedKernel()
    kernel.send_init()
    session = OwnSession(operations, kernel.theirs.detach())
    kernel.read_init()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.serve)
        assert (await kernel.ask(Opcode.LOOKUP, b"quick\0"))[0] == 0
        nursery.cancel_scope.cancel()
    session.close()
    kernel.close()
    assert operations.unmounted.is_set()


@pytest.mark.parametrize("_", range(10))  # trio takes tasks of one turn in a random order
async def test_nothing_is_served_after_an_answer_that_the_mount_is_gone(_: int) -> None:
    """A program that is told so ends, and its files must not look as if it had closed them."""

    class Stopping(Slow):
        async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
            served_names.append(name)
            nursery.cancel_scope.cancel()
            try:
                return await super().lookup(parent_inode, name, ctx)
            finally:
                kernel.send(Opcode.LOOKUP, b"after it\0")

    served_names: list[bytes] = []
    kernel = PlayedKernel()
    kernel.send_init()
    session = OwnSession(Stopping(), kernel.theirs.detach())
    kernel.read_init()
    last = kernel.send(Opcode.LOOKUP, b"slow\0")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.serve)
    answer, is_more = kernel.receive(), kernel.has_reply()
    session.close()
    kernel.close()
    assert answer == (last, errno.ENOTCONN, b"")
    assert (served_names, is_more) == ([b"slow"], False)


@pytest.mark.parametrize("of_a_process", [waiting.OF_A_PROCESS, 2])
async def test_every_request_is_answered_once(monkeypatch: pytest.MonkeyPatch, of_a_process: int) -> None:
    """Requests that wait, signals and errors at random. The seed changes with every run; a failure shows it."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    monkeypatch.setattr(waiting, "is_ending", lambda thread, *, by_hand=False: chance.random() < 0.5)
    monkeypatch.setattr(waiting, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(waiting, "OF_A_PROCESS", of_a_process)
    operations = Slow()
    makers: list[Callable[[], tuple[Opcode, bytes]]] = [
        lambda: (
            Opcode.LOOKUP,
            chance.choice([b"slow\0", b"nursery\0", b"failing nursery\0", b"quick\0", b"?"]),
        ),
        lambda: (Opcode.OPEN, OPEN_IN.pack(chance.choice([os.O_RDONLY, os.O_WRONLY | os.O_TRUNC]), 0)),
        lambda: (Opcode.READ, read_in(chance.randrange(2))),
        lambda: (Opcode.WRITE, WRITE_IN.pack(1, 0, 3, 0, 0, 0, 0) + b"abc"[: chance.choice([2, 3, 3])]),
        lambda: (Opcode.READDIRPLUS, read_in(chance.randrange(2), chance.randrange(2))),
        lambda: (Opcode.STATFS, b""),
    ]
    answered: list[int] = []
    async with served(operations) as kernel:
        sent: list[int] = []
        for _ in range(1500):
            sent.append(kernel.send(*chance.choice(makers)()))
            if chance.random() < 0.5:
                kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(chance.choice(sent[-20:])))
            if chance.random() < 0.02:
                operations.gate.set()
                operations.gate = trio.Event()
            while kernel.has_reply():
                answered.append(kernel.receive()[0])
            await trio.lowlevel.checkpoint()
        operations.gate.set()
        while len(answered) < len(sent):
            answered.append((await kernel.any_reply(f"seed {seed}"))[0])
        assert not kernel.has_reply(), f"seed {seed}"
    assert sorted(answered) == sent, f"seed {seed}"


# ---- notifications


def test_a_blocked_notification_keeps_its_descriptor() -> None:
    """Else its number would become another file's, and the next notification would be written into that."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writing, True)
    notifier = Notifier(writing)
    thread = threading.Thread(target=notifier.invalidate_inode, args=(1,))
    thread.start()
    while not notifier._calls:
        pass
    number = notifier._fd
    notifier.close()
    assert os.path.sameopenfile(number, writing)
    with pytest.raises(OSError, match="not connected"):
        notifier.invalidate_inode(2)
    notifier.invalidate_entry(1, b"late")  # no error: the mount's end forgets every name
    os.close(writing)
    while thread.is_alive():
        os.read(reading, 2**20)
    thread.join()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    os.close(reading)
