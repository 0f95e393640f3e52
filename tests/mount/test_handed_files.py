"""A mount for writing gives `loader` the files in its cache: reads come neither to the daemon nor to the mount."""

import os
import random
import subprocess
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fusecache.disk.cache_files import CacheFiles
from loader import ElasticBatchSampler, MDSDataset, MDSWriter, World
from loader.base.cached_files import CachedFiles
from loader.base.mount_endpoint import find_endpoint
from loader.fast import Loader
from tests.support.mounts import FUSECACHE, Mount, open_to_other_users, run, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20
NOBODY = 65534
# Not whole pages: the cache pads its files to those.
SIZE = 9 * MIB + 123
SAMPLES = 24


@pytest.fixture
def one(mount: Callable[..., Mount]) -> Mount:
    made = mount("--attribute-seconds", "0.2")
    try:
        os.close(CacheFiles(made.cache / "cache" / "files").open_probe())
    except OSError as exc:
        pytest.skip(f"the cache directory's file system cannot be used for this: {exc.strerror}")
    return made


@pytest.fixture
def data() -> bytes:
    return random.Random(7).randbytes(SIZE)


def handed_out(one: Mount) -> int:
    """Return how many files programs have of the daemon."""
    return int(one.status()["read_directly"]["loader"])


def warm(one: Mount, name: str) -> Path:
    """Fetch a file or a directory into the cache."""
    wait_until((one.path / name).exists, f"{name} on the mount")
    run(FUSECACHE, "warm", "--wait", one.path / name)
    return one.path / name


def opened(path: Path) -> int:
    """Return the descriptor that the daemon gives for a file, once it has checked it."""
    given = wait_until(lambda: CachedFiles().open(str(path)), f"{path.name} from the daemon")
    return int(given[0])


def put_dataset(bucket: Bucket, folder: Path) -> str:
    """Put a data set of six shards into the bucket; return its name there."""
    with MDSWriter(folder, {"bytes": "bytes"}, size_limit=4 * MIB, hashes=["sha1"]) as writer:
        for number in range(SAMPLES):
            writer.write({"bytes": number.to_bytes(4, "big") * (MIB // 4)})
    name = uuid.uuid4().hex
    for path in folder.iterdir():
        bucket.put(f"{name}/{path.name}", path.read_bytes())
    return name


def given_after_an_epoch(one: Mount, loader: Loader) -> int:
    """Read the next epoch, and check each sample. Return how many files the daemon has given then."""
    values = [value for batch in loader for value in batch["bytes"]]
    assert sorted(values) == [number.to_bytes(4, "big") * (MIB // 4) for number in range(SAMPLES)]
    loader.set_epoch(loader.epoch + 1)
    return handed_out(one)


def test_a_loader_reads_whole_shards_without_the_mount(one: Mount, bucket: Bucket, tmp_path: Path) -> None:
    """`Loader` opens every shard again in each epoch. So the daemon gives those that were not whole at first, too."""
    path = one.path / put_dataset(bucket, tmp_path / "data")
    wait_until(path.exists, "the data set on the mount")
    dataset = MDSDataset(path)
    sampler = ElasticBatchSampler(dataset, global_batch_size=8, world=World())
    with closing(Loader(dataset, sampler, hints=False)) as loader:
        given_after_an_epoch(one, loader)
        warm(one, path.name)
        # On a busy machine the daemon's check of a file may take longer than an open waits.
        wait_until(
            lambda: given_after_an_epoch(one, loader) == dataset.index.shards, "all shards from the daemon"
        )
        before = one.read_by_daemon()
        # All are open, and none is read through the mount.
        dataset_files = dataset._reader.files._files.values()
        assert all(file.cached for file in dataset_files)
        assert [len(dataset[number]["bytes"]) for number in range(SAMPLES)] == [MIB] * SAMPLES
        assert one.read_by_daemon() == before
    dataset.reopen_files()
    wait_until(lambda: handed_out(one) == 0, "the daemon's look at files that no program has open")


def test_a_mount_that_was_made_again_gives_files_to_the_same_reader(
    one: Mount, bucket: Bucket, data: bytes
) -> None:
    bucket.put("file", data)
    path, files = warm(one, "file"), CachedFiles()
    os.close(wait_until(lambda: files.open(str(path)), "the file")[0])
    one.unmount()
    one.start("--memory", "64MiB")
    wait_until(path.exists, "the file on the mount")
    fd, _ = wait_until(lambda: files.open(str(path)), "the file from the next mount")
    assert os.pread(fd, 2 * SIZE, 0) == data
    os.close(fd)


def test_what_is_not_whole_or_small_or_changed_is_not_given(one: Mount, bucket: Bucket, data: bytes) -> None:
    large = random.Random(3).randbytes(40 * MIB)
    bucket.put("large", large)
    bucket.put("small", b"1234")
    bucket.put("changed", data)
    with open(one.path / "large", "rb", buffering=0) as file:
        assert file.read(4) == large[:4]
    for name in ("small", "changed"):
        warm(one, name)
    with open(one.path / "changed", "r+b") as file:
        file.write(b"new")
        files = CachedFiles()
        for name in ("large", "small", "changed", "missing"):
            assert files.open(str(one.path / name)) is None
    assert handed_out(one) == 0


def test_a_file_keeps_its_version_and_the_next_one_has_the_new(
    one: Mount, bucket: Bucket, data: bytes
) -> None:
    bucket.put("file", data)
    fd = opened(warm(one, "file"))
    assert os.pread(fd, 2 * SIZE, 0) == data
    (one.path / "file").write_bytes(data[::-1])
    one.sync()
    warm(one, "file")
    other = opened(one.path / "file")
    assert os.pread(other, 2 * SIZE, 0) == data[::-1]
    (one.path / "file").unlink()
    one.sync()
    assert os.pread(fd, 2 * SIZE, 0) == data
    assert os.pread(other, 2 * SIZE, 0) == data[::-1]
    os.close(fd)
    os.close(other)


def test_a_file_that_a_program_has_is_not_evicted(
    mount: Callable[..., Mount], bucket: Bucket, data: bytes
) -> None:
    """Neither for other files, nor by `evict`, nor by the daemon after one that was killed."""
    bucket.put("whole", data)
    others = {f"other{index}": random.Random(index).randbytes(16 * MIB) for index in range(6)}
    for name, content in others.items():
        bucket.put(name, content)
    flags = ("--attribute-seconds", "0.2", "--cache-size", "64MiB", "--memory", "64MiB")
    one = mount(*flags)
    fd = opened(warm(one, "whole"))
    path = one.cache_file(SIZE)
    for _ in range(2):
        for name, content in others.items():
            assert (one.path / name).read_bytes() == content
        run(FUSECACHE, "evict", one.path / "whole")
        assert one.status()["cache"]["used_bytes"] >= SIZE
        assert os.pread(fd, 2 * SIZE, 0) == data
        one.kill()
        one.start(*flags)
    os.close(fd)

    def is_gone() -> bool:
        run(FUSECACHE, "evict", one.path / "whole")
        return not path.exists()

    wait_until(is_gone, "the eviction of a file that no program has")


def test_programs_hold_at_most_a_quarter_of_the_cache(mount: Callable[..., Mount], bucket: Bucket) -> None:
    """A trainer may keep many shards open, and the next shards must find space in the cache."""
    for index in range(5):
        bucket.put(f"file{index}", random.Random(index).randbytes(9 * MIB))
    one = mount("--cache-size", "128MiB")
    paths = [warm(one, f"file{index}") for index in range(5)]
    given = [opened(path) for path in paths[:3]]
    files = CachedFiles()
    assert [files.open(str(path)) for path in paths[3:]] == [None, None]
    again = opened(paths[0])
    for fd in (*given, again):
        os.close(fd)
    wait_until(lambda: handed_out(one) == 0, "the daemon's look at files that no program has open")
    os.close(opened(paths[4]))


def test_damage_on_disk_is_found_before_a_file_is_given(one: Mount, bucket: Bucket, data: bytes) -> None:
    bucket.put("file", data)
    path = warm(one, "file")
    cached = one.cache_file(SIZE)
    with open(cached, "r+b") as file:
        file.seek(5 * MIB)
        file.write(b"damage")
    assert CachedFiles().open(str(path)) is None
    assert path.read_bytes() == data
    os.close(opened(warm(one, "file")))
    one.new_alarms()


def test_the_daemon_of_another_mount_gives_no_file(
    one: Mount, mount: Callable[..., Mount], bucket: Bucket, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have another bucket with the same names."""
    bucket.put("file", data)
    path, other = warm(one, "file"), mount()
    warm(other, "file")
    found = find_endpoint(one.path)
    assert found is not None
    monkeypatch.setenv("FUSECACHE_SOCKET", (other.path / ".fusecache/socket").read_text().strip())
    with pytest.raises(PermissionError, match="daemon of another mount: unset FUSECACHE_SOCKET"):
        found[0].open_cached(os.stat(path))
    assert CachedFiles().open(str(path)) is None
    monkeypatch.delenv("FUSECACHE_SOCKET")
    os.close(opened(path))


def is_given_to(user: int, path: Path) -> bool:
    """Return whether a user gets a file from the daemon."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.write(write, b"given" if CachedFiles().open(str(path)) else b"not given")
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    assert answer in (b"given", b"not given")
    return answer == b"given"


needs_other_users = pytest.mark.skipif(os.geteuid() != 0, reason="needs other users")


@needs_other_users
def test_other_users_get_no_files_and_read_through_the_mount(
    mount: Callable[..., Mount], bucket: Bucket, data: bytes
) -> None:
    """The daemon does not know the groups of a user."""
    bucket.put("file", data)
    one = mount("--allow-other")
    open_to_other_users(one.path)
    path = warm(one, "file")
    os.close(opened(path))
    assert not is_given_to(NOBODY, path)
    done = subprocess.run(
        ["cat", path], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=True
    )
    assert done.stdout == data


@needs_other_users
def test_the_owner_gets_only_what_modes_let_him_read(
    mount: Callable[..., Mount], bucket: Bucket, data: bytes
) -> None:
    """Root mounts for a user, and gives some of the files to another one."""
    bucket.put("folder/file", data)
    bucket.put("folder/secret", data)
    bucket.put("closed/file", data)
    one = mount("--allow-other", "--uid", str(NOBODY), "--gid", str(NOBODY))
    open_to_other_users(one.path)
    secret, closed = warm(one, "folder/secret"), warm(one, "closed/file")
    for path in (secret, closed.parent):
        os.chown(path, 0, 0)
        path.chmod(0o700 if path.is_dir() else 0o600)
    paths = [warm(one, "folder/file"), secret, closed]
    for path in paths:
        os.close(opened(path))
    assert [is_given_to(NOBODY, path) for path in paths] == [True, False, False]


@pytest.mark.parametrize("check_hashes", [False, True])
def test_a_shard_that_the_disk_no_longer_gives_is_read_through_the_mount(
    one: Mount, bucket: Bucket, tmp_path: Path, *, check_hashes: bool
) -> None:
    """Also its table, and its bytes if they are compared with the hashes in the index."""
    path = warm(one, put_dataset(bucket, tmp_path / "data"))
    values = [number.to_bytes(4, "big") * (MIB // 4) for number in range(SAMPLES)]
    dataset = MDSDataset(path, check_hashes=check_hashes)
    files = dataset._reader.files

    def all_given() -> bool:
        dataset.reopen_files()
        assert [dataset[number]["bytes"] for number in range(SAMPLES)] == values
        return all(file.cached for file in files._files.values())

    wait_until(all_given, "all shards from the daemon")
    # As a disk that fails: the descriptors cannot be read any more.
    for file in files._files.values():
        unreadable = os.open(f"/proc/self/fd/{file.fd}", os.O_WRONLY)
        os.dup2(unreadable, file.fd)
        os.close(unreadable)
    files._offsets.clear()
    files._checked.clear()
    assert [dataset[number]["bytes"] for number in range(SAMPLES)] == values
    assert not any(file.cached for file in files._files.values())
