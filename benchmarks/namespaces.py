"""Nodes of a cluster on one machine: a network namespace each, on one bridge. Needs root and iproute2.

The bucket is at the bridge's address. Each node has its mount, its cache and its `fusecache serve`. All see all mounts.
Whatever happens, `close` ends the processes by their ids, and removes mounts, namespaces and the bridge.
"""

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.processes import BenchmarkError
from tests.s3server import ServerProcess
from tests.support.mounts import FUSECACHE
from tests.support.s3_buckets import PASSED_ON

PORT = 9470
_START_SECONDS = 60.0
_NET = "10.77.0"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Node:
    """One node. environment: of all that is started later, with the bucket's keys."""

    def __init__(self, name: str, address: str, folder: Path, environment: dict[str, str]) -> None:
        self.name, self.address = name, address
        self.path, self.cache = folder / f"{name}-mount", folder / f"{name}-cache"
        self.environment = dict(environment)
        self._log = folder / f"{name}.log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, server: ServerProcess, key_file: Path, peers: str, flags: Sequence[str]) -> None:
        """Mount, and serve if there are peers. Returns when both answer."""
        self.path.mkdir(exist_ok=True)
        words = [
            *("mount", f"s3://{server.bucket}", str(self.path), "--endpoint-url", server.endpoint_url),
            *("--cache-dir", str(self.cache), "--foreground", "--no-keep-mounted", "--read-only", *flags),
        ]
        if peers:
            words += ["--peers", peers, "--peers-key-file", str(key_file)]
        self._run(words)
        self._wait(lambda: os.path.ismount(self.path))
        if peers:
            self.serve(key_file)

    def serve(self, key_file: Path) -> None:
        """Serve the mount to the other nodes. Returns once it does."""
        said = self._log.stat().st_size
        listen = f"{self.address}:{PORT}"
        self._run(["serve", str(self.path), "--listen", listen, "--peers-key-file", str(key_file)])
        self._wait(lambda: "is at http" in self._log.read_text()[said:])

    def run(self, *words: str, stdout: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
        """Start a program on the node."""
        command = ["nsenter", f"--net=/run/netns/{self.name}", *words]
        return subprocess.Popen(command, stdout=stdout, env=self.environment)

    def _run(self, words: Sequence[str]) -> None:
        command = ["nsenter", f"--net=/run/netns/{self.name}", str(FUSECACHE), *words]
        with open(self._log, "ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command, stdout=log, stderr=log, env=self.environment, start_new_session=True
                )
            )

    def _wait(self, is_there: Any) -> None:
        until = time.monotonic() + _START_SECONDS
        while not is_there():
            if time.monotonic() > until or any(each.poll() is not None for each in self._processes):
                raise BenchmarkError(f"{self.name} did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        """Return the status of the mount."""
        done = subprocess.run(
            [FUSECACHE, "status", "--json", self.path], capture_output=True, text=True, check=True, timeout=60
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def cpu_seconds(self) -> float:
        """Return the processor time of the daemon so far."""
        fields = Path(f"/proc/{self.status()['pid']}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def slow_down(self, rate: str) -> None:
        """Limit what the node sends, such as 8mbit."""
        subprocess.run(
            ["tc", "-n", self.name, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate,
             "burst", "32kbit", "latency", "400ms"],
            check=True,
        )  # fmt: skip

    def cut_off(self, address: str) -> None:
        """Lose all that the node sends to an address. What that sends still comes."""
        _ip("-n", self.name, "route", "add", "blackhole", f"{address}/32")

    def kill(self) -> None:
        """End the node at once, as a power cut does."""
        for each in self._processes:
            each.kill()
            each.wait()
        self._processes.clear()

    def close(self) -> None:
        """End the node, and remove its mount and its cache."""
        for each in reversed(self._processes):
            each.terminate()
        for each in self._processes:
            with suppress(subprocess.TimeoutExpired):
                each.wait(20)
        self.kill()
        # A dead mount is no mount for os.path.
        subprocess.run(["umount", "-l", self.path], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.cache, ignore_errors=True)


class Cluster:
    """A bucket and some nodes: `with Cluster(folder, 4) as cluster`."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._count = count
        self._stack = ExitStack()
        self.nodes: list[Node] = []
        self.key_file = folder / "peers.key"

    def __enter__(self) -> Self:
        if os.geteuid():
            raise BenchmarkError("network namespaces need root")
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        self.key_file.write_text(secrets.token_hex(32))
        self.key_file.chmod(0o600)
        tag = secrets.token_hex(2)
        bridge = f"fc{tag}"
        _ip("link", "add", bridge, "type", "bridge")
        self._stack.callback(subprocess.run, ["ip", "link", "del", bridge], check=False)
        _ip("addr", "add", f"{_NET}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        self.server = ServerProcess()
        self.server.host = f"{_NET}.1"
        self._stack.enter_context(self.server)
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("FUSECACHE_") or name in PASSED_ON
            },
            "AWS_ACCESS_KEY_ID": self.server.access_key,
            "AWS_SECRET_ACCESS_KEY": self.server.secret_key,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for number in range(self._count):
            name, link = f"fc{tag}n{number}", f"fc{tag}v{number}"
            _ip("netns", "add", name)
            self._stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{_NET}.{10 + number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            self.nodes.append(Node(name, f"{_NET}.{10 + number}", self._folder, environment))

    def mount(self, *flags: str, peers: bool = True, only: int | None = None) -> None:
        """Mount on all nodes, or on the first ones only. peers: they fill from each other."""
        nodes = self.nodes[:only]
        names = ",".join(f"{node.address}:{PORT}" for node in nodes) if peers else ""
        for node in nodes:
            node.start(self.server, self.key_file, names, flags)

    def unmount(self) -> None:
        """End all nodes, and remove their caches."""
        for node in self.nodes:
            node.close()

    def sent(self) -> int:
        """Return how many bytes the bucket has sent since the last call."""
        rows = self.server.control.log("GetObject")
        self.server.control.clear_log()
        return sum(row.bytes_out for row in rows)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._stack:
            self.unmount()
