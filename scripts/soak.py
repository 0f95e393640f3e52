"""Hours in minutes: sixteen readers at random over five times what the cache may hold, every byte compared.

`python -m scripts.soak --minutes 10` makes a mount of the test server, reads for that long, prints one JSON line, and
exits with 1 if a byte was wrong, a read failed, the cache's limit was exceeded at any sample (each 100 ms, by the
daemon's account and by the blocks of its files), or memory grew.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.s3server import ServerProcess, synthetic_bytes
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket, Service

MIB = 2**20
READERS = 16
SAMPLE_SECONDS = 0.1
CACHE_SHARE = 5
# Large shards, and small files whose last page is not whole.
SHARD_BYTES = 48 * MIB + 12_345
SMALL_BYTES = 150_001
SMALL_FILES = 400
LENGTHS = (4096, 65_536, 131_072, MIB)
RUN_BYTES = 12 * MIB
GROWTH = 0.05


@dataclass
class Findings:
    """What readers and sampler saw. Bytes, and seconds since the start."""

    reads: int = 0
    read_bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    samples: int = 0
    over_limit: int = 0
    most_on_disk: int = 0
    most_accounted: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Dataset:
    """Files that are functions of their number: `f<number>`."""

    def __init__(self, total_bytes: int) -> None:
        shards = max(1, (total_bytes - SMALL_FILES * SMALL_BYTES) // SHARD_BYTES)
        self.sizes = [SHARD_BYTES] * shards + [SMALL_BYTES] * SMALL_FILES

    def store(self, bucket: Bucket) -> None:
        """Make the objects; they take no space."""
        for number, size in enumerate(self.sizes):
            bucket.control.add_synthetic(f"{bucket.prefix}f{number}", size, number)

    def choose(self, chance: random.Random) -> int:
        """Return a file's number: as often a small one as a shard."""
        shards = len(self.sizes) - SMALL_FILES
        return (
            chance.randrange(shards) if chance.random() < 0.5 else chance.randrange(shards, len(self.sizes))
        )


def read_on(root: Path, dataset: Dataset, seed: int, stop: threading.Event, findings: Findings) -> None:
    """Read at random, and now and then a stretch in order, until told to stop."""
    chance = random.Random(seed)
    while not stop.is_set() and not findings.wrong:
        number = dataset.choose(chance)
        size = dataset.sizes[number]
        try:
            with open(root / f"f{number}", "rb", buffering=0) as file:
                for _ in range(8):
                    offset, length = chance.randrange(size), chance.choice(LENGTHS)
                    end = offset + (RUN_BYTES if chance.random() < 0.05 else length)
                    # Out of the kernel's pages, so that the daemon is asked.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    while offset < min(end, size):
                        _compare(file.fileno(), number, size, offset, length, findings)
                        offset += length
        except OSError as exc:
            findings.errors.append(f"f{number}: {exc}")


def _compare(descriptor: int, number: int, size: int, offset: int, length: int, findings: Findings) -> None:
    data = os.pread(descriptor, length, offset)
    expected = synthetic_bytes(number, offset, min(length, size - offset))
    with findings.lock:
        findings.reads += 1
        findings.read_bytes += len(data)
    if data != expected:
        findings.wrong.append(f"f{number}: {len(data)} bytes at {offset} are others")


def sample_on(mount: Mount, limit_bytes: int, stop: threading.Event, findings: Findings) -> None:
    """Look at disk and memory ten times a second."""
    began = time.monotonic()
    while not stop.wait(SAMPLE_SECONDS):
        on_disk = _bytes_on_disk(mount, limit_bytes)
        facts = json.loads((mount.path / ".fusecache" / "stats.json").read_text())
        accounted = sum(_number(facts, name) for name in ("used_bytes", "staging_bytes"))
        findings.samples += 1
        findings.over_limit += on_disk > limit_bytes or accounted > limit_bytes
        findings.most_on_disk = max(findings.most_on_disk, on_disk)
        findings.most_accounted = max(findings.most_accounted, accounted)
        findings.memory.append((time.monotonic() - began, _memory_bytes(mount.pid)))


def _bytes_on_disk(mount: Mount, limit_bytes: int) -> int:
    """Return what cache and staging files hold.

    Files change while they are counted: bytes that are freed after their file was counted, and written to one that is
    counted later, are there twice. So more than the limit counts only if three looks in a row say so.
    """
    for _ in range(3):
        found = _blocks_below(mount.cache / "cache" / "files") + _blocks_below(mount.cache / "staging")
        if found <= limit_bytes:
            break
    return found


def _blocks_below(folder: Path) -> int:
    """Return the bytes of all files' blocks; files may go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def _number(facts: Any, name: str) -> int:
    """Return a counter of the cache, wherever the statistics show it."""
    if isinstance(facts, dict):
        if isinstance(facts.get(name), int):
            return facts[name]
        found = [number for value in facts.values() if (number := _number(value, name))]
        return found[0] if found else 0
    return 0


def _memory_bytes(pid: int) -> int:
    """Return what the process holds of its own: RssAnon and RssShmem."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(rows[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def memory_growth(memory: list[tuple[float, int]]) -> tuple[int, int]:
    """Return the medians of the second and the last of the run's minutes (of its quarters, if it is shorter)."""
    window = min(60.0, memory[-1][0] / 4)
    early = [value for moment, value in memory if window <= moment < 2 * window]
    late = [value for moment, value in memory if moment >= memory[-1][0] - window]
    return int(statistics.median(early)), int(statistics.median(late))


def soak(minutes: float, data_mib: int, memory_mib: int, directory: Path) -> dict[str, Any]:
    """Run it; return what was found."""
    limit = data_mib * MIB // CACHE_SHARE
    dataset = Dataset(data_mib * MIB)
    findings = Findings()
    stop = threading.Event()
    with ServerProcess() as server:
        service = Service(
            server.endpoint_url, server.access_key, server.secret_key, server.bucket, server.control
        )
        bucket = Bucket(service, service.client(), "soak/")
        dataset.store(bucket)
        mount = Mount(bucket, directory / "mnt", directory / "state")
        mount.path.mkdir()
        mount.start("--cache-size", str(limit), "--memory", f"{memory_mib}MiB", "--log-level", "info")
        try:
            threads = [threading.Thread(target=sample_on, args=(mount, limit, stop, findings))]
            threads += [
                threading.Thread(target=read_on, args=(mount.path, dataset, seed, stop, findings))
                for seed in range(READERS)
            ]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + minutes * 60
            while time.monotonic() < deadline and not findings.wrong and len(findings.errors) < READERS:
                time.sleep(0.2)
            facts = json.loads((mount.path / ".fusecache" / "stats.json").read_text())
            alarms = mount.new_alarms()
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)
            problems = mount.remove()
    early, late = memory_growth(findings.memory)
    return {
        "minutes": minutes,
        "readers": READERS,
        "data_bytes": sum(dataset.sizes),
        "limit_bytes": limit,
        "reads": findings.reads,
        "read_bytes": findings.read_bytes,
        "hits": _number(facts, "hits"),
        "misses": _number(facts, "misses"),
        "evicted_bytes": _number(facts, "evicted_bytes"),
        "samples": findings.samples,
        "samples_over_limit": findings.over_limit,
        "most_on_disk_bytes": findings.most_on_disk,
        "most_accounted_bytes": findings.most_accounted,
        "memory_early_bytes": early,
        "memory_late_bytes": late,
        "memory_growth": round(late / early - 1, 4),
        "wrong": findings.wrong[:5],
        "errors": findings.errors[:5],
        "alarms": [*alarms, *problems][:5],
    }


def is_good(result: dict[str, Any]) -> bool:
    """Say whether the run found nothing."""
    return (
        not (result["wrong"] or result["errors"] or result["alarms"] or result["samples_over_limit"])
        and result["reads"] > 0
        and result["most_accounted_bytes"] > 0
        and result["memory_growth"] < GROWTH
    )


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Read at random for minutes, and compare every byte.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--data-mib", type=int, default=2560, help="size of the bucket's data; the cache has a fifth"
    )
    parser.add_argument("--memory-mib", type=int, default=128, help="buffers of the daemon")
    parser.add_argument(
        "--directory", type=Path, help="where the cache lies; default: the system's for such files"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fusecache-soak-", dir=options.directory) as directory:
        result = soak(options.minutes, options.data_mib, options.memory_mib, Path(directory))
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if is_good(result) else 1


if __name__ == "__main__":
    sys.exit(main())
