"""One server for all tests, and `fusecache` as a process on plain folders. No FUSE."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.s3server import ServerProcess
from tests.support import ROOT
from tests.support.marks import mark_all
from tests.support.mounts import FUSECACHE, run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The bucket is the project's own server."""
    mark_all(items, __file__, pytest.mark.s3server_only)


@pytest.fixture(scope="session")
def whole_server() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server
        assert server.control.offences() == []


@pytest.fixture
def server(whole_server: ServerProcess) -> Iterator[ServerProcess]:
    """An empty bucket, which takes several writes a second of a key."""
    whole_server.control.reset()
    whole_server.control.set_rules(write_interval_seconds=0.0)
    yield whole_server
    whole_server.control.clear_faults()
    whole_server.control.close()


@dataclass
class Node:
    """A machine without FUSE: it runs commands on one bucket."""

    server: ServerProcess
    source: str
    without_fuse: Path
    running: list["subprocess.Popen[str]"]

    def environment(self) -> dict[str, str]:
        """Return the variables of its processes."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("FUSECACHE_")}
        return {
            **others,
            "AWS_ACCESS_KEY_ID": self.server.access_key,
            "AWS_SECRET_ACCESS_KEY": self.server.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
            "S3_ENDPOINT_URL": self.server.endpoint_url,
        }

    def start(self, *words: str | Path) -> "subprocess.Popen[str]":
        """Start a command of fusecache; it ends with the test at the latest."""
        return self.start_program(FUSECACHE, *words)

    def start_program(self, *words: str | Path, stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        """Start a program; it ends with the test at the latest."""
        child = subprocess.Popen(
            words,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment(), "PYTHONPATH": f"{self.without_fuse}:{ROOT}"},
        )
        self.running.append(child)
        return child

    def run(self, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end, by a fork. Only a command of `start` finds no FUSE."""
        return run(FUSECACHE, *words, check=False, seconds=120, env=self.environment())

    def pull(self, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
        """Run `fusecache pull`."""
        return self.run("pull", self.source, folder, *flags)

    def push(self, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
        """Run `fusecache push`."""
        return self.run("push", folder, self.source, *flags)

    def pulled(self, folder: Path, *flags: str) -> dict[str, Any]:
        """Return what a pull reports."""
        done = self.pull(folder, "--json", *flags)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def node(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node on which whatever needs FUSE fails."""
    without_fuse = tmp_path_factory.mktemp("without-fuse")
    (without_fuse / "pyfuse3.py").write_text("raise ImportError('there is no FUSE here')\n")
    made = Node(server, f"s3://{server.bucket}", without_fuse, [])
    yield made
    for child in made.running:
        if child.poll() is None:
            child.kill()
        child.communicate()


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a folder by name, without fusecache's own."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".fusecache" not in path.relative_to(folder).parts
    }


def bucket_of(server: ServerProcess) -> dict[str, bytes]:
    """Return the content of all objects, directory markers left out."""
    return {key: server.control.read(key) for key in server.control.objects() if not key.endswith("/")}
