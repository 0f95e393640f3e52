"""Names: what the bucket holds as a tree of directories, whatever its keys look like."""

import ctypes
import errno
import os
import shutil
import struct
import subprocess
import time

import pytest

from tests.mount.conftest import Place
from tests.support.mounts import Mount, run, run_python, wait_until
from tests.support.s3_buckets import Bucket


def test_a_directory_of_three_thousand_objects_is_listed_whole(place: Place):
    """More than one page of LIST; and of the kernel's READDIR."""
    for index in range(3000):
        place.bucket.put(f"many/{index:05}.txt", b"x")
    wait_until(lambda: (place.path / "many").is_dir(), "the directory")
    names = os.listdir(place.path / "many")
    assert sorted(names) == [f"{index:05}.txt" for index in range(3000)]
    with os.scandir(place.path / "many") as entries:
        assert all(entry.stat().st_size == 1 for entry in entries)
    assert (place.path / "many" / "02999.txt").read_bytes() == b"x"
    assert not (place.path / "many" / "03000.txt").exists()


@pytest.mark.s3server_only
def test_listing_with_sizes_asks_for_the_list_and_never_for_each_file(mount, bucket: Bucket):
    for index in range(300):
        bucket.put(f"d/{index:03}", b"x" * index)
    one: Mount = mount("--attribute-seconds", "60")  # both programs find what is known
    folder = one.path / "d"
    bucket.control.clear_log()
    seen = run("ls", "-l", folder).stdout
    assert len(seen.splitlines()) == 301
    assert run("find", folder, "-type", "f", "-size", "+0c").stdout.count("\n") == 299
    asked = bucket.operations("HeadObject")
    assert asked == [("HeadObject", "d/000")]  # empty: it might be a symlink
    assert len(bucket.requests("ListObjectsV2")) <= 6
    assert not bucket.requests("GetObject")


@pytest.mark.case(32)
@pytest.mark.s3server_only
def test_no_request_asks_for_the_bucket_itself(place: Place):
    place.bucket.put("a", b"1")
    assert (place.path / "a").read_bytes() == b"1"
    (place.path / "b").write_bytes(b"2")
    place.sync()
    asked = place.bucket.control.counts()
    assert not set(asked) & {"HeadBucket", "ListBuckets", "CreateBucket", "GetBucketLocation"}


def test_nested_directories_exist_by_their_objects_alone(place: Place):
    place.bucket.put("a/b/c/deep", b"1")
    place.bucket.put("a/shallow", b"2")
    assert (place.path / "a" / "b" / "c" / "deep").read_bytes() == b"1"
    assert sorted(os.listdir(place.path / "a")) == ["b", "shallow"]
    assert (place.path / "a" / "b").is_dir()
    with pytest.raises(NotADirectoryError):
        os.stat(place.path / "a" / "shallow" / "x")
    with pytest.raises(FileNotFoundError):
        os.stat(place.path / "a" / "x" / "y")


def test_markers_of_other_programs_are_directories(place: Place):
    place.bucket.put("empty/")
    place.bucket.put("full/")
    place.bucket.put("full/file", b"1")
    assert sorted(os.listdir(place.path)) == ["empty", "full"]
    assert os.listdir(place.path / "empty") == []
    assert os.listdir(place.path / "full") == ["file"]


def test_a_key_that_is_also_a_prefix_shows_as_the_directory(place: Place):
    place.bucket.put("both", b"bytes")
    place.bucket.put("both/file", b"1")
    place.bucket.put("both.txt", b"2")
    assert sorted(os.listdir(place.path)) == ["both", "both.txt"]
    assert (place.path / "both").is_dir()
    assert (place.path / "both" / "file").read_bytes() == b"1"


def test_keys_that_are_no_paths_are_hidden_and_harm_nothing(place: Place):
    place.bucket.put("good", b"1")
    place.bucket.put("a//b", b"x")
    place.bucket.put("a/fine", b"2")
    place.bucket.put("n" * 300, b"x")
    place.bucket.put("d/" + "n" * 300 + "/file", b"x")
    assert sorted(os.listdir(place.path)) == ["a", "d", "good"]
    assert os.listdir(place.path / "a") == ["fine"]
    assert os.listdir(place.path / "d") == []
    with pytest.raises(OSError, match="File name too long"):
        os.stat(place.path / ("n" * 300))
    assert (place.path / "good").read_bytes() == b"1"


@pytest.mark.s3server_only
@pytest.mark.parametrize("key", ["../x", "a/../../x", "./y", "a/./y", "/abs", "//", "..", ".", "nul\0key"])
def test_no_key_escapes_from_the_mount(place: Place, key: str):
    place.bucket.put(key, b"x")
    place.bucket.put("good", b"1")
    seen = run("find", place.path, "-type", "f").stdout.split()
    assert seen == [str(place.path / "good")]
    assert sorted(os.listdir(place.path)) in (["good"], ["a", "good"])


def test_a_directory_with_hidden_keys_is_not_empty(place: Place, expect_log):
    """Else rmdir would say success, and the objects would stay for ever behind a name that is gone."""
    expect_log("d: is not empty: no name shows 1 of its objects")
    place.bucket.put("d/")
    place.bucket.put("d/" + "n" * 300, b"x")
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
        os.rmdir(place.path / "d")
    assert caught.value.errno == errno.ENOTEMPTY


@pytest.mark.parametrize(
    "name",
    [
        "Ünïcödé",
        "日本語",
        "emoji 🎉",
        "a b  c",
        "per%20cent",
        "plus+and&amp",
        "quo'te\"s",
        "new\nline",
        "tab\t",
    ],
)
def test_any_unicode_name_goes_there_and_back(place: Place, name: str):
    (place.path / name).write_bytes(b"here")
    place.sync()
    assert place.bucket.names() == [name]
    assert (place.second / name).read_bytes() == b"here"
    assert os.listdir(place.second) == [name]


def test_a_name_that_is_not_utf8_is_refused(place: Place):
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
        open(os.fsencode(place.path) + b"/\xff\xfe", "wb").close()
    assert caught.value.errno == errno.EINVAL


def test_a_path_that_makes_too_long_a_key_is_refused(place: Place):
    path = place.path
    with pytest.raises(OSError) as caught:  # noqa: PT011, PT012  # its errno is checked below
        for _ in range(6):
            path = path / ("x" * 250)
            path.mkdir()
    assert caught.value.errno == errno.ENAMETOOLONG


@pytest.mark.case(48)
@pytest.mark.s3server_only
def test_looking_for_a_missing_file_again_and_again_costs_one_request_a_second(place: Place):
    program = """
import os, sys, time
end = time.monotonic() + 2
while time.monotonic() < end:
    assert not os.path.exists(sys.argv[1])
"""
    run_python(program, place.path / "latest")
    assert len(place.bucket.requests()) <= 4


def test_the_control_directory_is_there_but_not_listed(place: Place):
    root = place.first_mount.path
    assert ".fusecache" not in os.listdir(root)
    assert sorted(os.listdir(root / ".fusecache")) == ["hints", "socket", "stats.json"]
    assert (root / ".fusecache" / "socket").read_text().strip().startswith("/")
    assert '"pending_files"' in (root / ".fusecache" / "stats.json").read_text()
    with pytest.raises(PermissionError):
        (root / ".fusecache" / "mine").write_bytes(b"")
    with pytest.raises(PermissionError):
        (root / ".fusecache" / "socket").write_bytes(b"")
    assert not (place.path / ".fusecache").exists()


def test_a_directory_read_while_it_is_written_shows_each_name_once(place: Place):
    for index in range(400):
        (place.path / f"{index:04}").write_bytes(b"")
    names = []
    with os.scandir(place.path) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) % 50 == 0:
                (place.path / f"new{len(names)}").write_bytes(b"")
    assert len(names) == len(set(names))
    assert set(names) >= {f"{index:04}" for index in range(400)}
    first = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert sorted(os.listdir(first)) == sorted(os.listdir(first))  # rewinddir
    finally:
        os.close(first)


def test_an_empty_directory_read_again_shows_new_names(place: Place):
    first = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.listdir(first) == []
        (place.path / "new").write_bytes(b"")
        assert os.listdir(first) == ["new"]  # rewinddir
    finally:
        os.close(first)


def test_the_root_of_a_bucket_without_prefix_can_be_mounted(mount, bucket, whole_bucket):
    from dataclasses import replace

    bucket.put("file", b"1")
    root: Mount = mount(of=replace(whole_bucket, prefix=""))
    assert (root.path / bucket.prefix / "file").read_bytes() == b"1"
    (root.path / bucket.prefix / "new").write_bytes(b"2")
    root.sync(bucket.prefix.rstrip("/"))
    assert bucket.get("new") == b"2"


def test_a_prefix_without_any_object_is_an_empty_directory_to_write_into(mount, bucket):
    empty: Mount = mount()
    assert os.listdir(empty.path) == []
    (empty.path / "first").write_bytes(b"1")
    empty.sync()
    assert bucket.names() == ["first"]


def test_a_shell_in_a_directory_that_another_client_removed_sees_and_deletes_nothing(mount, bucket):
    """Its names must not turn into those of the mount's root."""
    bucket.put("job/data", b"in the job")
    bucket.put("data", b"in the root")
    one: Mount = mount()
    with subprocess.Popen(
        ["bash", "-c", "ls; echo entered; read; ls; rm -f data; echo new > made; cat data"],
        cwd=one.path / "job",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as shell:
        assert shell.stdout is not None
        assert [shell.stdout.readline() for _ in range(2)] == ["data\n", "entered\n"]
        bucket.delete("job/data")
        wait_until(lambda: not (one.path / "job").exists(), "the directory to go")
        seen, _ = shell.communicate("\n", timeout=30)
    assert seen == ""
    one.sync()
    assert bucket.sizes() == {"data": 11}
    assert (one.path / "data").read_bytes() == b"in the root"


@pytest.mark.parametrize(
    ("target", "code"),
    [(b"\xff\xfe", errno.EINVAL), (b"x" * 601, errno.ENAMETOOLONG), (b"x" * 4000, errno.ENAMETOOLONG)],
    ids=["not UTF-8", "too long", "much too long"],
)
def test_a_symlink_whose_target_the_bucket_cannot_keep_is_refused(place: Place, target: bytes, code: int):
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
        os.symlink(target, os.fsencode(place.path / "link"))
    assert caught.value.errno == code
    longest = "é" * 300  # 600 bytes, each percent-encoded in the object's metadata
    os.symlink(longest, place.path / "longest")
    place.sync()
    assert os.listdir(place.path) == ["longest"]
    assert os.readlink(place.second / "longest") == longest


def test_nothing_else_takes_the_name_of_the_control_directory(mount, bucket):
    one: Mount = mount()
    (one.path / "file").write_bytes(b"1")
    (one.path / "dir").mkdir()
    name = one.path / ".fusecache"
    for attempt in (
        lambda: (one.path / "file").rename(name),
        lambda: (one.path / "dir").rename(name),
        lambda: os.symlink("file", name),
        lambda: name.mkdir(),
        lambda: name.write_bytes(b"2"),
        lambda: name.rename(one.path / "other"),
        lambda: name.rmdir(),
    ):
        with pytest.raises(OSError):  # noqa: PT011  # EPERM, EEXIST, EISDIR, by the call
            attempt()
    assert sorted(os.listdir(name)) == ["hints", "socket", "stats.json"]
    one.sync()
    assert bucket.names() == ["dir/", "file"]


def next_names(directory: int) -> list[str]:
    """Return the next names of an open directory, some twenty of them: getdents64(2) with a small buffer."""
    buffer = ctypes.create_string_buffer(4096)
    size = ctypes.CDLL(None).getdents64(directory, buffer, len(buffer))
    assert size >= 0
    names, at = [], 0
    while at < size:
        (length,) = struct.unpack_from("=16xH", buffer, at)
        names.append(ctypes.string_at(ctypes.addressof(buffer) + at + 19).decode())
        at += length
    return [name for name in names if name not in {".", ".."}]


def test_a_directory_read_while_its_files_are_replaced_shows_each_name_once(place: Place):
    """As when a job lists a directory of checkpoints into which another one renames new versions."""
    names = [f"{index:04}" for index in range(300)]
    for name in names:
        place.bucket.put(f"dir/{name}", b"old")
    for name in names[::7]:
        (place.path / name).write_bytes(b"new")
    wait_until(lambda: (place.path / "dir" / names[-1]).exists(), "the files")
    directory = os.open(place.path / "dir", os.O_RDONLY | os.O_DIRECTORY)
    try:
        seen = next_names(directory)
        assert 0 < len(seen) < 100  # the rest is read after the renames
        for name in names[::7]:
            (place.path / name).rename(place.path / "dir" / name)
        while more := next_names(directory):
            seen += more
    finally:
        os.close(directory)
    assert sorted(seen) == names


@pytest.mark.parametrize("change", ["create", "mkdir", "symlink", "unlink", "rmdir", "rename"])
def test_a_directory_shows_the_time_of_the_last_change_of_its_names(place: Place, change: str):
    (place.path / "file").touch()
    (place.path / "directory").mkdir()
    os.utime(place.path, (1e9, 1e9))
    {
        "create": (place.path / "new").touch,
        "mkdir": (place.path / "new").mkdir,
        "symlink": lambda: (place.path / "new").symlink_to("file"),
        "unlink": (place.path / "file").unlink,
        "rmdir": (place.path / "directory").rmdir,
        "rename": lambda: (place.path / "file").rename(place.path / "directory" / "file"),
    }[change]()
    assert place.path.stat().st_mtime > 1e9


@pytest.mark.s3server_only
@pytest.mark.parametrize("flags", [(), ("--keep-mounted",)], ids=["", "with a keeper"])
def test_a_name_that_is_removed_and_made_again_is_listed_once(mount, bucket: Bucket, flags: tuple[str, ...]):
    """The daemon listed the directory before the removal reached the bucket, and the name is new since."""
    for name in ("d/b", "d/log", "d/sub/", "d/z"):
        bucket.put(name, b"old" * (not name.endswith("/")))
    one: Mount = mount("--settle-seconds", "3", "--attribute-seconds", "2", *flags)
    folder = one.path / "d"
    assert sorted(os.listdir(folder)) == ["b", "log", "sub", "z"]
    os.rename(folder / "log", folder / "log.1")
    os.rmdir(folder / "sub")

    def is_published() -> bool:
        assert sorted(os.listdir(folder)) == ["b", "log.1", "z"]
        return not {"d/log", "d/sub/"} & {*bucket.names()}

    wait_until(is_published, "the removals in the bucket", seconds=30)
    (folder / "log").write_bytes(b"new")
    (folder / "sub").mkdir()
    seen = []
    until = time.monotonic() + 4
    while time.monotonic() < until:
        seen.append(sorted(os.listdir(folder)))
    assert [each for each in seen if each != ["b", "log", "log.1", "sub", "z"]] == []
    shutil.rmtree(folder)
    assert os.listdir(one.path) == []
