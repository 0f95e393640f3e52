"""Starts a daemon for each bucket of a mount of several, and for a service waits in front of them all.

Each is a mount of its own in a folder of the mountpoint. It is `fusecache mount --only NAME`, with the words of the
command that starts it. What happens to one daemon touches no other.
"""

import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fusecache.cli.say import say
from fusecache.config.options import MountOptions, top_of
from fusecache.model.errors import FusecacheError, MountError, StateError
from fusecache.mount.bucket_folders import make_bucket_folder, remove_bucket_folder
from fusecache.mount.launch import MountState, clear_dead, mount_state, own_program, start_daemon
from fusecache.mount.sd_notify import notify

# Of a bucket that may wait, as another one of the command answers.
_BESIDE_OTHERS = "--beside-others"
# Pauses before a daemon that failed is started again, as those of systemd/fusecache@.service.
_PAUSES = (0.0, 2.0, 10.0)
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_MESSAGE_BYTES = 8192
_CREDENTIALS = struct.Struct("3i")  # unix(7): process, user, group


def start_in_folders(
    mounts: Mapping[str, MountOptions], words: Sequence[str]
) -> tuple[dict[str, str], dict[str, MountError]]:
    """Mount each bucket in the background. Return the messages of the daemons that serve, and the errors of the others.

    words: the arguments of `mount`. If one bucket answers, the others may be mounted without an answer. Raises
    MountError, StateError if the folders cannot be made.
    """
    prepare(mounts)
    messages, errors = _start(mounts, words)
    if messages and errors:
        try:
            more, errors = _start({name: mounts[name] for name in errors}, [_BESIDE_OTHERS, *words])
        except KeyboardInterrupt:
            say(f"mounted: {', '.join(messages)}; to end these: fusecache unmount {top_of(mounts)}")
            raise
        messages |= more
    if not messages:
        for each in mounts.values():
            remove_bucket_folder(each.mountpoint)
    return messages, errors


def _start(
    mounts: Mapping[str, MountOptions], words: Sequence[str]
) -> tuple[dict[str, str], dict[str, MountError]]:
    starting, messages, errors = {}, {}, {}
    try:
        for name, options in mounts.items():
            try:
                starting[name] = start_daemon(
                    options.cache_dir, [f"--only={name}", *words], has_keeper=options.session.has_keeper
                )
            except MountError as exc:
                errors[name] = exc
        for name, each in starting.items():
            try:
                messages[name] = each.wait()
            except MountError as exc:
                errors[name] = exc
    except BaseException:  # Ctrl-C
        for each in starting.values():
            each.end()
        raise
    return messages, errors


def named_error(name: str, error: FusecacheError) -> FusecacheError:
    """Return an error of a bucket's mount with its name."""
    if not str(error).startswith(f"bucket {name}: "):
        error.args = (f"bucket {name}: {error}",)
    return error


def prepare(mounts: Mapping[str, MountOptions]) -> None:
    """Make the folders of the buckets. Raises MountError, StateError."""
    for directory in {each.cache_dir.parent for name, each in mounts.items() if each.cache_dir.name == name}:
        if (directory / "fusecache.json").exists():
            raise StateError(
                f"{directory} is the cache directory of one mount, and may have what its bucket lacks: `fusecache "
                f"recover {directory}` lists them. Several buckets need a directory of their own; choose another with "
                "--cache-dir"
            )
    for each in mounts.values():
        make_bucket_folder(each.mountpoint, allow_other=each.allow_other)


@dataclass(eq=False)
class _BucketDaemon:
    """The daemon of one bucket, and what it tells its service manager, which is this process."""

    name: str
    mountpoint: Path
    process: "subprocess.Popen[bytes] | None" = None
    channel: socket.socket | None = None
    is_ready: bool = False
    status: str = ""
    failures: int = 0
    # When it is started again after a failure.
    due: float = float("-inf")
    exit_status: int = 0

    def start(self, words: Sequence[str]) -> None:
        channel = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        channel.bind("")  # unix(7): the kernel chooses an abstract address
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        address = "@" + channel.getsockname()[1:].decode()
        beside = [_BESIDE_OTHERS] if self.failures else []
        self.channel, self.is_ready, self.status = channel, False, "starting"
        try:
            self.process = subprocess.Popen(
                [*own_program(), "mount", "--foreground", f"--only={self.name}", *beside, *words],
                env={**os.environ, "NOTIFY_SOCKET": address},
                start_new_session=True,  # else Ctrl-C would reach it twice
            )
        except OSError as exc:  # no memory, or too many processes: the other daemons serve on
            say(f"bucket {self.name}: its daemon cannot be started: {exc}")
            self.end(1)

    def hear(self) -> None:
        """Take what the daemon has sent."""
        assert self.channel is not None
        with suppress(BlockingIOError):
            while True:
                data, found, _, _ = self.channel.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
                users = [_CREDENTIALS.unpack(each[2])[1] for each in found]
                if users != [os.geteuid()]:
                    continue  # any user can send to an abstract address
                fields = dict(line.partition("=")[::2] for line in data.decode(errors="replace").splitlines())
                if fields.get("READY") == "1":
                    self.is_ready, self.failures = True, 1
                self.status = fields.get("STATUS", self.status)

    def end(self, status: int) -> None:
        """The process has ended."""
        assert self.channel is not None
        self.channel.close()
        self.process, self.channel = None, None
        self.exit_status = 128 - status if status < 0 else status
        if status:
            self.due = time.monotonic() + _PAUSES[min(self.failures, len(_PAUSES) - 1)]
            self.failures += 1
            with suppress(FusecacheError, OSError):
                if mount_state(self.mountpoint) is MountState.DEAD:
                    clear_dead(self.mountpoint)


class BucketDaemons:
    """The daemons of all buckets, for a service manager or a terminal: one process that ends when all have ended."""

    def __init__(self, mounts: Mapping[str, MountOptions], words: Sequence[str]) -> None:
        """words: the arguments of `mount`."""
        prepare(mounts)
        self._words = words
        self._daemons = [_BucketDaemon(name, each.mountpoint) for name, each in mounts.items()]
        self._is_announced = self._is_stopping = False
        # Not passed on yet.
        self._signals: list[int] = []
        self._told = ""

    def run(self) -> int:
        """Start the daemons, pass signals on, and return the worst exit status once all have ended."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda number, _: self._signals.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it only wakes the loop
        for each in self._daemons:
            each.start(self._words)
        while any(each.process for each in self._daemons):
            self._wait(reader)
            self._pass_on()
            for each in self._daemons:
                if each.process is not None:
                    each.hear()
                    if (status := each.process.poll()) is not None:
                        each.end(status)
            self._start_again()
            self._tell()
        signal.set_wakeup_fd(-1)
        for end in (reader, writer):
            os.close(end)
        for each in self._daemons:
            remove_bucket_folder(each.mountpoint)
        return max(each.exit_status for each in self._daemons)

    def _wait(self, reader: int) -> None:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        for each in self._daemons:
            if each.channel is not None:
                poll.register(each.channel, select.POLLIN)
        left = min((each.due - time.monotonic() for each in self._waiting()), default=float("inf"))
        poll.poll(None if left == float("inf") else max(0.0, left) * 1000)
        with suppress(BlockingIOError):
            os.read(reader, 4096)

    def _waiting(self) -> list[_BucketDaemon]:
        """Return the daemons that are to be started again: only beside others that serve."""
        serves = any(each.process and each.is_ready for each in self._daemons)
        if self._is_stopping or not serves:
            return []
        return [each for each in self._daemons if not each.process and each.exit_status]

    def _start_again(self) -> None:
        for each in self._waiting():
            if time.monotonic() >= each.due:
                say(
                    f"bucket {each.name}: the daemon ended with status {each.exit_status}; it is started again"
                )
                each.start(self._words)

    def _tell(self) -> None:
        """Tell the service manager how the daemons are: that all have started, or have failed for good."""
        is_decided = all(
            each.is_ready or each.failures > 1 or not (each.process or each.exit_status)
            for each in self._daemons
        )
        if is_decided and not self._is_announced and any(each.is_ready for each in self._daemons):
            self._is_announced = notify(READY=1)
        told = "; ".join(
            f"{each.name}: {each.status if each.process else f'ended with status {each.exit_status}'}"
            for each in self._daemons
        )
        if told != self._told and notify(STATUS=told):
            self._told = told

    def _pass_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._is_stopping = True
            notify(STOPPING=1)
            for each in self._daemons:
                if each.process is not None:  # a daemon knows these two only
                    each.process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)
