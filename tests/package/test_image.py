"""The OCI image, run by podman: mounts a bucket, trains with the device and without, and says what it lacks.

`make test-image`. The trainer's interpreter and packages are those of this machine, as the image has no loader.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fusecache.model.objects import MIB
from loader import MDSWriter
from tests.s3server import ServerProcess
from tests.support import ROOT
from tests.support.mounts import wait_until

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("FUSECACHE_TEST_IMAGE"), reason="needs podman and the image: make test-image"
    ),
    pytest.mark.timeout(900),  # each container is a copy of the image
]
MAY_MOUNT = ("--device=/dev/fuse", "--cap-add=SYS_ADMIN")
# Podman's own are more than a machine may allow that is a container itself.
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000")
STOP_SECONDS = "60"
MEMORY_MIB = 512
SAMPLES = 640
PYTHON = str(ROOT / ".venv" / "bin" / "python")


class Podman:
    """Podman with a storage of its own. Containers see this machine's network, where the test's bucket is."""

    def __init__(self, folder: Path, archive: Path) -> None:
        self._command: list[str | Path] = [
            "podman", "--root", folder / "storage", "--runroot", folder / "run", "--tmpdir", folder / "tmp",
            "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "none", "--runtime", "runc",
        ]  # fmt: skip
        self.image = self("load", "--input", archive).stdout.split()[-1]

    def __call__(
        self, *words: str | Path, is_allowed_to_fail: bool = False
    ) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run([*self._command, *words], capture_output=True, text=True, check=False)
        assert is_allowed_to_fail or ended.returncode == 0, f"{words}: {ended.stderr}"
        return ended

    def run(
        self, *options: str, command: tuple[str, ...] = (), **keywords: bool
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of fusecache in a new container."""
        return self("run", "--network=host", *LIMITS, *options, self.image, *command, **keywords)

    def train(self, server: ServerProcess, *options: str, command: tuple[str, ...]) -> None:
        """Run a command in a container that sees the trainer, its interpreter and its packages."""
        environment = ROOT / ".venv"
        shown = {ROOT, environment.resolve(), Path(sys.base_prefix)} - {Path("/usr")}
        volumes = [f"--volume={each}:{each}:ro" for each in shown]
        self.run("--rm", *volumes, *_keys(server), *options, command=command)


def _keys(server: ServerProcess) -> tuple[str, ...]:
    return (
        f"--env=AWS_ACCESS_KEY_ID={server.access_key}",
        f"--env=AWS_SECRET_ACCESS_KEY={server.secret_key}",
        f"--env=AWS_ENDPOINT_URL={server.endpoint_url}",
    )


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """Podman with the image that was built last."""
    archives = (ROOT / "build" / "release").glob("*-oci.tar")
    archive = max(archives, key=lambda path: path.stat().st_mtime)
    # Below build: what a container's layers are kept in is large, and must allow devices.
    folder = ROOT / "build" / f"podman-{uuid.uuid4().hex[:8]}-root"
    folder.mkdir()
    try:
        yield Podman(folder, archive)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def mounted(podman: Podman) -> Iterator[tuple[str, ServerProcess]]:
    """A container that mounts a bucket at /data, and the bucket's server."""
    with ServerProcess() as server:
        server.control.put("already/there", b"bytes of another client")
        name = f"fusecache-{uuid.uuid4().hex[:8]}"
        podman.run(
            *MAY_MOUNT, *_keys(server), "--detach", f"--name={name}", f"--memory={MEMORY_MIB}m",
            command=("mount", "--foreground", f"s3://{server.bucket}", "/data"),
        )  # fmt: skip
        try:
            yield name, server
        finally:
            podman("rm", "--force", "--time", STOP_SECONDS, name)


def test_image_runs_fusecache(podman: Podman) -> None:
    assert podman.run("--rm", command=("version",)).stdout.startswith("fusecache ")


def test_image_without_the_device_says_what_to_do(podman: Podman) -> None:
    ended = podman.run(
        "--rm", command=("mount", "--foreground", "s3://bucket", "/data"), is_allowed_to_fail=True
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    assert "/dev/fuse is missing" in line
    assert "--device /dev/fuse --cap-add SYS_ADMIN" in line
    assert "`fusecache pull`, `push` and `watch`" in line


def test_container_mounts_reads_and_writes(podman: Podman, mounted: tuple[str, ServerProcess]) -> None:
    name, server = mounted
    asks = ("exec", name, "fusecache", "health", "/data")
    wait_until(lambda: not podman(*asks, is_allowed_to_fail=True).returncode, "the mount answers", seconds=60)
    assert podman("exec", name, "cat", "/data/already/there").stdout == "bytes of another client"
    podman("exec", name, "sh", "-c", "printf written >/data/file && fusecache sync /data")
    assert server.control.read("file") == b"written"
    status = json.loads(podman("exec", name, "fusecache", "status", "/data", "--json").stdout)
    assert status["options"]["memory"] == MEMORY_MIB * MIB // 8
    podman("exec", name, "sh", "-c", f"kill -9 {status['pid']}")
    # The keeper is the container's process 1.
    assert podman("exec", name, "cat", "/data/file").stdout == "written"
    podman("exec", name, "sh", "-c", "printf last >/data/last")
    podman("stop", "--time", STOP_SECONDS, name)
    assert server.control.read("last") == b"last"
    assert podman("wait", name).stdout.strip() == "0"


def test_training_without_the_device_does_what_it_does_on_a_mount(podman: Podman, tmp_path: Path) -> None:
    """pull, train, push: the same order of the samples, and the same bucket in the end."""
    numbers = np.random.default_rng(7)
    with MDSWriter(tmp_path, {"x": "ndarray:float64:64", "number": "int"}, size_limit=1 << 16) as writer:
        for number in range(SAMPLES):
            writer.write({"x": numbers.standard_normal(64), "number": number})
    train = f"{PYTHON} -m tests.package.train"
    with ServerProcess() as server:
        server.control.add_bucket("mounted")
        server.control.add_bucket("pulled")
        for bucket in ("mounted", "pulled"):
            for file in tmp_path.iterdir():
                server.control.put(f"dataset/{file.name}", file.read_bytes(), bucket=bucket)
        podman.train(
            server, *MAY_MOUNT,
            command=("run", "--mount", "s3://mounted", "/data", "--", "sh", "-c", f"cd {ROOT} && {train} /data"),
        )  # fmt: skip
        script = (
            f"! test -e /dev/fuse && fusecache pull s3://pulled /local && cd {ROOT} && {train} /local && "
            "fusecache push /local s3://pulled"
        )
        podman.train(server, "--entrypoint=sh", command=("-euc", script))
        mounted, pulled = (
            {key: server.control.read(key, bucket=bucket) for key in server.control.objects(bucket=bucket)}
            for bucket in ("mounted", "pulled")
        )
    assert pulled == mounted
    order = mounted["run/order.txt"].decode().split()
    assert len(order) == 2 * SAMPLES
    assert set(order) == set(map(str, range(SAMPLES)))
    assert order != sorted(order, key=int)
    assert "run/final.npy" in mounted
