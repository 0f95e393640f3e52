"""Rename, unlink, directories, symlinks: atomic here at once, and in the bucket never neither old nor new."""

import ctypes
import errno
import os
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, pattern, run, tree_of
from tests.support.s3_buckets import Bucket

HOLD = Fault(FaultAction.HOLD, operation="PutObject")
# Nothing is sent between two calls, however far apart they are: all of it when the mount ends.
AT_THE_END = ("--settle-seconds", "3600")
AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2
libc = ctypes.CDLL(None, use_errno=True)


def renameat2(old: Path, new: Path, flags: int) -> None:
    """renameat2(2), which Python does not offer."""
    if libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def copies(place: Place) -> list[tuple[str, str]]:
    """Return the requests that copied within the bucket; [] where requests cannot be seen."""
    return (
        place.bucket.operations("CopyObject", "UploadPartCopy")
        if place.bucket.service.control is not None
        else []
    )


# ---- files


def test_an_unpublished_file_is_renamed_without_a_trace_of_its_first_name(mount):
    one: Mount = mount(*AT_THE_END)
    (one.path / "first").write_bytes(b"bytes")
    (one.path / "first").rename(one.path / "second")
    assert os.listdir(one.path) == ["second"]
    one.unmount()
    assert one.bucket.names() == ["second"]
    if one.bucket.service.control is not None:
        assert one.bucket.published() == [("PutObject", "second")]


@pytest.mark.case(5)
def test_an_open_dirty_file_is_renamed_and_written_further(place: Place):
    place.bucket.put("target", b"old")
    with open(place.path / ".tmpXYZ", "wb") as file:
        file.write(b"first half, ")
        file.flush()
        os.rename(place.path / ".tmpXYZ", place.path / "target")
        assert (place.path / "target").read_bytes() == b"first half, "
        assert place.bucket.get("target") == b"old"
        file.write(b"second half")
    assert (place.path / "target").read_bytes() == b"first half, second half"
    place.sync()
    assert place.bucket.get("target") == b"first half, second half"
    assert place.bucket.names() == ["target"]
    assert copies(place) == []


def test_a_published_file_is_renamed(place: Place):
    place.bucket.put("first", b"bytes")
    (place.path / "first").rename(place.path / "second")
    assert os.listdir(place.path) == ["second"]
    assert (place.path / "second").read_bytes() == b"bytes"
    place.sync()
    assert place.bucket.names() == ["second"]
    assert place.bucket.get("second") == b"bytes"
    assert (place.path / "second").read_bytes() == b"bytes"
    if place.bucket.service.control is not None:
        assert place.bucket.published() == [("CopyObject", "second"), ("DeleteObject", "first")]


def test_an_open_file_reads_on_under_its_new_name(place: Place):
    data = pattern(6 * 2**20)
    place.bucket.put("first", data)
    with open(place.path / "first", "rb", buffering=0) as file:
        assert file.read(100) == data[:100]
        (place.path / "first").rename(place.path / "second")
        place.sync()
        assert os.pread(file.fileno(), len(data), 0) == data


def test_renaming_over_an_existing_file_replaces_it(place: Place):
    place.bucket.put("target", b"old")
    (place.path / "new").write_bytes(b"new")
    (place.path / "new").rename(place.path / "target")
    assert (place.path / "target").read_bytes() == b"new"
    place.sync()
    assert place.bucket.names() == ["target"]
    assert place.bucket.get("target") == b"new"


def test_renaming_a_published_file_over_a_published_file_replaces_it(place: Place):
    place.bucket.put("a", b"a")
    place.bucket.put("b", b"b")
    (place.path / "a").rename(place.path / "b")
    assert (place.path / "b").read_bytes() == b"a"
    place.sync()
    assert place.bucket.names() == ["b"]
    assert place.bucket.get("b") == b"a"


def test_a_replaced_file_stays_readable_to_who_has_it_open(place: Place):
    place.bucket.put("target", b"old bytes")
    with open(place.path / "target", "rb") as reader:
        assert reader.read(3) == b"old"
        (place.path / "new").write_bytes(b"new")
        (place.path / "new").rename(place.path / "target")
        assert os.pread(reader.fileno(), 100, 0) == b"old bytes"


def test_renames_there_and_back_while_the_bucket_is_slow(place: Place):
    (place.path / "a").write_bytes(b"A")
    (place.path / "b").write_bytes(b"B")
    place.sync()
    for _ in range(3):
        (place.path / "a").rename(place.path / "swap")
        (place.path / "b").rename(place.path / "a")
        (place.path / "swap").rename(place.path / "b")
    assert ((place.path / "a").read_bytes(), (place.path / "b").read_bytes()) == (b"B", b"A")
    place.sync()
    assert place.bucket.names() == ["a", "b"]
    assert (place.bucket.get("a"), place.bucket.get("b")) == (b"B", b"A")
    assert ((place.path / "a").read_bytes(), (place.path / "b").read_bytes()) == (b"B", b"A")


def test_a_new_file_takes_the_place_of_one_that_was_renamed_away(place: Place):
    place.bucket.put("log", b"old")
    (place.path / "log").rename(place.path / "log.1")
    (place.path / "log").write_bytes(b"new")
    assert (place.path / "log.1").read_bytes() == b"old"
    place.sync()
    assert (place.bucket.get("log"), place.bucket.get("log.1")) == (b"new", b"old")


def test_a_published_file_that_is_being_changed_is_renamed(place: Place):
    place.bucket.put("first", b"0123456789")
    with open(place.path / "first", "r+b") as file:
        file.write(b"ab")
        file.flush()
        os.rename(place.path / "first", place.path / "second")
    assert (place.path / "second").read_bytes() == b"ab23456789"
    place.sync()
    assert place.bucket.names() == ["second"]
    assert place.bucket.get("second") == b"ab23456789"


@pytest.mark.s3server_only
def test_a_file_renamed_while_its_upload_is_on_the_way_ends_under_its_new_name(place: Place):
    place.bucket.control.faults(HOLD)
    (place.path / "first").write_bytes(b"bytes")
    place.bucket.control.wait_requests(
        1, operation="PutObject", key=place.bucket.prefix + "first", finished=False
    )
    (place.path / "first").rename(place.path / "second")
    assert os.listdir(place.path) == ["second"]
    place.bucket.control.clear_faults()
    place.sync()
    assert place.bucket.names() == ["second"]
    assert place.bucket.get("second") == b"bytes"
    assert (place.path / "second").read_bytes() == b"bytes"


def test_rename_noreplace_refuses_an_existing_target(place: Place):
    (place.path / "a").write_bytes(b"a")
    (place.path / "b").write_bytes(b"b")
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
        renameat2(place.path / "a", place.path / "b", RENAME_NOREPLACE)
    assert caught.value.errno == errno.EEXIST
    renameat2(place.path / "a", place.path / "c", RENAME_NOREPLACE)
    assert sorted(os.listdir(place.path)) == ["b", "c"]
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
        renameat2(place.path / "b", place.path / "c", RENAME_EXCHANGE)
    assert caught.value.errno == errno.EINVAL


def test_a_file_and_a_directory_do_not_replace_each_other(place: Place):
    (place.path / "file").write_bytes(b"f")
    (place.path / "dir").mkdir()
    with pytest.raises(IsADirectoryError):
        os.rename(place.path / "file", place.path / "dir")
    with pytest.raises(NotADirectoryError):
        os.rename(place.path / "dir", place.path / "file")
    with pytest.raises(FileNotFoundError):
        os.rename(place.path / "missing", place.path / "x")


# ---- directories


@pytest.mark.case(39)
def test_a_directory_with_unpublished_and_published_files_is_renamed_at_once(place: Place):
    place.bucket.put("d/old", b"old")
    place.bucket.put("d/sub/older", b"older")
    (place.path / "d" / "new").write_bytes(b"new")
    (place.path / "d" / "link").symlink_to("old")
    (place.path / "d").rename(place.path / "e")
    expected = {"old": b"old", "sub": None, "sub/older": b"older", "new": b"new", "link": "old"}
    assert os.listdir(place.path) == ["e"]
    assert tree_of(place.path / "e") == expected
    place.sync()
    assert [name for name in place.bucket.names() if not name.endswith("/")] == [
        "e/link",
        "e/new",
        "e/old",
        "e/sub/older",
    ]
    assert not [name for name in place.bucket.names() if name.startswith("d/")]
    assert tree_of(place.path / "e") == expected
    assert tree_of(place.second / "e") == expected


@pytest.mark.case(39)
def test_a_directory_of_two_hundred_files_of_both_kinds_is_renamed(place: Place):
    for index in range(200):
        place.bucket.put(f"step/p{index:03}", b"p%d" % index)
    for index in range(200):
        (place.path / "step" / f"u{index:03}").write_bytes(b"u%d" % index)
    (place.path / "step").rename(place.path / "final")
    assert len(os.listdir(place.path / "final")) == 400
    assert (place.path / "final" / "p007").read_bytes() == b"p7"
    place.sync()
    names = [name for name in place.bucket.names() if not name.endswith("/")]
    assert names == [f"final/{kind}{index:03}" for kind in "pu" for index in range(200)]
    assert place.bucket.get("final/u199") == b"u199"
    if place.bucket.service.control is not None:
        published = place.bucket.published()
        early = {name.removeprefix("step/") for _, name in published if name.startswith("step/u")}
        for name in [*(f"p{index:03}" for index in range(200)), *early]:  # never neither
            copied = published.index(("CopyObject", f"final/{name}"))
            assert copied < published.index(("DeleteObject", f"step/{name}"))
        put = {name for method, name in published if method == "PutObject" and name.startswith("final/u")}
        assert put == {f"final/u{index:03}" for index in range(200)} - {f"final/{name}" for name in early}


def test_a_directory_replaces_an_empty_one_and_no_other(place: Place):
    place.bucket.put("d/file", b"1")
    place.bucket.put("full/file", b"2")
    (place.path / "empty").mkdir()
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
        os.rename(place.path / "d", place.path / "full")
    assert caught.value.errno == errno.ENOTEMPTY
    os.rename(place.path / "d", place.path / "empty")
    assert tree_of(place.path / "empty") == {"file": b"1"}
    place.sync()
    assert tree_of(place.second) == {"empty": None, "empty/file": b"1", "full": None, "full/file": b"2"}


def test_a_directory_cannot_be_moved_into_itself(place: Place):
    (place.path / "d").mkdir()
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
        os.rename(place.path / "d", place.path / "d" / "e")
    assert caught.value.errno == errno.EINVAL


def test_a_renamed_directory_with_an_open_file_takes_its_bytes_along(place: Place):
    (place.path / "tmp-step").mkdir()
    with open(place.path / "tmp-step" / "shard", "wb") as file:
        file.write(b"first ")
        file.flush()
        os.rename(place.path / "tmp-step", place.path / "step")
        file.write(b"second")
    place.sync()
    assert place.bucket.get("step/shard") == b"first second"
    assert [name for name in place.bucket.names() if name.startswith("tmp-")] == []


def test_a_made_directory_is_seen_by_other_nodes_and_goes_again(place: Place):
    (place.path / "dir").mkdir()
    assert os.listdir(place.path / "dir") == []
    place.sync()
    assert place.bucket.sizes() == {"dir/": 0}
    assert (place.second / "dir").is_dir()
    (place.path / "dir").rmdir()
    assert not (place.path / "dir").exists()
    place.sync()
    assert place.bucket.names() == []


def test_a_directory_with_entries_is_not_removed(place: Place):
    place.bucket.put("far/file", b"1")
    (place.path / "near").mkdir()
    (place.path / "near" / "file").write_bytes(b"1")
    for name in ("far", "near"):
        with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
            os.rmdir(place.path / name)
        assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(NotADirectoryError):
        os.rmdir(place.path / "near" / "file")
    with pytest.raises(FileExistsError):
        os.mkdir(place.path / "far")


def test_a_directory_stays_when_its_last_file_goes(place: Place):
    """Without a marker it would vanish with its last object."""
    place.bucket.put("dir/only", b"1")
    (place.path / "dir" / "only").unlink()
    assert os.listdir(place.path / "dir") == []
    place.sync()
    assert (place.path / "dir").is_dir()
    assert place.bucket.names() == ["dir/"]


def test_a_whole_tree_is_removed_in_the_bucket_too(place: Place):
    for index in range(30):
        place.bucket.put(f"tree/far/{index}", b"x")
    (place.path / "tree" / "near").mkdir()
    for index in range(30):
        (place.path / "tree" / "near" / f"{index}").write_bytes(b"x")
    run("rm", "-r", place.path / "tree")
    assert os.listdir(place.path) == []
    place.sync()
    assert place.bucket.names() == []


def test_a_directory_is_made_again_at_once_after_its_removal(place: Place):
    for turn in range(3):
        (place.path / "dir").mkdir()
        (place.path / "dir" / "file").write_bytes(b"%d" % turn)
        if turn < 2:
            (place.path / "dir" / "file").unlink()
            (place.path / "dir").rmdir()
    place.sync()
    assert place.bucket.get("dir/file") == b"2"
    assert tree_of(place.second) == {"dir": None, "dir/file": b"2"}


# ---- unlink


def test_an_unlinked_open_file_keeps_working(place: Place):
    place.bucket.put("published", b"published bytes")
    with open(place.path / "published", "rb") as old, open(place.path / "fresh", "w+b") as new:
        new.write(b"written")
        new.flush()
        os.posix_fadvise(old.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.unlink(place.path / "published")
        os.unlink(place.path / "fresh")
        assert os.listdir(place.path) == []
        assert old.read() == b"published bytes"
        new.write(b" further")
        new.flush()
        assert os.pread(new.fileno(), 100, 0) == b"written further"
        assert os.fstat(new.fileno()).st_nlink == 0
    place.sync()
    assert place.bucket.names() == []


def test_a_file_removed_before_its_upload_is_never_uploaded(mount):
    one: Mount = mount(*AT_THE_END)
    for index in range(5):
        (one.path / f"f{index}").write_bytes(b"x" * 1000)
        (one.path / f"f{index}").unlink()
    (one.path / "last").write_bytes(b"1")
    one.unmount()
    assert one.bucket.names() == ["last"]
    if one.bucket.service.control is not None:
        assert one.bucket.published() == [("PutObject", "last")]


@pytest.mark.case(36)
@pytest.mark.s3server_only
def test_a_file_removed_while_its_parts_are_sent_leaves_no_upload(place: Place):
    place.bucket.control.faults(Fault(FaultAction.HOLD, operation="UploadPart", nth=2))
    (place.path / "big").write_bytes(pattern(70 * 2**20))
    place.bucket.control.wait_requests(2, operation="UploadPart", finished=False)
    (place.path / "big").unlink()
    place.bucket.control.clear_faults()
    place.bucket.control.wait_requests(1, operation="AbortMultipartUpload")
    assert place.bucket.uploads() == []
    assert place.bucket.names() == []


def test_removed_and_written_again_is_the_new_file(place: Place):
    place.bucket.put("file", b"old")
    (place.path / "file").unlink()
    assert not (place.path / "file").exists()
    (place.path / "file").write_bytes(b"new")
    place.sync()
    assert place.bucket.get("file") == b"new"
    assert (place.second / "file").read_bytes() == b"new"


@pytest.mark.s3server_only
def test_removing_and_renaming_into_place_is_one_put(mount, bucket: Bucket):
    bucket.put(".metadata", b"old")
    one: Mount = mount(*AT_THE_END)
    (one.path / ".metadata.tmp").write_bytes(b"new")
    (one.path / ".metadata").unlink()
    (one.path / ".metadata.tmp").rename(one.path / ".metadata")
    one.unmount()
    assert bucket.get(".metadata") == b"new"
    assert bucket.published() == [("PutObject", ".metadata")]


# ---- symlinks, links, attributes


@pytest.mark.case(13)
def test_symlinks_are_kept_relative_absolute_and_dangling(mount, bucket):
    bucket.put("dir/file", b"bytes")
    targets = {"relative": "file", "up": "../x/y", "absolute": "/etc/hostname", "dangling": "ünïcode 日"}
    one, other = mount("--symlinks", "all"), mount("--symlinks", "all")
    for name, target in targets.items():
        os.symlink(target, one.path / "dir" / name)
    assert (one.path / "dir" / "relative").read_bytes() == b"bytes"
    one.sync()
    for root in (one.path, other.path):
        assert {name: os.readlink(root / "dir" / name) for name in targets} == targets
        assert os.lstat(root / "dir" / "relative").st_size == len("file")
    assert (other.path / "dir" / "relative").read_bytes() == b"bytes"
    assert set(bucket.names()) == {f"dir/{name}" for name in ("file", *targets)}
    with pytest.raises(FileExistsError):
        os.symlink("x", one.path / "dir" / "relative")


@pytest.mark.case(13)
def test_a_symlink_follows_its_target_into_the_bucket_and_can_be_replaced(place: Place):
    """As Composer and Lightning do: a file, then `latest` pointing at it, again and again."""
    for turn in range(3):
        (place.path / f"ep{turn}.pt").write_bytes(pattern(100_000, seed=turn))
        latest = place.path / "latest.pt"
        latest.unlink(missing_ok=True)
        latest.symlink_to(f"ep{turn}.pt")
    assert (place.path / "latest.pt").read_bytes() == pattern(100_000, seed=2)
    place.sync()
    assert (place.second / "latest.pt").read_bytes() == pattern(100_000, seed=2)
    if place.bucket.service.control is not None:
        order = [name for _, name in place.bucket.published()]
        assert order.index("ep2.pt") < len(order) - 1 - order[::-1].index("latest.pt")


def test_a_symlink_is_renamed_and_removed(place: Place):
    os.symlink("target", place.path / "a")
    place.sync()
    (place.path / "a").rename(place.path / "b")
    assert os.readlink(place.path / "b") == "target"
    place.sync()
    assert os.readlink(place.second / "b") == "target"
    (place.path / "b").unlink()
    place.sync()
    assert place.bucket.names() == []


def test_a_hard_link_is_refused_with_eperm(place: Place):
    (place.path / "file").write_bytes(b"x")
    with pytest.raises(PermissionError):
        os.link(place.path / "file", place.path / "other")


def test_statfs_tells_the_room_that_is_left(place: Place):
    seen = os.statvfs(place.path)
    assert seen.f_blocks * seen.f_frsize == 4 * 2**30
    assert 0 < seen.f_bavail <= seen.f_blocks
    assert seen.f_namemax == 255


def test_mode_owner_and_times_are_shown_at_once(place: Place):
    path = place.path / "file"
    path.write_bytes(b"x")
    path.chmod(0o600)
    os.chown(path, 1234, 2345)
    os.utime(path, (1_000_000_000, 1_100_000_000))
    seen = path.stat()
    assert (seen.st_mode & 0o7777, seen.st_uid, seen.st_gid, seen.st_mtime) == (0o600, 1234, 2345, 1.1e9)
    (place.path / "dir").mkdir(mode=0o750)
    assert (place.path / "dir").stat().st_mode & 0o7777 == 0o750
    (place.path / "dir").chmod(0o700)
    assert (place.path / "dir").stat().st_mode & 0o7777 == 0o700
