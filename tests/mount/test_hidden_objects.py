"""Objects that no name shows: nothing is moved or removed by halves because of them, and what stays is said.

They are an object with the name of a directory, and the content of a directory's marker.
"""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import FUSECACHE, Mount, refusal, run, wait_until
from tests.support.s3_buckets import Bucket

STAYS = "cannot move with its directory; nothing was moved"
NOT_EMPTY = "is not empty: no name shows 1 of its objects"
REMOVED = "removed, as the directory of its name is"
SHADOWED = {"d/a": b"object", "d/a/x": b"below", "d/b": b"other"}


def put(bucket: Bucket, objects: dict[str, bytes]) -> dict[str, bytes]:
    for key, data in objects.items():
        bucket.put(key, data)
    return objects


def shown(bucket: Bucket) -> dict[str, bytes]:
    return {key: bucket.get(key) for key in bucket.names()}


@pytest.fixture(params=["not listed", "listed", "looked up"])
def look(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """What a program has asked of a directory before."""

    def look_at(folder: Path) -> None:
        if request.param == "listed":
            run("find", folder)
        elif request.param == "looked up":
            assert (folder / "a").is_dir()

    return look_at


# ---- a key that is also a prefix


def test_a_directory_in_which_a_key_is_also_a_prefix_is_not_moved(
    place: Place, look: Callable[[Path], None], expect_log: Callable[[str], None]
) -> None:
    expect_log(STAYS)
    before = put(place.bucket, SHADOWED)
    look(place.path / "d")
    done = run("mv", place.path / "d", place.path / "e", check=False)
    assert done.returncode != 0
    assert "subdirectory of itself" not in done.stderr
    place.sync()
    assert shown(place.bucket) == before
    assert sorted(os.listdir(place.path / "d")) == ["a", "b"]


def test_a_directory_that_hides_an_object_is_not_moved_away_from_it(
    place: Place, expect_log: Callable[[str], None]
) -> None:
    expect_log(STAYS)
    before = put(place.bucket, SHADOWED)
    assert refusal(lambda: os.rename(place.path / "d" / "a", place.path / "d" / "c")) == errno.EPERM
    place.sync()
    assert shown(place.bucket) == before


def test_a_parent_of_such_a_directory_is_not_moved(place: Place, expect_log: Callable[[str], None]) -> None:
    expect_log(STAYS)
    before = put(place.bucket, {f"top/deep/{key}": data for key, data in SHADOWED.items()})
    assert refusal(lambda: os.rename(place.path / "top", place.path / "other")) == errno.EPERM
    place.sync()
    assert shown(place.bucket) == before


def test_a_directory_with_a_pending_file_where_the_bucket_has_a_directory_is_not_moved(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    """Half of it would go, and half stay: no other order of publishing mends that."""
    expect_log(STAYS)
    bucket.put("d/b", b"other")
    one = mount("--settle-seconds", "3600")
    (one.path / "d" / "a").write_bytes(b"ours")
    bucket.put("d/a/x", b"theirs")
    assert refusal(lambda: os.rename(one.path / "d", one.path / "e")) == errno.EPERM
    assert (one.path / "d" / "a").read_bytes() == b"ours"
    one.unmount()
    assert shown(bucket) == {"d/a": b"ours", "d/a/x": b"theirs", "d/b": b"other"}


def test_a_directory_that_became_a_file_in_the_bucket_moves_as_the_file(place: Place) -> None:
    place.bucket.put("d/a/x", b"below")
    assert os.listdir(place.path / "d" / "a") == ["x"]
    place.bucket.delete("d/a/x")
    place.bucket.put("d/a", b"file")
    os.rename(place.path / "d", place.path / "e")
    place.sync()
    wait_until((place.path / "e" / "a").is_file, "the file, once the kernel asks for the name again")
    assert (place.path / "e" / "a").read_bytes() == b"file"
    assert {key for key in place.bucket.names() if not key.endswith("/")} == {"e/a"}


@pytest.mark.parametrize("tool", ["rm", "find", "shutil"])
def test_one_run_removes_a_tree_in_which_a_key_is_also_a_prefix(
    place: Place, tool: str, expect_log: Callable[[str], None]
) -> None:
    expect_log(REMOVED)
    put(place.bucket, {f"t/{key}": data for key, data in SHADOWED.items()})
    top = place.path / "t"
    if tool == "shutil":
        shutil.rmtree(top)
    else:
        run(*(["rm", "-r", top] if tool == "rm" else ["find", top, "-delete"]))
    assert not top.exists()
    place.sync()
    assert place.bucket.names() == []


def test_rmdir_leaves_no_half_of_a_name(place: Place, expect_log: Callable[[str], None]) -> None:
    expect_log(REMOVED)
    put(place.bucket, {"a/": b"", "a": b"object", "a.txt": b"another name"})
    os.rmdir(place.path / "a")
    assert os.listdir(place.path) == ["a.txt"]
    place.sync()
    assert shown(place.bucket) == {"a.txt": b"another name"}


def test_a_hidden_object_that_another_client_replaced_is_not_removed(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    expect_log(REMOVED)
    expect_log("conflict, change dropped")
    put(bucket, {"a/": b"", "a": b"object"})
    one = mount("--settle-seconds", "2")
    os.rmdir(one.path / "a")
    bucket.put("a", b"newer")
    assert run(FUSECACHE, "sync", one.path, check=False).returncode == 3
    assert shown(bucket) == {"a": b"newer"}
    wait_until(lambda: (one.path / "a").is_file(), "the newer object")


def test_after_a_kill_the_rest_of_a_name_goes_too(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    expect_log("recovered files=0 changes=4")
    put(bucket, {"t/a": b"object", "t/a/x": b"below"})
    one = mount("--settle-seconds", "3600")
    shutil.rmtree(one.path / "t")
    one.kill()
    one.start("--settle-seconds", "0.2")
    assert os.listdir(one.path) == []
    one.sync()
    assert bucket.names() == []


def test_a_file_takes_the_place_of_a_directory_and_of_what_it_hid(
    place: Place, expect_log: Callable[[str], None]
) -> None:
    expect_log(REMOVED)
    put(place.bucket, {"a/": b"", "a": b"object"})
    os.rmdir(place.path / "a")
    (place.path / "a").write_bytes(b"new")
    place.sync()
    assert shown(place.bucket) == {"a": b"new"}


@pytest.mark.s3server_only
def test_a_hidden_object_that_goes_while_the_marker_is_made_is_no_conflict(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    """The marker's HEAD finds the object, and the answer comes when a program has removed it with the directory."""
    expect_log(REMOVED)
    put(bucket, {"a": b"object", "a/x": b"below"})
    one = mount("--settle-seconds", "0.2")
    control = bucket.service.control
    control.faults(Fault(FaultAction.DELAY, operation="HeadObject", key="*/a", seconds=3.0))
    os.unlink(one.path / "a" / "x")
    control.wait_requests(1, "HeadObject", f"{bucket.prefix}a", finished=False)
    os.rmdir(one.path / "a")
    (one.path / "a").write_bytes(b"new")
    one.sync()
    assert shown(bucket) == {"a": b"new"}
    assert os.listdir(one.path) == ["a"]


# ---- a directory marker with content


@pytest.mark.parametrize("listed", [False, True])
def test_the_content_of_a_directory_marker_is_neither_removed_nor_left_behind(
    place: Place, *, listed: bool, expect_log: Callable[[str], None]
) -> None:
    expect_log(STAYS)
    expect_log(NOT_EMPTY)
    before = put(place.bucket, {"t/d/": b"content", "t/d/x": b"1"})
    if listed:
        run("find", place.path)
    assert refusal(lambda: os.rename(place.path / "t" / "d", place.path / "t" / "e")) == errno.EPERM
    assert refusal(lambda: os.rename(place.path / "t", place.path / "u")) == errno.EPERM
    place.sync()
    assert shown(place.bucket) == before
    os.unlink(place.path / "t" / "d" / "x")
    assert refusal(lambda: os.rmdir(place.path / "t" / "d")) == errno.ENOTEMPTY
    assert run("rm", "-r", place.path / "t", check=False).returncode == 1
    place.sync()
    assert shown(place.bucket) == {"t/d/": b"content"}


def test_a_directory_whose_marker_has_content_is_not_replaced(
    place: Place, expect_log: Callable[[str], None]
) -> None:
    expect_log(NOT_EMPTY)
    before = put(place.bucket, {"d/x": b"1", "e/": b"content"})
    assert refusal(lambda: os.rename(place.path / "d", place.path / "e")) == errno.ENOTEMPTY
    place.sync()
    assert shown(place.bucket) == before


def test_mkdir_keeps_the_marker_that_another_client_made_meanwhile(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    one = mount("--settle-seconds", "1")
    (one.path / "d").mkdir()
    bucket.put("d/", b"content")
    one.sync()
    assert shown(bucket) == {"d/": b"content"}


def test_check_names_a_directory_marker_with_content(mount: Callable[..., Mount], bucket: Bucket) -> None:
    put(bucket, {"d/": b"content", "e/": b""})
    said = run(FUSECACHE, "check", mount().path, check=False).stdout
    assert "d/" in said
    assert "whose content no path shows" in said
    assert "e/" not in said


# ---- keys that become too long


def test_a_directory_is_not_moved_if_a_pending_file_would_get_too_long_a_key(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    one = mount("--settle-seconds", "3600")
    (one.path / "d").mkdir()
    part = "p" * 200
    room = 1024 - len(bucket.prefix) - len("d/") - 4 * 201
    folder = one.path / "d" / part / part / part / part
    os.makedirs(folder)
    (folder / ("f" * room)).write_bytes(b"pending")
    (one.path / "d" / "first").write_bytes(b"pending")
    assert refusal(lambda: os.rename(one.path / "d", one.path / "longer")) == errno.ENAMETOOLONG
    assert sorted(os.listdir(one.path)) == ["d"]
    assert (folder / ("f" * room)).read_bytes() == b"pending"
    one.unmount()
    assert [key for key in bucket.names() if not key.startswith("d/")] == []


def test_a_directory_is_not_moved_if_an_empty_one_below_would_get_too_long_a_key(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    one = mount("--settle-seconds", "3600")
    part = "p" * 200
    room = 1024 - len(bucket.prefix) - len("d/") - 4 * 201 - len("/")
    os.makedirs(one.path / "d" / part / part / part / part / ("e" * room))
    assert refusal(lambda: os.rename(one.path / "d", one.path / "dd")) == errno.ENAMETOOLONG
    assert os.listdir(one.path) == ["d"]


# ---- the other library


def test_with_pyfuse3_nothing_is_moved_by_halves_either(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    expect_log(STAYS)
    expect_log(REMOVED)
    before = put(bucket, SHADOWED)
    one = mount("--fuse-library", "pyfuse3")
    assert refusal(lambda: os.rename(one.path / "d", one.path / "e")) == errno.EPERM
    one.sync()
    assert shown(bucket) == before
    subprocess.run(["rm", "-r", one.path / "d"], check=True)
    one.sync()
    assert bucket.names() == []
