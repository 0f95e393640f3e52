"""Two nodes that do the same thing: success on both, and one object. What differs is a conflict."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.engine.publish.rejections import LISTED_SECONDS
from tests.mount.conftest import ExpectedLog
from tests.s3server import Rules
from tests.support.mounts import FUSECACHE, Mount, pattern, run, wait_until
from tests.support.s3_buckets import Bucket

# Longer than what a node knows of a name may be old.
KNOWN_SECONDS = 40.0


@pytest.fixture
def bucket(bucket: Bucket) -> Iterator[Bucket]:
    """A prefix whose keys may be written as often as one likes: two nodes write one at the same moment."""
    if bucket.service.control is not None:
        bucket.control.set_rules(write_interval_seconds=0)
    yield bucket
    if bucket.service.control is not None:
        bucket.control.set_rules(write_interval_seconds=Rules().write_interval_seconds)


@pytest.fixture
def nodes(mount: Callable[..., Mount], bucket: Bucket) -> tuple[Mount, Mount]:
    """Two nodes, of which neither sees for a while what the other does."""
    return two_nodes(mount, bucket, "--attribute-seconds", "20")


@pytest.fixture
def watchful_nodes(mount: Callable[..., Mount], bucket: Bucket) -> tuple[Mount, Mount]:
    """Two nodes that look for each other's changes once a second."""
    return two_nodes(mount, bucket)


def two_nodes(mount: Callable[..., Mount], bucket: Bucket, *flags: str) -> tuple[Mount, Mount]:
    """Return two nodes that know the directory `dir`."""
    bucket.put("dir/")
    bucket.put("dir/old", b"bytes")
    made = mount(*flags), mount(*flags)
    for node in made:
        assert os.listdir(node.path / "dir") == ["old"]
    return made


def sync_status(node: Mount) -> tuple[int, str]:
    """Return how `fusecache sync` ends, and what it says."""
    done = run(FUSECACHE, "sync", node.path, check=False)
    return done.returncode, done.stderr


def test_the_same_symlink(nodes: tuple[Mount, Mount], bucket: Bucket) -> None:
    for node in nodes:
        os.symlink("step-100", node.path / "dir/last")
        assert sync_status(node)[0] == 0
    assert bucket.names() == ["dir/", "dir/last", "dir/old"]
    assert [os.readlink(node.path / "dir/last") for node in nodes] == ["step-100"] * 2


def test_symlinks_to_different_targets_are_a_conflict(
    nodes: tuple[Mount, Mount], bucket: Bucket, expect_log: ExpectedLog
) -> None:
    expect_log("conflict, change dropped key=")
    said = []
    for number, node in enumerate(nodes):
        os.symlink(f"step-{number}", node.path / "dir/last")
        said.append(sync_status(node)[0])
    assert said == [0, 3]
    assert bucket.head("dir/last")["Metadata"]["symlink-target"] == "step-0"


def test_an_empty_file_is_not_the_same_as_a_symlink(
    nodes: tuple[Mount, Mount], bucket: Bucket, expect_log: ExpectedLog
) -> None:
    """Both are objects without a byte."""
    expect_log("conflict key=")
    os.symlink("step-1", nodes[0].path / "dir/last")
    assert sync_status(nodes[0])[0] == 0
    (nodes[1].path / "dir/last").touch()
    assert sync_status(nodes[1])[0] == 3
    (copy,) = [name for name in bucket.names() if ".conflict-" in name]
    assert bucket.head("dir/last")["Metadata"]["symlink-target"] == "step-1"
    (nodes[1].path / copy).unlink()


def test_a_rename_of_equal_bytes(nodes: tuple[Mount, Mount], bucket: Bucket) -> None:
    """Each node has published them under a name of its own before."""
    for number, node in enumerate(nodes):
        (node.path / f"dir/part-{number}").write_bytes(pattern(1000))
        node.sync()
    for number, node in enumerate(nodes):
        os.rename(node.path / f"dir/part-{number}", node.path / "dir/model")
        assert sync_status(node)[0] == 0
    assert bucket.sizes() == {"dir/": 0, "dir/model": 1000, "dir/old": 5}
    assert bucket.get("dir/model") == pattern(1000)


def test_the_same_rename_of_one_file(nodes: tuple[Mount, Mount], bucket: Bucket) -> None:
    for node in nodes:
        os.rename(node.path / "dir/old", node.path / "dir/after")
        assert sync_status(node)[0] == 0
    assert bucket.names() == ["dir/", "dir/after"]
    assert [(node.path / "dir/after").read_bytes() for node in nodes] == [b"bytes"] * 2


def test_the_same_directory_and_the_same_removal(nodes: tuple[Mount, Mount], bucket: Bucket) -> None:
    for node in nodes:
        (node.path / "dir/old").unlink()
        (node.path / "dir/new").mkdir()
        assert sync_status(node)[0] == 0
    assert bucket.names() == ["dir/", "dir/new/"]


def test_a_cache_of_hugging_face_that_both_fill(nodes: tuple[Mount, Mount], bucket: Bucket) -> None:
    """Blobs by a temporary name, snapshots that link to them, and the file that names the revision."""
    for node in nodes:
        (node.path / "dir/old").unlink()
        hub = node.path / "dir"
        for folder in ("blobs", "refs", "snapshots", "snapshots/rev"):
            (hub / folder).mkdir()
        (hub / "blobs/0a1b.incomplete").write_bytes(b"weights")
        os.replace(hub / "blobs/0a1b.incomplete", hub / "blobs/0a1b")
        os.symlink("../../blobs/0a1b", hub / "snapshots/rev/model.bin")
        (hub / "refs/main").write_text("rev")
        assert sync_status(node)[0] == 0
    assert [name for name in bucket.names() if not name.endswith("/")] == [
        "dir/blobs/0a1b",
        "dir/refs/main",
        "dir/snapshots/rev/model.bin",
    ]
    for node in nodes:
        assert (node.path / "dir/snapshots/rev/model.bin").read_bytes() == b"weights"


def test_a_directory_over_another_nodes_file_is_a_conflict(
    nodes: tuple[Mount, Mount], bucket: Bucket, expect_log: ExpectedLog
) -> None:
    expect_log("conflict key=")
    (nodes[0].path / "dir/result").write_bytes(b"of one")
    assert sync_status(nodes[0])[0] == 0
    time.sleep(LISTED_SECONDS)  # a name that was free in a younger listing is free
    (nodes[1].path / "dir/result").mkdir()
    (nodes[1].path / "dir/result/part-0").write_bytes(b"of two")
    status, said = sync_status(nodes[1])
    assert status == 3
    assert "one client made a file of this name, another a directory" in said
    wait_until(lambda: any(".conflict-" in name for name in bucket.names()), "the copy")
    (copy,) = [name for name in bucket.names() if ".conflict-" in name]
    assert copy in said
    for node in nodes:
        wait_until((node.path / copy).exists, "the copy", seconds=KNOWN_SECONDS)
        assert (node.path / copy).read_bytes() == b"of one"
        assert (node.path / "dir/result/part-0").read_bytes() == b"of two"
    (nodes[1].path / copy).unlink()
    assert sync_status(nodes[1])[0] == 0


def test_a_file_that_is_published_after_another_nodes_directory_is_a_conflict(
    nodes: tuple[Mount, Mount], bucket: Bucket, expect_log: ExpectedLog
) -> None:
    """The node of the file notices by its next listing: no condition of the upload could tell."""
    expect_log("conflict key=")
    with open(nodes[0].path / "dir/result", "wb") as file:
        file.write(b"of one")
        (nodes[1].path / "dir/result").mkdir()
        (nodes[1].path / "dir/result/part-0").write_bytes(b"of two")
        assert sync_status(nodes[1])[0] == 0
    nodes[0].sync()

    def copies(node: Mount) -> list[str]:
        return [name for name in os.listdir(node.path / "dir") if ".conflict-" in name]

    for node in nodes:
        wait_until(lambda node=node: len(copies(node)) == 1, "the copy", seconds=KNOWN_SECONDS)
        assert (node.path / "dir" / copies(node)[0]).read_bytes() == b"of one"
        wait_until((node.path / "dir/result/part-0").exists, "the directory", seconds=KNOWN_SECONDS)
        assert (node.path / "dir/result/part-0").read_bytes() == b"of two"
    status, said = sync_status(nodes[0])
    assert (status, "one client made a file of this name, another a directory" in said) == (3, True)
    (nodes[0].path / "dir" / copies(nodes[0])[0]).unlink()
    assert sync_status(nodes[0])[0] == 0


@pytest.mark.parametrize("way", ["removed", "renamed"])
def test_a_directory_in_place_of_ones_own_file_is_no_conflict(
    nodes: tuple[Mount, Mount], bucket: Bucket, way: str
) -> None:
    node = nodes[0]
    (node.path / "dir/x").write_bytes(b"file")
    node.sync()
    if way == "removed":
        (node.path / "dir/x").unlink()
    else:
        (node.path / "dir/x").rename(node.path / "dir/y")
    (node.path / "dir/x").mkdir()
    assert sync_status(node)[0] == 0
    assert bucket.names() == ["dir/", "dir/old", "dir/x/", *(["dir/y"] if way == "renamed" else [])]


# ---- times


def times(nodes: tuple[Mount, Mount], name: str) -> list[int]:
    """Return when each node says that a file was changed."""
    return [(node.path / "dir" / name).stat().st_mtime_ns for node in nodes]


def wait_same_time(nodes: tuple[Mount, Mount], name: str) -> None:
    """Return when both nodes show the file, with one time."""
    for node in nodes:
        wait_until((node.path / "dir" / name).exists, "the file", seconds=KNOWN_SECONDS)
    wait_until(lambda: len(set(times(nodes, name))) == 1, "one time", seconds=KNOWN_SECONDS)


def test_a_file_has_one_time_on_all_nodes(watchful_nodes: tuple[Mount, Mount], bucket: Bucket) -> None:
    nodes = one, two = watchful_nodes
    (one.path / "dir/data").write_bytes(b"1")
    one.sync()
    wait_same_time(nodes, "data")
    with open(two.path / "dir/data", "ab") as file:
        file.write(b"2")
    two.sync()
    wait_until(lambda: (one.path / "dir/data").stat().st_size == 2, "the append")
    wait_same_time(nodes, "data")
    (one.path / "dir/data").rename(one.path / "dir/moved")
    one.sync()
    wait_same_time(nodes, "moved")


def test_bytes_that_another_client_stores_again_have_its_time_everywhere(
    watchful_nodes: tuple[Mount, Mount], bucket: Bucket
) -> None:
    nodes = watchful_nodes
    (nodes[0].path / "dir/data").write_bytes(b"bytes")
    nodes[0].sync()
    wait_same_time(nodes, "data")
    before = times(nodes, "data")[0]
    bucket.control.advance_clock(100)
    bucket.put("dir/data", b"bytes")
    bucket.control.advance_clock(-100)  # the server is that of the tests to come
    wait_until(lambda: all(each > before for each in times(nodes, "data")), "the new time")
    wait_same_time(nodes, "data")


@pytest.mark.parametrize("age_seconds", [1.5, 1e9])
def test_a_time_that_a_program_set_stays_where_it_was_set(
    watchful_nodes: tuple[Mount, Mount], tmp_path: Path, age_seconds: float
) -> None:
    """So `rsync -t` from there finds nothing to do the second time, also with a file that was just made."""
    nodes = watchful_nodes
    (tmp_path / "file").write_bytes(b"bytes")
    set_to = time.time_ns() - int(age_seconds * 1e9)
    os.utime(tmp_path / "file", ns=(set_to, set_to))
    for _ in range(2):
        run("cp", "--preserve=timestamps", "--update", tmp_path / "file", nodes[0].path / "dir/file")
        nodes[0].sync()
        wait_until((nodes[1].path / "dir/file").exists, "the file")
    time.sleep(LISTED_SECONDS)
    assert times(nodes, "file")[0] == set_to
    (nodes[0].path / "dir/file").rename(nodes[0].path / "dir/moved")
    nodes[0].sync()
    time.sleep(LISTED_SECONDS)
    assert times(nodes, "moved")[0] == set_to


def test_a_package_that_both_import_is_compiled_once(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    """At the same path, as the compiled files hold it."""
    bucket.put("pkg/")
    nodes = mount(), mount()
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b"):
        (nodes[0].path / f"pkg/{name}.py").write_text(f"x = {name!r}\n")
    (nodes[0].path / "pkg/__init__.py").write_text("from . import a, b\n")
    nodes[0].sync()
    source = (nodes[0].path / "pkg/a.py", nodes[1].path / "pkg/a.py")
    wait_until(
        lambda: source[1].exists() and len({each.stat().st_mtime_ns for each in source}) == 1, "one time"
    )

    def start(node: Mount) -> "subprocess.Popen[bytes]":
        program = f"import sys; sys.path.insert(0, {str(data)!r}); import pkg"
        keys = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        script = f'mount --bind {node.path} {data} && exec "$0" -c "$1"'
        return subprocess.Popen(["unshare", "-m", "sh", "-c", script, sys.executable, program], env=keys)

    for each in [start(node) for node in nodes]:
        assert each.wait() == 0
    assert [sync_status(node)[0] for node in nodes] == [0, 0]
    assert not [name for name in bucket.names() if ".conflict-" in name]
    compiled = {name for name in bucket.names() if name.endswith(".pyc")}
    assert len(compiled) == 3
    for node in nodes:
        wait_until(
            lambda node=node: all((node.path / name).exists() for name in compiled), "the compiled files"
        )
    bucket.control.clear_log()
    for node in nodes * 2:
        assert start(node).wait() == 0
        node.sync()
    assert bucket.published() == []
