"""Checksums that are taken of a growing, changing file piece by piece are those of the whole file."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.disk.staging import StagingDirectory, StagingFile
from fusecache.model.objects import GRANULE_BYTES, MIB
from fusecache.policy.incremental_checksums import IncrementalChecksums
from tests.support.node import Bucket, running_node


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StagingFile]:
    made = StagingDirectory(tmp_path).create(1)
    yield made
    made.close()


def take(sums: IncrementalChecksums, file: StagingFile, size: int) -> None:
    with sums.taking(size) as extent:
        sums.put(extent, size, file.checksums(extent[0], extent[1] - extent[0]))


@pytest.mark.parametrize("seed", range(20))
def test_they_are_those_of_the_whole_file_whatever_was_changed(file: StagingFile, seed: int) -> None:
    chance = random.Random(seed)
    sums, size = IncrementalChecksums(), 0
    for _ in range(60):
        at = chance.choice((size, chance.randrange(6 * GRANULE_BYTES), GRANULE_BYTES * chance.randrange(6)))
        if chance.random() < 0.2:
            file.truncate(at)
            sums.change(min(at, size), max(at, size))
            size = at
        else:
            data = chance.randbytes(chance.choice((1, 700, GRANULE_BYTES, 3 * GRANULE_BYTES)))
            sums.change(min(at, size), at + len(data))
            file.write(at, data)
            size = max(size, at + len(data))
        if chance.random() < 0.4:
            take(sums, file, size)
            assert sums.checksums == file.checksums()
            assert sums.are_current


def test_what_changes_while_they_are_taken_is_taken_the_next_time(file: StagingFile) -> None:
    sums = IncrementalChecksums()
    file.write(0, b"1" * 100_000)
    with sums.taking(100_000) as extent:
        assert not sums.are_current
        sums.put(extent, 100_000, file.checksums())
        sums.change(5, 6)
        file.write(5, b"2")
    assert not sums.are_current
    take(sums, file, 100_000)
    assert sums.checksums == file.checksums()


def test_a_failure_forgets_nothing(file: StagingFile) -> None:
    sums = IncrementalChecksums()
    file.write(0, b"1" * 100_000)
    with pytest.raises(OSError, match="disk"), sums.taking(100_000):
        raise OSError("the disk fails")
    assert not sums.are_current
    take(sums, file, 100_000)
    assert sums.checksums == file.checksums()


async def test_a_log_that_is_synced_line_by_line_is_read_once(bucket: Bucket, cache: Path) -> None:
    """And found verified at its close."""
    async with running_node(bucket, cache) as user:
        handle = await user.open("log")
        for number in range(200):
            await user.fs.file_io.write(handle, number * 10_000, b"-" * 10_000)
            await user.fs.fsync(handle)
        version = handle.node.version
        assert version is not None
        assert version.checksums.summed_bytes < 200 * (10_000 + 2 * GRANULE_BYTES)
        await user.fs.close_protocol.flush(handle)
        assert version.record.synced
        await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"


async def test_a_large_file_that_is_changed_here_and_there_is_not_read_at_every_sync(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        handle = await user.open("data.db")
        for offset in range(0, 8 * MIB, MIB):
            await user.fs.file_io.write(handle, offset, bytes(MIB))
        for _ in range(100):
            for offset in (0, 4 * MIB, 8 * MIB - 4096):
                await user.fs.file_io.write(handle, offset, b"x" * 4096)
            await user.fs.fsync(handle)
        version = handle.node.version
        assert version is not None
        assert version.checksums.summed_bytes <= version.upload.written_bytes + 8 * MIB
        await user.close(handle)
        assert await user.drained() == "durable"
