"""Carries a trace out again: on a directory, be it local or a mount's, or on the engine under a virtual clock."""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fusecache.engine.namespace.nodes import FileHandle, attributes_of, in_use
from fusecache.model.records import PosixAttributes
from tests.support.node import User
from tests.traces.trace import Call, Trace, payload


class Target(Protocol):
    """Has a method for each call of `trace.py`, with these arguments; `write` has the bytes instead of their number."""


async def _nothing(_line: int) -> None:
    """Wait for nothing."""


async def replay(
    trace: Trace,
    target: Target,
    *,
    before: Callable[[int], Awaitable[None]] = _nothing,
    after: Callable[[int], Awaitable[None]] = _nothing,
) -> None:
    """Carry out all lines. before, after: called with each line's number; marks are lines, too."""
    for number, line in enumerate(trace.lines):
        await before(number)
        if isinstance(line, Call):
            arguments = list(line.arguments)
            if line.name == "write":
                arguments[2] = payload(number, arguments[2])
            await getattr(target, line.name)(*arguments)
        await after(number)


class Directory:
    """A target: a directory. files: descriptors of the trace's open files. inodes: theirs, also once closed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.files: dict[int, int] = {}
        self.inodes: dict[int, int] = {}

    async def open(self, number: int, path: str, letters: str) -> None:
        flags = os.O_RDWR if "r" in letters else os.O_WRONLY
        for letter, flag in zip(
            "cxtas", (os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_SYNC), strict=True
        ):
            flags |= flag if letter in letters else 0
        self.files[number] = os.open(self._root / path, flags, 0o644)
        self.inodes[number] = os.fstat(self.files[number]).st_ino

    async def write(self, number: int, offset: int | None, data: bytes) -> None:
        if offset is not None:
            os.lseek(self.files[number], offset, os.SEEK_SET)
        assert os.write(self.files[number], data) == len(data)

    async def ftruncate(self, number: int, size: int) -> None:
        os.ftruncate(self.files[number], size)

    async def allocate(self, number: int, size: int) -> None:
        if os.fstat(self.files[number]).st_size < size:
            os.ftruncate(self.files[number], size)

    async def fsync(self, number: int) -> None:
        os.fsync(self.files[number])

    async def fsync_name(self, path: str) -> None:
        descriptor = os.open(self._root / path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    async def flush(self, number: int) -> None:
        os.close(os.dup(self.files[number]))

    async def close(self, number: int) -> None:
        os.close(self.files.pop(number))

    async def rename(self, old: str, new: str) -> None:
        os.rename(self._root / old, self._root / new)

    async def symlink(self, path: str, target: str) -> None:
        os.symlink(target, self._root / path)

    async def truncate(self, path: str, size: int) -> None:
        os.truncate(self._root / path, size)

    async def unlink(self, path: str) -> None:
        os.unlink(self._root / path)

    async def mkdir(self, path: str) -> None:
        os.mkdir(self._root / path)

    async def rmdir(self, path: str) -> None:
        os.rmdir(self._root / path)

    async def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._root / path, mode)

    async def utimes(self, path: str) -> None:
        now = time.time_ns() - 3600 * 10**9
        os.utime(self._root / path, ns=(now, now), follow_symlinks=False)

    def abandon(self) -> None:
        """Close what is open, whatever became of the mount."""
        for descriptor in self.files.values():
            with suppress(OSError):
                os.close(descriptor)
        self.files.clear()


class Node:
    """A target: the engine, called as the kernel calls a mount: it holds the directories in which it changes names."""

    def __init__(self, user: User) -> None:
        self._user = user
        self._files: dict[int, FileHandle] = {}

    async def open(self, number: int, path: str, letters: str) -> None:
        async with self._held(path):
            handle = await self._user.open(path, truncate="t" in letters)
        handle.appends = "a" in letters
        self._files[number] = handle

    async def write(self, number: int, offset: int | None, data: bytes) -> None:
        handle = self._files[number]
        await self._user.fs.file_io.write(handle, handle.node.size if offset is None else offset, data)

    async def ftruncate(self, number: int, size: int) -> None:
        await self._user.fs.file_io.truncate(self._files[number].node, size)

    async def allocate(self, number: int, size: int) -> None:
        if self._files[number].node.size < size:
            await self.ftruncate(number, size)

    async def fsync(self, number: int) -> None:
        await self._user.fs.close_protocol.fsync(self._files[number])

    async def fsync_name(self, path: str) -> None:
        await self._user.fs.journal.wait_committed()

    async def flush(self, number: int) -> None:
        await self._user.fs.close_protocol.flush(self._files[number])

    async def close(self, number: int) -> None:
        await self._user.close(self._files.pop(number))

    async def rename(self, old: str, new: str) -> None:
        async with self._held(old, new):
            await self._user.rename(old, new)

    async def symlink(self, path: str, target: str) -> None:
        async with self._held(path):
            await self._user.symlink(target, path)

    async def truncate(self, path: str, size: int) -> None:
        node = await self._user.fs.resolve(path)
        with in_use(node):
            await self._user.fs.file_io.wait_release(node)
            await self._user.fs.file_io.truncate(node, size)

    async def unlink(self, path: str) -> None:
        async with self._held(path):
            await self._user.unlink(path)

    async def mkdir(self, path: str) -> None:
        async with self._held(path):
            await self._user.mkdir(path)

    async def rmdir(self, path: str) -> None:
        async with self._held(path):
            await self._user.rmdir(path)

    async def chmod(self, path: str, mode: int) -> None:
        await self._set(path, mode=mode)

    async def utimes(self, path: str) -> None:
        await self._set(path, mtime_ns=1_700_000_000 * 10**9)

    @asynccontextmanager
    async def _held(self, *paths: str) -> AsyncIterator[None]:
        held = []
        try:
            for path in paths:
                held.append(await self._user.fs.resolve(path.rpartition("/")[0]))
                held[-1].lookups += 1
            yield
        finally:
            for folder in held:
                self._user.fs.tree.forget(folder.number, 1)

    async def _set(self, path: str, **changes: int) -> None:
        node = await self._user.fs.resolve(path)
        old = attributes_of(node)
        new: dict[str, Any] = {
            "mode": old.mode,
            "uid": old.uid,
            "gid": old.gid,
            "mtime_ns": old.mtime_ns,
            **changes,
        }
        if "mode" in changes:
            new["mode"] = old.mode & ~0o7777 | changes["mode"]
        self._user.fs.file_io.set_attributes(node, PosixAttributes(**new))
