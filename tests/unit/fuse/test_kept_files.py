"""A daemon believes a row of its predecessor if the journal has the change."""

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from fusecache.engine.namespace.nodes import FileHandle, Kind, Node
from fusecache.fs.kept_files import KeptFiles
from fusecache.fuse.kept_mount import FORMAT, KeptMount, KeptTable
from fusecache.fuse.kept_requests import make_memory
from fusecache.fuse.protocol import IN_HEADER, Opcode
from fusecache.model.errors import LocalDiskError
from fusecache.model.objects import ObjectInfo
from fusecache.model.predecessor import LOST, KeptNode, Predecessor

BEGAN_NS = 1_700_000_000_000_000_000
OLD = ObjectInfo("f", "etag-1", 3, 1.0)
NEW = ObjectInfo("f", "etag-2", 5, 2.0, {"a": "b"})


class Memory:
    """Kept memory, and the journal beside it. Its commits are taken one by one."""

    def __init__(self) -> None:
        self.fd = make_memory("test")
        self.journal: Any = SimpleNamespace(last_commit=0, next_commit=1, is_awaited=False)
        self.root = Node(1, Kind.DIRECTORY, "", None, 0o755, 0, 0, 0)

    def daemon(self, *, is_resumed: bool = True) -> KeptFiles:
        kept: Any = SimpleNamespace(table=KeptTable(self.fd), is_resumed=is_resumed, unanswered=[])
        files = KeptFiles(kept)
        files.settle(self.journal, BEGAN_NS)
        return files

    def begin_commit(self) -> None:
        self.journal.next_commit += 1

    def end_commit(self) -> None:
        self.journal.last_commit = self.journal.next_commit - 1

    def left(self) -> Predecessor:
        """Return what the next daemon finds."""
        found = self.daemon().predecessor
        assert found is not None
        return found

    def file(self) -> KeptNode:
        (found,) = self.left().files
        return found


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    os.close(made.fd)


def open_file(files: KeptFiles, parent: Node, name: str = "f", inode: int = 20) -> Node:
    node = Node(inode, Kind.FILE, name, parent, 0o644, 0, 0, 0, object=OLD)
    node.handles = 1
    files.on_opened(inode + 100, 7, FileHandle(node, writable=True), 0)
    return node


def test_a_change_counts_once_the_journal_has_it(memory: Memory) -> None:
    files = memory.daemon(is_resumed=False)
    node = open_file(files, memory.root)
    node.name, node.object = "g", NEW
    files.on_moved(node)
    memory.begin_commit()
    assert (memory.file().name, memory.file().object) == ("f", OLD)


def test_a_change_that_the_journal_has_is_believed(memory: Memory) -> None:
    files = memory.daemon(is_resumed=False)
    node = open_file(files, memory.root)
    node.name, node.object = "g", NEW
    files.on_moved(node)
    memory.begin_commit()
    memory.end_commit()
    assert (memory.file().name, memory.file().object) == ("g", NEW)


def test_of_changes_in_several_commits_those_that_the_journal_has_are_believed(memory: Memory) -> None:
    files = memory.daemon(is_resumed=False)
    node = open_file(files, memory.root)
    for name in ("g", "between", "h"):
        node.name = name
        files.on_moved(node)
        if name != "between":  # which is part of the next commit
            memory.begin_commit()
    memory.journal.last_commit = 1
    assert memory.file().name == "g"


def test_a_file_that_lost_its_name_has_none_once_the_journal_knows(memory: Memory) -> None:
    files = memory.daemon(is_resumed=False)
    node = open_file(files, memory.root)
    node.parent = None
    files.on_moved(node)
    memory.begin_commit()
    assert memory.file().parent == memory.root.number
    memory.end_commit()
    # What a successor settled stays so, whatever its own commits are.
    assert memory.file().parent == memory.root.number


def test_a_directory_is_where_the_journal_has_it(memory: Memory) -> None:
    files = memory.daemon(is_resumed=False)
    folder = Node(30, Kind.DIRECTORY, "d", memory.root, 0o755, 0, 0, 0)
    files.on_shown(folder, memory.root)
    folder.name = "e"
    files.on_moved(folder)
    memory.begin_commit()
    (found,) = memory.left().directories
    assert (found.number, found.parent, found.name) == (30, 1, "d")


def test_content_counts_at_once_and_content_that_misses_bytes_is_lost(memory: Memory) -> None:
    files = memory.daemon(is_resumed=False)
    node = open_file(files, memory.root)
    version: Any = SimpleNamespace(state=None, record=SimpleNamespace(generation=5))
    node.version = version
    files.on_changed(node)
    assert memory.file().generation == 5
    node.write_error = LocalDiskError("a write failed")
    files.on_changed(node)
    assert memory.file().generation == LOST


OLD_ROWS: dict[str, Any] = {
    "start": 3,
    "session": [45, 65536, []],
    "d/30": [1, "d", 0o755, 0, 0, 9, 0],
    "n/20": [30, "f", 0o644, 0, 0, 9, 4, ["d/f", "etag", 3, 1.0, None]],
    "h/9": [7, 20, 11, True, 11, False, 0],
}


@pytest.fixture
def _memory_files() -> Iterator[None]:
    """Close the memory files that a test leaves open, as a daemon does to its end."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    for fd in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
                os.close(int(fd))


def old_memory(rows: dict[str, Any]) -> int:
    """Return a table as the format before has it."""
    fd = make_memory("old")
    table = KeptTable(fd)
    for key, row in rows.items():
        table.put(key, row)
    os.pwrite(fd, (FORMAT - 1).to_bytes(8, "little"), 8)
    return fd


@pytest.mark.usefixtures("_memory_files")
def test_rows_of_the_format_before_are_read_and_stay_as_they_are(memory: Memory) -> None:
    fd = old_memory(OLD_ROWS)
    before = os.pread(fd, os.fstat(fd).st_size, 0)
    files = KeptFiles(KeptMount(fd, make_memory("requests"), device_fd=0))
    files.settle(memory.journal, BEGAN_NS)
    found = files.predecessor
    assert found is not None
    (file,) = found.files
    assert (file.parent, file.name, file.generation, file.is_written) == (30, "f", 4, True)
    assert file.object == ObjectInfo("d/f", "etag", 3, 1.0)
    assert os.pread(fd, os.fstat(fd).st_size, 0) == before


@pytest.mark.usefixtures("_memory_files")
@pytest.mark.parametrize(("opcode", "certain"), [(Opcode.RENAME2, 0), (Opcode.LOOKUP, 1)])
def test_a_name_of_the_format_before_that_was_being_moved_is_not_certain(
    memory: Memory, opcode: int, certain: int
) -> None:
    """Its program changed the row before the journal had the change."""
    body = bytes(16) + b"e\0f\0"
    request = IN_HEADER.pack(IN_HEADER.size + len(body), opcode, 44, 1, 0, 0, 0, 0, 0) + body
    requests = make_memory("requests")
    os.ftruncate(requests, 4096 * 8192)
    os.pwrite(requests, request, 0)
    fd = old_memory(OLD_ROWS)
    files = KeptFiles(KeptMount(fd, requests, device_fd=0))
    files.settle(memory.journal, BEGAN_NS)
    assert files.predecessor is not None
    assert len(files.predecessor.files) == files.predecessor.is_whole == certain


@pytest.mark.parametrize("row", [[[], 0o644], {"a": 1}, 5, None, "text", [[[0, 1, "f", None]], 1, 2]])
def test_a_damaged_row_is_not_guessed_and_its_handle_is_left_without_a_file(
    memory: Memory, row: object, caplog: pytest.LogCaptureFixture
) -> None:
    files = memory.daemon(is_resumed=False)
    open_file(files, memory.root)
    open_file(files, memory.root, "whole", 21)
    KeptTable(memory.fd).put("n/20", row)
    left = memory.left()
    assert [each.name for each in left.files] == ["whole"]
    assert sorted(each.inode for each in left.handles) == [20, 21]
    assert not left.is_whole
    assert "a row of the predecessor is not readable" in caplog.text


@pytest.mark.parametrize("kind", ["h/120", "o/5", "r/5"])
@pytest.mark.parametrize("row", [[1], 5, "text"])
def test_a_damaged_row_of_a_handle_leaves_it_out(memory: Memory, kind: str, row: object) -> None:
    files = memory.daemon(is_resumed=False)
    open_file(files, memory.root)
    files.on_directory_opened(5, 8, memory.root, 11)
    KeptTable(memory.fd).put(kind, row)
    left = memory.left()
    assert [
        each for each in left.handles if f"h/{each.number}" == kind or kind[1:] == f"/{each.number}"
    ] == []
    assert not left.is_whole


async def test_an_open_waits_for_a_move_that_the_journal_is_taking_and_for_no_other(memory: Memory) -> None:
    files = memory.daemon(is_resumed=False)
    node = Node(20, Kind.FILE, "f", memory.root, 0o644, 0, 0, 0, object=OLD)

    async def commit() -> None:
        memory.begin_commit()
        memory.end_commit()
        memory.journal.is_awaited = False

    memory.journal.wait_committed = commit
    files.on_moved(node)  # another client took the name: no row follows
    await files.wait_for_moves(node)
    assert memory.journal.last_commit == 0
    memory.journal.is_awaited = True
    await files.wait_for_moves(node)
    assert memory.journal.last_commit == 1
