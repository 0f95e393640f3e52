"""A daemon in a process of its own, so that it can be killed for real, and what programs do with its mount."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.s3server import ServerProcess
from tests.support.mounts import run
from tests.support.starter import FUSECACHE, Started, can_fork, start_forked

MIB = 1 << 20
SETTLE_SECONDS = 0.3
_SECONDS = 30.0


class Daemon:
    """One cache directory and one mountpoint; daemons come and go."""

    def __init__(self, server: ServerProcess, directory: Path, *flags: str) -> None:
        self.server = server
        self.path = directory / "mount"
        self.cache = directory / "cache"
        self.log_path = directory / "log"
        self.flags = ["--settle-seconds", str(SETTLE_SECONDS), "--memory", "64MiB", *flags]
        self.program: list[str | Path] = [FUSECACHE]
        self.path.mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | Started | None = None

    def command(self, *words: str | Path, seconds: float = 120) -> "subprocess.CompletedProcess[str]":
        """Run `fusecache` with the bucket's keys. Raises TimeoutExpired after so many seconds."""
        return run(FUSECACHE, *words, check=False, seconds=seconds, env=self._environment())

    def mount_words(self, *flags: str) -> list[str | Path]:
        """Return the words of the mount command, without the program."""
        source = f"s3://{self.server.bucket}"
        return ["mount", source, self.path, "--cache-dir", self.cache, "--foreground", *self.flags, *flags]

    def mount(self, *flags: str) -> None:
        """Start a daemon; return when its mount answers."""
        reader, writer = os.pipe()
        words = [*self.program, *self.mount_words(*flags), "--ready-fd", str(writer)]
        environment = self._environment()
        with self.log_path.open("ab") as log:
            if can_fork(words, environment):
                self._process = start_forked(
                    words, environment, stdout=log.fileno(), stderr=log.fileno(), pass_fds=[writer]
                )
            else:
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[writer],
                    env=environment,
                )
        os.close(writer)
        with os.fdopen(reader) as told:
            line = told.readline().strip()
        assert line.split(" ")[0] == "ready", f"{line}\n{self.log_path.read_text()}"

    def kill(self) -> None:
        """End the daemon with SIGKILL, and clear the mount that it leaves behind."""
        self.signal(signal.SIGKILL)
        self.wait()
        self._detach()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, seconds: float = _SECONDS) -> int:
        """Return the exit status once the daemon has ended."""
        assert self._process is not None
        status = self._process.wait(seconds)
        self._process = None
        return status

    def is_running(self) -> bool:
        """Return whether the daemon has not ended."""
        return self._process is not None and self._process.poll() is None

    def status(self) -> dict[str, Any]:
        """Return what the daemon says of itself."""
        found: dict[str, Any] = json.loads((self.path / ".fusecache" / "stats.json").read_text())
        return found

    def sync(self, path: str = "", timeout: float = 60) -> int:
        """Return the exit status of `fusecache sync`."""
        words = ("sync", self.path / path, "--timeout", str(timeout))
        return self.command(*words, seconds=timeout + 60).returncode

    def log(self) -> str:
        """Return everything that the daemons logged."""
        return self.log_path.read_text()

    def clean_up(self) -> None:
        """End whatever is left, so that no mount and no process stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SECONDS)
            self._process = None
        if f" {self.path} " in Path("/proc/self/mountinfo").read_text():
            self._detach()

    def orphans(self) -> list[bytes]:
        """Return the contents of the unfinished files that were kept aside."""
        return [path.read_bytes() for path in (self.cache / "orphans").iterdir()]

    def _detach(self) -> None:
        subprocess.run(["fusermount3", "-u", "-z", self.path], check=True)

    def _environment(self) -> dict[str, str]:
        # Without a keeper: what dies is to stay dead until the next mount, and the process is the daemon.
        return {
            "FUSECACHE_KEEP_MOUNTED": "no",
            **os.environ,
            "AWS_ACCESS_KEY_ID": self.server.access_key,
            "AWS_SECRET_ACCESS_KEY": self.server.secret_key,
            "S3_ENDPOINT_URL": self.server.endpoint_url,
        }


def some_bytes(size: int, seed: int) -> bytes:
    """Return bytes in which two files differ everywhere."""
    block = bytes((seed * 31 + index) % 251 for index in range(4099))
    return (block * (size // len(block) + 1))[:size]
