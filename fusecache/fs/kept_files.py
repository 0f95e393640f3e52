"""What a successor of this daemon must know of the files and directories that the kernel has open, in kept memory.

Rows of the table (`fuse/kept_mount.py`), by key:

    start           how many daemons have served the mount before this one
    began           when the first one began to serve: the time of directories, as the bucket has none for them
    owner           user and group of the mountpoint
    d/<inode>       a directory that the kernel knows: its places, attributes
    n/<inode>       an open file: its places, attributes, and the generation of its content here (0: the bucket's;
                    LOST: bytes are missing in it, as a write failed)
    k/<inode>       the handle of an open file whose writer was killed
    h/<handle>      an open file's handle, with the number of the request that opened it
    o/<handle>      an open directory's
    r/<handle>      how far it has been read: the places from which the kernel may go on

A *place* is what the journal must agree with: the inode of the directory (0: the file has no name), the name, and the
object that the bucket shows under it. A call changes places in memory first, and answers when the journal has its rows.
So a row has several places, each with the journal's commit from which on it holds. `settle` chooses: the last one that
the journal took. The rest of a row holds from the moment at which it is written, as the call is not asked for a commit.

A row is written before the request's reply is sent. A successor ignores the handles whose open was not answered.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fusecache.engine.namespace.nodes import DirectoryHandle, FileHandle, Kind, ListedName, Node, Shown
from fusecache.fuse.kept_mount import KeptMount
from fusecache.fuse.protocol import Opcode
from fusecache.fuse.requests import KernelRequest
from fusecache.fuse.values import ROOT_INODE
from fusecache.model.objects import ObjectInfo
from fusecache.model.predecessor import LOST, KeptHandle, KeptNode, KeptReading, Predecessor, ReadPlace
from fusecache.model.records import FileState, PosixAttributes

log = logging.getLogger(__name__)

# Handles of one daemon, and inodes of its hint files; the next one begins with another multiple.
HANDLES_OF_START = 1 << 32
# Names in a reply of a page at most. Later kernels (6.16) ask for no more than a program's buffer takes, and take all.
_SMALL_REPLY = 32
_MOVING = frozenset({Opcode.RENAME, Opcode.RENAME2, Opcode.UNLINK, Opcode.RMDIR})
# From so many files on that were moved, those whose moves are on disk are forgotten.
_MOVES_MAX = 4096


class Commits(Protocol):
    """The journal. last_commit: the number of the last commit on disk; next_commit: of what is submitted now."""

    last_commit: int
    next_commit: int

    @property
    def is_awaited(self) -> bool:
        """Whether changes are on their way to the disk that a caller waits for."""
        ...

    async def wait_committed(self) -> None:
        """Return when all that was submitted is on disk. Raises NoSpace or ReadOnly if that takes long."""
        ...


class KeptFiles:
    """Writes what a successor must know, and reads what a predecessor left. Does nothing without kept memory."""

    def __init__(self, kept: KeptMount | None) -> None:
        self._table = None if kept is None else kept.table
        self._journal: Commits | None = None
        # The commit that has the last move of a file, by inode.
        self._moves: dict[int, int] = {}
        self.predecessor: Predecessor | None = None
        self.start = 0
        self._unanswered: frozenset[int] = frozenset()
        # The bodies of unanswered requests that move or remove names.
        self._moving: list[bytes] = []
        if kept is None:
            return
        self.start = int(kept.table.get("start") or 0) + kept.is_resumed
        kept.table.put("start", self.start)
        if kept.is_resumed:
            self.predecessor = Predecessor(self.start, int(kept.table.get("began") or time.time_ns()))
            requests = [KernelRequest(each.buffer.view[: each.size]) for each in kept.unanswered]
            self._unanswered = frozenset(each.unique for each in requests)
            self._moving = [bytes(each.body) for each in requests if each.opcode in _MOVING]

    @property
    def is_on(self) -> bool:
        """Whether there is kept memory."""
        return self._table is not None

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

    def on_shown(self, shown: Shown, parent: Node | None) -> None:
        """The kernel hears of an inode. Directories are kept, as a process may work in one."""
        if self._table is None or shown.kind is not Kind.DIRECTORY or shown.number == ROOT_INODE:
            return
        if f"d/{shown.number}" not in self._table:
            self._put_node("d", shown, parent)

    def on_opened(self, number: int, request: int, handle: FileHandle, backing_id: int) -> None:
        """A file was opened under a handle number, after `wait_for_moves`. request: the number of the request."""
        if self._table is not None:
            self._put_node("n", handle.node, handle.node.parent)
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

    def on_lost_closed(self, number: int) -> None:
        """A handle of a predecessor is gone whose file is not certain."""
        if self._table is not None:
            self._table.remove(f"h/{number}")

    def on_directory_closed(self, number: int) -> None:
        """A directory's handle is gone."""
        if self._table is not None:
            self._forget_directory(number)

    def on_moved(self, node: Node) -> None:
        """A file or directory is about to have another name, or none."""
        if self._table is None or self._journal is None:
            return
        if node.kind is Kind.FILE:
            if len(self._moves) >= _MOVES_MAX:
                self._moves = {
                    inode: commit
                    for inode, commit in self._moves.items()
                    if commit > self._journal.last_commit
                }
            self._moves[node.number] = self._journal.next_commit
        self.on_changed(node)

    async def wait_for_moves(self, node: Node) -> None:
        """Return when the journal has the last move of a file, so that its first row can say where it is.

        Raises what `Commits.wait_committed` raises.
        """
        journal = self._journal
        # A name that another client took has no row in the journal, and nothing to wait for.
        while journal and journal.is_awaited and self._moves.get(node.number, 0) > journal.last_commit:
            await journal.wait_committed()

    def on_changed(self, node: Node) -> None:
        """A file or directory has another name, other attributes or other content."""
        kind = "d" if node.kind is Kind.DIRECTORY else "n"
        if self._table is not None and f"{kind}/{node.number}" in self._table:
            self._put_node(kind, node, node.parent)

    def on_forgotten(self, inodes: Iterable[int]) -> None:
        """The kernel does not know inodes any more."""
        if self._table is not None:
            for inode in inodes:
                self._table.remove(f"d/{inode}")

    def _forget_directory(self, number: int | str) -> None:
        assert self._table is not None
        for kind in "or":
            self._table.remove(f"{kind}/{number}")

    def _put_node(self, kind: str, shown: Shown, parent: Node | None) -> None:
        """Write the row of a file or directory as it is now in memory."""
        assert self._table is not None
        assert self._journal is not None
        remote = shown.object if isinstance(shown, Node) and shown.kind is Kind.FILE else None
        place: list[Any] = [0 if parent is None else parent.number, shown.name, _object_row(remote)]
        key, commit, taken = f"{kind}/{shown.number}", self._journal.next_commit, self._journal.last_commit
        row = self._table.get(key)
        places: list[list[Any]] = [[0, *place]] if row is None else row[0]
        if places[-1][1:] != place:
            first = max(index for index, each in enumerate(places) if each[0] <= taken)
            # All that was made since the last commit began is one change.
            places = [*(each for each in places[first:] if each[0] < commit), [commit, *place]]
        self._table.put(key, [places, *_attributes(shown), _generation(shown)])

    # ---- what a predecessor left

    def settle(self, journal: Commits, began_ns: int) -> None:
        """Begin with a journal: find out which of its last changes the predecessor's journal took, and keep that.

        began_ns: as `Tree.began_ns`.

        Call it before anything is committed. `predecessor` has the files, directories and handles afterwards. A row
        that cannot be read is left out: its descriptors get EIO, and what was written through them is quarantined.
        """
        self._journal = journal
        if self._table is None:
            return
        self._table.put("began", began_ns)
        if self.predecessor is None:
            return
        left, files = self.predecessor, self._settled("n", journal.last_commit)
        left.directories += self._settled("d", journal.last_commit).values()
        written, unused = set[int](), set(files)
        for number, row in list(self._table.items("h/")):
            with self._readable(f"h/{number}"):
                request, inode, pid, writable, process, appends, backing_id = row
                if request in self._unanswered:
                    self._table.remove(f"h/{number}")
                    continue
                unused.discard(inode)
                if writable:
                    written.add(inode)
                left.handles.append(
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
        for number, row in list(self._table.items("o/")):
            with self._readable(f"o/{number}"):
                request, inode, pid = row
                if request in self._unanswered:
                    self._forget_directory(number)
                    continue
                reading = self._reading(number)
                left.handles.append(KeptHandle(int(number), inode, pid, is_directory=True, reading=reading))
        for inode in unused:
            del files[inode]
            self._table.remove(f"n/{inode}")
        left.files += [replace(each, is_written=each.number in written) for each in files.values()]

    def _settled(self, kind: str, commit: int) -> dict[int, KeptNode]:
        """Return the nodes of a kind as they were after a commit of the predecessor, and keep only that."""
        assert self._table is not None
        found: dict[int, KeptNode] = {}
        for inode, row in list(self._table.items(f"{kind}/")):
            with self._readable(f"{kind}/{inode}"):
                place, attributes, generation = self._parsed(row, commit)
                found[int(inode)] = _kept_node(int(inode), place, attributes, generation)
                self._table.put(f"{kind}/{inode}", [[[0, *place]], *attributes, generation])
        return found

    def _parsed(self, row: list[Any], commit: int) -> "tuple[_Place, list[int], int]":
        """Return a row's place after a commit, its attributes and its generation."""
        if isinstance(row[0], list):
            places, *attributes, generation = row
            _, parent, name, remote = [each for each in places if each[0] <= commit][-1]
            return (parent, name, remote), attributes, int(generation)
        # Of a program that kept one place: its journal may lack a change that it was making.
        parent, name, *rest = row
        if any(name.encode() + b"\0" in body for body in self._moving):
            raise ValueError(f"{name}: was being moved or removed")
        generation, remote = rest[4:] if len(rest) == 6 else (0, None)
        return (parent, name, remote), rest[:4], int(generation)

    @contextmanager
    def _readable(self, key: str) -> Iterator[None]:
        """Read a row in the block. If that fails, leave the row out, and know that not all is known."""
        assert self.predecessor is not None
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError) as exc:
            log.error("a row of the predecessor is not readable row=%s error=%s", key, exc)
            self.predecessor.is_whole = False

    def _reading(self, number: str) -> KeptReading | None:
        assert self._table is not None
        places = self._table.get(f"r/{number}")
        if places is None:
            return None
        return KeptReading(tuple(map(_place, places)))


# What a row says of a place: the directory's inode, the name, the object's row.
_Place = tuple[int, str, list[Any] | None]


def _kept_node(number: int, place: _Place, attributes: list[int], generation: int) -> KeptNode:
    parent, name, remote = place
    shown = None if remote is None else ObjectInfo(*remote)
    return KeptNode(number, parent, name, PosixAttributes(*attributes), generation, shown)


def _generation(shown: Shown) -> int:
    """Return the number of a file's content on this node, 0 if it has none; LOST if bytes are missing in it."""
    if not isinstance(shown, Node):
        return 0
    version = shown.version
    if shown.write_error is not None or (version is not None and version.state is FileState.FAILED):
        return LOST
    return shown.staged if version is None else version.record.generation


def _object_row(remote: ObjectInfo | None) -> list[Any] | None:
    if remote is None:
        return None
    return [remote.key, remote.etag, remote.size, remote.modified, remote.metadata]


def _place(row: list[Any]) -> ReadPlace:
    position, after, early_files = row
    return ReadPlace(position, after, tuple(early_files))


def _attributes(shown: Node | ListedName) -> list[int]:
    return [shown.mode, shown.uid, shown.gid, shown.mtime_ns]
