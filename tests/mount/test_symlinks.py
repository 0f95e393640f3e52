"""Symlinks of the bucket: links inside the mount are followed; others are shown, and never lead to a host file."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusecache.model.objects import SYMLINK_TARGET
from tests.support.mounts import FUSECACHE, Mount, refusal, run
from tests.support.s3_buckets import Bucket

Mounting = Callable[..., Mount]
ORIGINAL = "a line of the host\n"


@pytest.fixture
def host_file(tmp_path: Path) -> Path:
    """A file outside every mount."""
    path = tmp_path / "train.log"
    path.write_text(ORIGINAL)
    return path


def link(bucket: Bucket, name: str, target: str) -> None:
    """Store a symlink, as a writer of the bucket could."""
    bucket.put(name, b"", {"mode": "120777", SYMLINK_TARGET: target})


def climb(path: Path, *, first: str = "") -> str:
    """Return a relative target that leaves any mount of this machine and ends at a path."""
    return f"{first}{'../' * 40}{path.as_posix().lstrip('/')}"


def put_outward_links(bucket: Bucket, host_file: Path) -> list[str]:
    """Store links that lead out of the mount by each way; return their names."""
    targets = {
        "absolute": str(host_file),
        "climbing": climb(host_file),
        "run/climbing": climb(host_file),
        # `run/up` alone stays inside, and so would this target if `up` were a directory.
        "through": climb(host_file, first="run/up/"),
        "hidden": f"run/./up//../{host_file}",
    }
    for name, target in targets.items():
        link(bucket, name, target)
    link(bucket, "run/up", "..")
    return list(targets)


def test_outward_links_are_not_followed(mount: Mounting, bucket: Bucket, host_file: Path) -> None:
    """Neither an absolute target, nor one that climbs out, nor one that climbs out through another link."""
    names = put_outward_links(bucket, host_file)
    one = mount()
    for name in names:
        path = one.path / name
        assert path.is_symlink()
        for call in (
            lambda path=path: os.readlink(path),
            lambda path=path: os.stat(path),
            lambda path=path: path.read_text(),
            lambda path=path: path.open("a").close(),
            lambda path=path: path.write_text("overwritten"),
        ):
            assert refusal(call) == errno.EACCES, name
    assert host_file.read_text() == ORIGINAL


def test_tools_report_outward_links(mount: Mounting, bucket: Bucket, host_file: Path, tmp_path: Path) -> None:
    """A copy or an archive of the mount is not silently incomplete: the tool names the link, and fails."""
    link(bucket, "run/train.log", str(host_file))
    bucket.put("run/data", b"data")
    run_path = mount().path / "run"
    for command in (
        ("cp", "-r", run_path, tmp_path / "copy"),
        ("cp", "-rL", run_path, tmp_path / "followed"),
        ("tar", "-cf", tmp_path / "archive.tar", "-C", run_path, "."),
        ("find", "-L", run_path, "-type", "f", "-newer", "/proc/1/stat"),
    ):
        done = run(*command, check=False, env={**os.environ, "LC_ALL": "C"})
        assert done.returncode != 0, command
        assert "train.log" in done.stderr, command
        assert "Permission denied" in done.stderr, command
    assert (tmp_path / "copy" / "data").read_bytes() == b"data"
    assert sorted(run("find", run_path, "-printf", "%f ").stdout.split()) == ["data", "run", "train.log"]


def test_outward_link_can_be_removed(mount: Mounting, bucket: Bucket, host_file: Path) -> None:
    link(bucket, "run/train.log", str(host_file))
    one = mount()
    (one.path / "run" / "train.log").rename(one.path / "old")
    assert refusal(lambda: os.readlink(one.path / "old")) == errno.EACCES
    (one.path / "old").unlink()
    one.sync()
    assert bucket.names() == ["run/"]
    assert host_file.read_text() == ORIGINAL


def test_inward_links_are_followed(mount: Mounting, bucket: Bucket) -> None:
    """As Composer and the cache of Hugging Face make them: relative, through directories and chains."""
    bucket.put("run/ep3-rank0.pt", b"weights")
    bucket.put("hub/models/blobs/0a1b", b"model")
    link(bucket, "run/latest-rank0.pt", "ep3-rank0.pt")
    link(bucket, "latest", "./run/")
    link(bucket, "hub/models/snapshots/rev/model.bin", "../../blobs/0a1b")
    link(bucket, "hub/chain", "models/snapshots/rev/model.bin")
    link(bucket, "hub/models/root", "../..")
    one = mount()
    assert (one.path / "latest" / "latest-rank0.pt").read_bytes() == b"weights"
    assert (one.path / "hub" / "chain").read_bytes() == b"model"
    assert (one.path / "hub/models/root/run/ep3-rank0.pt").read_bytes() == b"weights"
    os.symlink("ep4-rank0.pt", one.path / "run" / "next")
    assert os.readlink(one.path / "run" / "next") == "ep4-rank0.pt"


def test_outward_link_is_refused_when_made(mount: Mounting, bucket: Bucket, host_file: Path) -> None:
    """The program that makes it hears of it at once, rather than the one that reads it later."""
    one = mount()
    (one.path / "run").mkdir()
    for target in (str(host_file), str(one.path / "run"), "../../x", "a/../x"):
        assert refusal(lambda target=target: os.symlink(target, one.path / "run" / "link")) == errno.EPERM
    assert os.listdir(one.path / "run") == []
    one.sync()
    assert bucket.names() == ["run/"]


def test_link_moved_up_is_not_followed(mount: Mounting, bucket: Bucket) -> None:
    """What counts is where the link is now."""
    link(bucket, "a/b/link", "../../data")
    bucket.put("data", b"data")
    one = mount()
    assert (one.path / "a" / "b" / "link").read_bytes() == b"data"
    (one.path / "a" / "b").rename(one.path / "b")
    assert refusal(lambda: (one.path / "b" / "link").read_bytes()) == errno.EACCES


def test_symlinks_all_follows_every_link(mount: Mounting, bucket: Bucket, host_file: Path) -> None:
    names = put_outward_links(bucket, host_file)
    one = mount("--symlinks", "all")
    assert [os.readlink(one.path / name) for name in names[:1]] == [str(host_file)]
    assert (one.path / "absolute").read_text() == ORIGINAL
    os.symlink(host_file, one.path / "made")
    assert (one.path / "made").read_text() == ORIGINAL


def test_symlinks_none_follows_no_link(mount: Mounting, bucket: Bucket) -> None:
    bucket.put("data", b"data")
    link(bucket, "link", "data")
    one = mount("--symlinks", "none")
    assert refusal(lambda: (one.path / "link").read_bytes()) == errno.EACCES
    assert refusal(lambda: os.symlink("data", one.path / "made")) == errno.EPERM
    assert (one.path / "data").read_bytes() == b"data"


def test_check_names_outward_links(mount: Mounting, bucket: Bucket, host_file: Path) -> None:
    names = put_outward_links(bucket, host_file)
    bucket.put("empty")
    one = mount()
    done = run(FUSECACHE, "check", one.path, check=False)
    assert done.returncode == 1
    for name in names:
        assert f"symlink not followed: {name} -> " in done.stdout
    assert "not followed: run/up " not in done.stdout
    found = json.loads(run(FUSECACHE, "check", one.path, "--json", check=False).stdout)
    assert found["unfollowed_links"] == len(names)
    assert {"path": "absolute", "target": str(host_file)} in found["unfollowed"]
    run(FUSECACHE, "check", one.path / "empty")


def test_status_shows_outward_link(mount: Mounting, bucket: Bucket, host_file: Path) -> None:
    link(bucket, "absolute", str(host_file))
    one = mount()
    done = run(FUSECACHE, "status", one.path / "absolute")
    assert str(host_file) in done.stdout
    assert "not followed" in done.stdout
