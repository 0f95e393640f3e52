"""Programs that people use on a directory, on the mount: right here, and right on another node after a sync."""

import errno
import hashlib
import os
import shutil
import sqlite3
import sys
import time
import zipfile
from pathlib import Path

import numpy
import pytest

from tests.mount.conftest import Place
from tests.support.mounts import FUSECACHE, pattern, run, run_python, tree_of, wait_until

KIB, MIB = 2**10, 2**20


def assert_same_elsewhere(place: Place) -> None:
    """Let the bucket get everything, and compare the test's directory with what another node sees of it."""
    here = tree_of(place.path)
    run(FUSECACHE, "sync", place.path)
    elsewhere: dict[str, bytes | str | None] = {}

    def same_names() -> bool:
        elsewhere.clear()
        try:
            elsewhere.update(tree_of(place.second))
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ESTALE):  # listed as it was, read as it is
                return False
            raise
        return elsewhere.keys() == here.keys()

    wait_until(same_names, f"the names {sorted(here)} on the other node", seconds=30)
    different = [name for name in here if here[name] != elsewhere[name]]
    assert different == []
    leftovers = [name for name in place.bucket.names() if name.rstrip("/") not in here]
    assert leftovers == []


# ---- many files

RSYNC_FILES = int(os.environ.get("RSYNC_FILES", "1000"))


@pytest.mark.case(38)
@pytest.mark.s3server_only
@pytest.mark.timeout(1200)
def test_rsync_carries_many_small_files_and_no_temporary_name_reaches_the_bucket(
    place: Place, tmp_path: Path
):
    """Case 38, with RSYNC_FILES=10000 in the environment; how fast it is, is a benchmark's question."""
    tree = tmp_path / "tree"
    for index in range(RSYNC_FILES):
        folder = tree / f"{index // 100:02}"
        if index % 100 == 0:
            folder.mkdir(parents=True)
        (folder / f"{index:05}.txt").write_bytes(b"file %d\n" % index * (index % 50))
    began = time.monotonic()
    run("rsync", "-a", f"{tree}/", place.path / "copy", seconds=900)
    copied = time.monotonic() - began
    run(FUSECACHE, "sync", place.path, seconds=300)
    whole = time.monotonic() - began
    sys.stdout.write(
        f"rsync {copied:.1f} s, in the bucket after {whole:.1f} s: {RSYNC_FILES / whole:.0f} files/s\n"
    )

    expected = {
        f"{place.bucket.prefix}copy/{path.relative_to(tree)}": hashlib.md5(path.read_bytes()).hexdigest()
        for path in tree.rglob("*.txt")
    }
    made = place.bucket.control.objects()
    assert {
        key: made[key].etag for key in made if key.startswith(place.bucket.prefix) and not key.endswith("/")
    } == expected
    written = {name.rpartition("/")[2] for _, name in place.bucket.published()}
    assert [name for name in written if name.startswith(".")] == []
    assert not place.bucket.operations("CopyObject", "DeleteObject")
    wait_until(lambda: (place.second / "copy/07").is_dir(), "the tree on the other node")
    run("diff", "-r", tree / "07", place.second / "copy/07")


# ---- copies, archives, moves


def test_dd_syncs_what_it_wrote_and_writes_into_the_middle(place: Place, tmp_path: Path):
    data = bytearray(pattern(5 * MIB + 17))
    (tmp_path / "source").write_bytes(data)
    run("dd", f"if={tmp_path}/source", f"of={place.path}/file", "bs=1M", "conv=fsync", "status=none")
    assert (place.path / "file").read_bytes() == data
    place.sync()
    run(
        "dd", "if=/dev/zero", f"of={place.path}/file", "bs=4k", "count=3", "seek=100", "status=none",
        "conv=notrunc,fdatasync",
    )  # fmt: skip
    data[100 * 4096 : 103 * 4096] = bytes(3 * 4096)
    assert (place.path / "file").read_bytes() == data
    run("truncate", "-s", "+100", place.path / "file")
    assert (place.path / "file").read_bytes() == data + bytes(100)
    assert_same_elsewhere(place)


def test_zip_and_unzip_on_the_mount(place: Place, tmp_path: Path):
    tree = tmp_path / "tree"
    (tree / "deep/er").mkdir(parents=True)
    for index in range(40):
        (tree / "deep/er" / f"{index}.bin").write_bytes(pattern(20 * KIB + index, seed=index + 1))
    run("zip", "-qr", place.path / "archive.zip", ".", cwd=tree)
    run("zip", "-qd", place.path / "archive.zip", "deep/er/3.bin")
    run("zip", "-q", place.path / "archive.zip", "deep/er/3.bin", cwd=tree)
    run("unzip", "-q", place.path / "archive.zip", "-d", place.path / "out")
    assert tree_of(place.path / "out") == tree_of(tree)
    assert_same_elsewhere(place)
    run("unzip", "-tq", place.second / "archive.zip")


def test_mv_between_directories_and_from_another_disk(place: Place, tmp_path: Path):
    for name in ("a/1", "a/2", "a/deep/3", "b/2"):
        (place.path / name).parent.mkdir(parents=True, exist_ok=True)
        (place.path / name).write_bytes(name.encode())
    place.sync()
    (place.path / "a/new").write_bytes(b"new")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_bytes(pattern(3 * MIB))
    run("mv", place.path / "a/1", place.path / "a/new", place.path / "b")
    run("mv", "-n", place.path / "a/2", place.path / "b")  # there is one already
    run("mv", place.path / "a/deep", place.path / "b/deeper")
    run("mv", tmp_path / "outside", place.path / "b")
    assert tree_of(place.path) == {
        "a": None,
        "a/2": b"a/2",
        "b": None,
        "b/1": b"a/1",
        "b/2": b"b/2",
        "b/deeper": None,
        "b/deeper/3": b"a/deep/3",
        "b/new": b"new",
        "b/outside": None,
        "b/outside/file": pattern(3 * MIB),
    }
    assert_same_elsewhere(place)
    run("mv", place.path / "b", tmp_path / "back")
    assert_same_elsewhere(place)
    assert (tmp_path / "back/outside/file").read_bytes() == pattern(3 * MIB)


# ---- version control, packages


def test_a_clone_is_committed_to_and_whole_on_another_node(place: Place, tmp_path: Path):
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_OPTIONAL_LOCKS": "0",
    }

    def git(where: Path, *words: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*"]
        return run("git", "-C", where, *names, *words, env=environment).stdout

    origin = tmp_path / "origin"
    origin.mkdir()
    git(origin, "init", "-q", "-b", "main")
    for index in range(60):
        (origin / f"file{index}").write_bytes(pattern(3 * KIB, seed=index + 1))
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "all")

    clone = place.path / "clone"
    git(tmp_path, "clone", "-q", f"file://{origin}", str(clone))
    (clone / "file3").write_bytes(b"changed")
    (clone / "file60").write_bytes(b"new")
    git(clone, "rm", "-q", "file4")
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "more")
    git(clone, "repack", "-adq")
    git(clone, "push", "-q", "origin", "main:pushed")
    assert git(origin, "log", "--format=%s", "pushed").split() == ["more", "all"]
    assert_same_elsewhere(place)
    other = place.second / "clone"
    assert git(other, "fsck", "--full", "--strict") == ""
    assert git(other, "log", "--format=%s").split() == ["more", "all"]
    assert git(other, "status", "--porcelain") == ""


def test_pip_installs_a_wheel_into_a_directory_of_the_mount(place: Place, tmp_path: Path):
    wheel = tmp_path / "smallest-1.0-py3-none-any.whl"
    files = {
        "smallest/__init__.py": "ANSWER = 42\n",
        "smallest/data/table.txt": "1 2 3\n",
        "smallest-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: smallest\nVersion: 1.0\n",
        "smallest-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "smallest-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    target = place.path / "packages"
    words = ["--disable-pip-version-check", "--no-input", "--root-user-action", "ignore"]
    for more in ([], ["--upgrade"]):  # the second time over what is there
        run(
            sys.executable, "-m", "pip", "install", "-q", *words, "--no-index", "--no-deps", *more,
            "--target", target, wheel,
        )  # fmt: skip
    assert_same_elsewhere(place)
    environment = {**os.environ, "PYTHONPATH": str(place.second / "packages"), "PYTHONDONTWRITEBYTECODE": "1"}
    found = run_python("import smallest; print(smallest.ANSWER, smallest.__file__)", env=environment)
    assert found.stdout.split() == ["42", str(place.second / "packages/smallest/__init__.py")]


# ---- files written all over


def test_two_processes_share_a_sqlite_database_with_a_write_ahead_log(place: Place):
    program = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=30)
for turn in range(40):
    with database:
        database.execute("insert into numbers values (?, ?)", (sys.argv[2], turn))
database.close()
"""
    path = place.path / "data.db"
    database = sqlite3.connect(path)
    database.execute("pragma journal_mode=wal")
    database.execute("create table numbers (who text, turn integer)")
    database.commit()
    run_python(program, path, "first")  # while this process has it open, and its index mapped
    run_python(program, path, "second")
    assert database.execute("select count(*) from numbers").fetchone() == (80,)
    assert (place.path / "data.db-wal").stat().st_size > 0
    database.close()
    assert_same_elsewhere(place)
    other = sqlite3.connect(f"file:{place.second}/data.db?immutable=1", uri=True)
    assert other.execute("pragma integrity_check").fetchone() == ("ok",)
    rows = other.execute("select who, count(*), sum(turn) from numbers group by who order by who").fetchall()
    assert rows == [("first", 40, 780), ("second", 40, 780)]
    other.close()


def test_scattered_writes_into_a_published_file(place: Place):
    expected = bytearray(pattern(6 * MIB))
    (place.path / "file").write_bytes(expected)
    place.sync()
    offsets = numpy.random.default_rng(5).integers(0, len(expected) - 5000, 200).tolist()
    with open(place.path / "file", "r+b", buffering=0) as file:
        for index, offset in enumerate(offsets):
            piece = pattern(1 + 37 * index % 5000, seed=index + 1)
            assert os.pwrite(file.fileno(), piece, offset) == len(piece)
            expected[offset : offset + len(piece)] = piece
            assert os.pread(file.fileno(), 100, offset - 3) == expected[offset - 3 : offset + 97]
        assert os.pwrite(file.fileno(), b"end", 7 * MIB) == 3
    expected += bytes(MIB) + b"end"
    assert (place.path / "file").read_bytes() == expected
    assert_same_elsewhere(place)


def test_a_memmap_changes_a_published_file_in_place(place: Place):
    expected = numpy.arange(2_000_000, dtype="i4")
    expected.tofile(place.path / "array")
    place.sync()
    view = numpy.memmap(place.path / "array", "i4", "r+")
    view[5::1000] = -1
    view[-1] = 7
    view.flush()
    del view
    expected[5::1000] = -1
    expected[-1] = 7
    assert_same_elsewhere(place)
    assert numpy.array_equal(numpy.memmap(place.second / "array", "i4", "r"), expected)


@pytest.mark.parametrize("engine", ["psync", "mmap"])
def test_fio_finds_every_block_that_it_wrote(place: Place, engine: str):
    run(
        "fio", "--name=check", f"--directory={place.path}", f"--ioengine={engine}", "--rw=randwrite",
        "--bsrange=4k-64k", "--blockalign=4k", "--size=24M", "--numjobs=2", "--fallocate=none",
        "--fsync=100", "--end_fsync=1", "--verify=crc32c", "--verify_fatal=1", "--output-format=terse",
        cwd=place.first_mount.cache.parent,
    )  # fmt: skip
    assert_same_elsewhere(place)


# ---- editors


def save_with_backup(path: Path, data: bytes) -> None:
    """As vim does by default: the old file becomes the backup, a new one takes its name."""
    backup = path.with_name(path.name + "~")
    path.rename(backup)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(backup.stat().st_mode & 0o7777)
    backup.unlink()


def save_in_place(path: Path, data: bytes) -> None:
    """As vim does with backupcopy=yes, and nano and VS Code: a copy is kept while the file is truncated."""
    backup = path.with_name(path.name + "~")
    shutil.copy2(path, backup)
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    backup.unlink()


def save_beside_and_rename(path: Path, data: bytes) -> None:
    """As emacs and gedit do, with emacs' lock: a symlink to nowhere."""
    lock = path.with_name(".#" + path.name)
    lock.symlink_to("someone@somewhere.123:456")
    beside = path.with_name(f".goutputstream-{path.name}")
    beside.write_bytes(data)
    beside.replace(path)
    lock.unlink()


@pytest.mark.parametrize("save", [save_with_backup, save_in_place, save_beside_and_rename])
def test_a_published_file_is_saved_by_an_editor_again_and_again(place: Place, save):
    path = place.path / "notes.txt"
    path.write_bytes(b"first\n")
    path.chmod(0o640)
    place.sync()
    swap = place.path / ".notes.txt.swp"
    with open(swap, "wb") as open_swap:
        for turn in range(3):
            open_swap.write(b"x" * 4096)
            save(path, b"turn %d\n" % turn)
            assert path.read_bytes() == b"turn %d\n" % turn
    swap.unlink()
    if save is not save_beside_and_rename:
        assert path.stat().st_mode & 0o777 == 0o640
    assert_same_elsewhere(place)
    assert tree_of(place.second) == {"notes.txt": b"turn 2\n"}
