"""Cache files keep bytes where they were put."""

import mmap
import os
import tempfile
from pathlib import Path

import pytest
import xxhash

from fusecache.disk import cache_files
from fusecache.disk.cache_files import FOLDERS, CacheFiles, granule_checksums
from fusecache.disk.direct_reads import LARGE_BYTES, SMALL_BYTES, AlignedBuffers
from fusecache.model.errors import LocalDiskError
from fusecache.model.objects import GRANULE_BYTES, KIB, MIB

SHM = Path("/dev/shm")


def _memory(size: int, fill: bytes = b"\0") -> memoryview:
    """Return page-aligned memory."""
    area = mmap.mmap(-1, size)
    area.write((fill * size)[:size])
    return memoryview(area)


@pytest.fixture
def files(tmp_path: Path) -> CacheFiles:
    """Files on the disk of the test's own folder."""
    return CacheFiles(tmp_path)


def test_stored_bytes_come_back_and_match_their_checksums(files: CacheFiles) -> None:
    memory = _memory(3 * GRANULE_BYTES, b"abc")
    size = 2 * GRANULE_BYTES + 777
    checksums = files.store(1, 5 * GRANULE_BYTES, memory, size)
    assert checksums == granule_checksums(memory[:size])
    back = _memory(3 * GRANULE_BYTES)
    assert files.load(1, 5 * GRANULE_BYTES, back, size, checksums) == []
    assert back[:size] == memory[:size]


@pytest.mark.parametrize(
    "size", [1, GRANULE_BYTES, 2 * GRANULE_BYTES, 2 * GRANULE_BYTES + 1, 5 * GRANULE_BYTES]
)
def test_checksums_are_those_of_the_package_with_and_without_its_lock(size: int) -> None:
    data = os.urandom(size)
    expected = b"".join(
        xxhash.xxh3_64_digest(data[start : start + GRANULE_BYTES])[::-1]
        for start in range(0, size, GRANULE_BYTES)
    )
    assert granule_checksums(memoryview(data)) == expected  # read-only: by the package itself
    assert granule_checksums(memoryview(bytearray(data))) == expected


def test_the_packages_own_function_is_found() -> None:
    assert cache_files._xxh3 is not None


def test_damaged_and_missing_granules_are_named(files: CacheFiles, tmp_path: Path) -> None:
    memory = _memory(4 * GRANULE_BYTES, b"xyz")
    checksums = files.store(1, 0, memory, 4 * GRANULE_BYTES)
    (path,) = [path for path in tmp_path.glob("*/*") if path.is_file()]
    with path.open("r+b") as file:
        file.seek(GRANULE_BYTES + 5)
        file.write(b"!")
        file.truncate(3 * GRANULE_BYTES)
    assert files.load(1, 0, _memory(4 * GRANULE_BYTES), 4 * GRANULE_BYTES, checksums) == [1, 3]
    files.delete(1)
    assert files.load(1, 0, _memory(4 * GRANULE_BYTES), 2 * GRANULE_BYTES, bytes(16)) == [0, 1]


def test_a_punched_hole_frees_its_bytes_and_leaves_the_rest(files: CacheFiles, tmp_path: Path) -> None:
    memory = _memory(4 * MIB, b"0123456")
    checksums = files.store(1, 0, memory, 4 * MIB)
    (path,) = [path for path in tmp_path.glob("*/*") if path.is_file()]
    before = path.stat().st_blocks
    files.punch(1, [(MIB, MIB)])
    assert before - path.stat().st_blocks == MIB // 512
    assert files.load(1, 0, _memory(4 * MIB), 4 * MIB, checksums) == list(range(16, 32))


def test_missing_files_may_be_punched_and_deleted(files: CacheFiles) -> None:
    files.punch(99, [(0, MIB)])
    files.delete(99)


def test_an_adopted_file_is_read_to_its_last_byte(files: CacheFiles, tmp_path: Path) -> None:
    data = b"q" * (GRANULE_BYTES + 4097)
    staged = tmp_path / "staged"
    staged.write_bytes(data)
    files.adopt(staged, 300)
    assert files.numbers_in(300 % FOLDERS) == [300]
    assert files.folders() == [300 % FOLDERS]
    back = _memory(2 * GRANULE_BYTES)
    assert files.load(300, 0, back, len(data), granule_checksums(memoryview(data))) == []
    assert back[: len(data)] == data
    staged.unlink()
    with pytest.raises(LocalDiskError):
        files.adopt(staged, 301)


@pytest.mark.skipif(not SHM.is_dir(), reason="no tmpfs on this machine")
def test_a_file_system_of_another_kind_works_too() -> None:
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        files = CacheFiles(Path(folder))
        memory = _memory(GRANULE_BYTES, b"tmpfs")
        checksums = files.store(7, 0, memory, 70)
        back = _memory(GRANULE_BYTES)
        assert files.load(7, 0, back, 70, checksums) == []
        assert back[:70] == memory[:70]
        assert files.free_bytes() > 0


def test_buffers_are_page_aligned_disjoint_and_within_their_bound() -> None:
    pool = AlignedBuffers(40 * MIB)
    assert {len(buffer) for buffer in pool.large} == {LARGE_BYTES}
    assert {len(buffer) for buffer in pool.small} == {SMALL_BYTES}
    assert sum(map(len, [*pool.large, *pool.small])) <= 40 * MIB
    for number, buffer in enumerate([*pool.large, *pool.small]):
        buffer[0], buffer[-1] = number % 251, number % 251
    for number, buffer in enumerate([*pool.large, *pool.small]):
        assert buffer[0] == buffer[-1] == number % 251
    with pytest.raises(ValueError, match="at least"):
        AlignedBuffers(KIB)


def _whole(files: CacheFiles, number: int, size: int) -> int:
    """Store a file and open it for a program; skips where files have no direct I/O or no leases."""
    try:
        os.close(files.open_probe())
    except OSError as exc:
        pytest.skip(f"no passthrough here: {exc.strerror}")
    files.store(number, 0, _memory(-(-size // 4096) * 4096, b"abcdefg"), size)
    fd = files.open_whole(number, size)
    assert fd is not None
    return fd


def test_a_file_for_a_program_has_the_bytes_of_its_object_and_no_others(files: CacheFiles) -> None:
    fd = _whole(files, 1, 100_001)
    assert os.read(fd, 200_000) == (b"abcdefg" * 20_000)[:100_001]
    os.close(fd)
    assert files.open_whole(1, 100_002) is None
    assert files.open_whole(2, 1) is None


def test_a_file_is_in_use_while_it_is_open_or_mapped(files: CacheFiles) -> None:
    fd = _whole(files, 1, 8192)
    assert files.is_in_use(1)
    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    os.close(fd)
    assert files.is_in_use(1)
    mapping.close()
    assert not files.is_in_use(1)
    assert not files.is_in_use(2)


def test_a_restart_finds_the_files_that_are_still_in_use(files: CacheFiles, tmp_path: Path) -> None:
    """Lines that are no numbers, as a full disk leaves them, are passed over."""
    first, second = _whole(files, 10, 8192), _whole(files, 11, 8192)
    os.close(first)
    with open(tmp_path / "passed-through", "a") as file:
        file.write("b\nno number\n1f")
    assert CacheFiles(tmp_path).in_use_before() == {11: 8192}
    assert CacheFiles(tmp_path).in_use_before() == {11: 8192}
    os.close(second)
    assert CacheFiles(tmp_path).in_use_before() == {}
