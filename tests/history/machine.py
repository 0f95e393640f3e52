"""Carries a program's steps out, on a node and on the model beside it, and holds one against the other."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from fusecache.engine.namespace.nodes import FileHandle
from fusecache.model.errors import ObjectChanged
from fusecache.model.records import PosixAttributes
from tests.history.bucket import WatchedBucket
from tests.history.checkpoints import Checkpoints
from tests.history.past import NOTHING, Cause, Change, Link, Past, Value, Values
from tests.history.programs import Step
from tests.history.rules import Violation
from tests.support.node import User

T = TypeVar("T")
# Virtual seconds that any call may take, and a drain: a file under a temporary name is published after 60.
CALL_SECONDS = 300.0
DRAIN_SECONDS = 3000.0
# A file held open is published as a snapshot after 60 s at the earliest; a little less, for clocks.
SNAPSHOT_SECONDS = 55.0
# Of a node whose threads are slow, a call may take so long.
_SLOW_CALL_SECONDS = 35.0


@dataclass(eq=False)
class Inode:
    """A file of the model. data: as programs see it. path: None once it was unlinked.

    is_dirty: changed since the last FLUSH. is_flushed: a FLUSH promised it, and a writer is left. is_closed: its name
    holds a closed version of it. before: what its name was promised to hold before the FLUSH. seen: every content
    since `held_since`, when it was last known to be closed.
    """

    path: str | None
    data: bytes = b""
    writers: int = 0
    is_dirty: bool = False
    is_flushed: bool = False
    is_closed: bool = False
    has_place: bool = False
    before: Values = NOTHING
    flushed_at: float = 0.0
    held_since: float = float("inf")
    seen: set[Value] = field(default_factory=set)


@dataclass(eq=False)
class Handle:
    """An open file: the node's and the model's."""

    there: FileHandle
    inode: Inode


class Machine:
    """The model of a tree, over all lives of its node."""

    def __init__(
        self, bucket: WatchedBucket, past: Past, checkpoints: Checkpoints, *, is_slow: bool = False
    ) -> None:
        self.bucket = bucket
        self.past = past
        self._checkpoints = checkpoints
        self._is_slow = is_slow
        self.names: dict[str, Inode | Link] = {}
        self.folders: set[str] = set()
        self.slots: dict[int, Handle] = {}
        self.done: set[str] = set()
        self._count = 0
        self._user: User | None = None

    @property
    def user(self) -> User:
        """The node of this life."""
        assert self._user is not None
        return self._user

    async def start(self, user: User) -> None:
        """A node was started on what the one before it left: it must show what was promised, and all of it."""
        self._user = user
        self.slots.clear()
        tree = await self._call(user.tree())
        folders = {path for path, data in tree.items() if data is None}
        shown = {path: _value(data) for path, data in tree.items() if data is not None}
        for promise in list(self.past.pending):
            kept = all(shown.get(path) in after for path, _, after in promise.files) and all(
                (path in folders) == is_there for path, is_there in promise.folders
            )
            (self.past.keep if kept else self.past.undo)(promise)
        self._compare("after a restart", shown, self.past.tree())
        if folders != self.past.tree_folders():
            raise Violation(f"after a restart: directories {folders}, promised {self.past.tree_folders()}")
        self.folders = folders
        self.names = {}
        for path, value in shown.items():
            self.past.settle(path, value)
            self.names[path] = (
                Inode(path, value, is_closed=True) if isinstance(value, bytes) else value  # type: ignore[assignment]
            )
        for path in self.past.tree():
            if path not in shown:
                self.past.settle(path, None)

    async def take(self, step: Step) -> None:
        """Carry out one step, if it can be done as things are."""
        word, *arguments = step
        await getattr(self, f"do_{word}")(*arguments)
        self._note_snapshots()

    async def finish(self) -> None:
        """Close all, drain, and look: the bucket holds the tree of what was closed, and nothing else."""
        for slot in list(self.slots):
            await self.do_close(slot)
        await self.do_drain()
        await self.do_look()
        await trio.sleep(30)  # aborts, and the removal of what is not needed any more
        left = self.bucket.uploads_left()
        if left:
            raise Violation(f"multipart uploads are left behind: {left}")
        journal = self.user.fs.journal.journal
        queue = [row.key for row in journal.files() if row.state.value != "orphan"]
        if queue or journal.operations():
            raise Violation(f"the journal still speaks of {queue} {journal.operations()}")
        staging = self.user.fs.options.directory / "staging"
        if files := [path.name for path in staging.iterdir()]:
            raise Violation(f"staging files are left behind: {files}")

    # ---- names

    async def do_mkdir(self, path: str) -> None:
        if path in self.folders or path in self.names or not self._has_parent(path):
            return
        async with self._held(path):
            await self._promise({}, Cause.MKDIR, self.user.mkdir(path), folders={path: True})
        self.folders.add(path)

    async def do_rmdir(self, path: str) -> None:
        if path not in self.folders or self._below(path):
            return
        async with self._held(path):
            await self._promise({}, Cause.RMDIR, self.user.rmdir(path), folders={path: False})
        self.folders.discard(path)

    async def do_symlink(self, path: str, target: str) -> None:
        if path in self.names or path in self.folders or not self._has_parent(path):
            return
        link = Link(target)
        change = Change(frozenset({link}), Cause.SYMLINK)
        async with self._held(path):
            await self._promise({path: change}, Cause.SYMLINK, self.user.symlink(target, path))
        self.names[path] = link

    async def do_unlink(self, path: str) -> None:
        if path not in self.names:
            return
        async with self._held(path):
            await self._promise({path: Change(NOTHING, Cause.UNLINK)}, Cause.UNLINK, self.user.unlink(path))
        self._lose_name(path)

    async def do_rename(self, old: str, new: str) -> None:
        if old not in self.names or new in self.folders or old == new or not self._has_parent(new):
            return
        changes = self._moved(old, new, Cause.RENAME)
        async with self._held(old, new):
            await self._promise(changes, Cause.RENAME, self._rename(old, new))
        if new in self.names:
            self._lose_name(new)
        self._move_name(old, new)

    async def do_rename_folder(self, old: str, new: str) -> None:
        is_free = new not in self.names and (new not in self.folders or not self._below(new))
        if (
            old not in self.folders
            or not is_free
            or not self._has_parent(new)
            or f"{new}/".startswith(f"{old}/")
        ):
            return
        below = self._below(old)
        changes: dict[str, Change] = {}
        folders = {old: False, new: True}
        for path in below:
            moved = new + path[len(old) :]
            if path in self.folders:
                folders |= {path: False, moved: True}
            else:
                changes |= self._moved(path, moved, Cause.FOLDER_RENAME)
        async with self._held(old, new):
            await self._promise(changes, Cause.FOLDER_RENAME, self._rename(old, new), folders=folders)
        for path in [old, *below]:
            moved = new + path[len(old) :]
            if path in self.folders:
                self.folders.discard(path)
                self.folders.add(moved)
            else:
                self._move_name(path, moved)

    # ---- content

    async def do_open(self, slot: int, path: str, mode: str) -> None:
        if slot in self.slots or not self._can_be_file(path):
            return
        is_new = path not in self.names
        inode = self.names.get(path) or Inode(path)
        assert isinstance(inode, Inode)
        truncates = mode == "truncate" and not is_new
        changes = self._touched(inode) if truncates else {}
        async with self._held(path):
            handle = await self._promise(changes, Cause.TAKEN_BACK, self.user.open(path, truncate=truncates))
        self.slots[slot] = Handle(handle, inode)
        self.names[path] = inode
        inode.writers += 1
        if is_new or truncates:
            self._change(inode, b"")

    async def do_write(self, slot: int, where: str, size: int) -> None:
        handle = self.slots.get(slot)
        if handle is None or size == 0:
            return
        inode, data = handle.inode, self._bytes(size)
        offset = {
            "start": 0,
            "middle": len(inode.data) // 2,
            "end": len(inode.data),
            "hole": len(inode.data) + 3,
        }[where]
        after = inode.data.ljust(offset, b"\0")[:offset] + data + inode.data[offset + size :]
        write = self.user.fs.file_io.write(handle.there, offset, data)
        await self._promise(self._touched(inode), Cause.TAKEN_BACK, write)
        self._change(inode, after)

    async def do_truncate(self, path: str, size: int) -> None:
        inode = self.names.get(path)
        if not isinstance(inode, Inode):
            return
        node = await self._call(self.user.fs.resolve(path))
        after = inode.data[:size].ljust(size, b"\0")
        truncate = self.user.fs.file_io.truncate(node, size)
        if inode.writers:
            await self._promise(self._touched(inode), Cause.TAKEN_BACK, truncate)
            self._change(inode, after)
            return
        await self._promise({path: Change(frozenset({after}), Cause.CLOSE)}, Cause.CLOSE, truncate)
        inode.data = after
        inode.is_closed = True

    async def do_flush(self, slot: int) -> None:
        """A child that inherited the descriptor closes it. While a writer is left, that promises nothing yet."""
        handle = self.slots.get(slot)
        if handle is not None:
            await self._flush(handle)
            self._widen(handle.inode)

    async def _flush(self, handle: Handle) -> None:
        inode, flush = handle.inode, self.user.fs.close_protocol.flush(handle.there)
        if inode.path is None:
            await self._call(flush)
            return
        now = frozenset({inode.data})
        if not inode.is_dirty:
            # An earlier close was no promise if a writer was left: then this one is.
            is_again = inode.is_flushed and self.past.now(inode.path) != now
            change = Change(now, Cause.CLOSE, closed_at=inode.flushed_at)
            await self._promise({inode.path: change} if is_again else {}, Cause.CLOSE, flush)
            return
        before = inode.before if inode.is_flushed else self.past.now(inode.path)
        await self._promise({inode.path: Change(now, Cause.CLOSE)}, Cause.CLOSE, flush)
        inode.before = before
        inode.is_dirty, inode.is_flushed, inode.has_place = False, True, True
        inode.flushed_at = trio.current_time()

    async def do_close(self, slot: int) -> None:
        if slot in self.slots:
            inode = self.slots[slot].inode
            await self._flush(self.slots[slot])
            if inode.writers > 1:
                self._widen(inode)
            await self._release(slot)

    async def do_late(self, slot: int, seconds: float) -> None:
        """Pages of a mapping arrive after its descriptor was closed, and no FLUSH after them."""
        if slot in self.slots:
            await self.do_flush(slot)
            await self.do_wait(seconds)
            if self.slots[slot].inode.has_place:
                await self.do_write(slot, "start", 5)
            await self._release(slot)

    async def do_fsync(self, slot: int) -> None:
        if slot in self.slots:
            await self._call(self.user.fs.close_protocol.fsync(self.slots[slot].there))

    async def do_chmod(self, path: str) -> None:
        inode = self.names.get(path)
        if isinstance(inode, Inode):
            node = await self._call(self.user.fs.resolve(path))
            self._count += 1
            attributes = PosixAttributes(0o600, 0, 0, self._count)
            self.user.fs.file_io.set_attributes(node, attributes)

    # ---- what programs do in one go

    async def do_save(self, path: str, size: int, slot: int = 100) -> None:
        if self._can_be_file(path):
            await self.do_open(slot, path, "truncate")
            await self.do_write(slot, "end", size)
            await self.do_close(slot)

    async def do_save_by_rename(self, path: str, size: int) -> None:
        """As DCP does it with `.metadata`."""
        await self.do_save(f"{path}.tmp", size)
        if f"{path}.tmp" in self.names:
            await self.do_rename(f"{path}.tmp", path)

    async def do_replace(self, path: str, size: int) -> None:
        """As DCP does it when it overwrites: the old one goes first."""
        await self.do_save(f"{path}.tmp", size)
        await self.do_unlink(path)
        if f"{path}.tmp" in self.names:
            await self.do_rename(f"{path}.tmp", path)

    async def do_safetensors(self, path: str, size: int) -> None:
        """Renamed while it is open."""
        folder, slash, name = path.rpartition("/")
        temporary = f"{folder}{slash}.tmp{name}"
        if not self._can_be_file(path) or temporary in self.names:
            return
        await self.do_open(101, temporary, "truncate")
        if 101 not in self.slots:
            return
        await self.do_truncate(temporary, size)
        await self.do_write(101, "start", size)
        await self.do_rename(temporary, path)
        await self.do_close(101)

    async def do_checkpoint(self, folder: str, size: int) -> None:
        await self.do_mkdir(folder)
        for name in ("a", "b"):
            await self.do_save(f"{folder}/{name}", size)
        await self.do_save_by_rename(f"{folder}/.metadata", 40)
        await self.do_save("latest", 10)

    async def do_complete(self, *paths: str) -> None:
        """A program calls closed files a checkpoint."""
        files = [self.names.get(path) for path in paths]
        if all(isinstance(each, Inode) and each.is_closed and not each.writers for each in files):
            values = [self.past.now(path) for path in paths]
            if all(len(each) == 1 for each in values):
                self._checkpoints.complete(self.past.step, frozenset[Value]().union(*values))

    async def do_remove_all(self, folder: str) -> None:
        for path in sorted(self._below(folder), reverse=True):
            await (self.do_rmdir(path) if path in self.folders else self.do_unlink(path))
        await self.do_rmdir(folder)

    # ---- the rest

    async def do_wait(self, seconds: float) -> None:
        self._note_snapshots(seconds)
        await trio.sleep(seconds)

    async def do_outage(self) -> None:
        self.bucket.takes_nothing = not self.bucket.takes_nothing

    async def do_fail(self, soon: int, when: str) -> None:
        self.bucket.failing[self.bucket.requests + soon] = when

    async def do_drain(self) -> None:
        self.bucket.takes_nothing = False
        self._note_snapshots(DRAIN_SECONDS)
        with trio.move_on_after(DRAIN_SECONDS) as scope:
            ended = await self.user.fs.wait_durable("", None)
        publisher = self.user.fs.publisher
        if scope.cancelled_caught:
            queue = [(item.sequence, item.changed_keys()) for item in self.user.fs.queue.items()]
            raise Violation(f"not durable after {DRAIN_SECONDS:.0f} s: {queue}, failure {publisher.failure}")
        rejections = publisher.rejections
        if ended.result != "durable" or rejections.conflicts or rejections.rejected:
            rejected = [(item.changed_keys(), item.error) for item in rejections.rejected]
            raise Violation(f"drained: {ended}, conflicts {rejections.conflicts}, rejected {rejected}")
        # The delete of a file that a program still has open waits up to ten minutes; a sync does not wait for it.
        deferred = {
            key
            for item in self.user.fs.queue.unordered()
            if publisher.is_deferred(item)
            for key in item.changed_keys()
        }
        if deferred and not self.slots:
            raise Violation(f"drained: the deletes of {deferred} wait, and no program has a file open")
        shown = {path: value for path, value in self.bucket.shows().items() if path not in deferred}
        files = {path: value for path, value in shown.items() if not path.endswith("/")}
        self._compare("after a drain, the bucket", files, self.past.tree())
        folders = {key[:index] for key in shown for index, letter in enumerate(key) if letter == "/"}
        if folders != self.past.tree_folders():
            raise Violation(
                f"after a drain: the bucket's directories {folders}, not {self.past.tree_folders()}"
            )

    async def do_look(self) -> None:
        """Programs on the node see what they wrote."""
        tree = await self._call(self.user.tree())
        shown = {path: _value(data) for path, data in tree.items() if data is not None}
        wanted: dict[str, Values] = {
            path: frozenset({item.data if isinstance(item, Inode) else item})
            for path, item in self.names.items()
        }
        self._compare("on the node", shown, wanted)
        folders = {path for path, data in tree.items() if data is None}
        if folders != self.folders:
            raise Violation(f"on the node: directories {folders}, not {self.folders}")

    # ---- inside

    async def _rename(self, old: str, new: str) -> None:
        try:
            await self.user.rename(old, new)
        except ObjectChanged:
            await self.user.rename(old, new)  # as the kernel does after ESTALE

    @asynccontextmanager
    async def _held(self, *paths: str) -> AsyncIterator[None]:
        """Hold the directories of the paths, as the kernel does with those in which it changes names."""
        tree = self.user.fs.tree
        async with AsyncExitStack() as stack:
            for path in paths:
                folder = await self._call(self.user.fs.resolve(path.rpartition("/")[0]))
                folder.lookups += 1
                stack.callback(tree.forget, folder.number, 1)
            yield

    async def _promise(
        self,
        files: dict[str, Change],
        cause: Cause,
        call: Awaitable[T],
        folders: dict[str, bool] | None = None,
    ) -> T:
        if not files and not folders:
            return await self._call(call)
        promise = self.past.begin(files, folders or {}, cause, trio.current_time())
        result = await self._call(call)
        self.past.keep(promise)
        return result

    async def _call(self, call: Awaitable[T]) -> T:
        if self._is_slow:
            self._note_snapshots(_SLOW_CALL_SECONDS)
        with trio.move_on_after(CALL_SECONDS):
            return await call
        raise Violation(f"a call did not return within {CALL_SECONDS:.0f} s: {call}")

    async def _release(self, slot: int) -> None:
        handle = self.slots.pop(slot)
        inode = handle.inode
        inode.writers -= 1
        changes: dict[str, Change] = {}
        is_sealed = inode.writers == 0 and inode.path is not None and inode.has_place
        if is_sealed and inode.path is not None:
            now = frozenset({inode.data})
            if self.past.now(inode.path) != now:
                # Its pages may have come late: it was closed at the FLUSH.
                changes[inode.path] = Change(now, Cause.CLOSE, closed_at=inode.flushed_at)
        await self._promise(changes, Cause.CLOSE, self.user.fs.file_io.release(handle.there))
        if is_sealed:
            inode.is_closed, inode.has_place = True, False
            inode.is_dirty = inode.is_flushed = False
            inode.held_since = float("inf")
            inode.seen.clear()

    def _touched(self, inode: Inode) -> dict[str, Change]:
        """Bytes are about to change: what a FLUSH promised while others hold the file is taken back."""
        if inode.path is None or not inode.is_flushed:
            return {}
        return {inode.path: Change(inode.before, Cause.TAKEN_BACK)}

    def _change(self, inode: Inode, data: bytes) -> None:
        inode.data = data
        inode.is_dirty, inode.is_flushed = True, False
        inode.held_since = min(inode.held_since, trio.current_time())
        inode.seen.add(data)

    def _widen(self, inode: Inode) -> None:
        """A writer is left at a close: the name may still hold what it held before."""
        if inode.is_flushed and inode.path is not None:
            self.past.widen(inode.path, inode.before)

    def _note_snapshots(self, seconds: float = 0.0) -> None:
        """A file held open for long may be published as it was at some moment; seconds: that are about to pass."""
        then = trio.current_time() + seconds
        for inode in self.names.values():
            if (
                isinstance(inode, Inode)
                and inode.path is not None
                and then - inode.held_since > SNAPSHOT_SECONDS
            ):
                self.past.widen(inode.path, frozenset(inode.seen))

    def _moved(self, old: str, new: str, cause: Cause) -> dict[str, Change]:
        item = self.names[old]
        value = self.past.now(old)
        if isinstance(item, Inode) and not (item.is_closed or item.is_flushed):
            # Never closed: what its old name was promised to hold is another's that it replaced, if anything.
            return {} if value == NOTHING else {old: Change(value | NOTHING, cause)}
        return {old: Change(NOTHING, cause, new), new: Change(value, cause, old)}

    def _move_name(self, old: str, new: str) -> None:
        item = self.names[new] = self.names.pop(old)
        if isinstance(item, Inode):
            item.path = new
            if not item.is_closed:
                item.before = item.before | self.past.at(new, self.past.step - 1)

    def _lose_name(self, path: str) -> None:
        item = self.names.pop(path)
        if isinstance(item, Inode):
            item.path = None

    def _compare(self, where: str, shown: dict[str, Value], wanted: dict[str, Values]) -> None:
        for path in sorted(shown.keys() | wanted.keys()):
            value, allowed = shown.get(path), wanted.get(path, NOTHING)
            if value not in allowed:
                raise Violation(
                    f"{where}: {path} is {_short(value)}, not {' or '.join(map(_short, allowed))}"
                )

    def _can_be_file(self, path: str) -> bool:
        there = self.names.get(path)
        return path not in self.folders and not isinstance(there, Link) and self._has_parent(path)

    def _has_parent(self, path: str) -> bool:
        folder = path.rpartition("/")[0]
        return not folder or folder in self.folders

    def _below(self, folder: str) -> list[str]:
        return sorted(path for path in {*self.names, *self.folders} if path.startswith(f"{folder}/"))

    def _bytes(self, size: int) -> bytes:
        """Return bytes that no other write has."""
        self._count += 1
        word = b"<%d>" % self._count
        return (word * (size // len(word) + 1))[:size]


def _value(data: bytes | None) -> Value:
    if data is not None and data.startswith(b"-> "):
        return Link(data[3:].decode())
    return data


def _short(value: Value) -> str:
    return f"{len(value)} bytes {value[:16]!r}…{value[-8:]!r}" if isinstance(value, bytes) else repr(value)
