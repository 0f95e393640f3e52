"""`pull`, `push` and `watch` follow no symlink below their folder: nothing outside is written, read or named.

A bucket's writer chooses keys and targets of symlinks. What one pull leaves, a later one may meet.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fusecache.folder import pull as pulling
from fusecache.folder.local_folder import LocalFolder, scan
from fusecache.folder.pull import Patience, list_bucket
from fusecache.model.errors import FolderError, ObjectChanged, Refused
from fusecache.model.objects import Extent, ObjectId, ObjectInfo
from tests.folder.conftest import Node, bucket_of, files_of
from tests.folder.test_push import write
from tests.s3server import Fault, FaultAction
from tests.support.daemons import MIB, some_bytes
from tests.support.memory_store import MemoryStore


def put_link(node: Node, key: str, target: str) -> None:
    """Put a symlink as fusecache stores it."""
    node.server.control.put(key, b"", metadata={"symlink-target": target})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a file that nothing may touch, and a folder to pull into, `job/folder`."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "authorized_keys").write_text("good key\n")
    return home


def assert_inside(folder: Path) -> None:
    """Each symlink below the folder leads to a place in it, and not into `.fusecache`."""
    for above, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(above) / name
            if path.is_symlink():
                real = Path(os.path.realpath(path))
                assert real.is_relative_to(folder)
                assert ".fusecache" not in real.relative_to(folder).parts


# ---- pull


def test_a_link_of_an_earlier_pull_is_not_followed_by_a_later_one(node: Node, home: Path) -> None:
    """Through `l` a relative target would be counted from another depth than it has."""
    folder = home / "job" / "folder"
    node.server.control.put("x/keep", b"1")
    put_link(node, "a/b/c/d/l", "../../../../x")
    assert node.pull(folder).returncode == 0
    node.server.control.delete("a/b/c/d/l")
    put_link(node, "a/b/c/d/l/train.log", "../../../.ssh/authorized_keys")
    done = node.pull(folder)
    assert done.returncode == 1
    assert "left out: a/b/c/d/l/train.log: a/b/c/d/l: it is a symlink, which is not followed" in done.stderr
    assert os.listdir(folder / "x") == ["keep"]
    assert_inside(folder)


def test_files_below_a_link_of_an_earlier_pull_replace_nothing_at_its_target(node: Node, home: Path) -> None:
    folder = home / "folder"
    node.server.control.put("data/shard", b"data")
    put_link(node, "latest", "data")
    assert node.pull(folder).returncode == 0
    node.server.control.delete("latest")
    node.server.control.put("latest/shard", b"other")
    node.server.control.put("latest/deeper/new", b"new")
    report = node.pulled(folder)
    assert set(report["skipped"]) == {"latest/shard", "latest/deeper/new"}
    assert files_of(folder / "data") == {"shard": b"data"}
    os.unlink(folder / "latest")
    assert node.pull(folder).returncode == 0
    assert files_of(folder) == bucket_of(node.server)


@pytest.mark.parametrize(
    "target",
    [".fusecache", ".fusecache/state.jsonl", "./.fusecache/parts/x", "x/../.fusecache", ".FuseCache/lock"],
)
def test_no_pulled_link_leads_into_the_state_of_the_pull(node: Node, tmp_path: Path, target: str) -> None:
    put_link(node, "link", target)
    put_link(node, "here", ".")
    put_link(node, "chained", f"here/{target}")
    assert set(node.pulled(tmp_path)["skipped"]) == {"link", "chained"}
    assert_inside(tmp_path)


def test_another_name_of_the_state_is_no_way_into_it(node: Node, tmp_path: Path) -> None:
    """As on a file system that ignores case; here by a bind mount."""
    node.server.control.put("good", b"1")
    assert node.pull(tmp_path).returncode == 0
    state = (tmp_path / ".fusecache" / "state.jsonl").read_bytes()
    (tmp_path / "alias").mkdir()
    bound = subprocess.run(
        ["mount", "--bind", tmp_path / ".fusecache", tmp_path / "alias"], capture_output=True, check=False
    )
    if bound.returncode:
        pytest.skip("this user may not mount")
    try:
        node.server.control.put("alias/state.jsonl", b"evil")
        node.server.control.put("alias/parts/evil", b"evil")
        report = node.pulled(tmp_path, "--force")
    finally:
        subprocess.run(["umount", tmp_path / "alias"], check=True)
    assert set(report["skipped"]) == {"alias/state.jsonl", "alias/parts/evil"}
    assert (tmp_path / ".fusecache" / "state.jsonl").read_bytes() == state


@pytest.mark.parametrize("name", ["parts", "state.jsonl", "lock", "engine", "state.new"])
def test_a_link_in_the_state_is_refused(node: Node, home: Path, name: str) -> None:
    folder = home / "folder"
    node.server.control.put("a", b"1")
    (folder / ".fusecache").mkdir(parents=True)
    target = home / ".ssh" if name in {"parts", "engine"} else home / ".ssh" / "authorized_keys"
    (folder / ".fusecache" / name).symlink_to(target)
    for run in (node.pull, node.push):
        done = run(folder)
        assert done.returncode == 1
        assert f"{folder}/.fusecache/{name} is a symlink: remove it" in done.stderr
    assert files_of(home / ".ssh") == {"authorized_keys": b"good key\n"}


def test_a_link_that_appears_during_the_pull_is_not_followed(node: Node, home: Path) -> None:
    folder = home / "folder"
    node.server.control.put("a/b/file", b"data")
    node.server.control.faults(Fault(FaultAction.HOLD, operation="GetObject"))
    child = node.start("pull", node.source, folder)
    node.server.control.wait_requests(1, "GetObject", finished=False)
    os.rename(folder / "a" / "b", folder / "a" / "moved")
    (folder / "a" / "b").symlink_to(home / ".ssh")
    node.server.control.clear_faults()
    _, said = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "left out: a/b/file: a/b: it is a symlink, which is not followed" in said
    assert os.listdir(home / ".ssh") == ["authorized_keys"]


def test_directory_markers_and_forced_pulls_follow_no_link(node: Node, home: Path) -> None:
    folder = home / "folder"
    folder.mkdir()
    (folder / "out").symlink_to(home / ".ssh")
    (folder / "authorized_keys").symlink_to(home / ".ssh" / "authorized_keys")
    for key in ("out/authorized_keys", "authorized_keys"):
        node.server.control.put(key, b"evil")
    node.server.control.put("out/made/", b"")
    report = node.pulled(folder, "--force")
    assert set(report["skipped"]) == {"out/authorized_keys", "out/made/"}
    assert files_of(home / ".ssh") == {"authorized_keys": b"good key\n"}
    assert (folder / "authorized_keys").read_bytes() == b"evil"  # the link itself was replaced
    assert not (folder / "authorized_keys").is_symlink()


# ---- push and watch


def test_a_push_reads_nothing_through_a_link(node: Node, home: Path) -> None:
    folder = home / "folder"
    write(folder, {"a/authorized_keys": b"mine", "b": b"b"})
    (folder / "inside").symlink_to("a")
    (folder / "outside").symlink_to(home / ".ssh")
    done = node.push(folder)
    assert done.returncode == 1
    assert "not published: outside: " in done.stderr
    assert bucket_of(node.server) == {"a/authorized_keys": b"mine", "b": b"b", "inside": b""}


def test_a_folder_that_became_a_link_since_it_was_listed_is_not_read(home: Path) -> None:
    folder = home / "folder"
    write(folder, {"a/authorized_keys": b"mine"})
    with LocalFolder(folder, "memory", "push", create=False) as local:
        found = scan(local, "")
        assert list(found.files) == ["a/authorized_keys"]
        os.rename(folder / "a", folder / "moved")
        (folder / "a").symlink_to(home / ".ssh")
        assert local.stat("a/authorized_keys") is None
        with pytest.raises(FolderError, match=r"^a: it is a symlink"):
            local.open("a/authorized_keys")
        (folder / "authorized_keys").symlink_to(home / ".ssh" / "authorized_keys")
        with pytest.raises(OSError, match="symbolic links"):
            local.open("authorized_keys")


# ---- descriptors


def descriptors() -> set[str]:
    """Return what this process has open in a part file of a pull."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if "/.fusecache/parts/" in target:
            found.add(target)
    return found


class Changing(MemoryStore):
    """A store whose objects change, or cannot be read, when they are read."""

    def __init__(self, on_read: Callable[["Changing", ObjectId], None]) -> None:
        super().__init__()
        self._on_read = on_read
        self.refuses_heads = False

    def head(self, key: str) -> ObjectInfo:
        if self.refuses_heads:
            raise Refused("no")
        return super().head(key)

    def get_into(self, object_id: ObjectId, extent: Extent, *others: object) -> None:  # type: ignore[override]
        self._on_read(self, object_id)
        super().get_into(object_id, extent, *others)  # type: ignore[arg-type]


def _change_once(store: Changing, object_id: ObjectId) -> None:
    if object_id.etag == store.head(object_id.key).etag and store.head(object_id.key).size > MIB:
        store.put_bytes(object_id.key, b"newer")
        raise ObjectChanged("changed")


def _remove(store: Changing, object_id: ObjectId) -> None:
    store.remove(object_id.key)
    raise ObjectChanged("changed")


def _refuse(_: Changing, __: ObjectId) -> None:
    raise Refused("no")


def _change_and_refuse(store: Changing, _: ObjectId) -> None:
    store.refuses_heads = True
    raise ObjectChanged("changed")


@pytest.mark.parametrize(
    ("on_read", "fetched"),
    [(_change_once, 20), (_remove, 0), (_refuse, 0), (_change_and_refuse, 0)],
    ids=["changes", "goes", "is refused", "changes and is refused"],
)
async def test_an_object_that_is_given_up_keeps_no_descriptor(
    tmp_path: Path, on_read: Callable[[Changing, ObjectId], None], fetched: int
) -> None:
    store, patience = Changing(on_read), Patience(1)
    for number in range(20):
        store.put_bytes(f"{number}", some_bytes(20 * MIB if number < 2 else 2 * MIB, number))
    with LocalFolder(tmp_path / "folder", "memory", "pull", create=True) as folder:
        pull = pulling.Pull(folder, store, list_bucket(store, "", patience), patience)
        await pull.run(lambda _: None)
        assert pull.report.fetched_files == fetched
        assert len(pull.report.failed) + len(pull.report.skipped) == 20 - fetched
        assert descriptors() == set()
