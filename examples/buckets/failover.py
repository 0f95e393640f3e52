"""One data set at two endpoints: `python -m examples.buckets.failover` shows what happens when one of them fails.

Two of the tests' S3 servers on this machine hold the same objects. One mount reads from both. Then one server is killed
in the middle of a read, starts again, and serves other bytes under one key. Exit status 0: all checks held.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.s3server import ServerProcess, synthetic_bytes

FUSECACHE = Path(sys.executable).parent / "fusecache"
MIB = 1 << 20
FILES, FILE_BYTES = 60, 256 << 10
BIG_BYTES = 64 * MIB
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
        with ServerProcess() as first, ServerProcess() as second:
            for server in (first, second):
                fill(server)
            mount(folder, mountpoint, first, second)
            try:
                check_shares(mountpoint)
                check_failover(mountpoint, first, second)
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


def fill(server: ServerProcess) -> None:
    """Store the data set."""
    for seed in range(4 * FILES):
        server.control.add_synthetic(f"shards/{seed:04}", FILE_BYTES, seed)
    server.control.add_synthetic("big", BIG_BYTES, 1)


def mount(folder: Path, mountpoint: Path, first: ServerProcess, second: ServerProcess) -> None:
    """Mount the first server's bucket, with the second as another endpoint."""
    config = folder / "dataset.toml"
    config.write_text(
        f'source = "s3://{first.bucket}"\n'
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


def check_failover(mountpoint: Path, first: ServerProcess, second: ServerProcess) -> None:
    """Kill the server that serves a file in the middle of a read."""
    for server in (first, second):
        server.control.set(bandwidth=BYTES_PER_SECOND)
    before = [row["bytes_read"] for row in endpoints(mountpoint)]
    expected = synthetic_bytes(1, 0, BIG_BYTES)
    with open(mountpoint / "big", "rb", buffering=0) as file:
        data = file.read(MIB)
        grown = [row["bytes_read"] - old for row, old in zip(endpoints(mountpoint), before, strict=True)]
        serving = grown.index(max(grown))
        (first, second)[serving].kill()
        while piece := file.read(MIB):
            data += piece
    check(
        data == expected,
        f"endpoint {serving + 1} was killed during a read of {BIG_BYTES // MIB} MiB: no error, all bytes right",
    )
    read_shards(mountpoint, FILES)
    check(endpoints(mountpoint)[serving]["state"] == "failing", "status names it: " + verdict(mountpoint))
    (first, second)[serving].start()


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
        second.control.put(f"shards/{seed:04}", bytes(FILE_BYTES))
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
