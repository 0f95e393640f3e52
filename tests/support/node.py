"""A node without a kernel: the engine over a bucket in memory, driven as programs drive a mount.

`Bucket` remembers what it showed after every publishing request, and can end the node at any request.
"""

import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from fusecache.config.option_groups import ORDER_LAST, TEMP_NAMES
from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.nodes import DirectoryHandle, FileHandle, Kind, Node, in_use
from fusecache.engine.namespace.tree import Ownership
from fusecache.engine.options import EngineOptions
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.errors import NotFound, Unavailable
from fusecache.model.objects import MIB, SYMLINK_TARGET
from fusecache.remote.statistics import StoreStatistics
from tests.support.inline_offload import InlineOffload
from tests.support.memory_store import MemoryStore

PUBLISHING = ("put", "complete_multipart", "copy", "delete")
WRITING = (*PUBLISHING, "create_multipart", "upload_part", "abort_multipart")


class Bucket:
    """A bucket in memory.

    states: the contents after each publishing request; copied: the numbers of those after a copy; requests: (method,
    key) of each write; gets: the key of each GET, in no order.

    A key's value is its bytes; a symlink's is `-> target`.
    """

    def __init__(self) -> None:
        self.memory = MemoryStore(part_minimum_bytes=MIB)
        self.requests: list[tuple[str, str]] = []
        self.gets: list[str] = []
        self.states: list[dict[str, bytes]] = []
        self.copied: set[int] = set()
        self._dies_at: tuple[int, str] | None = None
        self._on_death: Callable[[], None] = lambda: None
        self.is_cut_off = False  # nothing is answered
        self.takes_nothing = False  # reads are answered, writes are not
        # Told of a writing request's method and key before it takes effect.
        self.on_request: Callable[[str, str], None] = lambda _method, _key: None

    def die_at(self, request: int, when: str, on_death: Callable[[], None]) -> None:
        """At the writing request of that number (from 0) the node ends, `before` or `after` it takes effect."""
        self._dies_at, self._on_death = (len(self.requests) + request, when), on_death

    def come_back(self) -> None:
        """Answer again."""
        self.is_cut_off = self.takes_nothing = False
        self._dies_at = None

    def shows(self) -> dict[str, bytes]:
        """Return what lies in the bucket now."""
        shown = {}
        for key, data in self.memory.contents().items():
            target = (self.memory.head(key).metadata or {}).get(SYMLINK_TARGET)
            shown[key] = f"-> {target}".encode() if target else data
        return shown

    def sent(self, method: str = "put", prefix: str = "") -> list[str]:
        """Return the keys of a method's requests, in order."""
        return [key for name, key in self.requests if name == method and key.startswith(prefix)]

    def statistics(self) -> StoreStatistics:
        """Return how many requests were answered."""
        return self.memory.statistics()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.memory, name)

        def passed(key: Any, *args: Any, **options: Any) -> Any:
            if self.is_cut_off:
                raise Unavailable("the bucket cannot be reached")
            if name not in WRITING:
                if name == "get_into":
                    self.gets.append(key.key)
                return call(key, *args, **options)
            if self.takes_nothing:
                raise Unavailable("the bucket takes nothing")
            number = len(self.requests)
            self.requests.append((name, args[0] if name == "copy" else key))
            self.on_request(name, key)
            if self._dies_at == (number, "before"):
                self._die()
            result = call(key, *args, **options)
            if name in PUBLISHING:
                if name == "copy":
                    self.copied.add(len(self.states))
                self.states.append(self.shows())
            if self._dies_at == (number, "after"):
                self._die()
            return result

        return passed

    def _die(self) -> None:
        self.is_cut_off = True
        self._on_death()
        raise Unavailable("the node is gone")


class User:
    """What programs do, by paths below the mountpoint."""

    def __init__(self, filesystem: FileSystem) -> None:
        self.fs = filesystem

    async def open(self, path: str, *, truncate: bool = True) -> FileHandle:
        """Open for writing as open(2) with O_CREAT does."""
        parent, name = await self._parent(path)
        try:
            node = await self.fs.lookup.lookup(parent, name)
        except NotFound:
            node = await self.fs.namespace_ops.create(parent, name, 0o644)
            return self.fs.file_io.open(node, writable=True, pid=0)
        await self.fs.file_io.check_space(node)
        await self.fs.file_io.wait_release(node)
        handle = self.fs.file_io.open(node, writable=True, pid=0)
        if truncate:
            await self.fs.file_io.truncate(node, 0)
        return handle

    async def close(self, handle: FileHandle) -> None:
        """Flush and release."""
        try:
            await self.fs.close_protocol.flush(handle)
        finally:
            await self.fs.file_io.release(handle)

    async def write(self, path: str, data: bytes) -> None:
        """Write a whole file."""
        handle = await self.open(path)
        for start in range(0, len(data), 8 * MIB):
            await self.fs.file_io.write(handle, start, data[start : start + 8 * MIB])
        await self.close(handle)

    async def read(self, path: str) -> bytes:
        """Read a whole file."""
        node = await self.fs.resolve(path)
        handle = self.fs.file_io.open(node, writable=False, pid=0)
        data = bytearray()
        while piece := await self.fs.file_io.read(handle, len(data), MIB):
            data += piece
        await self.fs.file_io.release(handle)
        return bytes(data)

    async def unlink(self, path: str) -> None:
        await self.fs.namespace_ops.unlink(*await self._parent(path))

    async def mkdir(self, path: str) -> None:
        parent, name = await self._parent(path)
        await self.fs.namespace_ops.mkdir(parent, name, 0o755)

    async def rmdir(self, path: str) -> None:
        await self.fs.namespace_ops.rmdir(*await self._parent(path))

    async def symlink(self, target: str, path: str) -> None:
        parent, name = await self._parent(path)
        await self.fs.namespace_ops.symlink(parent, name, target)

    async def rename(self, old: str, new: str) -> None:
        (await self.fs.resolve(old)).lookups += 1  # the kernel holds what it renames
        await self.fs.namespace_ops.rename(*await self._parent(old), *await self._parent(new), replace=True)

    async def tree(self, path: str = "") -> dict[str, bytes | None]:
        """Return everything below a path: bytes of files, `-> target` of symlinks, None for directories."""
        found: dict[str, bytes | None] = {}
        directory = await self.fs.resolve(path)
        with in_use(directory):  # as an open directory is
            handle = DirectoryHandle(directory)
            while entries := await self.fs.lookup.reader.next_entries(handle, 100):
                for _, node in entries:
                    inner = f"{path}/{node.name}".strip("/")
                    found[inner] = await self._shown(node, inner)
                    if node.kind is Kind.DIRECTORY:
                        found |= await self.tree(inner)
        return found

    async def drained(self, seconds: float = 600) -> str:
        """Wait until the bucket has everything, and it is cache here; return how that ended."""
        with trio.fail_after(seconds):
            durability = await self.fs.wait_durable("", None)
            await self.fs.publisher.retirement.wait_idle()
            return durability.result

    async def _shown(self, node: Node, path: str) -> bytes | None:
        if node.kind is Kind.SYMLINK:
            return f"-> {node.target}".encode()
        return None if node.kind is Kind.DIRECTORY else await self.read(path)

    async def _parent(self, path: str) -> tuple[Node, str]:
        folder, _, name = path.rpartition("/")
        return await self.fs.resolve(folder), name


@asynccontextmanager
async def running_node(store: Any, directory: Path, **options: Any) -> AsyncIterator[User]:
    """Run a node on a cache directory until the block ends, then stop it in order."""
    settings: dict[str, Any] = {
        "prefix": "",
        "ownership": Ownership(0, 0, 0o022),
        "cache_bytes": 1 << 30,
        "buffer_bytes": 40 * MIB,
        "temp_names": TEMP_NAMES,
        "order_last": ORDER_LAST,
        **options,
    }
    offload = settings.pop("offload", None) or InlineOffload()
    kernel = settings.pop("kernel", None)
    supervisor = settings.pop("supervisor", None) or Supervisor()
    filesystem = FileSystem(
        store, offload, EngineOptions(directory=directory, **settings), supervisor, kernel
    )
    async with filesystem.running():
        yield User(filesystem)


def photograph(directory: Path, copy: Path) -> None:
    """Copy what of a cache directory must outlive a crash at this moment: not the cache, not the names known."""
    ignored = shutil.ignore_patterns("cache", "names", "lock.mdb")
    shutil.copytree(directory, copy, ignore=ignored, copy_function=_copy_data)


def _copy_data(source: str, target: str) -> None:
    """Copy a file without its holes: the journal's reserve is 32 MiB of nothing."""
    with open(source, "rb") as reader, open(target, "wb") as writer:
        size, start = os.fstat(reader.fileno()).st_size, 0
        writer.truncate(size)
        while start < size:
            try:
                start = os.lseek(reader.fileno(), start, os.SEEK_DATA)
            except OSError as exc:
                if exc.errno != errno.ENXIO:
                    raise
                break  # a hole up to the end
            stop = os.lseek(reader.fileno(), start, os.SEEK_HOLE)
            writer.seek(start)
            writer.write(os.pread(reader.fileno(), stop - start, start))
            start = stop
    shutil.copystat(source, target)


def files_of(tree: dict[str, bytes | None]) -> dict[str, bytes]:
    """Return the files and symlinks of a tree."""
    return {path: data for path, data in tree.items() if data is not None}


def files_in(shown: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files and symlinks that a bucket shows: no markers."""
    return {key: data for key, data in shown.items() if not key.endswith("/")}


def folders_in(shown: dict[str, bytes]) -> set[str]:
    """Return the directories that a bucket shows, by markers or by what lies in them."""
    return {key[:index] for key in shown for index, letter in enumerate(key) if letter == "/"}


async def listed(user: User, path: str) -> None:
    """List a directory to its end, as `ls` does, and hold it as the kernel does."""
    directory = await user.fs.resolve(path)
    directory.lookups += 1
    handle = DirectoryHandle(directory)
    while await user.fs.lookup.reader.next_entries(handle, 100):
        pass
