"""Clusters of processes on this machine, and drivers: `python -m loader` in the engines' virtual environment."""

import os
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from tests.recipes.runs import descendants
from tests.support import ROOT
from tests.support.mounts import is_running, wait_until

# A virtual environment with both engines.
VENV = Path(os.environ.get("FUSECACHE_TEST_CLUSTERS", ""))
START_SECONDS = 120.0
# A driver and its workers import all of an engine, beside other tests on a busy machine.
END_SECONDS = 400.0
# `ray start` gives up when a node is not there after 30 s, which no setting changes.
RAY_STARTS = 4
HOST = "127.0.0.1"
WORKERS = 2


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs. environment: what a driver needs to find it."""

    engine: str
    environment: Mapping[str, str]
    folder: Path


class Driver:
    """One `python -m loader …`: `with Driver(cluster, words) as driver`. Gone at the end of the block."""

    def __init__(self, cluster: Cluster, words: Sequence[str | Path]) -> None:
        self._log = cluster.folder / uuid.uuid4().hex
        with open(self._log, "wb") as log:
            self._process = _start(
                [VENV / "bin" / "python", "-m", "loader", *words], cluster.environment, log
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it with SIGKILL."""
        _kill(self._process)

    def finish(self) -> tuple[int, str]:
        """Return its exit status and what it said, once it ended."""
        return self._process.wait(END_SECONDS), self._log.read_text()


def convert(cluster: Cluster, *words: str | Path) -> tuple[int, str]:
    """Run `convert` on a cluster; return exit status and output."""
    with Driver(cluster, ["convert", *words, "--engine", cluster.engine]) as driver:
        return driver.finish()


class HeldInput:
    """A pipe in the place of an input file: a process that reads it waits until `release`. Use it in a `with` block."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path
        self._pipe = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)

    def reader(self) -> int:
        """Return the process that reads it, once there is one."""
        if self._pipe < 0:
            wait_until(self._open, f"a process that opens {self._path}", END_SECONDS)
        return int(wait_until(self._reader, f"a reader of {self._path}", END_SECONDS))

    def release(self, content: bytes) -> None:
        """Give the content to the process that reads it."""
        self.reader()
        os.set_blocking(self._pipe, True)
        with open(self._pipe, "wb") as pipe:
            self._pipe = -1
            pipe.write(content)

    def _open(self) -> bool:
        try:
            self._pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        return True

    def _reader(self) -> int:
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                pid = int(link.parts[2])
                if pid != os.getpid() and os.readlink(link) == str(self._path):
                    return pid
        return 0


@contextmanager
def ray_cluster(folder: Path) -> Iterator[Cluster]:
    """A head without CPUs, and two nodes with one each."""
    environment = _environment(folder) | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    address = f"{HOST}:{_free_port()}"
    ray = [VENV / "bin" / "ray", "start", "--block", "--object-store-memory=100000000"]
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short,
        ExitStack() as running,
    ):  # sockets have 108 bytes

        def start(name: str, *words: str) -> None:
            log = folder / name
            for _ in range(RAY_STARTS):
                process = running.enter_context(_running([*ray, *words], environment, log))
                if (
                    wait_until(lambda each=process: _ray_state(each, log), f"Ray: {log}", START_SECONDS)
                    == "runs"
                ):
                    return
            raise AssertionError(log.read_text())

        head = ["--head", "--num-cpus=0", f"--port={address.partition(':')[2]}", f"--temp-dir={short}"]
        start("head", *head, f"--node-ip-address={HOST}", "--include-dashboard=false")
        for number in range(WORKERS):
            start(f"node {number}", f"--address={address}", "--num-cpus=1")
        yield Cluster("ray", environment | {"RAY_ADDRESS": address}, folder)


def _ray_state(process: "subprocess.Popen[bytes]", log: Path) -> str:
    if process.poll() is not None:
        return "ended"
    return "runs" if "--block" in log.read_text() else ""


@contextmanager
def spark_cluster(folder: Path) -> Iterator[Cluster]:
    """A master, and two workers with one core each."""
    environment = _environment(folder) | {"SPARK_LOCAL_IP": HOST}
    port = _free_port()
    address = f"spark://{HOST}:{port}"
    start = [next(VENV.glob("lib/python*/site-packages/pyspark/bin/spark-class"))]
    deploy = "org.apache.spark.deploy"
    master = [f"{deploy}.master.Master", "--host", HOST, "--port", str(port), "--webui-port", "0"]
    worker = [f"{deploy}.worker.Worker", address, "--host", HOST, "--webui-port", "0", "--cores", "1"]
    with ExitStack() as running:
        running.enter_context(_running([*start, *master], environment, folder / "master"))
        for number in range(WORKERS):
            words = [*start, *worker, "--memory", "1g", "--work-dir", str(folder / f"work {number}")]
            running.enter_context(_running(words, environment, folder / f"worker {number}"))
        wait_until(
            lambda: (folder / "master").read_text().count("Registering worker") == WORKERS,
            f"Spark's workers {folder}",
            START_SECONDS,
        )
        yield Cluster("spark", environment | {"MASTER": address}, folder)


def _environment(folder: Path) -> dict[str, str]:
    """Both engines write into the home directory. The workers import this checkout's loader."""
    kept = {name: os.environ[name] for name in ("LANG", "PATH", "JAVA_HOME") if name in os.environ}
    return kept | {"HOME": str(folder), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def _running(
    words: Sequence[str | Path], environment: Mapping[str, str], log: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    with open(log, "wb") as output:
        process = _start(words, environment, output)
    try:
        yield process
    finally:
        pids = descendants(process.pid)
        _kill(process)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)), f"the end of {words[0]}'s processes")


def _start(
    words: Sequence[str | Path], environment: Mapping[str, str], log: IO[bytes]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
    )


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
