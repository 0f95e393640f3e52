"""The node: its daemon, its cache disk, and what can happen to them."""

import fcntl
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from fusecache.model.errors import MountError
from fusecache.mount.control_client import find_mount
from tests.chaos.plan import FEW_DESCRIPTORS_SHARE
from tests.s3server import ServerProcess
from tests.support.daemons import Daemon
from tests.support.disks import Disk
from tests.support.mounts import wait_until

MIB = 1 << 20
CACHE_BYTES = 256 * MIB
FEW_DESCRIPTORS, USUAL_DESCRIPTORS = 256, 1024
LITTLE_MEMORY = 192 * MIB
MEMORY_GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
FLOOD_CONNECTIONS = 64
REMOUNT_PAUSE_SECONDS = 3.0
# A keeper's next daemon may have to wait for a disk that hangs.
NEXT_SECONDS = 120.0
# linux/ext4.h: end all access to a mounted ext4, after everything is written.
EXT4_IOC_SHUTDOWN = 0x8004587D


class ChaosDaemon(Daemon):
    """A daemon with its keys in a file, and a keeper if `is_kept`: then the process is the keeper's."""

    def __init__(
        self, server: ServerProcess, directory: Path, cache: Path, credentials: Path, *flags: str
    ) -> None:
        super().__init__(
            server,
            directory,
            "--credentials-file",
            str(credentials),
            "--cache-size",
            str(CACHE_BYTES),
            *flags,
        )
        self.cache = cache
        self.few_descriptors = False
        self.is_kept = False

    @property
    def pid(self) -> int:
        """The process that serves the mount; 0 if there is none."""
        if self._process is None:
            return 0
        started = self._process.pid
        return next(filter(_holds_a_mount, _children(started)), 0) if self.is_kept else started

    def mount(self, *flags: str) -> None:
        """Start a daemon; return when its mount answers."""
        limit = FEW_DESCRIPTORS if self.few_descriptors else USUAL_DESCRIPTORS
        self.program = ["prlimit", f"--nofile={limit}:{limit}", sys.executable, "-m", "fusecache"]
        super().mount(*flags, "--keep-mounted" if self.is_kept else "--no-keep-mounted")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process that serves the mount, if there is one."""
        if pid := self.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End the daemon and its keeper with SIGKILL, and clear the mount that they leave behind."""
        self._end_all()
        self._detach()

    def clean_up(self) -> None:
        """End whatever is left, so that no mount and no process stays."""
        self._end_all()
        super().clean_up()

    def _end_all(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGSTOP)  # it starts no other one from now on
        below = [os.pidfd_open(pid) for pid in _children(self._process.pid)] if self.is_kept else []
        self._process.kill()
        for process in below:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            # Until all its threads have ended: their open files would hold the disk that is to be mounted again.
            assert select.select([process], [], [], NEXT_SECONDS)[0]
            os.close(process)
        self.wait()

    def take_ended(self) -> int:
        """Return the status of a daemon that ended by itself, and clear its mount away."""
        status = self.wait()
        self.clean_up()
        return status

    def _environment(self) -> dict[str, str]:
        found = super()._environment()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del found[name]
        return {**found, "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # it has ended
        return []


def _holds_a_mount(pid: int) -> bool:
    """Return whether a process has the descriptor of a mount: a standby has none."""
    for fd in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            if os.readlink(fd) == "/dev/fuse":
                return True
    return False


class Node:
    """One daemon after the other, on a disk of its own if the machine allows one. Use as a context manager."""

    def __init__(
        self, server: ServerProcess, directory: Path, seed: int, *flags: str, whole_machine: bool
    ) -> None:
        """flags: of each mount."""
        self._directory, self._rng = directory, random.Random(f"{seed} node")
        self.credentials = directory / "keys"
        self._image = directory / "image"
        self._disk = Disk.new(self._image, directory / "disk") if whole_machine else None
        cache = (self._disk.path if self._disk else directory) / "cache"
        self.daemon = ChaosDaemon(server, directory / "node", cache, self.credentials, *flags)
        self._is_down = threading.Event()  # no daemon on purpose
        self._stopped = threading.Lock()  # held while the daemon must write nothing: its successor would
        self.down_since: list[float] = []
        self.up_since: list[float] = []
        self._group: Path | None = None
        self._flood: threading.Thread | None = None
        self._flood_ends = threading.Event()
        self.most_rss = self.most_descriptors = 0
        self.starts = 0

    def __enter__(self) -> "Node":
        if self._disk:
            # ext4 as servers have it: the first error makes it read-only.
            subprocess.run(["tune2fs", "-e", "remount-ro", self._image], check=True, capture_output=True)
            self._disk.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_flood()
        with suppress(OSError):
            self._thaw()
        self.daemon.signal(signal.SIGCONT)
        self.daemon.clean_up()
        if self._disk:
            self._disk.__exit__()
        self._leave_group()

    # ---- the daemon

    def start(self, seconds: float) -> str:
        """Start a daemon, as a service manager does: again until it mounts. Return why it did not."""
        self.daemon.few_descriptors = self._rng.random() < FEW_DESCRIPTORS_SHARE
        deadline = time.monotonic() + seconds
        while True:
            self.starts += 1
            try:
                self.daemon.mount()
            except AssertionError as exc:
                self.daemon.clean_up()
                if time.monotonic() > deadline:
                    return str(exc)[-2000:]
                time.sleep(REMOUNT_PAUSE_SECONDS)
            else:
                self.up_since.append(time.monotonic())
                self._is_down.clear()
                return ""

    def is_down_on_purpose(self) -> bool:
        """Return whether the daemon was ended by a fault and is not mounted again."""
        return self._is_down.is_set()

    def was_down(self, began: float, ended: float) -> bool:
        """Return whether there was no daemon at any time from `began` to `ended`."""
        downs = list(self.down_since)
        ups = list(self.up_since)
        return any(
            down - 1 < ended and began < next((up for up in ups if up > down), time.monotonic()) + 5
            for down in downs
        )

    def has_few_descriptors(self) -> bool:
        """Return whether the daemon may open few files."""
        return self.daemon.few_descriptors

    def note_down(self) -> None:
        """Note that there is no daemon from now on."""
        self.down_since.append(time.monotonic())
        self._is_down.set()

    def kill(self) -> None:
        """End the daemon with SIGKILL."""
        self.note_down()
        self.daemon.kill()

    def measure(self) -> None:
        """Look at the daemon's memory and descriptors."""
        pid = self.daemon.pid
        with suppress(OSError, KeyError):  # it has just ended
            rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
            rss = sum(int(rows[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
            self.most_rss = max(self.most_rss, rss)
            self.most_descriptors = max(self.most_descriptors, len(os.listdir(f"/proc/{pid}/fd")))

    # ---- faults

    def begin(self, kind: str) -> None:
        """Begin a fault."""
        match kind:
            case "daemon stopped":
                self.daemon.signal(signal.SIGSTOP)
            case "daemon killed" if self.daemon.is_kept:
                with self._stopped:
                    killed = self.daemon.pid
                    self.daemon.signal(signal.SIGKILL)
                wait_until(
                    lambda: self._is_down.is_set() or self.daemon.pid not in {killed, 0},
                    "the next daemon",
                    seconds=NEXT_SECONDS,
                )
            case "daemon killed":
                self.kill()
            case "socket flooded":
                self._begin_flood()
            case "little memory":
                self._limit_memory()
            case "disk full":
                self._fill_disk()
            case "disk hangs":
                self._on_disk("fsfreeze", "--freeze")
            case "disk read-only":
                self._fail_disk()
            case "disk EIO":
                descriptor = os.open(self._directory / "disk", os.O_RDONLY)
                try:
                    fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", 0))
                finally:
                    os.close(descriptor)
            case _:
                raise ValueError(f"no such fault: {kind}")

    def end(self, kind: str) -> None:
        """End it. A daemon that it ended is started by `start`."""
        match kind:
            case "daemon stopped":
                self.daemon.signal(signal.SIGCONT)
            case "socket flooded":
                self._end_flood()
            case "little memory":
                self._allow_memory()
            case "disk full":
                (self._directory / "disk" / "filler").unlink()
            case "disk hangs":
                self._thaw()
            case "disk read-only" | "disk EIO":
                # ext4 stays as it is until it is mounted again, for which its user must end.
                assert self._disk
                if not self._is_down.is_set():
                    self.kill()
                self._disk.__exit__()
                self._disk.__enter__()

    def _fill_disk(self) -> None:
        filler = self._directory / "disk" / "filler"
        with filler.open("wb") as file:
            free = os.statvfs(filler).f_bavail * os.statvfs(filler).f_frsize
            step = free
            size = 0
            while step >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), size, step)
                    size += step
                except OSError:
                    step //= 2

    def _fail_disk(self) -> None:
        """Make ext4 go read-only, as after an error of its own.

        The daemon is stopped and all is synced before: what was written stays, as the daemon promises nothing else.
        """
        device = os.stat(self._directory / "disk").st_dev
        name = (Path("/sys/dev/block") / f"{os.major(device)}:{os.minor(device)}").resolve().name
        with self._stopped:
            wait_until(lambda: self.daemon.pid, "a daemon", seconds=NEXT_SECONDS)
            self.daemon.signal(signal.SIGSTOP)
            try:
                self._on_disk("sync", "--file-system")
                (Path("/sys/fs/ext4") / name / "trigger_fs_error").write_text("1")
            finally:
                self.daemon.signal(signal.SIGCONT)

    def _thaw(self) -> None:
        self._on_disk("fsfreeze", "--unfreeze")

    def _on_disk(self, *words: str) -> None:
        subprocess.run([*words, self._directory / "disk"], check=False, capture_output=True)

    def _limit_memory(self) -> None:
        root = memory_group()
        assert root is not None
        self._leave_group()
        self._group = root / f"fusecache-chaos-{os.getpid()}-{self.starts}"
        self._group.mkdir(exist_ok=True)
        self._memory_limit().write_text(str(LITTLE_MEMORY))
        # Zero would be this process.
        if pid := self.daemon.pid:
            with suppress(ProcessLookupError):
                (self._group / "cgroup.procs").write_text(str(pid))

    def _allow_memory(self) -> None:
        limit = self._memory_limit()
        limit.write_text("-1" if limit.name == "memory.limit_in_bytes" else "max")

    def _memory_limit(self) -> Path:
        assert self._group is not None
        old = self._group / "memory.limit_in_bytes"
        return old if old.exists() else self._group / "memory.max"

    def _leave_group(self) -> None:
        if self._group is not None:
            with suppress(OSError):
                for pid in (self._group / "cgroup.procs").read_text().split():
                    (self._group.parent / "cgroup.procs").write_text(pid)
                self._group.rmdir()

    def _begin_flood(self) -> None:
        self._flood_ends.clear()
        self._flood = threading.Thread(target=self._flood_on)
        self._flood.start()

    def _end_flood(self) -> None:
        if self._flood is not None:
            self._flood_ends.set()
            self._flood.join()
            self._flood = None

    def _flood_on(self) -> None:
        """Hold many connections, some with half a request, and send what the daemon must refuse."""
        held: list[socket.socket] = []
        requests = [
            b"{" * 5000,
            b'{"command": "status", "path": ""}\n' * 50,
            b"\0\n",
            b'{"command": "sync"',
            b"",
        ]
        try:
            mount, _ = find_mount(self.daemon.path, os.environ)
            while not self._flood_ends.wait(0.02):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                held.append(connection)
                connection.settimeout(0.2)
                with suppress(OSError):
                    connection.connect(os.fspath(mount.socket_path))
                    connection.sendall(requests[len(held) % len(requests)])
                if len(held) >= FLOOD_CONNECTIONS:
                    for each in held[::2]:
                        each.close()
                    del held[::2]
        except (MountError, OSError):
            pass  # there is no daemon to flood
        finally:
            for each in held:
                each.close()


def memory_group() -> Path | None:
    """Return a memory control group below which others can be made; None if there is none."""
    for root in MEMORY_GROUPS:
        probe = root / f"fusecache-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        has_limit = (probe / "memory.limit_in_bytes").exists() or (probe / "memory.max").exists()
        probe.rmdir()
        if has_limit:
            return root
    return None
