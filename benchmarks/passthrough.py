"""Passthrough beside the native cache file, and beside reads through the daemon, in turns, in one run.

`python -m benchmarks.passthrough` prints a table: fio's rates, medians over rounds. The file's pages are warm, those of
FUSE are dropped before each run through the daemon. Last: opening, reading and closing files of several sizes, which
says from which size on passthrough is worth its open (`LEAST_BYTES`). Needs root, Linux 6.9 and fio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fusecache.fs.passthrough import LEAST_BYTES
from tests.s3server import ServerProcess
from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket, Service

MIB = 2**20
FILE_BYTES = 512 * MIB
CASES = {
    "sequential, 1 MiB": (("--rw=read", "--bs=1M", "--ioengine=psync"), 0.95),
    "random 4 KiB": (("--rw=randread", "--bs=4k", "--ioengine=psync"), 0.85),
    "mmap, sequential": (("--rw=read", "--bs=1M", "--ioengine=mmap"), 0.9),
    "mmap, random 4 KiB": (("--rw=randread", "--bs=4k", "--ioengine=mmap"), 0.9),
    "random 4 KiB, O_DIRECT": (("--rw=randread", "--bs=4k", "--ioengine=psync", "--direct=1"), 0.85),
}
# On both sides of LEAST_BYTES.
FILE_SIZES = (64 * 1024, LEAST_BYTES // 4, LEAST_BYTES - 1, LEAST_BYTES, 4 * LEAST_BYTES, 16 * LEAST_BYTES)
OPENS = 30


def _rate(path: Path, words: tuple[str, ...], seconds: float, *, is_cold: bool) -> float:
    """Return the bytes a second of one run of fio."""
    done = subprocess.run(
        [
            "fio", "--name=case", f"--filename={path}", f"--size={FILE_BYTES}", "--readonly", "--thread",
            "--time_based", f"--runtime={int(seconds * 1000)}ms", f"--invalidate={int(is_cold)}",
            "--output-format=json", *words,
        ],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def _open_seconds(path: Path) -> float:
    """Return the seconds that opening, reading and closing a file takes."""
    began = time.perf_counter()
    for _ in range(OPENS):
        with open(path, "rb", buffering=0) as file:
            while file.read(MIB):
                pass
    return (time.perf_counter() - began) / OPENS


def _warm(mount: Mount, name: str, *, passes: bool) -> int:
    """Fetch a file into the cache, and return a descriptor, by passthrough if it `passes`."""
    run(FUSECACHE, "warm", "--wait", mount.path / name)

    def opened() -> int:
        fd = os.open(mount.path / name, os.O_RDONLY)
        if not passes or mount.status()["read_directly"]["kernel"]:
            return fd
        os.close(fd)
        return 0

    return int(wait_until(opened, f"{name}: passthrough", seconds=120))


def compare(passing: Mount, daemon: Mount, rounds: int, seconds: float) -> list[str]:
    """Return the rows of the table."""
    held = [_warm(passing, "data", passes=True), _warm(daemon, "data", passes=False)]
    (native,) = [
        path for path in (passing.cache / "cache" / "files").glob("??/*") if path.stat().st_size == FILE_BYTES
    ]
    native.read_bytes()
    paths = {"native": native, "passthrough": passing.path / "data", "daemon": daemon.path / "data"}
    rows = []
    for case, (words, bar) in CASES.items():
        rates: dict[str, list[float]] = {way: [] for way in paths}
        for number in range(rounds):
            for way in list(paths) if number % 2 else reversed(paths):
                rates[way].append(_rate(paths[way], words, seconds, is_cold=way == "daemon"))
        median = {way: statistics.median(found) / 1e6 for way, found in rates.items()}
        ratio, other = (
            statistics.median(a / b for a, b in zip(rates[way], rates["native"], strict=True))
            for way in ("passthrough", "daemon")
        )
        rows.append(
            f"| {case} | {ratio:.2f} | {bar} | {other:.2f} | {median['native']:.0f} | {median['passthrough']:.0f} "
            f"| {median['daemon']:.0f} |"
        )
    for fd in held:
        os.close(fd)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.passthrough", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each case, way and round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, ServerProcess() as server:
        service = Service(
            server.endpoint_url, server.access_key, server.secret_key, server.bucket, server.control
        )
        bucket = Bucket(service, service.client(), "")
        bucket.put("data", os.urandom(FILE_BYTES))
        for size in FILE_SIZES:
            bucket.put(f"file-{size}", os.urandom(size))
        mounts = [
            Mount(bucket, Path(folder) / name, Path(folder) / f"{name}-cache") for name in ("pass", "own")
        ]
        passing, daemon = mounts
        try:
            for mount, flags in ((passing, ("--read-only",)), (daemon, ())):
                mount.path.mkdir()
                mount.start("--cache-size", "4GiB", *flags)
            lines = [
                "| case | passthrough / native | bar | daemon / native | native, MB/s | passthrough | daemon |",
                "|---|---|---|---|---|---|---|",
                *compare(passing, daemon, options.rounds, options.seconds),
                "",
                "| open, read, close | read-only mount, µs | for writing, µs |",
                "|---|---|---|",
            ]
            for size in FILE_SIZES:
                for mount in mounts:
                    os.close(_warm(mount, f"file-{size}", passes=mount is passing and size >= LEAST_BYTES))
                times: list[list[float]] = [[], []]
                for _ in range(options.rounds):
                    for mount, found in zip(mounts, times, strict=True):
                        found.append(_open_seconds(mount.path / f"file-{size}") * 1e6)
                first, second = (statistics.median(found) for found in times)
                lines.append(f"| {size} B | {first:.0f} | {second:.0f} |")
            sys.stdout.write("\n".join(lines) + "\n")
        finally:
            for mount in mounts:
                mount.remove()


if __name__ == "__main__":
    main()
