"""The OCI image, run by podman: mounts a bucket, reads and writes, and says what it lacks. `make test-image`."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3server import ServerProcess
from tests.support import ROOT
from tests.support.mounts import wait_until

pytestmark = pytest.mark.skipif(
    not os.environ.get("FUSECACHE_TEST_IMAGE"), reason="needs podman and the image: make test-image"
)
MAY_MOUNT = ("--device=/dev/fuse", "--cap-add=SYS_ADMIN")
# Podman's own are more than a machine may allow that is a container itself.
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000")
STOP_SECONDS = "60"


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


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """Podman with the image that was built last."""
    (archive,) = (ROOT / "build" / "release").glob("fusecache-*-oci.tar")
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
            *MAY_MOUNT, "--detach", f"--name={name}",
            f"--env=AWS_ACCESS_KEY_ID={server.access_key}", f"--env=AWS_SECRET_ACCESS_KEY={server.secret_key}",
            f"--env=AWS_ENDPOINT_URL={server.endpoint_url}",
            command=("mount", "--foreground", f"s3://{server.bucket}", "/data"),
        )  # fmt: skip
        try:
            yield name, server
        finally:
            podman("rm", "--force", "--time", STOP_SECONDS, name)


def test_image_runs_fusecache(podman: Podman) -> None:
    assert podman.run("--rm", command=("version",)).stdout.startswith("fusecache ")


def test_image_without_the_device_says_how_to_give_it(podman: Podman) -> None:
    ended = podman.run(
        "--rm", command=("mount", "--foreground", "s3://bucket", "/data"), is_allowed_to_fail=True
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    assert "/dev/fuse is missing" in line
    assert "--device /dev/fuse --cap-add SYS_ADMIN" in line


def test_container_mounts_reads_and_writes(podman: Podman, mounted: tuple[str, ServerProcess]) -> None:
    name, server = mounted
    asks = ("exec", name, "fusecache", "health", "/data")
    wait_until(lambda: not podman(*asks, is_allowed_to_fail=True).returncode, "the mount answers", seconds=60)
    assert podman("exec", name, "cat", "/data/already/there").stdout == "bytes of another client"
    podman("exec", name, "sh", "-c", "printf written >/data/file && fusecache sync /data")
    assert server.control.read("file") == b"written"
    podman("exec", name, "sh", "-c", "printf last >/data/last")
    podman("stop", "--time", STOP_SECONDS, name)
    assert server.control.read("last") == b"last"
    assert podman("wait", name).stdout.strip() == "0"
