"""The files of examples/deploy for nodes that fill from each other: their own commands, on two nodes.

Each node has a folder for what they name by paths. There is no container, no Slurm and no DNS: a stand-in for srun runs
its command, and the name of the Service becomes the list of nodes.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.namespaces import PORT, Cluster, Node
from tests.s3server import synthetic_bytes
from tests.support.deploy_files import DEPLOY, compose_commands, pod_commands
from tests.support.mounts import FUSECACHE, wait_until

MIB = 1 << 20
SIZE = 64 * MIB - 777
DATA = synthetic_bytes(1, 0, SIZE)
# What a job does: it reads once all nodes serve, and stays until all have read.
JOB = """
until [ -e "$TOGETHER/go" ]; do sleep 0.1; done
cat "$MOUNT/model" >"$HERE/read"
touch "$TOGETHER/$NAME"
until [ -e "$TOGETHER/end" ]; do sleep 0.1; done
"""


class Machine:
    """A node on which commands run, with its folder, and what they write."""

    def __init__(self, node: Node, cluster: Cluster, folder: Path, peers: str) -> None:
        self.node, self.folder = node, folder / f"{node.name}-files"
        self.folder.mkdir()
        self.log = self.folder / "log"
        key = self.folder / "peers.key"
        key.write_bytes(cluster.key_file.read_bytes())
        key.chmod(0o600)
        (self.folder / "srun").write_text(
            '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
        )
        (self.folder / "srun").chmod(0o755)
        self.environment = {
            **node.environment,
            "PATH": f"{self.folder}:{FUSECACHE.parent}:{os.environ['PATH']}",
            "AWS_ENDPOINT_URL": cluster.server.endpoint_url,
            "BUCKET": f"s3://{cluster.server.bucket}",
            "PEERS": peers,
            "MOUNT": str(self.folder / "data"),
            "CACHE_DIR": str(self.folder / "cache"),
            "PEERS_KEY_FILE": str(key),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "10.77.0.[10-11]",
            "TOGETHER": str(folder),
            "HERE": str(self.folder),
            "NAME": node.name,
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, words: Sequence[str], environment: Mapping[str, str] = {}) -> None:
        """Start a command on the node."""
        own = {
            r"/mnt/fusecache/data|/mounts/data": self.environment["MOUNT"],
            r"(?<=--cache-dir )/cache\b": self.environment["CACHE_DIR"],
            r"/keys/peers\.key": self.environment["PEERS_KEY_FILE"],
            r"dns:fusecache:9470": self.environment["PEERS"],
        }
        for place, mine in own.items():
            words = [re.sub(place, mine, word) for word in words]
        with open(self.log, "ab") as log:
            self.processes.append(
                subprocess.Popen(
                    ["nsenter", f"--net=/run/netns/{self.node.name}", *words],
                    stdout=log, stderr=log, start_new_session=True, env={**environment, **self.environment},
                )
            )  # fmt: skip

    def serves(self) -> bool:
        """Whether the other nodes are served. Fails if a command has ended."""
        written = self.log.read_text()
        assert not any(each.poll() for each in self.processes), written[-3000:]
        return "is at http" in written

    def end(self) -> None:
        """End all commands, and the mount."""
        for each in reversed(self.processes):
            each.terminate()
        for each in self.processes:
            try:
                each.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
        mount = self.environment["MOUNT"]
        if os.path.ismount(mount):
            subprocess.run([FUSECACHE, "unmount", mount], check=True, capture_output=True, timeout=60)


@pytest.fixture
def machines(cluster: Cluster, tmp_path: Path) -> Iterator[list[Machine]]:
    """Two nodes. The bucket has one object, `model`."""
    cluster.server.control.add_synthetic("model", SIZE, 1)
    nodes = cluster.nodes[:2]
    peers = ",".join(f"{node.address}:{PORT}" for node in nodes)
    with ExitStack() as stack:
        made = [Machine(node, cluster, tmp_path, peers) for node in nodes]
        for each in made:
            stack.callback(each.end)
        yield made


def all_serve(machines: list[Machine]) -> bool:
    return all([each.serves() for each in machines])


@pytest.mark.parametrize("name", ["compose", "kubernetes", "many-nodes.sh"])
def test_services_of_two_nodes_fill_from_each_other(
    name: str, cluster: Cluster, machines: list[Machine]
) -> None:
    for machine in machines:
        commands = [([str(DEPLOY / name), machine.environment["PEERS"]], {})]
        if name == "compose":
            commands = compose_commands(DEPLOY / "compose/many-nodes.yaml", machine.environment)
        elif name == "kubernetes":
            commands = pod_commands(DEPLOY / "kubernetes/many-nodes.yaml")
        # The service first: it waits for its mount.
        for words, environment in reversed(commands):
            machine.start(words, environment)
    wait_until(lambda: all_serve(machines), "all serve", 120)
    readers = [
        machine.node.run("cat", f"{machine.environment['MOUNT']}/model", stdout=subprocess.PIPE)
        for machine in machines
    ]
    for reader in readers:
        found, _ = reader.communicate(timeout=120)
        assert found == DATA
    assert SIZE <= cluster.sent() < 1.05 * SIZE


@pytest.mark.parametrize("name", ["slurm/many-nodes.sbatch", "node.sh"])
def test_jobs_on_two_nodes_fill_from_each_other(
    name: str, cluster: Cluster, machines: list[Machine], tmp_path: Path
) -> None:
    for machine in machines:
        words = [] if name.endswith(".sbatch") else ["run"]
        machine.start(["bash", str(DEPLOY / name), *words, "sh", "-euc", JOB])
    wait_until(lambda: all_serve(machines), "all serve", 120)
    (tmp_path / "go").touch()
    wait_until(
        lambda: all((tmp_path / machine.node.name).exists() for machine in machines), "all have read", 120
    )
    assert all((machine.folder / "read").read_bytes() == DATA for machine in machines)
    assert SIZE <= cluster.sent() < 1.05 * SIZE
    (tmp_path / "end").touch()
    for machine in machines:
        assert [each.wait(60) for each in machine.processes] == [0], machine.log.read_text()[-3000:]
        assert not os.path.ismount(machine.environment["MOUNT"])
        # No program listens on the port any more.
        assert machine.node.run("bash", "-c", f"exec 3<>/dev/tcp/{machine.node.address}/{PORT}").wait(20)
