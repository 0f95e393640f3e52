"""Staging files: what is written is what is read, errors have names, nothing is overwritten by accident."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.disk.staging import (
    StagingDirectory,
    StagingFile,
    checksum_of_checksums,
    digests,
    sync_all,
)
from fusecache.model.errors import Damaged, LocalDiskError, NoSpace
from fusecache.model.objects import GRANULE_BYTES, MIB


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StagingDirectory]:
    made = StagingDirectory(tmp_path)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StagingFile]:
    made = StagingFile(tmp_path / "file", create=True)
    yield made
    made.close()


def test_bytes_are_read_as_written_with_zeros_in_holes(file: StagingFile) -> None:
    file.write(10, b"later")
    file.write(0, b"early")
    assert file.read(0, 100) == b"early\0\0\0\0\0later"
    assert (file.size(), file.read(15, 1), file.read(1000, 1)) == (15, b"", b"")


def test_truncate_cuts_and_extends_with_zeros(file: StagingFile) -> None:
    file.write(0, b"12345")
    file.truncate(2)
    file.truncate(4)
    assert file.read(0, 10) == b"12\0\0"


def test_what_is_in_memory_is_read_without_waiting_or_not_at_all(file: StagingFile) -> None:
    file.write(0, b"x" * MIB)
    assert file.read_nowait(0, MIB) in {b"x" * MIB, None}
    assert file.read_nowait(MIB - 1, 2) is None  # too short: `read` knows whether that is the end


def test_a_closed_file_opens_itself_again(file: StagingFile) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file.write(0, b"1")
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert file.read(0, 10) == b"1"
    file.write(1, b"2")
    file.sync()
    assert file.read(0, 10) == b"12"
    file.delete()
    with pytest.raises(LocalDiskError):
        file.read(0, 1)


def test_a_file_is_never_made_twice(file: StagingFile) -> None:
    with pytest.raises(LocalDiskError, match="exists"):
        StagingFile(file.path, create=True)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LocalDiskError, match="No such file"):
        StagingFile(tmp_path / "missing", create=False)


def test_a_full_disk_has_a_name_of_its_own() -> None:
    full = StagingFile(Path("/dev/full"), create=False)
    with pytest.raises(NoSpace, match="cache disk is full"):
        full.write(0, b"1")
    full.close()


def test_a_copy_takes_the_first_bytes_or_says_that_they_are_missing(
    tmp_path: Path, file: StagingFile
) -> None:
    file.write(0, b"x" * 100_000)
    with closing(StagingFile(tmp_path / "copy", create=True)) as copy:
        copy.copy_from(file, 70_000)
        assert copy.read(0, MIB) == b"x" * 70_000
    with (
        closing(StagingFile(tmp_path / "longer", create=True)) as longer,
        pytest.raises(Damaged, match="ends at"),
    ):
        longer.copy_from(file, 100_001)


@given(st.binary(max_size=300), st.integers(0, 3 * GRANULE_BYTES), st.integers(0, 3 * GRANULE_BYTES))
def test_any_changed_byte_changes_the_checksum(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, offset: int, place: int
) -> None:
    file = StagingFile(tmp_path_factory.mktemp("sums") / "file", create=True)
    file.truncate(3 * GRANULE_BYTES + 1)
    file.write(offset, data)
    before = file.checksums()
    assert len(before) == 8 * -(-file.size() // GRANULE_BYTES)
    file.write(place, bytes([file.read(place, 1)[0] ^ 1]))
    after = file.checksums()
    index = place // GRANULE_BYTES
    assert before[: 8 * index] == after[: 8 * index]
    assert before[8 * index : 8 * index + 8] != after[8 * index : 8 * index + 8]
    assert checksum_of_checksums(before) != checksum_of_checksums(after)
    file.delete()


def test_a_directory_knows_its_generations_and_moves_them_aside(
    directory: StagingDirectory, tmp_path: Path
) -> None:
    for number in (3, 12):
        directory.create(number).write(0, b"%d" % number)
    (tmp_path / "staging" / "notes.txt").write_text("not ours")
    assert directory.sizes().keys() == {3, 12}
    place = directory.quarantine(12, "orphans")
    assert place.read_bytes() == b"12"
    assert directory.sizes().keys() == {3}
    assert directory.open(3).read(0, 10) == b"3"
    directory.delete(3)
    directory.delete(3)
    assert directory.sizes() == {}


def test_a_directory_closes_all_its_files_and_keeps_their_bytes(directory: StagingDirectory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    first, second = (directory.create(number) for number in (1, 2))
    first.write(0, b"1")
    first.close()
    assert first.read(0, 1) == b"1"  # which opened it again
    later = directory.known(2)
    assert later.size() == 0
    assert len(os.listdir("/proc/self/fd")) == before + 3
    directory.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert (first.read(0, 1), second.size()) == (b"1", 0)


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (0, 3 * MIB + 5), (MIB, 2 * MIB), (2 * MIB, MIB + 5)])
def test_one_pass_gives_the_md5_and_the_checksums_of_a_part(
    file: StagingFile, offset: int, size: int
) -> None:
    data = os.urandom(3 * MIB + 5)
    file.write(0, data)
    md5, checksums = digests(file.path, offset, size)
    assert md5 == hashlib.md5(data[offset : offset + size]).digest()
    assert checksums == file.checksums(offset, size)
    assert file.checksums() == file.checksums(0, MIB) + file.checksums(MIB, 5 * MIB)


def test_a_part_behind_the_files_end_has_no_digests(file: StagingFile) -> None:
    file.write(0, b"x" * 100)
    with pytest.raises(Damaged):
        digests(file.path, 0, 101)
    file.delete()
    with pytest.raises(LocalDiskError):
        digests(file.path, 0, 1)


def test_of_files_that_are_synced_together_one_that_fails_fails_alone(tmp_path: Path) -> None:
    good, gone, empty = (StagingFile(tmp_path / name, create=True) for name in ("good", "gone", "empty"))
    with closing(good), closing(empty):
        good.write(0, b"x" * (GRANULE_BYTES + 1))
        gone.delete()
        first, second, third = sync_all([good, gone, empty])
        assert (first, third) == (good.checksums(), b"")
        assert isinstance(second, LocalDiskError)


def test_files_whose_folder_is_not_synced_are_not_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [StagingFile(tmp_path / name, create=True) for name in ("a", "b")]

    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with closing(files[0]), closing(files[1]):
        assert all(isinstance(each, LocalDiskError) for each in sync_all(files))
