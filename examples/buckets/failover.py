"""One data set at two endpoints: `python -m examples.buckets.failover` shows what happens when one of them fails.

Two servers hold the same objects: the tests' S3 server on this machine, and the store of FUSECACHE_TEST_*, or else
another such server. One mount reads from both. Then a server is killed in the middle of a read, starts again, and the
second one serves other bytes under some keys. Exit status 0: all checks held.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from examples.buckets.store import Store, open_store
from tests.s3server import ServerProcess, synthetic_bytes

FUSECACHE = Path(sys.executable).parent / "fusecache"
MIB = 1 << 20
FILES, FILE_BYTES = 60, 256 << 10
# Of so many, one is read at each server.
BIG_FILES, BIG_BYTES = 6, 32 * MIB
# Below it lies the data set.
PREFIX = f"failover-{os.getpid()}"
# So slow that the read of the big file lasts some seconds.
BYTES_PER_SECOND = 4e6
WAIT_SECONDS = 60.0


class CheckError(Exception):
    """Something was not as this example promises."""


def main() -> int:
    """Run all checks; return the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="fusecache-failover-", dir="/var/tmp"))
    mountpoint = folder / "data"
    mountpoint.mkdir()
    try:
        with (
            open_store() as first,
            ServerProcess(
                bucket=first.bucket, access_key=first.access_key, secret_key=first.secret_key
            ) as second,
        ):
            fill(first, second)
            mount(folder, mountpoint, first, second)
            try:
                check_shares(mountpoint)
                check_failover(mountpoint, first.server, second)
                check_return(mountpoint)
                check_other_bytes(mountpoint, second)
            finally:
                subprocess.run([FUSECACHE, "unmount", mountpoint, "--force"], check=True)
    except CheckError as exc:
        say(f"FAILED  {exc}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def fill(first: Store, second: ServerProcess) -> None:
    """Store the data set at both."""
    if first.server is not None:
        for server in (first.server, second):
            for key, size, seed in objects():
                server.control.add_synthetic(key, size, seed)
        return
    client = boto3.client(
        "s3",
        endpoint_url=first.endpoint_url,
        aws_access_key_id=first.access_key,
        aws_secret_access_key=first.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    with closing(client):
        for key, size, seed in objects():
            data = synthetic_bytes(seed, 0, size)
            client.put_object(Bucket=first.bucket, Key=key, Body=data)
            second.control.put(key, data)


def objects() -> Iterator[tuple[str, int, int]]:
    """Yield key, bytes and seed of each object."""
    for seed in range(4 * FILES):
        yield f"{PREFIX}/shards/{seed:04}", FILE_BYTES, seed
    for seed in range(BIG_FILES):
        yield f"{PREFIX}/big-{seed}", BIG_BYTES, seed


def mount(folder: Path, mountpoint: Path, first: Store, second: ServerProcess) -> None:
    """Mount the first store's bucket, with the second as another endpoint."""
    config = folder / "dataset.toml"
    config.write_text(
        f'source = "s3://{first.bucket}/{PREFIX}"\n'
        f'mountpoint = "{mountpoint}"\n'
        f'endpoint_url = "{first.endpoint_url}"\n'
        f'cache_dir = "{folder / "cache"}"\n'
        "read_only = true\n\n"
        f'[[endpoint]]\nurl = "{second.endpoint_url}"\n'
    )
    keys = {"AWS_ACCESS_KEY_ID": first.access_key, "AWS_SECRET_ACCESS_KEY": first.secret_key}
    say(config.read_text())
    subprocess.run([FUSECACHE, "mount", "--config", config], check=True, env={**os.environ, **keys})


def check_shares(mountpoint: Path) -> None:
    """Read many files: both servers serve some."""
    read_shards(mountpoint, 0)
    gets = [row["gets"] for row in endpoints(mountpoint)]
    check(
        min(gets) >= FILES / 4,
        f"{FILES} files were read, {gets[0]} GETs at the first and {gets[1]} at the second",
    )


def check_failover(mountpoint: Path, first: ServerProcess | None, second: ServerProcess) -> None:
    """Kill a server of ours that serves a file in the middle of a read."""
    servers = (first, second)
    for server in servers:
        if server is not None:
            server.control.set(bandwidth=BYTES_PER_SECOND)
    for seed in range(BIG_FILES):
        before = [row["bytes_read"] for row in endpoints(mountpoint)]
        with open(mountpoint / f"big-{seed}", "rb", buffering=0) as file:
            data = file.read(MIB)
            grown = [row["bytes_read"] - old for row, old in zip(endpoints(mountpoint), before, strict=True)]
            serving = grown.index(max(grown))
            killed = servers[serving]
            if killed is None:
                continue
            killed.kill()
            while piece := file.read(MIB):
                data += piece
        break
    else:
        raise CheckError("no large file was read at the server that can be killed")
    check(
        data == synthetic_bytes(seed, 0, BIG_BYTES),
        f"endpoint {serving + 1} was killed during a read of {BIG_BYTES // MIB} MiB: no error, all bytes right",
    )
    read_shards(mountpoint, FILES)
    check(endpoints(mountpoint)[serving]["state"] == "failing", "status names it: " + verdict(mountpoint))
    killed.start()


def check_return(mountpoint: Path) -> None:
    """The server runs again: it gets reads without anybody's help."""
    number = 2 * FILES

    def is_back() -> bool:
        nonlocal number
        read_shard(mountpoint, number)
        number = 2 * FILES + (number + 1) % FILES
        return all(row["state"] != "failing" for row in endpoints(mountpoint))

    wait_until(is_back, "it was started again, and gets reads again")


def check_other_bytes(mountpoint: Path, second: ServerProcess) -> None:
    """Other bytes under the same keys are never read, and are named."""
    for seed in range(3 * FILES, 4 * FILES):
        second.control.put(f"{PREFIX}/shards/{seed:04}", bytes(FILE_BYTES))
    read_shards(mountpoint, 3 * FILES)
    unused = endpoints(mountpoint)[1]["unused_copies"]
    check(
        unused.get("other bytes", 0) > 0,
        f"the second endpoint has other bytes now: none were read, {unused} named",
    )


def read_shards(mountpoint: Path, start: int) -> None:
    """Read one part of the files and compare their bytes."""
    for number in range(start, start + FILES):
        read_shard(mountpoint, number)


def read_shard(mountpoint: Path, number: int) -> None:
    """Read one file and compare its bytes."""
    if (mountpoint / "shards" / f"{number:04}").read_bytes() != synthetic_bytes(number, 0, FILE_BYTES):
        raise CheckError(f"shards/{number:04} has wrong bytes")


def status(mountpoint: Path) -> dict[str, Any]:
    """Return what `fusecache status --json` says."""
    found: dict[str, Any] = json.loads((mountpoint / ".fusecache" / "stats.json").read_text())
    return found


def endpoints(mountpoint: Path) -> list[dict[str, Any]]:
    """Return the status of both endpoints."""
    rows: list[dict[str, Any]] = status(mountpoint)["endpoints"]
    return rows


def verdict(mountpoint: Path) -> str:
    """Return the state of each endpoint in words."""
    return ", ".join(f"{row['endpoint']} {row['state']}" for row in endpoints(mountpoint))


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Wait for something that takes a while. Raises CheckError."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        if time.monotonic() > deadline:
            raise CheckError(f"not within {WAIT_SECONDS:g} s: {what}")
        time.sleep(0.2)
    say(f"ok      {what}")


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def check(holds: bool, what: str) -> None:  # noqa: FBT001  # a condition, and what it means
    """Say what was checked. Raises CheckError."""
    if not holds:
        raise CheckError(what)
    say(f"ok      {what}")


if __name__ == "__main__":
    sys.exit(main())
