"""Which of its predecessor's rows a daemon believes: those that the journal has taken."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fusecache.engine.namespace.nodes import FileHandle, Kind, Node
from fusecache.fs.kept_files import KeptFiles
from fusecache.fuse.kept_requests import make_memory
from fusecache.fuse.kept_table import FORMAT, KeptTable
from fusecache.model.errors import LocalDiskError
from fusecache.model.objects import ObjectInfo
from fusecache.model.predecessor import LOST, KeptNode, Predecessor

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
        files.settle(self.journal)
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


def test_rows_of_the_format_before_are_read_and_left_until_this_daemon_serves(memory: Memory) -> None:
    table = KeptTable(memory.fd)
    rows: dict[str, Any] = {
        "start": 3,
        "d/30": [1, "d", 0o755, 0, 0, 9, 0],
        "n/20": [30, "f", 0o644, 0, 0, 9, 4, ["d/f", "etag", 3, 1.0, None]],
        "h/9": [7, 20, 11, True, 11, False, 0],
    }
    for key, row in rows.items():
        table.put(key, row)
    os.pwrite(memory.fd, (FORMAT - 1).to_bytes(8, "little"), 8)
    files = memory.daemon()
    found = files.predecessor
    assert found is not None
    (file,) = found.files
    assert (file.parent, file.name, file.generation, file.is_written) == (30, "f", 4, True)
    assert file.object == ObjectInfo("d/f", "etag", 3, 1.0)
    node = Node(20, Kind.FILE, "g", None, 0o644, 0, 0, 0)
    files.on_moved(node)
    assert KeptTable(memory.fd).get("n/20") == rows["n/20"]
    assert KeptTable(memory.fd).is_old
    files.begin({20: node})
    assert not KeptTable(memory.fd).is_old
    assert (memory.file().name, memory.file().parent) == ("g", 0)


def test_a_damaged_row_is_not_guessed_and_its_handle_is_left_without_a_file(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    files = memory.daemon(is_resumed=False)
    open_file(files, memory.root)
    open_file(files, memory.root, "whole", 21)
    KeptTable(memory.fd).put("n/20", [[], 0o644])
    left = memory.left()
    assert [each.name for each in left.files] == ["whole"]
    assert sorted(each.inode for each in left.handles) == [20, 21]
    assert "a row of the predecessor is not readable" in caplog.text


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
