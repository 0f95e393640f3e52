"""Passthrough: on a read-only mount the kernel reads files that are whole in the cache, without the daemon."""

import ctypes
import mmap
import os
import random
import stat
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusecache.disk.cache_files import CacheFiles
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.session import OwnSession
from fusecache.fuse.values import EntryAttributes, MountPlan, MountRefused, RequestContext, StatvfsData
from loader import ElasticBatchSampler, MDSDataset, MDSWriter, World
from loader.base.mount_endpoint import find_endpoint
from loader.fast import Loader
from tests.mount.conftest import Mounts
from tests.support.mounts import FUSECACHE, ON_PYFUSE3, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20
# Not whole pages: the cache pads its files to those.
SIZE = 9 * MIB + 123
FLAGS = ("--read-only", "--attribute-seconds", "0.2")


class _Nothing(RequestHandlers):
    """An empty directory whose session asks for passthrough."""

    enable_passthrough = True

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino, entry.st_mode = inode, stat.S_IFDIR | 0o755
        return entry

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        return StatvfsData()


def refused_because(folder: Path) -> str:
    """Return why the kernel reads no file in a folder by itself; "" if it does. Asks the kernel, not the daemon."""
    if ON_PYFUSE3:
        return "pyfuse3 has no passthrough"
    (folder / "mnt").mkdir()
    try:
        session = OwnSession.mount(_Nothing(), MountPlan(str(folder / "mnt"), "nothing", "fusecache"))
    except MountRefused as exc:
        return f"cannot mount: {exc}"
    try:
        if not session.can_pass_through:
            return "the kernel is older than 6.9, or built without passthrough"
        fd = CacheFiles(folder / "files").open_probe()
        try:
            session.close_backing(session.open_backing(fd))
        finally:
            os.close(fd)
    except OSError as exc:
        return f"the kernel refuses passthrough here: {exc.strerror}"
    finally:
        session.close()
    return ""


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where the kernel, the rights or the file system below pytest's folders do not allow passthrough."""
    reason = refused_because(tmp_path_factory.mktemp("probe"))
    if reason:
        pytest.skip(reason)


def passed(one: Mount) -> int:
    """Return how many open files are read by passthrough."""
    return int(one.status()["read_directly"]["kernel"])


def read_through(path: Path) -> bytes:
    """Return a file's bytes, but not from the kernel's pages: what the cache had to leave out is fetched again."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def passed_descriptor(one: Mount, name: str) -> int:
    """Read a file until it is whole in the cache, and return a descriptor that reads it by passthrough."""
    path = one.path / name

    def open_passed() -> int:
        read_through(path)
        before = passed(one)
        fd = os.open(path, os.O_RDONLY)
        if passed(one) > before:
            return fd
        os.close(fd)
        return 0

    fd: int = wait_until(open_passed, f"{name} passed through")
    return fd


def files_in_use(cache: Path) -> list[Path]:
    """Return the cache files that anything has open or mapped: a program, the kernel for the daemon, the daemon."""
    files = CacheFiles(cache / "cache" / "files")
    found = [path for path in (cache / "cache" / "files").glob("??/*") if path.is_file()]
    return [path for path in found if files.is_in_use(int(path.name, 16))]


class Mapping:
    """A file's bytes in memory, by mmap(2) alone: Python's own mapping keeps the file open by a descriptor."""

    def __init__(self, fd: int, size: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._size = size
        self._address = self._libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        assert self._address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())

    def content(self) -> bytes:
        """Return the mapped bytes."""
        return ctypes.string_at(self._address, self._size)

    def close(self) -> None:
        """End the mapping."""
        assert self._libc.munmap(self._address, self._size) == 0


@pytest.fixture
def data() -> bytes:
    return random.Random(7).randbytes(SIZE)


@dataclass(frozen=True)
class Place:
    """A read-only mount that the tests of this file share, and the bucket behind it."""

    mount: Mount
    bucket: Bucket

    def put(self, data: bytes) -> str:
        """Store an object under a new name; return that, once the mount shows it: names are up to a second old."""
        name = uuid.uuid4().hex
        self.bucket.put(name, data)
        wait_until((self.mount.path / name).exists, "the file on the mount")
        return name


@pytest.fixture(scope="module")
def shared(able: None, whole_bucket: Bucket, mounts: Mounts) -> Place:
    """The shared mount."""
    bucket = whole_bucket.below("passthrough")
    bucket.put("first")
    return Place(mounts.make(bucket, *FLAGS), bucket)


@pytest.fixture
def whole(shared: Place, data: bytes) -> str:
    """The name of a file with `data`."""
    return shared.put(data)


@pytest.fixture
def one(shared: Place) -> Mount:
    """The shared mount, in which nothing else is open."""
    wait_until(lambda: passed(shared.mount) == 0, "the end of the last test's files")
    return shared.mount


@pytest.fixture
def fd(one: Mount, whole: str) -> Iterator[int]:
    """A descriptor of the file `whole`, passed through."""
    opened = passed_descriptor(one, whole)
    yield opened
    os.close(opened)


# ---- reading


def test_a_file_that_is_mapped_and_closed_is_not_counted_and_still_read_by_the_kernel(
    one: Mount, whole: str, data: bytes
) -> None:
    """As programs read weights: no descriptor is left, and the daemon sees no read."""
    fd = passed_descriptor(one, whole)
    memory = Mapping(fd, SIZE)
    os.close(fd)
    try:
        wait_until(lambda: passed(one) == 0, "the close")
        before = one.read_by_daemon()
        assert memory.content() == data
        assert one.read_by_daemon() == before
    finally:
        memory.close()


def test_all_ways_to_read_give_the_objects_bytes_without_the_daemon(
    one: Mount, whole: str, fd: int, data: bytes
) -> None:
    before = one.read_by_daemon()
    assert os.read(fd, SIZE + 4096) == data
    assert os.read(fd, 1) == b""
    for start in (0, 4095, MIB + 1, SIZE - 100, SIZE - 1, SIZE, SIZE + 5000):
        assert os.pread(fd, 8192, start) == data[start : start + 8192]
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        assert len(memory) == SIZE
        assert memory[:] == data
    direct = os.open(one.path / whole, os.O_RDONLY | os.O_DIRECT)
    try:
        page = mmap.mmap(-1, 8192)
        assert os.preadv(direct, [page], 4 * MIB) == 8192
        assert page[:] == data[4 * MIB : 4 * MIB + 8192]
        assert os.preadv(direct, [page], SIZE // 4096 * 4096) == SIZE % 4096
        assert passed(one) == 2
    finally:
        os.close(direct)
    assert os.fstat(fd).st_size == SIZE
    assert one.read_by_daemon() == before


def test_many_programs_open_one_file_at_once(one: Mount, whole: str, fd: int, data: bytes) -> None:
    """Also while it is closed by others: the kernel refuses an open of another kind."""

    def read(_: int) -> bool:
        return (one.path / whole).read_bytes() == data

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(64)))
    wait_until(lambda: passed(one) == 1, "the end of the other opens")


def test_a_file_that_becomes_whole_while_open_passes_at_its_next_open(
    one: Mount, whole: str, data: bytes
) -> None:
    """While the first open is there, others read through the daemon too, as the kernel demands."""
    path = one.path / whole
    used = one.status()["cache"]["used_bytes"]
    with open(path, "rb") as first:
        assert first.read(5) == data[:5]

        def is_whole() -> bool:
            assert read_through(path) == data
            return int(one.status()["cache"]["used_bytes"]) >= used + SIZE

        wait_until(is_whole, "the whole file")
        with open(path, "rb") as second:
            assert second.read() == data
            assert passed(one) == 0
        assert first.read() == data[5:]
    os.close(passed_descriptor(one, whole))


def test_a_loader_opens_its_shards_again_in_each_epoch(one: Mount, shared: Place, tmp_path: Path) -> None:
    with MDSWriter(tmp_path / "data", {"bytes": "bytes"}, size_limit=4 * MIB) as writer:
        for number in range(24):
            writer.write({"bytes": number.to_bytes(4, "big") * (MIB // 8)})
    folder = uuid.uuid4().hex
    for path in (tmp_path / "data").iterdir():
        shared.bucket.put(f"{folder}/{path.name}", path.read_bytes())
    wait_until((one.path / folder).exists, "the data set on the mount")
    dataset = MDSDataset(one.path / folder)
    sampler = ElasticBatchSampler(dataset, global_batch_size=8, world=World())
    # Hints would have the daemon follow the first reads.
    with closing(Loader(dataset, sampler, hints=False)) as loader:
        assert sum(len(batch["bytes"]) for batch in loader) == 24
        run(FUSECACHE, "warm", "--wait", one.path / folder)
        wait_until(
            lambda: passed_after_an_epoch(one, loader) == dataset.index.shards, "all shards passed through"
        )


def test_loaders_are_given_no_cache_files(one: Mount, whole: str) -> None:
    found = find_endpoint(one.path)
    assert found is not None
    with pytest.raises(PermissionError, match="the kernel reads the files of this mount by itself"):
        found[0].open_cached(os.stat(one.path / whole))


def passed_after_an_epoch(one: Mount, loader: Loader) -> int:
    """Return how many files are open and passed through after an epoch."""
    loader.set_epoch(loader.epoch + 1)
    assert sum(len(batch["bytes"]) for batch in loader) == 24
    return passed(one)


def test_files_that_are_not_whole_or_small_are_read_by_the_daemon(one: Mount, shared: Place) -> None:
    large = random.Random(3).randbytes(40 * MIB)
    for name, content in ((shared.put(large), large), (shared.put(b"1234"), b"1234")):
        for _ in range(2):
            with open(one.path / name, "rb", buffering=0) as file:
                assert file.read(4) == content[:4]
                assert passed(one) == 0


def test_a_mount_for_writing_has_no_passthrough(
    able: None, mount: Callable[..., Mount], bucket: Bucket, data: bytes
) -> None:
    bucket.put("whole", data)
    one = mount()
    for _ in range(3):
        with open(one.path / "whole", "rb") as file:
            assert file.read() == data
            assert passed(one) == 0
    assert ",WRITEBACK_CACHE" in one.log()
    assert "passthrough=off" not in one.log()


def test_a_cache_on_an_overlay_is_read_by_the_daemon(
    able: None, mount: Callable[..., Mount], bucket: Bucket, data: bytes, tmp_path: Path
) -> None:
    """The log says once why."""
    for name in ("lower", "upper", "work", "both"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    done = run("mount", "-t", "overlay", "overlay", "-o", layers, tmp_path / "both", check=False)
    if done.returncode:
        pytest.skip(f"no overlay can be mounted: {done.stderr}")
    try:
        bucket.put("whole", data)
        one = mount(*FLAGS, cache=tmp_path / "both" / "cache")
        for _ in range(3):
            with open(one.path / "whole", "rb") as file:
                assert file.read() == data
                assert passed(one) == 0
        assert one.log().count("passthrough=off") == 1
        one.unmount()
    finally:
        run("umount", tmp_path / "both")


# ---- versions


def test_an_open_file_keeps_its_version_and_the_next_open_has_the_new_one(
    one: Mount, shared: Place, whole: str, fd: int, data: bytes
) -> None:
    new = random.Random(8).randbytes(SIZE + 4097)
    shared.bucket.put(whole, new)
    path = one.path / whole
    wait_until(lambda: path.stat().st_size == len(new), "the new version")
    assert path.read_bytes() == new
    other = passed_descriptor(one, whole)
    try:
        assert os.pread(other, 2 * SIZE, 0) == new
        assert os.pread(fd, 2 * SIZE, 0) == data
    finally:
        os.close(other)


def test_damage_on_disk_is_found_before_the_first_open_passes(
    able: None,
    mount: Callable[..., Mount],
    bucket: Bucket,
    data: bytes,
    tmp_path: Path,
    expect_log: Callable[[str], None],
) -> None:
    bucket.put("whole", data)
    one = mount(*FLAGS, cache=tmp_path / "cache")
    os.close(passed_descriptor(one, "whole"))
    one.unmount()
    assert files_in_use(one.cache) == []
    with open(one.cache_file(SIZE), "r+b") as file:
        file.seek(SIZE - 5)
        file.write(b"wrong")
    one.start(*FLAGS, "--memory", "64MiB")
    expect_log("cached granules are damaged")
    with open(one.path / "whole", "rb") as file:
        assert passed(one) == 0
        assert file.read() == data
    passing = passed_descriptor(one, "whole")
    try:
        assert os.pread(passing, SIZE, 0) == data
    finally:
        os.close(passing)


# ---- the cache's disk


def test_a_file_that_passes_is_not_evicted(
    able: None, mount: Callable[..., Mount], bucket: Bucket, data: bytes
) -> None:
    """Neither by other files, nor by `evict`; nor if it is closed and still mapped. Its bytes stay accounted."""
    bucket.put("whole", data)
    others = {f"other{index}": random.Random(index).randbytes(16 * MIB) for index in range(6)}
    for name, content in others.items():
        bucket.put(name, content)
    one = mount(*FLAGS, "--cache-size", "64MiB")
    fd = passed_descriptor(one, "whole")
    path = one.cache_file(SIZE)
    mapping = Mapping(fd, SIZE)
    blocks = path.stat().st_blocks

    def is_kept() -> bool:
        assert {name: (one.path / name).read_bytes() for name in others} == others
        run(FUSECACHE, "evict", one.path / "whole")
        assert one.status()["cache"]["used_bytes"] >= SIZE
        return path.stat().st_blocks == blocks and mapping.content() == data

    assert is_kept()
    assert os.pread(fd, SIZE, 0) == data
    os.close(fd)
    assert is_kept()
    assert passed(one) == 0
    mapping.close()

    def is_gone() -> bool:
        run(FUSECACHE, "evict", one.path / "whole")
        return not path.exists()

    wait_until(is_gone, "the eviction of a file that no program reads")


def test_a_mapping_outlives_its_descriptor_and_a_killed_daemon(
    able: None, mount: Callable[..., Mount], bucket: Bucket, data: bytes, tmp_path: Path
) -> None:
    """The next daemon neither punches nor evicts the file until the mapping is gone."""
    bucket.put("whole", data)
    one = mount(*FLAGS, cache=tmp_path / "cache")
    fd = passed_descriptor(one, "whole")
    mapping = Mapping(fd, SIZE)
    os.close(fd)
    wait_until(lambda: passed(one) == 0, "the close, though the mapping is there")
    path = one.cache_file(SIZE)
    run(FUSECACHE, "evict", one.path / "whole")
    assert path.exists()
    one.kill()
    assert mapping.content() == data
    one.start(*FLAGS, "--memory", "64MiB")
    run(FUSECACHE, "evict", one.path / "whole")
    assert mapping.content() == data
    assert path.exists()
    mapping.close()

    def is_gone() -> bool:
        run(FUSECACHE, "evict", one.path / "whole")
        return not path.exists()

    wait_until(is_gone, "the eviction of a file that no program reads")


def test_nothing_is_left_of_a_closed_file(one: Mount, shared: Place) -> None:
    """The kernel's number for a file would hold the file."""
    size = 3 * SIZE
    fd = passed_descriptor(one, shared.put(random.Random(2).randbytes(size)))
    wait_until(lambda: files_in_use(one.cache) == [one.cache_file(size)], "the file in use")
    os.close(fd)
    wait_until(lambda: not files_in_use(one.cache), "the file given back")
