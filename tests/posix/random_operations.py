"""Run xfstests' fsx and fsstress on mounts of the project's S3 server: random operations on one file, and on a tree.

    python -m tests.posix.random_operations FOLDER [OPERATIONS]     as root. FOLDER: has the programs fsx and fsstress

fsx compares each read with what it wrote, by write(2), mmap and truncate, and closes the file every 50 operations.
The cache is smaller than what it writes, so blocks are evicted. Between its rounds the mount is made again, every
second time with an empty cache; all earlier files must then have the same bytes on the mount, and in the bucket.
fsstress runs 4 programs of OPERATIONS / 50 each [100 000 / 50]. The next mount must then show the same. A mount
with an empty cache must show the same but for owners: an owner that is set after the upload stays on its node. The exit
status is 1 at the first difference, and if the daemon's log has a warning.
"""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.s3server import S3Server
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket, Service

ROUNDS = 12
# Bytes of the longest file, and how fsx may access it: -R no mapped reads, -W no mapped writes.
LENGTHS = (262_144, 5_000_000, 9_000_000)
ACCESS = (("-W", "-R"), (), ("-R",), ("-W",))
# Limit of fsstress' files; longer ones fail with EFBIG. It copies to up to 1 024 blocks behind the end, and a block
# of the mount is 1 MiB. So it made files of a gigabyte, each uploaded after each close, and ran for over half an hour.
FILE_BYTES_MAX = 32 * 2**20
# Most copies fail then, so fsstress gets ten times as many.
COPIES = ("-f", "copyrange=40", "-f", "splice=10")
# What each name below a folder shows.
Tree = dict[str, tuple[object, ...]]


def main(folder: Path, operations: int) -> int:
    """Return the exit status."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch, S3Server() as server:
        server.control.set_rules(write_interval_seconds=0.0)
        service = Service(server.endpoint_url, server.access_key, server.secret_key, server.bucket)
        mount = Mount(Bucket(service, service.client(), ""), Path(scratch, "mnt"), Path(scratch, "cache"))
        mount.path.mkdir()
        try:
            return run_fsx(folder / "fsx", mount, operations // ROUNDS) or run_fsstress(
                folder / "fsstress", mount, operations // 50
            )
        finally:
            mount.remove()


def run_fsx(program: Path, mount: Mount, operations: int) -> int:
    """Return the exit status."""
    written: dict[str, str] = {}
    for number in range(ROUNDS):
        mount.start("--cache-size", "128MiB", "--memory", "64MiB")
        if wrong := [name for name, digest in written.items() if _digest(mount.path / name) != digest]:
            return _failed(f"other bytes on the next mount: {wrong}")
        length, access = LENGTHS[number % len(LENGTHS)], ACCESS[number % len(ACCESS)]
        name = f"fsx-{number}"
        words = ["-q", "-N", operations, "-S", number + 1, "-l", length, "-o", min(length, 300_000), "-c", 50]
        done = subprocess.run(
            [program, *map(str, words), *access, "-P", mount.cache.parent, mount.path / name],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return _failed(f"{name}: {done.stdout[-2000:]}{done.stderr}")
        written[name] = _digest(mount.path / name)
        mount.sync()
        if wrong := [key for key in written if _sha256(mount.bucket.get(key)) != written[key]]:
            return _failed(f"other bytes in the bucket: {wrong}")
        if alarms := mount.new_alarms():
            return _failed("\n".join(alarms))
        mount.unmount()
        if number % 2:
            shutil.rmtree(mount.cache)
        _say(f"fsx {operations} operations, {length} bytes, {' '.join(access) or 'mapped'}: the same bytes")
    return 0


def run_fsstress(program: Path, mount: Mount, operations: int) -> int:
    """Return the exit status."""
    flags = ("--cache-size", "8GiB", "--posix-metadata")
    mount.start(*flags)
    folder = mount.path / "fsstress"
    folder.mkdir()
    words = [f"--fsize={FILE_BYTES_MAX}", program, "-d", folder, "-p", 4, "-n", operations, "-s", 1, *COPIES]
    # Python ignores SIGXFSZ, and so must fsstress: the signal would end it.
    subprocess.run(
        ["prlimit", *map(str, words)], stdout=subprocess.DEVNULL, check=True, restore_signals=False
    )
    before = _tree(folder)
    mount.sync()
    if alarms := mount.new_alarms():
        return _failed("\n".join(alarms))
    mount.unmount()
    mount.start(*flags)
    if wrong := _differences(before, _tree(folder)):
        return _failed(f"on the next mount:\n{wrong}")
    mount.unmount()
    shutil.rmtree(mount.cache)
    mount.start(*flags)
    after = {name: _published(seen) for name, seen in _tree(folder).items()}
    if wrong := _differences({name: _published(seen) for name, seen in before.items()}, after):
        return _failed(f"on a mount with an empty cache:\n{wrong}")
    _say(f"fsstress 4 * {operations} operations: the same {len(after)} names on another mount")
    return 0


def _tree(folder: Path) -> Tree:
    """Return bytes, sizes, modes and owners of files, targets of links, names of directories."""
    found: Tree = {}
    for path in folder.rglob("*"):
        info = path.lstat()
        name = str(path.relative_to(folder))
        if stat.S_ISREG(info.st_mode):
            found[name] = (_digest(path), info.st_size, info.st_mode, info.st_uid, info.st_gid)
        elif stat.S_ISLNK(info.st_mode):
            found[name] = (os.readlink(path),)
        elif stat.S_ISDIR(info.st_mode):
            found[name] = ()
    return found


def _published(seen: tuple[object, ...]) -> tuple[object, ...]:
    """Return what the bucket must have: not the owners."""
    return seen[:3]


def _differences(before: Tree, after: Tree) -> str:
    names = sorted(before.keys() | after.keys())
    return "\n".join(
        f"{name}: {before.get(name)}, then {after.get(name)}"
        for name in names
        if before.get(name) != after.get(name)
    )


def _digest(path: Path) -> str:
    return _sha256(path.read_bytes())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _failed(why: str) -> int:
    sys.stderr.write(f"FAILED {why}\n")
    return 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), int((sys.argv[2:] or ["100000"])[0])))
