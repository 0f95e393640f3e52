"""Trees carried onto the mount and back by the tools that people use."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.support import ROOT
from tests.support.mounts import run, wait_until

# A tree is thousands of requests to the mount, on a machine that may have much else to do.
pytestmark = pytest.mark.timeout(900)
carry = partial(run, seconds=240)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Some of the project's own sources, with an empty file, an empty directory and symlinks."""
    tree = tmp_path_factory.mktemp("trees") / "tree"
    for folder in ("fusecache/cli", "fusecache/config", "fusecache/engine"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (tree / "empty").write_bytes(b"")
    (tree / "empty directory").mkdir()
    (tree / "link").symlink_to("fusecache/cli/main.py")
    (tree / "dangling").symlink_to("nowhere/at all")
    (tree / "fusecache" / "cli" / "main.py").chmod(0o755)
    os.utime(tree / "fusecache" / "config" / "options.py", (1e9, 1.2e9))
    yield tree
    shutil.rmtree(tree)


def assert_same_on_both_nodes(tree: Path, place: Place, name: str) -> None:
    """Compare here at once, then in the bucket as another node sees it."""
    carry("diff", "-r", "--no-dereference", tree, place.path / name)
    place.sync()
    wait_until(lambda: (place.second / name).is_dir(), "the tree on the other node")
    carry("diff", "-r", "--no-dereference", tree, place.second / name)
    assert (place.path / name / "fusecache" / "cli" / "main.py").stat().st_mode & 0o777 == 0o755
    assert (place.path / name / "fusecache" / "config" / "options.py").stat().st_mtime == 1.2e9
    leftovers = [key for key in place.bucket.names() if "/." in key or ".tmp" in key]
    assert leftovers == []


def test_cp_a_carries_a_tree_there_and_back(place: Place, tree: Path, tmp_path: Path):
    carry("cp", "-a", tree, place.path / "copy")
    assert_same_on_both_nodes(tree, place, "copy")
    carry("cp", "-a", place.second / "copy", tmp_path / "back")
    carry("diff", "-r", "--no-dereference", tree, tmp_path / "back")


def test_rsync_a_carries_a_tree_and_finds_nothing_to_do_the_second_time(place: Place, tree: Path):
    carry("rsync", "-a", f"{tree}/", place.path / "copy")
    assert_same_on_both_nodes(tree, place, "copy")
    if place.bucket.service.control is not None:
        assert not place.bucket.operations("CopyObject")
    again = carry("rsync", "-ai", f"{tree}/", place.path / "copy").stdout
    changed = [line for line in again.splitlines() if line.startswith((">f", "cL", "cd"))]
    assert changed == []


def test_tar_extracts_a_tree_onto_the_mount(place: Place, tree: Path, tmp_path: Path):
    archive = tmp_path / "tree.tar"
    carry("tar", "-C", tree.parent, "-cf", archive, tree.name)
    carry("tar", "-C", place.path, "-xpf", archive)
    assert_same_on_both_nodes(tree, place, tree.name)
    carry("tar", "-C", place.second, "-cf", tmp_path / "back.tar", tree.name)
    names = [
        sorted(carry("tar", "-tf", each).stdout.splitlines()) for each in (archive, tmp_path / "back.tar")
    ]
    assert names[0] == names[1]


def test_a_git_repository_works_on_the_mount(place: Place):
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}

    def git(*words: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*"]
        return run("git", "-C", place.path, *names, *words, env=environment).stdout

    git("init", "-q")
    for turn in range(3):
        (place.path / "file").write_text(f"turn {turn}\n")
        git("add", "file")
        git("commit", "-qm", f"turn {turn}")
    git("gc", "-q")
    assert git("log", "--format=%s").split("\n")[:3] == ["turn 2", "turn 1", "turn 0"]
    assert git("fsck", "--full", "--strict") == ""
    place.sync()


def test_a_file_is_edited_in_place_by_sed_and_mv(place: Place):
    place.bucket.put("config", b"a=1\nb=2\n")
    run("sed", "-i", "s/a=1/a=3/", place.path / "config")
    assert (place.path / "config").read_bytes() == b"a=3\nb=2\n"
    run("mv", place.path / "config", place.path / "renamed")
    place.sync()
    assert place.bucket.names() == ["renamed"]
    assert place.bucket.get("renamed") == b"a=3\nb=2\n"
