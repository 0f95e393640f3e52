"""Pipes, sockets and device nodes on a mount: names of this node, which behave as files do and are never published."""

import errno
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.support.mounts import Mount, refusal, wait_until


def make_socket(path: Path) -> None:
    """Bind a socket there, and close it: its name stays."""
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_PATH)  # a socket's path has at most 107 bytes
        try:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


MAKERS: dict[str, tuple[Callable[[Path], None], int, int]] = {
    "pipe": (os.mkfifo, stat.S_IFIFO, 0),
    "socket": (make_socket, stat.S_IFSOCK, 0),
    "character device": (
        lambda path: os.mknod(path, stat.S_IFCHR | 0o640, os.makedev(300, 70_000)),
        stat.S_IFCHR,
        os.makedev(300, 70_000),
    ),
    "block device": (
        lambda path: os.mknod(path, stat.S_IFBLK | 0o640, os.makedev(7, 1)),
        stat.S_IFBLK,
        os.makedev(7, 1),
    ),
}
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")


@pytest.mark.parametrize(("make", "kind", "device"), MAKERS.values(), ids=MAKERS)
def test_it_behaves_as_a_file_does_and_the_bucket_never_has_it(place: Place, make, kind, device):
    path = place.path / "special"
    make(path)
    assert refusal(lambda: make(path)) in {errno.EEXIST, errno.EADDRINUSE}
    os.chown(path, 1234, 2345)
    path.chmod(0o4601)
    os.utime(path, (1e9, 1.1e9))
    moved = place.path / "moved"
    path.rename(moved)
    seen = moved.lstat()
    assert (stat.S_IFMT(seen.st_mode), stat.S_IMODE(seen.st_mode)) == (kind, 0o4601)
    assert (seen.st_uid, seen.st_gid, seen.st_mtime) == (1234, 2345, 1.1e9)
    assert (seen.st_rdev, seen.st_size, seen.st_nlink) == (device, 0, 1)
    with os.scandir(place.path) as entries:
        assert [(each.name, stat.S_IFMT(each.stat(follow_symlinks=False).st_mode)) for each in entries] == [
            ("moved", kind)
        ]
    place.sync()
    assert place.bucket.names() == []
    assert place.first_mount.status(f"{place.name}/moved")["state"] == "local-only"
    moved.unlink()
    assert list(place.path.iterdir()) == []


def test_all_kinds_survive_a_killed_daemon(mount, bucket):
    one: Mount = mount()
    for name, (make, _, _) in MAKERS.items():
        make(one.path / name)
        (one.path / name).chmod(0o700)
    one.sync()
    one.kill()
    again: Mount = mount(cache=one.cache)
    seen = {path.name: path.lstat() for path in again.path.iterdir()}
    assert {name: (each.st_mode, each.st_rdev) for name, each in seen.items()} == {
        name: (kind | 0o700, device) for name, (_, kind, device) in MAKERS.items()
    }
    again.sync()
    assert bucket.names() == []


def test_two_programs_talk_through_a_pipe(place: Place):
    path = place.path / "pipe"
    os.mkfifo(path)
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(path.read_bytes()))
    reader.start()
    path.write_bytes(b"through the kernel, not through the daemon")
    reader.join(20)
    assert heard == [b"through the kernel, not through the daemon"]


def test_two_programs_talk_through_a_socket(place: Place):
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        here = os.open(place.path, os.O_PATH)
        server.bind(f"/proc/self/fd/{here}/socket")
        server.listen()
        client.connect(f"/proc/self/fd/{here}/socket")
        os.close(here)
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"hello")
            assert accepted.recv(5) == b"hello"


def test_in_place_of_a_published_file_it_takes_that_out_of_the_bucket(place: Place):
    (place.path / "file").write_bytes(b"bytes")
    place.sync()
    os.mkfifo(place.path / "pipe")
    (place.path / "pipe").rename(place.path / "file")
    place.sync()
    assert place.bucket.names() == []
    wait_until(lambda: not (place.second / "file").exists(), "the file to go on the other mount")
    assert stat.S_ISFIFO((place.path / "file").stat().st_mode)


def test_a_file_that_takes_its_place_is_published(place: Place):
    os.mkfifo(place.path / "name")
    (place.path / "new").write_bytes(b"bytes")
    (place.path / "new").rename(place.path / "name")
    place.sync()
    assert place.bucket.get("name") == b"bytes"
    assert (place.path / "name").read_bytes() == b"bytes"


def test_its_directory_is_not_empty_and_moves_with_it(place: Place):
    (place.path / "directory").mkdir()
    os.mkfifo(place.path / "directory" / "pipe")
    assert refusal((place.path / "directory").rmdir) == errno.ENOTEMPTY
    (place.path / "directory").rename(place.path / "renamed")
    assert stat.S_ISFIFO((place.path / "renamed" / "pipe").stat().st_mode)
    shutil.rmtree(place.path / "renamed")
    assert list(place.path.iterdir()) == []
    place.sync()
    assert place.bucket.names() == []


def test_mknod_makes_an_ordinary_file_too(place: Place):
    os.mknod(place.path / "file", stat.S_IFREG | 0o640)
    assert (place.path / "file").stat().st_mode == stat.S_IFREG | 0o640
    place.sync()
    assert place.bucket.sizes() == {"file": 0}


def test_none_is_made_on_a_read_only_mount(mount):
    one: Mount = mount("--read-only")
    assert refusal(lambda: os.mkfifo(one.path / "pipe")) == errno.EROFS
