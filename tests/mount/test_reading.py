"""Reading what others wrote: any size, any access, exactly the bytes of the bucket."""

import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import pattern

MIB = 2**20
# The cache's largest block; the edges of the smaller ones lie inside.
BLOCK = 4 * MIB


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_whole_file_has_the_bytes_and_the_size_of_its_object(place: Place, size: int):
    data = pattern(size)
    place.bucket.put("file", data)
    assert (place.path / "file").read_bytes() == data
    assert (place.path / "file").stat().st_size == size


def test_ranges_are_exact_also_across_the_end(place: Place):
    data = pattern(BLOCK + 12_345)
    place.bucket.put("file", data)
    chance = random.Random(1)
    with open(place.path / "file", "rb", buffering=0) as file:
        for _ in range(200):
            offset, size = chance.randrange(len(data) + 100), chance.choice([1, 100, 4096, 70_000, MIB])
            assert os.pread(file.fileno(), size, offset) == data[offset : offset + size]
        assert os.pread(file.fileno(), 10, len(data)) == b""
        assert os.pread(file.fileno(), 10, len(data) + BLOCK) == b""


def test_sixty_four_mebibytes_one_after_another_and_at_random_are_the_source(place: Place):
    data = pattern(64 * MIB)
    place.bucket.put("big", data)
    with open(place.path / "big", "rb", buffering=0) as file:
        offset = 0
        while chunk := file.read(MIB):
            assert chunk == data[offset : offset + len(chunk)]
            offset += len(chunk)
        assert offset == len(data)
    chance = random.Random(2)
    with open(place.second / "big", "rb", buffering=0) as file:
        for _ in range(100):
            offset = chance.randrange(len(data))
            size = chance.choice([1, 4096, 100_000])
            assert os.pread(file.fileno(), size, offset) == data[offset : offset + size]


def test_a_mapping_shows_the_bytes(place: Place):
    data = pattern(3 * MIB + 5)
    place.bucket.put("mapped", data)
    with (
        open(place.path / "mapped", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
    ):
        assert view[2 * MIB : 2 * MIB + 10] == data[2 * MIB : 2 * MIB + 10]
        assert view[-5:] == data[-5:]
        assert view[:] == data


def test_a_mapping_that_is_read_at_random_fetches_what_it_needs(place: Place):
    """The kernel reads a whole window around each page fault; the daemon fetches the part that is needed."""
    data = pattern(96 * MIB)
    place.bucket.put("tokens", data)
    chance = random.Random(3)
    before = fetched_bytes(place)
    with (
        open(place.path / "tokens", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
    ):
        for _ in range(60):
            offset = chance.randrange(len(data))
            assert view[offset] == data[offset]
    assert fetched_bytes(place) - before <= 60 * 128 * 1024


def test_mappings_that_threads_read_in_order_fetch_each_byte_once(place: Place):
    data = pattern(64 * MIB)
    place.bucket.put("weights", data)
    before = fetched_bytes(place)
    with (
        open(place.path / "weights", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
        ThreadPoolExecutor(4) as pool,
    ):

        def read(part: int) -> bool:
            start = part * 16 * MIB
            return all(
                view[at : at + MIB] == data[at : at + MIB] for at in range(start, start + 16 * MIB, MIB)
            )

        assert all(pool.map(read, range(4)))
    assert fetched_bytes(place) - before <= len(data) + 4 * MIB


def fetched_bytes(place: Place) -> int:
    """How many bytes the daemon of the first mount asked the bucket for."""
    return sum(place.first_mount.status()["cache"]["bytes_by_cause"].values())


def test_many_readers_of_many_files_at_once_get_their_own_bytes(place: Place):
    contents = {f"f{index}": pattern(300_000 + index, seed=index) for index in range(12)}
    for name, data in contents.items():
        place.bucket.put(name, data)

    def read(turn: int) -> bool:
        name = f"f{turn % len(contents)}"
        return (place.path / name).read_bytes() == contents[name]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(read, range(96)))


def test_many_readers_of_one_large_file_at_once_get_right_bytes(place: Place):
    data = pattern(16 * MIB, seed=7)
    place.bucket.put("one", data)
    chance = random.Random(3)
    offsets = [chance.randrange(len(data)) for _ in range(400)]
    with open(place.path / "one", "rb") as file, ThreadPoolExecutor(16) as pool:
        pieces = pool.map(lambda offset: os.pread(file.fileno(), 50_000, offset), offsets)
        assert all(
            piece == data[offset : offset + 50_000] for offset, piece in zip(offsets, pieces, strict=True)
        )


@pytest.mark.s3server_only
def test_what_was_read_once_is_not_asked_for_again(place: Place):
    data = pattern(2 * MIB)
    place.bucket.put("file", data)
    assert (place.path / "file").read_bytes() == data
    asked = len(place.bucket.requests("GetObject"))
    with open(place.path / "file", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel's copy goes
        assert file.read() == data
    assert len(place.bucket.requests("GetObject")) == asked


@pytest.mark.s3server_only
@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultAction.SHORT_BODY, operation="GetObject", times=2, after_bytes=1000),
        Fault(FaultAction.ANSWER, operation="GetObject", times=2, status=503, code="SlowDown"),
        Fault(FaultAction.DROP_BEFORE, operation="GetObject", times=2),
        Fault(FaultAction.WRONG_RANGE, operation="GetObject", times=1),
        Fault(FaultAction.IGNORE_RANGE, operation="GetObject", times=1),
    ],
    ids=lambda fault: fault.action.name,
)
def test_a_damaged_answer_is_asked_for_again(place: Place, fault: Fault):
    data = pattern(500_000)
    place.bucket.put("file", data)
    place.bucket.control.faults(fault)
    assert (place.path / "file").read_bytes() == data
    assert any(entry.fault for entry in place.bucket.requests("GetObject"))


def test_the_marks_of_a_file_made_elsewhere_are_the_defaults_and_the_objects_time(place: Place):
    place.bucket.put("file", b"bytes")
    seen = (place.path / "file").stat()
    assert seen.st_mode & 0o7777 == 0o644
    assert seen.st_uid == os.stat(place.first_mount.path).st_uid
    assert seen.st_blksize == MIB
    assert seen.st_mtime == pytest.approx(place.bucket.head("file")["LastModified"].timestamp(), abs=1.5)
