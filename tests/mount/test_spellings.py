"""A name is bytes: what a program or another client wrote is what every program, the bucket and the commands show.

Unicode spells `é` and `한` in two ways, composed (NFC) and decomposed (NFD). Names from a Mac are decomposed.
"""

import json
import os
import shutil
import subprocess
import tarfile
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import FUSECACHE, Mount, run, tree_of, wait_until
from tests.support.s3_buckets import Bucket

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "한국어 café") for form in ("NFC", "NFD"))
BOTH = sorted([COMPOSED, DECOMPOSED])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree whose names are decomposed, files and directories alike, with both spellings of one name."""
    tree = tmp_path / "tree"
    (tree / DECOMPOSED / f"deep {DECOMPOSED}").mkdir(parents=True)
    (tree / DECOMPOSED / f"deep {DECOMPOSED}" / f"{DECOMPOSED}.txt").write_bytes(b"deep")
    (tree / DECOMPOSED / "empty").write_bytes(b"")
    (tree / f"{DECOMPOSED}.jpg").write_bytes(b"decomposed")
    (tree / f"{COMPOSED}.jpg").write_bytes(b"composed")
    (tree / f"link {DECOMPOSED}").symlink_to(f"{DECOMPOSED}.jpg")
    return tree


def assert_same_everywhere(place: Place, name: str, tree: Path) -> None:
    """Compare a copy with its tree: here at once, in the bucket, and on another node."""
    expected = tree_of(tree)
    assert tree_of(place.path / name) == expected
    place.sync()
    keys = {key.rstrip("/") for key in place.bucket.below(name).names()}
    files = {each for each in expected if not (tree / each).is_dir() or (tree / each).is_symlink()}
    assert files <= keys <= expected.keys()
    wait_until(lambda: (place.second / name).is_dir(), "the copy on the other node")
    assert tree_of(place.second / name) == expected


# ---- what this node writes


@pytest.mark.case(44)
def test_two_spellings_of_a_name_are_two_files(place: Place):
    (place.path / DECOMPOSED).write_bytes(b"1")
    assert not (place.path / COMPOSED).exists()
    (place.path / COMPOSED).write_bytes(b"22")
    assert sorted(os.listdir(place.path)) == BOTH
    place.sync()
    assert sorted(place.bucket.names()) == BOTH
    for path in (place.path, place.second):
        wait_until(lambda path=path: sorted(os.listdir(path)) == BOTH, "both names")
        assert [(path / name).read_bytes() for name in (DECOMPOSED, COMPOSED)] == [b"1", b"22"]
    os.unlink(place.path / COMPOSED)
    place.sync()
    assert place.bucket.names() == [DECOMPOSED]
    assert (place.path / DECOMPOSED).read_bytes() == b"1"


def test_a_file_is_renamed_from_one_spelling_to_the_other(place: Place):
    """As convmv does; before and after the upload."""
    old, new = place.path / COMPOSED, place.path / DECOMPOSED
    for data in (b"published", b"pending"):
        old.write_bytes(data)
        if data == b"published":
            place.sync()
        os.rename(old, new)
        assert os.listdir(place.path) == [DECOMPOSED]
        place.sync()
        assert (place.bucket.names(), place.bucket.get(DECOMPOSED)) == ([DECOMPOSED], data)


@pytest.mark.parametrize("how", ["--delete", "--delete-before", "--delete-after", "--delete-excluded"])
def test_rsync_with_delete_keeps_every_file_of_its_source(place: Place, tree: Path, how: str):
    for _ in range(2):
        run("rsync", "-a", how, f"{tree}/", place.path / "copy")
        assert tree_of(place.path / "copy") == tree_of(tree)
    assert_same_everywhere(place, "copy", tree)
    assert run("rsync", "-ai", how, f"{tree}/", place.path / "copy").stdout == ""
    assert run("rsync", "-ai", how, f"{place.second}/copy/", tree).stdout.count("f+++") == 0


def test_cp_a_tar_and_git_carry_the_names_there_and_back(place: Place, tree: Path, tmp_path: Path):
    run("cp", "-a", tree, place.path / "copied")
    assert_same_everywhere(place, "copied", tree)
    run("tar", "-C", tree, "-cf", place.path / "a.tar", ".")
    (place.path / "unpacked").mkdir()
    run("tar", "-C", place.path / "unpacked", "-xf", place.path / "a.tar")
    assert_same_everywhere(place, "unpacked", tree)
    with tarfile.open(place.path / "a.tar") as archive:
        assert {name.removeprefix("./") for name in archive.getnames()} - {"."} == tree_of(tree).keys()

    git = ("git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "core.precomposeUnicode=false")
    run(*git, "init", "-q", tree)
    run(*git, "-C", tree, "add", ".")
    run(*git, "-C", tree, "commit", "-qm", "names")
    run(*git, "clone", "-q", tree, place.path / "cloned")
    assert run(*git, "-C", place.path / "cloned", "status", "--porcelain").stdout == ""
    shutil.rmtree(tree / ".git")
    shutil.rmtree(place.path / "cloned" / ".git")
    assert tree_of(place.path / "cloned") == tree_of(tree)


# ---- what another client wrote


def put_both(bucket: Bucket) -> dict[str, bytes]:
    """Write objects whose keys have both spellings, in names and in directories; return them."""
    objects = {
        f"train/{name}{end}": f"{name}{end}".encode() for name in BOTH for end in (".jpg", "/inner.txt")
    }
    objects |= {f"train/only/{DECOMPOSED}": b"decomposed", "train/plain": b"plain"}
    for key, data in objects.items():
        bucket.put(key, data)
    return objects


def test_keys_in_both_spellings_are_shown_read_moved_and_removed(place: Place):
    objects = put_both(place.bucket)
    wait_until(lambda: (place.path / "train").is_dir(), "the directory")
    files = {name: data for name, data in tree_of(place.path).items() if data is not None}
    assert files == objects
    run("mv", place.path / "train", place.path / "moved")
    place.sync()
    moved = {key.replace("train/", "moved/"): data for key, data in objects.items()}
    assert {key: place.bucket.get(key) for key in place.bucket.names() if not key.endswith("/")} == moved
    run("find", place.path / "moved", "-delete")
    assert os.listdir(place.path) == []
    place.sync()
    assert place.bucket.names() == []


def test_commands_take_and_name_a_path_as_it_is_spelled(place: Place):
    put_both(place.bucket)
    folder = place.path / "train"
    wait_until(lambda: (folder / "only").is_dir(), "the directory")
    path = folder / "only" / DECOMPOSED
    run(FUSECACHE, "warm", folder)
    assert json.loads(run(FUSECACHE, "status", "--json", path).stdout)["state"] == "clean"
    assert run(FUSECACHE, "status", folder / "only" / COMPOSED, check=False).returncode != 0
    run(FUSECACHE, "evict", path)
    path.write_bytes(b"changed")
    run(FUSECACHE, "sync", path)
    assert place.bucket.get(f"train/only/{DECOMPOSED}") == b"changed"


def test_a_recording_and_its_replay_name_files_as_they_are_spelled(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
):
    objects = put_both(bucket)
    one = mount()
    file = tmp_path / "recording"
    recording = subprocess.Popen(
        [FUSECACHE, "record", file, one.path / "train"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert recording.stderr is not None
        assert "recording" in recording.stderr.readline()
        for key in objects:
            assert (one.path / key).read_bytes() == objects[key]
    finally:
        recording.terminate()
        recording.communicate(timeout=30)
    two = mount()
    done = run(FUSECACHE, "replay", file, two.path)
    assert f"of {len(objects)} files" in done.stdout
    assert "lacks" not in done.stderr


# ---- options


@pytest.mark.parametrize("other", [COMPOSED, DECOMPOSED])
def test_patterns_match_the_spelling_that_they_have(mount: Callable[..., Mount], bucket: Bucket, other: str):
    name = DECOMPOSED if other == COMPOSED else COMPOSED
    one = mount("--local-only", f"{name}.log", "--local-only", f"{name}/")
    (one.path / name).mkdir()
    for each in (f"{name}.log", f"{other}.log", f"{name}/inside"):
        (one.path / each).write_bytes(b"1")
    one.sync()
    assert [key for key in bucket.names() if not key.endswith("/")] == [f"{other}.log"]


def test_a_mount_of_a_decomposed_prefix_shows_it(mount: Callable[..., Mount], bucket: Bucket):
    below = bucket.below(DECOMPOSED)
    below.put("file", b"1")
    one = mount(of=below)
    assert os.listdir(one.path) == ["file"]
    (one.path / COMPOSED).write_bytes(b"2")
    one.sync()
    assert below.names() == ["file", COMPOSED]


# ---- a restart


def test_pending_files_keep_their_spelling_over_a_kill(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Callable[[str], None]
):
    expect_log("recovered files=2")
    one = mount("--settle-seconds", "3600")
    for name in BOTH:
        (one.path / name).write_bytes(name.encode())
    one.kill()
    one.detach()
    two = mount(cache=one.cache)
    assert sorted(os.listdir(two.path)) == BOTH
    two.sync()
    assert {name: bucket.get(name) for name in bucket.names()} == {name: name.encode() for name in BOTH}


# ---- a store for which two spellings are one object


@pytest.fixture
def r2(bucket: Bucket) -> Iterator[Bucket]:
    """A bucket that compares names in NFC and lists them as they were last written, as Cloudflare R2 does."""
    bucket.control.set_rules(normalise_keys=True)
    yield bucket
    bucket.control.set_rules(normalise_keys=False)


def files_in(bucket: Bucket) -> dict[str, bytes]:
    """Return all objects but directory markers."""
    return {key: bucket.get(key) for key in bucket.names() if not key.endswith("/")}


@pytest.mark.s3server_only
@pytest.mark.parametrize("host", ["the server's", "R2's"])
def test_on_r2_a_rename_to_the_other_spelling_loses_nothing(
    mount: Callable[..., Mount], r2: Bucket, host: str
):
    r2.put(f"{COMPOSED}.txt", b"file")
    r2.put(f"{COMPOSED}/inner", b"inner")
    one = mount(of=r2.as_r2() if host == "R2's" else r2)
    os.rename(one.path / f"{COMPOSED}.txt", one.path / f"{DECOMPOSED}.txt")
    os.rename(one.path / COMPOSED, one.path / DECOMPOSED)
    one.sync()
    assert files_in(r2) == {f"{DECOMPOSED}.txt": b"file", f"{DECOMPOSED}/inner": b"inner"}
    assert tree_of(mount().path) == {
        f"{DECOMPOSED}.txt": b"file",
        DECOMPOSED: None,
        f"{DECOMPOSED}/inner": b"inner",
    }


@pytest.mark.s3server_only
def test_on_r2_a_delete_of_the_other_spelling_spares_the_object(
    mount: Callable[..., Mount], r2: Bucket, expect_log: Callable[[str], None]
):
    """As `rsync --delete` does it after another client has written the same bytes under the other spelling."""
    r2.put(COMPOSED, b"same")
    expect_log("publish failed, will retry .* SlowDown")
    key = r2.prefix + COMPOSED
    r2.control.faults(
        Fault(FaultAction.ANSWER, operation="DeleteObject", key=key, times=2, status=503, code="SlowDown")
    )
    one = mount()
    os.unlink(one.path / COMPOSED)
    r2.control.wait_requests(1, "DeleteObject", key)
    r2.put(DECOMPOSED, b"same")
    one.sync()
    assert files_in(r2) == {DECOMPOSED: b"same"}


@pytest.mark.s3server_only
@pytest.mark.parametrize("how", ["--delete-before", "--delete-after"])
def test_on_r2_rsync_with_delete_from_a_mac_keeps_every_file(
    mount: Callable[..., Mount], r2: Bucket, tree: Path, how: str
):
    """The bucket has the names composed, as earlier versions wrote them."""
    os.unlink(tree / f"{COMPOSED}.jpg")
    for name, data in tree_of(tree).items():
        if isinstance(data, bytes):
            r2.put(unicodedata.normalize("NFC", name), data)
    one = mount()
    for _ in range(2):
        run("rsync", "-a", how, f"{tree}/", one.path)
        one.sync()
        assert tree_of(one.path) == tree_of(tree)
    assert tree_of(mount().path) == tree_of(tree)
