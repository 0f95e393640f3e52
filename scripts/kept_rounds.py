"""Kills the daemon of a mount that outlives it, again and again, under programs that read, write and change names.

    python -m scripts.kept_rounds [--rounds 100] [--read-only] [--against COMMIT]

The bucket is the test server's, or the one that FUSECACHE_TEST_ENDPOINT, _BUCKET, _ACCESS_KEY and _SECRET_KEY name.

With --against the program of that commit mounts, and kills alternate with upgrades: first from that program to this
one, then from this one to itself. The way back is not promised: an older program may not know the rows of a newer one.

Prints how long system calls waited, and every error that a program saw: there must be none. Each byte that is read is
compared; in the end names and contents of all files are, on the mount and in the bucket.
"""

import argparse
import hashlib
import os
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from tests.s3server import ServerProcess
from tests.support import ROOT
from tests.support.mounts import FUSECACHE, Mount, is_running, pattern, run, tree_of
from tests.support.s3_buckets import Bucket, Service

_FILES = 9
_FILE_BYTES = 3_000_000
_SHOWN = 20
# How often a file is rewritten in place before another one is.
_REWRITES = 40
# Names move before, while and after what was closed is uploaded.
_MOVE_SECONDS = (0.0, 0.0, 0.1, 0.4)
# Longer than the keeper takes for a death in a loop. With the shorter ones there may be no standby yet.
_SECONDS_BETWEEN = (1.2, 5.0)


class Programs:
    """Threads that use a mount. errors: what went wrong, with the program's name; longest: of one call, in seconds.

    written: the checksum of each file that was closed, by its key without the prefix.
    """

    def __init__(self, root: Path, data: dict[str, bytes]) -> None:
        self._root = root
        self._data = data
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.errors: list[str] = []
        self.steps: Counter[str] = Counter()
        self.longest: dict[str, float] = {}
        self.written: dict[str, str] = {}
        self._rewritten = b""
        self._fd = os.open(root / "d0/f0", os.O_RDONLY)

    def start(self, name: str, step: Callable[[int], None]) -> None:
        """Repeat a step in a thread until `end`."""

        def work() -> None:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    step(self.steps[name])
                except Exception as exc:  # noqa: BLE001  # each is a finding
                    self.errors.append(f"{name}: {exc!r}")
                self.longest[name] = max(self.longest.get(name, 0), time.monotonic() - began)
                self.steps[name] += 1

        self._threads.append(threading.Thread(target=work, name=name))
        self._threads[-1].start()

    def end(self) -> None:
        """Let each thread finish its step."""
        self._stop.set()
        for each in self._threads:
            each.join()
        os.close(self._fd)

    def read_at_random(self, _: int) -> None:
        at = random.randrange(_FILE_BYTES - 4096)
        assert os.pread(self._fd, 4096, at) == self._data["d0/f0"][at : at + 4096]

    def read_whole(self, _: int) -> None:
        name = random.choice(list(self._data))
        assert (self._root / name).read_bytes() == self._data[name], name

    def walk(self, _: int) -> None:
        names = {
            (Path(folder) / file).relative_to(self._root).as_posix()
            for part in ("d0", "d1", "d2")
            for folder, _, files in os.walk(self._root / part)
            for file in files
        }
        assert names == self._data.keys()

    def write(self, step: int) -> None:
        draw, body = random.Random(step), hashlib.sha256()
        with open(self._root / "out" / f"w{step}", "wb") as file:
            for _ in range(20):
                piece = draw.randbytes(draw.randrange(1, 200_000))
                file.write(piece)
                body.update(piece)
                time.sleep(0.005)
        self.written[f"out/w{step}"] = body.hexdigest()

    def change_names(self, step: int) -> None:
        first, second = (self._root / "out" / f"{letter}{step}" for letter in "nm")
        first.mkdir()
        (first / "x").write_bytes(b"1")
        (first / "x").rename(first / "y")
        first.rename(second)
        if step % 2:
            (second / "y").unlink()
            second.rmdir()
        else:
            self.written[f"out/m{step}/y"] = _digest(b"1")

    def rewrite(self, step: int) -> None:
        """Open a file, change a part of it or make it longer, and close it, while the last close is uploaded."""
        draw, name = random.Random(step), f"out/r{step // _REWRITES}"
        body = b"" if step % _REWRITES == 0 else self._rewritten
        with _unbuffered(self._root / name, "r+b" if body else "w+b") as file:
            assert file.read() == body, name
            piece, at = draw.randbytes(draw.randrange(1, 50_000)), draw.randint(0, len(body))
            file.seek(at)
            file.write(piece)
            self._rewritten = body[:at] + piece + body[at + len(piece) :]
            if draw.random() < 0.5:
                os.fsync(file.fileno())
        self.written[name] = _digest(self._rewritten)
        time.sleep(draw.choice((0.0, 0.02, 0.3)))

    def move_open_files(self, step: int) -> None:
        """Rotate a log, replace a file and remove one, and write on to each through what was opened before."""
        draw, top = random.Random(step), self._root / "out" / f"v{step}"
        top.mkdir()
        bodies: dict[BinaryIO, bytes] = {}

        def opened(name: str) -> BinaryIO:
            """Make a file, which perhaps is closed, and in the bucket, before it is opened."""
            body = draw.randbytes(draw.choice((0, 30_000)))
            if body:
                (top / name).write_bytes(body)
                time.sleep(draw.choice(_MOVE_SECONDS))
            file = stack.enter_context(
                _unbuffered(top / name, draw.choice(("r+b", "a+b")) if body else "x+b")
            )
            bodies[file] = body
            return file

        def write() -> None:
            for file in bodies:
                piece = draw.randbytes(draw.randrange(1, 50_000))
                file.seek(0, os.SEEK_END)
                file.write(piece)
                bodies[file] += piece
            time.sleep(draw.choice(_MOVE_SECONDS))

        with ExitStack() as stack:
            log, model, _ = (opened(name) for name in ("log", "model", "removed"))
            reader = stack.enter_context(_unbuffered(top / "model", "rb"))
            if draw.random() < 0.5:
                write()
            (top / "log").rename(top / "log.1")
            (top / "removed").unlink()
            new_log, new_model, _ = (opened(name) for name in ("log", "model.new", "removed"))
            write()
            (top / "model.new").rename(top / "model")
            write()
            moved = top.with_name(f"u{step}")
            top.rename(moved)
            write()
            for file, body in bodies.items():
                file.seek(0)
                assert file.read() == body, f"{file.name} through its descriptor"
            assert reader.read() == bodies[model], f"{reader.name} through its reader"
            (moved / "removed").unlink()
        for name, file in {"log.1": log, "log": new_log, "model": new_model}.items():
            self.written[f"out/u{step}/{name}"] = _digest(bodies[file])


def main() -> int:
    """Run the rounds; return 1 if a program saw an error, or a byte is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--against", metavar="COMMIT", help="upgrade from the program of this commit")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _service() as service:
        bucket = Bucket(service, service.client(), f"kept-{uuid.uuid4().hex}/")
        data = {f"d{index % 3}/f{index}": pattern(_FILE_BYTES, index) for index in range(_FILES)}
        for name, body in data.items():
            bucket.put(name, body)
        (Path(folder) / "mnt").mkdir()
        mount = _Mount(bucket, Path(folder) / "mnt", Path(folder) / "cache")
        if arguments.against:
            mount.program = _program_of(arguments.against, Path(folder))
        mount.start(
            "--keep-mounted", "--settle-seconds", "0.2", "--cache-size", "4GiB",
            *(["--read-only"] if arguments.read_only else []),
        )  # fmt: skip
        try:
            return _rounds(
                mount,
                data,
                arguments.rounds,
                upgrades=bool(arguments.against),
                is_read_only=arguments.read_only,
            )
        finally:
            mount.pid = mount.status()["pid"]
            mount.unmount()


@contextmanager
def _service() -> Iterator[Service]:
    """Return the S3 service that the environment names, else the project's own server."""
    if outside := Service.named_outside():
        yield outside
        return
    with ServerProcess() as server:
        yield Service(
            server.endpoint_url,
            server.access_key,
            server.secret_key,
            server.bucket,
            server.control,
            server.ca_path,
        )


def _unbuffered(path: Path, mode: str) -> BinaryIO:
    return cast("BinaryIO", open(path, mode, buffering=0))


class _Mount(Mount):
    """A mount that another program makes."""

    program: str | Path = FUSECACHE

    def command(self, *flags: str) -> list[str | Path]:
        return [self.program, *super().command(*flags)[1:]]


def _program_of(commit: str, folder: Path) -> Path:
    """Return a program that has the packages of a commit, and the libraries of this Python."""
    tree = folder / "tree"
    tree.mkdir()
    packages = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "fusecache", "loader"], check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "--extract", "--directory", str(tree)], input=packages, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = (folder / "venv/lib").glob("*/site-packages")
    (site / "other.pth").write_text(f"{tree}\n{sysconfig.get_path('purelib')}\n")
    program = folder / "fusecache"
    program.write_text(f'#!/bin/sh\nexec {folder}/venv/bin/python -P -m fusecache "$@"\n')
    program.chmod(0o755)
    return program


def _upgrade(python: str, mount: Mount) -> None:
    """Let the program of a Python serve the mount. Its packages are its own, not those of PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [python, "-P", "-m", "fusecache", "upgrade", str(mount.path)]
    subprocess.run(words, env=environment, check=True, capture_output=True)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _differences(mount: Mount, data: dict[str, bytes], written: dict[str, str]) -> list[str]:
    """Compare names and contents on the mount, and in the bucket, with what there was and what programs wrote."""
    files = {**{name: _digest(body) for name, body in data.items()}, **written}
    folders = {"out", *(folder.as_posix() for name in files for folder in Path(name).parents)} - {"."}
    tree = tree_of(mount.path)
    names = mount.bucket.names()
    on_mount = {name: _digest(body) for name, body in tree.items() if isinstance(body, bytes)}
    in_bucket = {name: _digest(mount.bucket.get(name)) for name in names if not name.endswith("/")}
    return [
        *_compared("on the mount", files, on_mount),
        *_compared("in the bucket", files, in_bucket),
        *_compared(
            "on the mount",
            dict.fromkeys(folders),
            {name: None for name, body in tree.items() if body is None},
        ),
        # Not every directory has an object of its own.
        *(
            f"{name} in the bucket: not removed"
            for name in names
            if name.endswith("/") and name[:-1] not in folders
        ),
    ]


def _compared(where: str, expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    return [
        *(f"{name} {where}: lost" for name in expected.keys() - found.keys()),
        *(f"{name} {where}: not removed" for name in found.keys() - expected.keys()),
        *(
            f"{name} {where}: wrong bytes"
            for name in expected.keys() & found.keys()
            if expected[name] != found[name]
        ),
    ]


def _rounds(mount: Mount, data: dict[str, bytes], rounds: int, *, upgrades: bool, is_read_only: bool) -> int:
    """upgrades: instead of every second kill."""
    programs = Programs(mount.path, data)
    programs.start("random reads", programs.read_at_random)
    programs.start("whole files", programs.read_whole)
    programs.start("walks", programs.walk)
    if not is_read_only:
        (mount.path / "out").mkdir()
        programs.start("writes", programs.write)
        programs.start("names", programs.change_names)
        programs.start("rewrites", programs.rewrite)
        programs.start("open files", programs.move_open_files)
    pauses: list[float] = []
    upgraded = 0
    for number in range(rounds):
        time.sleep(random.uniform(*_SECONDS_BETWEEN))
        pid = mount.status()["pid"]
        if upgrades and number % 2 == 0:
            _upgrade(sys.executable, mount)
            upgraded += 1
            served_by = Path(f"/proc/{mount.status()['pid']}/cmdline").read_bytes().split(b"\0")[0]
            assert os.fsdecode(served_by) == sys.executable
        else:
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            os.statvfs(mount.path)  # is never cached: it waits for the next daemon
            pauses.append(time.monotonic() - began)
        assert not is_running(pid)
    programs.end()
    wrong = []
    if not is_read_only:
        run(FUSECACHE, "sync", mount.path)
        wrong = _differences(mount, data, programs.written)
        wrong += [f"quarantined: {each.name}" for each in (mount.cache / "orphans").iterdir()]
    slowest = ", ".join(f"{name} {each:.2f}" for name, each in programs.longest.items())
    lines = [
        f"kills {len(pauses)}, upgrades {upgraded}, errors to programs {len(programs.errors)}, wrong {len(wrong)}",
        f"closed files compared {len(programs.written)}; steps {dict(programs.steps)}",
        f"pause, seconds: median {statistics.median(pauses):.2f}, longest {max(pauses):.2f}",
        f"longest step, seconds: {slowest}",
        *programs.errors[:_SHOWN],
        *wrong[:_SHOWN],
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(programs.errors or wrong))


if __name__ == "__main__":
    sys.exit(main())
