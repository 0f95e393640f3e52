"""A private one-node Ceph with an S3 gateway, all in memory: a store that is neither ours nor a model of one.

    ceph.py start DIR       build it in DIR (which must not exist), print endpoint, bucket and keys as JSON
    ceph.py stop DIR        end what start began in DIR and remove DIR
    ceph.py run -- COMMAND  start, run COMMAND with FUSECACHE_TEST_* and CEPH_CONF set, stop; exits as COMMAND does

Invariants:
1. Only loopback is listened on, on ports that were free at the start, so several may run side by side.
2. A process is ended only if its pid file lies in DIR and its command line names DIR.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

READY_SECONDS = 60.0
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
BUCKET = "fusecache-test"

CONFIG = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {root}/keyring
run dir = {root}/run
pid file = {root}/run/$name.pid
admin socket = {root}/run/$name.asok
log file = {root}/log/$name.log
mon cluster log file = {root}/log/cluster.log
mon data = {root}/mon
osd data = {root}/osd
# One copy of everything, in memory: nothing here is meant to survive.
osd objectstore = memstore
memstore device bytes = {capacity_bytes}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
# The gateway makes about eight pools on the only disk there is.
mon max pg per osd = 1000
# Without a manager nobody can scale pools.
osd pool default pg autoscale mode = off

[client.rgw]
rgw data = {root}/rgw
rgw frontends = beast endpoint=127.0.0.1:{gateway}
"""
CAPACITY_BYTES = 8 * 2**30


class CephError(Exception):
    """Ceph did not start; the message says which step, and what it printed."""


@dataclass(frozen=True)
class Gateway:
    """Where the started gateway listens, and the one user and bucket it has."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """The variables by which the tests find it."""
        return {f"FUSECACHE_TEST_{name.upper()}": value for name, value in asdict(self).items()}


def start(root: Path) -> Gateway:
    """Build and start a cluster in root, which must not exist. On failure everything is ended again.

    Raises CephError.
    """
    root.mkdir(parents=True)
    try:
        return _start(root)
    except BaseException:
        stop(root)
        raise


def stop(root: Path) -> None:
    """End the processes whose pid files lie in root, and remove root. Nothing there is no error."""
    processes = [pid for file in root.glob("run/*.pid") if (pid := _live_pid(file, root)) is not None]
    for pid in processes:
        # Nothing is kept, so nobody needs to say goodbye.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + STOP_SECONDS
    while any(_names_root(pid, root) for pid in processes):
        if time.monotonic() > deadline:
            raise CephError(f"processes {processes} did not end in {STOP_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    shutil.rmtree(root, ignore_errors=True)


def _start(root: Path) -> Gateway:
    for name in ("mon", "osd", "rgw", "run", "log"):
        (root / name).mkdir()
    mon_v2, mon_v1, gateway_port = _free_ports(3)
    fsid = str(uuid.uuid4())
    conf = root / "ceph.conf"
    conf.write_text(
        CONFIG.format(
            root=root,
            fsid=fsid,
            mon_v2=mon_v2,
            mon_v1=mon_v1,
            gateway=gateway_port,
            capacity_bytes=CAPACITY_BYTES,
        )
    )
    keyring = root / "keyring"

    def ceph(*words: str, stdin: str = "") -> str:
        return _output("ceph", "-c", conf, "--connect-timeout", "30", *words, stdin=stdin)

    everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
    _output(
        "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"
    )
    _output("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *everything)
    _output("ceph-authtool", keyring, "--gen-key", "-n", "client.rgw", *everything)
    monmap = root / "monmap"
    addresses = f"[v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]"
    _output("monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses, monmap)
    # The monitor takes client.admin and client.rgw from this keyring into its own database.
    _output("ceph-mon", "-c", conf, "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
    _output("ceph-mon", "-c", conf, "-i", "a")

    osd_id, osd_key = str(uuid.uuid4()), _output("ceph-authtool", "--gen-print-key").strip()
    ceph("osd", "new", osd_id, "-i", "-", stdin=json.dumps({"cephx_secret": osd_key}))
    with keyring.open("a") as file:
        file.write(f"[osd.0]\n\tkey = {osd_key}\n")
    _output("ceph-osd", "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", osd_id)
    _output("ceph-osd", "-c", conf, "-i", "0")
    _wait("the disk", lambda: json.loads(ceph("osd", "stat", "-f", "json"))["num_up_osds"] == 1)

    found = Gateway(
        endpoint=f"http://127.0.0.1:{gateway_port}",
        bucket=BUCKET,
        access_key=secrets.token_hex(10),
        secret_key=secrets.token_hex(20),
    )
    keys = (f"--access-key={found.access_key}", f"--secret-key={found.secret_key}")
    _output("radosgw-admin", "-c", conf, "user", "create", "--uid=test", "--display-name=test", *keys)
    _output("radosgw", "-c", conf, "-n", "client.rgw")
    _wait("the gateway", lambda: _bucket_made(found))
    return found


def _bucket_made(gateway: Gateway) -> bool:
    """Make the bucket; False as long as the gateway does not answer."""
    client = boto3.client(
        "s3",
        endpoint_url=gateway.endpoint,
        aws_access_key_id=gateway.access_key,
        aws_secret_access_key=gateway.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )
    try:
        client.create_bucket(Bucket=gateway.bucket)
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now; all are held until all are found, so they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _output(*command: str | Path, stdin: str = "") -> str:
    """Run a command to its end and return what it printed. Raises CephError with its complaint.

    The daemons leave a child behind, so their output goes to a file: on a pipe one would wait for them.
    """
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as complained:
        with tempfile.TemporaryFile("w+") as asked:
            asked.write(stdin)
            asked.seek(0)
            ended = subprocess.run(
                [str(word) for word in command], stdin=asked, stdout=printed, stderr=complained, check=False
            )
        printed.seek(0)
        complained.seek(0)
        if ended.returncode:
            raise CephError(f"{' '.join(map(str, command[:4]))}: {complained.read().strip()[-2000:]}")
        return printed.read()


def _wait(what: str, is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not is_ready():
        if time.monotonic() > deadline:
            raise CephError(f"{what} was not ready after {READY_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def _live_pid(pid_file: Path, root: Path) -> int | None:
    text = pid_file.read_text().strip()
    return int(text) if text and _names_root(int(text), root) else None


def _names_root(pid: int, root: Path) -> bool:
    """Whether the process lives and was started on this root: a pid may have gone to someone else."""
    try:
        return os.fsencode(root / "ceph.conf") in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False


def run(command: list[str]) -> int:
    """Run a command beside a fresh gateway and return its exit status; the gateway never outlives it."""

    def on_terminate(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, on_terminate)
    root = Path(tempfile.mkdtemp(prefix="fusecache-ceph-")) / "cluster"
    try:
        began = time.monotonic()
        gateway = start(root)
        sys.stderr.write(f"ceph is ready after {time.monotonic() - began:.0f} s at {gateway.endpoint}\n")
        environment = {**os.environ, **gateway.environment(), "CEPH_CONF": str(root / "ceph.conf")}
        with subprocess.Popen(command, env=environment) as child:
            try:
                return child.wait()
            except BaseException:
                child.terminate()
                raise
    finally:
        stop(root)
        root.parent.rmdir()


def main() -> int:
    """Do what the command line says and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("start", "stop"):
        verbs.add_parser(verb).add_argument("directory", type=Path)
    verbs.add_parser("run").add_argument("command", nargs="+")
    arguments = parser.parse_args()
    try:
        if arguments.verb == "run":
            return run(arguments.command)
        if arguments.verb == "stop":
            stop(arguments.directory.resolve())
        else:
            gateway = start(arguments.directory.resolve())
            sys.stdout.write(json.dumps(asdict(gateway)) + "\n")
    except CephError as error:
        sys.stderr.write(f"ceph: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
