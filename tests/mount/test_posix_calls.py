"""What docs/posix.md says of calls that a mount refuses or does in its own way, and of programs that make them."""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.support.mounts import pattern, refusal, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sets owners, attributes and access lists")

DOCUMENT = Path(__file__).parents[2] / "docs" / "posix.md"
SIZE = 3 * 2**20
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
libc.posix_fallocate.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long]
AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
FICLONE, GET_FLAGS = 0x40049409, 0x80086601
OPEN_FILE_LOCK = 37
# Each call gets a directory with the files a (3 MiB) and b, and returns its errno's name, "works" or what it did.
CALLS: dict[str, tuple[Callable[[Path], object], object]] = {}


def call(*names: str, answer: object) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    """Register a row of the table in docs/posix.md."""

    def register(function: Callable[[Path], object]) -> Callable[[Path], object]:
        CALLS[", ".join(names)] = function, answer
        return function

    return register


def libc_error(function: Callable[..., int], *arguments: object) -> str:
    return "works" if function(*arguments) == 0 else errno.errorcode[ctypes.get_errno()]


def python_error(function: Callable[[], object]) -> str:
    number = refusal(function)
    return "works" if number is None else errno.errorcode[number]


def renamed(folder: Path, flags: int) -> str:
    return libc_error(
        libc.renameat2, AT_FDCWD, os.fsencode(folder / "a"), AT_FDCWD, os.fsencode(folder / "b"), flags
    )


@call("link", answer="EPERM")
def link(folder: Path) -> object:
    return python_error(lambda: os.link(folder / "a", folder / "other"))


@call("RENAME_EXCHANGE", answer="EINVAL")
def exchange(folder: Path) -> object:
    return renamed(folder, RENAME_EXCHANGE)


@call("RENAME_WHITEOUT", answer="EINVAL")
def whiteout(folder: Path) -> object:
    return renamed(folder, RENAME_WHITEOUT)


@call("RENAME_NOREPLACE", answer=("EEXIST", "works"))
def noreplace(folder: Path) -> object:
    before = renamed(folder, RENAME_NOREPLACE)
    (folder / "b").unlink()
    return before, renamed(folder, RENAME_NOREPLACE)


@call("fallocate", answer={"ENOTSUP"})
def fallocate(folder: Path) -> object:
    """Of every mode, in the file and behind its end."""
    with open(folder / "a", "r+b") as file:
        return {
            libc_error(libc.fallocate, file.fileno(), mode, 0, size)
            for mode in (0, KEEP_SIZE, KEEP_SIZE | PUNCH_HOLE, ZERO_RANGE)
            for size in (4096, 2 * SIZE)
        }


@call("posix_fallocate", answer=("works", pattern(SIZE) + bytes(5000)))
def posix_fallocate(folder: Path) -> object:
    with open(folder / "a", "r+b") as file:
        number = libc.posix_fallocate(file.fileno(), 100, SIZE + 5000 - 100)  # it returns the errno
    return errno.errorcode.get(number, "works"), (folder / "a").read_bytes()


@call("copy_file_range", answer=(SIZE, pattern(SIZE)))
def copy_range(folder: Path) -> object:
    with open(folder / "a", "rb") as source, open(folder / "b", "wb") as target:
        count = os.copy_file_range(source.fileno(), target.fileno(), SIZE)
    return count, (folder / "b").read_bytes()


@call("FICLONE", answer="ENOTSUP")
def clone(folder: Path) -> object:
    with open(folder / "a", "rb") as source, open(folder / "b", "wb") as target:
        return python_error(lambda: fcntl.ioctl(target, FICLONE, source.fileno()))


@call("SEEK_DATA", "SEEK_HOLE", answer=(0, 2**20))
def seek(folder: Path) -> object:
    with open(folder / "b", "wb") as file:
        file.truncate(2**20)
    with open(folder / "b", "rb") as file:
        return file.seek(0, os.SEEK_DATA), file.seek(0, os.SEEK_HOLE)


@call("setxattr", "getxattr", "listxattr", "removexattr", answer={"ENOTSUP"})
def extended_attributes(folder: Path) -> object:
    path = folder / "a"
    return {
        python_error(lambda: os.setxattr(path, "user.x", b"1")),
        python_error(lambda: os.getxattr(path, "user.x")),
        python_error(lambda: os.listxattr(path)),
        python_error(lambda: os.removexattr(path, "user.x")),
    }


@call("flock", "fcntl locks", answer=("EAGAIN", "EAGAIN"))
def locks(folder: Path) -> object:
    """Of two open files of one process; of other processes see `test_locks_hold_on_one_node`."""
    write_lock = struct.pack("hhllhh", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0, 0)
    with open(folder / "a", "r+b") as one, open(folder / "a", "r+b") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.fcntl(one, OPEN_FILE_LOCK, write_lock)
        return (
            python_error(lambda: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)),
            python_error(lambda: fcntl.fcntl(other, OPEN_FILE_LOCK, write_lock)),
        )


@call("O_TMPFILE", answer=("ENOTSUP", b"bytes"))
def unnamed(folder: Path) -> object:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"bytes")
        file.seek(0)
        return python_error(lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR)), file.read()


@call("O_DIRECT", answer=(4096, 3, b"d" * 4096 + b"odd"))
def direct(folder: Path) -> object:
    with mmap.mmap(-1, 4096) as memory:
        memory.write(b"d" * 4096)
        file = os.open(folder / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            counts = os.pwritev(file, [memory], 0), os.pwrite(file, b"odd", 4096)
        finally:
            os.close(file)
    return (*counts, (folder / "direct").read_bytes())


@call("MAP_SHARED", answer=b"mapped")
def shared_mapping(folder: Path) -> object:
    with open(folder / "a", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:6] = b"mapped"
    return (folder / "a").read_bytes()[:6]


@call("FS_IOC_GETFLAGS", answer="ENOTTY")
def flags(folder: Path) -> object:
    with open(folder / "a", "rb") as file:
        return python_error(lambda: fcntl.ioctl(file, GET_FLAGS, bytes(8)))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_answers_as_documented(place: Place, name: str):
    function, answer = CALLS[name]
    (place.path / "a").write_bytes(pattern(SIZE))
    (place.path / "b").write_bytes(b"b")
    assert function(place.path) == answer


def test_the_document_has_each_call():
    rows = re.findall(r"^\| (`\w.*?) \| ", DOCUMENT.read_text(), re.MULTILINE)
    assert [row.replace("`", "") for row in rows] == list(CALLS)


@pytest.mark.s3server_only
def test_a_copy_in_the_mount_reads_and_sends_all_bytes(place: Place):
    """The kernel copies page by page: a file that is not cached is fetched, and nothing is copied in the bucket."""
    control = place.bucket.service.control
    assert control is not None
    (place.path / "a").write_bytes(pattern(SIZE))
    place.sync()
    control.clear_log()
    copy_range(place.second)
    place.second_mount.sync()
    assert control.counts()["GetObject"] > 0
    assert [entry.operation for entry in control.log() if entry.key.endswith("/b")][-1] == "PutObject"
    assert "CopyObject" not in control.counts()
    assert place.bucket.get("b") == pattern(SIZE)


# Command -> exit status. The working directory has `f` with a user attribute, its second name `f2`, and a directory.
PROGRAMS = {
    "ln {mount}/f {mount}/other": 1,
    "cp f {mount}": 0,
    "cp -l {mount}/f {mount}/other": 1,
    "cp --reflink=auto {mount}/f {mount}/other": 0,
    "cp --reflink=always {mount}/f {mount}/other": 1,
    "cp -a . {mount}/all": 1,
    "cp -a --no-preserve=links . {mount}/all": 0,
    "cp --preserve=xattr f {mount}/other": 1,
    "mv -n {mount}/f {mount}/g": 0,
    "mv f {mount}/moved": 0,
    "rsync -a ./ {mount}/all": 0,
    "rsync -aA ./ {mount}/all": 0,
    "rsync -aH ./ {mount}/all": 23,
    "rsync -aX ./ {mount}/all": 23,
    "rsync -a --preallocate ./ {mount}/all": 0,
    "rsync -aX {mount}/ {scratch}/back": 0,
    "tar -C {mount} --xattrs -xf {scratch}/one.tar": 0,
    "tar -C {mount} -xf {scratch}/links.tar": 2,
    "tar -C {mount} --xattrs -cf {scratch}/from.tar .": 0,
    "git clone -q {mount}/git {mount}/clone": 0,
    "git clone -q --local {mount}/git {mount}/clone": 128,
    "fallocate -l 5000 {mount}/zeros": 1,
    "fallocate -x -l 5000 {mount}/zeros": 0,
    "setfacl -m u:daemon:r {mount}/f": 1,
    "getfacl -p {mount}/f": 0,
    "lsattr {mount}/f": 1,
}


@pytest.mark.parametrize("command", PROGRAMS)
def test_a_program_does_as_documented(place: Place, tmp_path: Path, command: str):
    program = command.split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "f").write_bytes(pattern(10_000))
    os.setxattr(source / "f", "user.x", b"1")
    (source / "d" / "one").write_bytes(b"1")
    run("tar", "-C", source, "--xattrs", "-cf", tmp_path / "one.tar", "f")
    os.link(source / "f", source / "f2")
    run("tar", "-C", source, "-cf", tmp_path / "links.tar", ".")
    shutil.copytree(source, place.path, dirs_exist_ok=True)
    if program == "git":
        repository = place.path / "git"
        run("git", "init", "-q", repository)
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        run("git", "-C", repository, *identity, "commit", "-q", "--allow-empty", "-m", "one")
    words = command.format(mount=place.path, scratch=tmp_path).split()
    done = run(*words, check=False, cwd=source)
    assert done.returncode == PROGRAMS[command], done.stdout + done.stderr
