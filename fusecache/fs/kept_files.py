"""What a successor of this daemon must know of the files and directories that the kernel has open, in kept memory.

Rows of the table (`fuse/kept_table.py`), by key:

    start           how many daemons have served the mount before this one
    owner           user and group of the mountpoint
    d/<inode>       a directory that the kernel knows: its parent's inode, name, attributes, and the number of the
                    request that made it, 0 if it was found
    n/<inode>       an open file: the same, and its content, which is a generation here or an object in the bucket
    k/<inode>       the handle of an open file whose writer was killed
    h/<handle>      an open file's handle, with the number of the request that opened it
    o/<handle>      an open directory's
    r/<handle>      how far it has been read: the places from which the kernel may go on

A row is written before the request's reply is sent. A successor ignores the handles whose open was not answered.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusecache.engine.namespace.nodes import DirectoryHandle, FileHandle, Kind, ListedName, Node, Shown
from fusecache.fuse.kept_mount import KeptMount
from fusecache.fuse.requests import KernelRequest, names_of
from fusecache.fuse.values import ROOT_INODE
from fusecache.model.objects import ObjectInfo
from fusecache.model.predecessor import KeptHandle, KeptNode, KeptReading, Predecessor, ReadPlace
from fusecache.model.records import PosixAttributes

# Handles of one daemon, and inodes of its hint files; the next one begins with another multiple.
HANDLES_OF_START = 1 << 32
# Names in a reply of a page at most. Later kernels (6.16) ask for no more than a program's buffer takes, and take all.
_SMALL_REPLY = 32


class KeptFiles:
    """Writes what a successor must know, and reads what a predecessor left. Does nothing without kept memory."""

    def __init__(self, kept: KeptMount | None) -> None:
        self._table = None if kept is None else kept.table
        self.is_on = kept is not None
        self.predecessor: Predecessor | None = None
        self.start = 0
        # Directories of which the kernel was to hear by an answer that was never sent.
        self._untold: frozenset[int] = frozenset()
        if kept is None:
            return
        self.start = int(kept.table.get("start") or 0) + kept.is_resumed
        kept.table.put("start", self.start)
        if kept.is_resumed:
            self.predecessor = self._read(
                [KernelRequest(each.buffer.view[: each.size]) for each in kept.unanswered]
            )

    def owner(self, mountpoint: Path) -> tuple[int, int]:
        """Return user and group of the mountpoint. Under a mount that waits for this daemon it cannot be looked at."""
        known = None if self._table is None else self._table.get("owner")
        if known is None:
            status = os.stat(mountpoint)
            known = status.st_uid, status.st_gid
            if self._table is not None:
                self._table.put("owner", known)
        return known[0], known[1]

    # ---- while this daemon serves

    def on_shown(self, shown: Shown, parent: Node | None, made_by: int = 0) -> None:
        """The kernel hears of an inode. Directories are kept, as a process may work in one. made_by: a request."""
        if self._table is None or shown.kind is not Kind.DIRECTORY or shown.number == ROOT_INODE:
            return
        key = f"d/{shown.number}"
        if key not in self._table:
            self._put_directory(key, shown, parent, made_by)

    def on_opened(self, number: int, request: int, handle: FileHandle, backing_id: int) -> None:
        """A file was opened under a handle number. request: the number of the request."""
        if self._table is not None:
            self._put_file(handle.node)
            self._table.put(
                f"h/{number}",
                [
                    request, handle.node.number, handle.pid, handle.writable, handle.process, handle.appends,
                    backing_id,
                ],
            )  # fmt: skip

    def on_flushed(self, number: int, handle: FileHandle) -> None:
        """A descriptor of a file was closed, perhaps as its process is being killed."""
        if self._table is None:
            return
        version = handle.node.version
        killed = None if version is None else version.close_state.killed_writer
        if killed is handle:
            self._table.put(f"k/{handle.node.number}", number)
        elif killed is None:
            self._table.remove(f"k/{handle.node.number}")

    def on_directory_opened(self, number: int, request: int, node: Node, pid: int) -> None:
        """A directory was opened."""
        if self._table is not None:
            self.on_shown(node, node.parent)
            self._table.put(f"o/{number}", [request, node.number, pid])

    def on_directory_read(self, number: int, handle: DirectoryHandle) -> None:
        """Names were returned: the kernel goes on behind them, behind some of them, or again from where they begin."""
        if self._table is None:
            return
        before = handle.returned[0][2]
        between = [place for *_, place in handle.returned[1:]]
        places = [before, *(between if len(between) < _SMALL_REPLY else ()), handle.place]
        self._table.put(f"r/{number}", [each for each in places if each is not None])

    def on_closed(self, number: int, node: Node) -> None:
        """A file's handle is gone."""
        if self._table is not None:
            self._table.remove(f"h/{number}")
            if not node.handles:
                self._table.remove(f"n/{node.number}")
                self._table.remove(f"k/{node.number}")

    def on_directory_closed(self, number: int) -> None:
        """A directory's handle is gone."""
        if self._table is not None:
            self._forget_directory(number)

    def on_changed(self, node: Node | None) -> None:
        """A file or directory has another name, other attributes or other content."""
        if self._table is None or node is None:
            return
        if f"n/{node.number}" in self._table:
            self._put_file(node)
        key = f"d/{node.number}"
        if key in self._table:
            self._put_directory(key, node, node.parent, _made_by(self._table.get(key)))

    def on_forgotten(self, inodes: Iterable[int]) -> None:
        """The kernel does not know inodes any more."""
        if self._table is not None:
            for inode in inodes:
                self._table.remove(f"d/{inode}")

    def knows(self, parent: Node, name: str) -> bool:
        """Return whether the kernel has been told of a directory of that name, under the inode that it has now."""
        node = parent.children.get(name)
        if self._table is None or node is None or node.number in self._untold:
            return False
        return f"d/{node.number}" in self._table

    def _forget_directory(self, number: int | str) -> None:
        assert self._table is not None
        for kind in "or":
            self._table.remove(f"{kind}/{number}")

    def _put_directory(self, key: str, shown: Shown, parent: Node | None, made_by: int) -> None:
        assert self._table is not None
        number = 0 if parent is None else parent.number
        self._table.put(key, [number, shown.name, *_attributes(shown), made_by])

    def _put_file(self, node: Node) -> None:
        assert self._table is not None
        version, remote = node.version, node.object
        self._table.put(
            f"n/{node.number}",
            [
                0 if node.parent is None else node.parent.number,
                node.name,
                *_attributes(node),
                0 if version is None else version.record.generation,
                None
                if remote is None
                else [remote.key, remote.etag, remote.size, remote.modified, remote.metadata],
            ],
        )

    # ---- what a predecessor left

    def _read(self, unanswered: list[KernelRequest]) -> Predecessor:
        assert self._table is not None
        open_requests = {each.unique for each in unanswered}
        directories = [(int(number), row) for number, row in self._table.items("d/")]
        self._untold = frozenset(number for number, row in directories if _made_by(row) in open_requests)
        files = {int(number): _kept_file(int(number), row) for number, row in self._table.items("n/")}
        unused, written = set(files), set()
        handles: list[KeptHandle] = []
        for number, (request, inode, *rest) in list(self._table.items("h/")):
            if request in open_requests:
                self._table.remove(f"h/{number}")
            elif inode in files:
                unused.discard(inode)
                pid, writable, process, appends, backing_id = rest
                if writable:
                    written.add(inode)
                handles.append(
                    KeptHandle(
                        int(number),
                        inode,
                        pid,
                        writable=writable,
                        process=process,
                        appends=appends,
                        backing_id=backing_id,
                        was_killed=self._table.get(f"k/{inode}") == int(number),
                    )
                )
        for number, (request, inode, pid) in list(self._table.items("o/")):
            if request in open_requests:
                self._forget_directory(number)
            else:
                reading = self._reading(number)
                handles.append(KeptHandle(int(number), inode, pid, is_directory=True, reading=reading))
        for inode in unused:
            self._table.remove(f"n/{inode}")
        return Predecessor(
            self.start,
            [KeptNode(number, row[0], row[1], PosixAttributes(*row[2:6])) for number, row in directories],
            [
                replace(each, is_written=each.number in written)
                for each in files.values()
                if each.number not in unused
            ],
            handles,
            frozenset(name for each in unanswered for name in _names_changed(each)),
        )

    def _reading(self, number: str) -> KeptReading | None:
        assert self._table is not None
        places = self._table.get(f"r/{number}")
        if places is None:
            return None
        return KeptReading(tuple(map(_place, places)))


def _place(row: list[Any]) -> ReadPlace:
    position, after, early_files = row
    return ReadPlace(position, after, tuple(early_files))


def _attributes(shown: Node | ListedName) -> list[int]:
    return [shown.mode, shown.uid, shown.gid, shown.mtime_ns]


def _made_by(directory: list[Any]) -> int:
    # Absent in rows of the first daemons that outlived themselves.
    return int(directory[6]) if len(directory) > 6 else 0


def _kept_file(number: int, row: list[Any]) -> KeptNode:
    parent, name, *attributes, generation, remote = row
    return KeptNode(
        number,
        parent,
        name,
        PosixAttributes(*attributes),
        generation,
        None if remote is None else ObjectInfo(*remote),
    )


def _names_changed(request: KernelRequest) -> Iterator[tuple[int, str]]:
    """Yield the names that a request changes, each with the inode of its directory."""
    for inode, name in names_of(request):
        yield inode, name.decode("utf-8", "surrogateescape")
