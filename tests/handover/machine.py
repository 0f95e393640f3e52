"""Runs one short history on the real handlers and engine, as a kernel asks them, over two daemons.

The first daemon is killed at one moment: before or after one of its journal commits, requests to the bucket or file
operations, or between two calls. The second one has the journal, the staging files and the table in kept memory, each
as it was then. It carries out the request that was not answered, and the history goes on.

A POSIX tree of names, files and descriptors says what a program must see, and what the bucket must hold in the end:
one node, one client, so there is only one right answer.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio
from trio.testing import MockClock

from fusecache.config.option_groups import ORDER_LAST, TEMP_NAMES
from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.tree import Ownership
from fusecache.engine.options import EngineOptions
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.fs.control import ControlDirectory
from fusecache.fs.hint_files import HintFiles, OwnedHints
from fusecache.fs.kept_files import KeptFiles
from fusecache.fs.kernel import KernelCaches
from fusecache.fs.operations import Operations
from fusecache.fuse.kept_mount import KeptTable
from fusecache.fuse.kept_requests import make_memory
from fusecache.fuse.values import ROOT_INODE, FUSEError, RequestContext
from fusecache.model.objects import MIB
from tests.history.bucket import WatchedBucket
from tests.history.crashes import Crash, Moment, Reaper
from tests.history.runs import leaves_of, repeatable, small_scale
from tests.support.inline_offload import InlineOffload

# One call of a program: a word and its arguments.
Step = tuple[Any, ...]
CALL_SECONDS = 300.0
SETTLE_SECONDS = 1.0


_LOCKS = shutil.ignore_patterns("lock.mdb")


class Wrong(AssertionError):
    """A program or the bucket saw something else than the tree of the model."""


@dataclass(eq=False)
class File:
    """A file of the model. links: how many names it has."""

    data: bytes = b""
    links: int = 1


@dataclass(eq=False)
class Descriptor:
    """An open file: of the model, and the numbers by which the kernel knows it."""

    file: File
    inode: int
    handle: int


class _DyingReaper(Reaper):
    """Also takes a picture of the table in kept memory."""

    table_fd = -1
    table = b""

    def die(self, label: str) -> None:
        self.table = os.pread(self.table_fd, os.fstat(self.table_fd).st_size, 0)
        try:
            super().die(label)
        finally:  # without a reboot the cache is as it was
            shutil.copytree(self._place / "cache", self._next_place / "cache", ignore=_LOCKS)


@dataclass
class History:
    """One history. kill_before: a step before which the first daemon dies. counts: of moments in the first life.

    dies_again: the second daemon dies as soon as it has taken over. seed: of the order of tasks.
    """

    steps: tuple[Step, ...]
    moment: Moment | None = None
    kill_before: int = -1
    dies_again: bool = False
    seed: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree: dict[str, File] = {}
        self.folders: set[str] = set()
        self.slots: dict[int, Descriptor] = {}
        self._is_looking = True
        self._next = 0  # index of the step to begin
        # The request under way, and what its answer means.
        self._pending: (
            tuple[str, tuple[Any, ...], Callable[[Any], None], Callable[[], Awaitable[Any]]] | None
        ) = None
        # What is left of the step under way.
        self._rest: Iterator[Any] = iter(())
        self._writes = 0
        self._operations: Operations | None = None
        self._reaper = Reaper()
        self._bucket = WatchedBucket(self._reaper)

    def run(self) -> None:
        """Run it over up to three daemons. Raises Wrong."""
        self._reaper = reaper = _DyingReaper()
        repeatable(self.seed)
        self._bucket = bucket = WatchedBucket(reaper)
        memory = Path("/dev/shm")
        with (
            tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name,
            reaper.watching(),
            small_scale(),
        ):
            for life in range(3 if self.dies_again else 2):
                place, next_place = Path(name) / f"{life}", Path(name) / f"{life + 1}"
                reaper.begin(self.moment if life == 0 else None, place, next_place)
                repeatable(self.seed)
                with _memory() as fd:
                    os.pwrite(fd, reaper.table, 0)
                    reaper.table_fd = fd
                    try:
                        self._live(bucket, place, fd, life)
                    except BaseException as exc:
                        if not reaper.is_dead or any(isinstance(leaf, Wrong) for leaf in leaves_of(exc)):
                            raise
                    if life == 0:
                        self.counts = dict(reaper.counts)
                    if not reaper.is_dead:
                        return
            raise AssertionError("the last daemon died too")

    def _live(self, bucket: WatchedBucket, place: Path, table_fd: int, life: int) -> None:
        left = self._pending if life else None
        is_resumed = os.fstat(table_fd).st_size > 0
        unanswered = []
        if left is not None:
            message = bytearray(40)
            message[:4] = (40).to_bytes(4, "little")
            message[8:16] = self._unique.to_bytes(8, "little")
            unanswered = [SimpleNamespace(buffer=SimpleNamespace(view=memoryview(message)), size=40)]
        kept: Any = SimpleNamespace(table=KeptTable(table_fd), is_resumed=is_resumed, unanswered=unanswered)

        async def main() -> None:
            files = KeptFiles(kept)
            options = EngineOptions(
                directory=place,
                prefix="",
                ownership=Ownership(0, 0, 0o022),
                cache_bytes=1 << 30,
                buffer_bytes=24 * MIB,
                temp_names=TEMP_NAMES,
                order_last=ORDER_LAST,
                predecessor=files.predecessor,
                settle_seconds=SETTLE_SECONDS,
            )
            filesystem = FileSystem(bucket, InlineOffload(), options, Supervisor(), KernelCaches(files))  # type: ignore[arg-type]
            files.settle(filesystem.journal, filesystem.tree.began_ns)
            hints = OwnedHints(filesystem.hints, frozenset({0}))
            control = ControlDirectory(
                lambda: Path("/nowhere"), dict, HintFiles(hints, 0, 0, files.start), 0, 0, files.start
            )

            def fail(call: str, error: Exception, path: str) -> None:
                raise error

            self._operations = Operations(filesystem, control, fail, files, read_only=False)
            async with filesystem.running():
                self._operations.adopt()
                if self.dies_again and life == 1:
                    self._reaper.die("as soon as it has taken over")
                with trio.fail_after(10 * CALL_SECONDS):
                    await self._go_on(filesystem, bucket, life)

        trio.run(main, clock=MockClock(autojump_threshold=0))

    # ---- steps

    async def _go_on(self, filesystem: FileSystem, bucket: WatchedBucket, life: int) -> None:
        if life and self._pending is not None:
            name, arguments, done, request = self._pending
            try:
                done(await self._call(name, arguments, is_redone=True))
            except FUSEError:  # ESTALE: the kernel looks the name up again
                name, arguments, done = await request()
                done(await self._call(name, arguments))
            self._pending = None
            await self._finish_step()
        while self._next < len(self.steps):
            if life == 0 and self._next == self.kill_before:
                await trio.lowlevel.checkpoint()
                self._reaper.die("between two calls")
            word, *arguments = self.steps[self._next]
            self._next += 1
            self._rest = getattr(self, f"_do_{word}")(*arguments)
            await self._finish_step()
            await self._look()
        self._is_looking = True
        await self._look()
        self._rest = self._close_all()
        await self._finish_step()
        await self._look()
        ended = await filesystem.wait_durable("", CALL_SECONDS)
        if ended.result != "durable":
            raise Wrong(f"sync: {ended}")
        await trio.sleep(30)
        await self._look()
        shown = {key: value for key, value in bucket.shows().items() if not key.endswith("/")}
        wanted = {path: file.data for path, file in self.tree.items()}
        if shown != wanted:
            raise Wrong(f"the bucket holds {shown}, not {wanted}")
        if left := list((filesystem.options.directory / "orphans").iterdir()):
            raise Wrong(f"quarantined: {[each.read_bytes() for each in left]}")

    async def _finish_step(self) -> None:
        for request in self._rest:
            if isinstance(request, float):
                await trio.sleep(request)
                continue
            name, arguments, done = await request()
            self._pending = (name, arguments, done, request)
            answer = await self._call(name, arguments)
            if self._reaper.is_dead:  # before this answer, in another task
                raise Crash("the answer was not sent")
            done(answer)
            self._pending = None

    _unique = 1

    async def _call(self, name: str, arguments: tuple[Any, ...], *, is_redone: bool = False) -> Any:
        if not is_redone:
            self._unique += 1
        context = RequestContext(0, 0, 0, 0o022, self._unique, is_redone)
        assert self._operations is not None
        handler = getattr(self._operations, name)
        needs_context = name not in {"read", "write", "flush", "release", "fsync"}
        try:
            return await (handler(*arguments, context) if needs_context else handler(*arguments))
        except FUSEError as exc:
            if exc.errno == errno.ESTALE and name == "open":
                raise
            raise Wrong(f"{name}{arguments} failed with {errno.errorcode[exc.errno]}") from exc

    async def _inode(self, path: str) -> int:
        """Return the inode of a path, as the kernel finds it; 0: there is none."""
        inode = ROOT_INODE
        for part in filter(None, path.split("/")):
            found = await self._call("lookup", (inode, part.encode()))
            inode = found.st_ino
            if not inode:
                return 0
        return inode

    async def _look(self) -> None:
        """Compare all names and all open files with the model."""
        if not self._is_looking:
            return
        for path in ("a", "b", "x/a", "y/a"):
            inode = await self._inode(path)
            file = self.tree.get(path)
            if bool(inode) != (file is not None):
                raise Wrong(f"{path} is {'there' if inode else 'missing'}")
            if file is not None:
                info = await self._call("open", (inode, os.O_RDONLY))
                data = bytes(await self._call("read", (info.fh, 0, 1 << 16)))
                await self._call("release", (info.fh,))
                if data != file.data:
                    raise Wrong(f"{path} shows {data!r}, not {file.data!r}")
        for slot, opened in self.slots.items():
            data = bytes(await self._call("read", (opened.handle, 0, 1 << 16)))
            if data != opened.file.data:
                raise Wrong(f"descriptor {slot} shows {data!r}, not {opened.file.data!r}")

    # ---- calls of programs. Each yields the requests that the kernel sends, in order, and pauses in seconds.

    def _request(
        self,
        name: str,
        arguments: Callable[[], Awaitable[tuple[Any, ...]]],
        done: Callable[[Any], None] = lambda _: None,
    ) -> Callable[[], Awaitable[Any]]:
        async def prepared() -> Any:
            return name, await arguments(), done

        return prepared

    def _place(self, path: str) -> Callable[[], Awaitable[tuple[int, bytes]]]:
        async def found() -> tuple[int, bytes]:
            folder, _, name = path.rpartition("/")
            return await self._inode(folder), name.encode()

        return found

    def _do_open(self, slot: int, path: str, mode: str) -> Iterator[Any]:
        """mode: `r`, `r+`, or `w`."""
        if slot in self.slots or path in self.folders or not self._has_parent(path):
            return
        file = self.tree.get(path)
        flags = os.O_RDONLY if mode == "r" else os.O_RDWR

        def opened(file: File, inode: int, info: Any) -> None:
            self.slots[slot] = Descriptor(file, inode, info.fh)

        if file is None:
            if mode != "w":
                return

            async def make() -> tuple[Any, ...]:
                return (*(await self._place(path)()), 0o644, os.O_RDWR)

            def made(answer: Any) -> None:
                info, entry = answer
                self.tree[path] = File()
                opened(self.tree[path], entry.st_ino, info)

            yield self._request("create", make, made)
            return
        there = file

        async def known() -> tuple[Any, ...]:
            nonlocal inode
            inode = await self._inode(path)
            return inode, flags | (os.O_TRUNC if mode == "w" else 0)

        inode = 0

        def done(info: Any) -> None:
            opened(there, inode, info)
            if mode == "w":
                there.data = b""

        yield self._request("open", known, done)

    def _do_write(self, slot: int) -> Iterator[Any]:
        """Overwrite the first bytes."""
        opened = self.slots.get(slot)
        if opened is None:
            return
        self._writes += 1
        data = b"<%d>" % self._writes

        async def arguments() -> tuple[Any, ...]:
            return opened.handle, 0, data

        def done(_: Any) -> None:
            opened.file.data = data + opened.file.data[len(data) :]

        yield self._request("write", arguments, done)

    def _close(self, slot: int) -> Iterator[Any]:
        opened = self.slots[slot]

        async def handle() -> tuple[Any, ...]:
            return (opened.handle,)

        def closed(_: Any) -> None:
            del self.slots[slot]

        yield self._request("flush", handle)
        yield self._request("release", handle, closed)

    def _close_all(self) -> Iterator[Any]:
        for slot in list(self.slots):
            yield from self._close(slot)

    def _do_close(self, slot: int) -> Iterator[Any]:
        if slot in self.slots:
            yield from self._close(slot)

    def _do_look_away(self) -> Iterator[Any]:
        """Compare nothing until the last step: what is read comes into the cache."""
        self._is_looking = False
        yield from ()

    def _do_save(self, path: str) -> Iterator[Any]:
        """Write a whole file."""
        slot = 99
        yield from self._do_open(slot, path, "w")
        if slot in self.slots:
            yield from self._do_write(slot)
            yield from self._do_close(slot)

    def _do_unlink(self, path: str) -> Iterator[Any]:
        if path in self.tree:

            def done(_: Any) -> None:
                self.tree.pop(path).links -= 1

            yield self._request("unlink", self._place(path), done)

    def _do_rename(self, old: str, new: str) -> Iterator[Any]:
        if old not in self.tree or new in self.folders or not self._has_parent(new) or old == new:
            return

        async def places() -> tuple[Any, ...]:
            return (*(await self._place(old)()), *(await self._place(new)()), 0)

        def done(_: Any) -> None:
            self.tree[new] = self.tree.pop(old)

        yield self._request("rename", places, done)

    def _do_mkdir(self, path: str) -> Iterator[Any]:
        if path in self.folders or path in self.tree:
            return

        async def place() -> tuple[Any, ...]:
            return (*(await self._place(path)()), 0o755)

        yield self._request("mkdir", place, lambda _: self.folders.add(path))

    def _do_rename_folder(self, old: str, new: str) -> Iterator[Any]:
        if old not in self.folders or new in self.folders or new in self.tree:
            return

        async def places() -> tuple[Any, ...]:
            return (*(await self._place(old)()), *(await self._place(new)()), 0)

        def done(_: Any) -> None:
            self.folders.discard(old)
            self.folders.add(new)
            for path in [each for each in self.tree if each.startswith(f"{old}/")]:
                self.tree[new + path[len(old) :]] = self.tree.pop(path)

        yield self._request("rename", places, done)

    def _do_refuse(self, *, refuses: bool = True) -> Iterator[Any]:
        """From now on the bucket refuses what it is sent, for good."""
        self._bucket.refuses = refuses
        yield 0.01

    def _do_accept(self) -> Iterator[Any]:
        return self._do_refuse(refuses=False)

    def _do_wait(self, seconds: float) -> Iterator[Any]:
        yield seconds

    def _has_parent(self, path: str) -> bool:
        folder = path.rpartition("/")[0]
        return not folder or folder in self.folders


@contextmanager
def _memory() -> Iterator[int]:
    fd = make_memory("table")
    try:
        yield fd
    finally:
        with suppress(OSError):
            os.close(fd)
