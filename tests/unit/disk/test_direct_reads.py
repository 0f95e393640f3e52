"""Reads of a file by the kernel's asynchronous I/O, on a real disk."""

import errno
import mmap
import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.disk.direct_reads import DirectReads
from tests.support.direct_reads import skip_without_direct_reads

PAGE = 4096
DATA = os.urandom(8 * PAGE)


@pytest.fixture
def reads() -> Iterator[DirectReads]:
    try:
        made = DirectReads(4)
    except OSError as exc:
        pytest.skip(f"this kernel does not offer it: {exc}")
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> bytes:
    """A file of DATA that can be read directly: with pages that are still to be written, the kernel would wait."""
    file = tmp_path / "file"
    with file.open("wb") as open_file:
        open_file.write(DATA)
        os.fsync(open_file.fileno())
    skip_without_direct_reads(file)
    return os.fsencode(file)


def memory(pages: int) -> memoryview:
    return memoryview(mmap.mmap(-1, pages * PAGE))


def all_ended(reads: DirectReads, count: int) -> dict[object, int]:
    found: dict[object, int] = {}
    while len(found) < count:
        assert select.select([reads.events], [], [], 10)[0], "no read ended in 10 s"
        found.update(reads.ended())
    return found


def test_several_reads_end_each_with_its_own_tag_and_bytes(reads: DirectReads, path: bytes) -> None:
    buffers = [memory(2) for _ in range(4)]
    for number, buffer in enumerate(buffers):
        assert reads.begin(path, number * 2 * PAGE, buffer, f"read {number}")
    assert all_ended(reads, 4) == {f"read {number}": 2 * PAGE for number in range(4)}
    assert b"".join(buffers) == DATA


def test_one_more_than_fit_is_left_to_a_thread_until_one_has_ended(reads: DirectReads, path: bytes) -> None:
    for number in range(4):
        assert reads.begin(path, 0, memory(1), number)
    assert not reads.begin(path, 0, memory(1), "one more")
    assert set(all_ended(reads, 4)) == {0, 1, 2, 3}
    assert reads.begin(path, 0, memory(1), "one more")
    assert all_ended(reads, 1) == {"one more": PAGE}


def test_at_the_end_of_a_file_fewer_bytes_come(reads: DirectReads, path: bytes) -> None:
    assert reads.begin(path, len(DATA) - PAGE, memory(2), "last")
    assert all_ended(reads, 1) == {"last": PAGE}
    assert reads.begin(path, len(DATA), memory(2), "behind it")
    assert all_ended(reads, 1) == {"behind it": 0}


def test_a_file_that_is_not_there_is_left_to_a_thread(reads: DirectReads, path: bytes) -> None:
    assert not reads.begin(path + b"-not-there", 0, memory(1), "none")


def test_a_read_that_would_wait_ends_with_an_error(reads: DirectReads, path: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(DATA[:PAGE])
        file.flush()
        assert reads.begin(path, 0, memory(1), "dirty")
        result = all_ended(reads, 1)["dirty"]
    assert result in (-errno.EAGAIN, PAGE)  # the kernel's writer may have come first


def test_descriptors_and_places_come_back(reads: DirectReads, path: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        assert reads.begin(path, 0, memory(1), number)
        assert not reads.begin(path + b"-not-there", 0, memory(1), "none")
        assert all_ended(reads, 1) == {number: PAGE}
    assert len(os.listdir("/proc/self/fd")) == before
