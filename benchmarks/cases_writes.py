"""The cases in which files are written: by large and by small pieces, and until the bucket has them."""

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench import GIB, MIB, Bench, fetch, write
from benchmarks.origins import Origin, Site
from benchmarks.peers import FUSECACHE, WRITERS, Mount, Peer
from benchmarks.processes import BenchmarkError, TooSlow, drop_pages
from benchmarks.published import check_object, wait_published
from benchmarks.writers import pieces

BUCKET = "writes"
KEY = "object"
LARGE_STEP = 4 * MIB
SMALL_STEP = 4096
SMALL_FILES = 3
# What the daemon makes of 1 GiB, and so what the raw client sends.
PART_BYTES = 64 * MIB
DURABLE_SECONDS = 60.0
# The default of the option settle_seconds.
SETTLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class DiscardFs:
    """`benchmarks.discardfs` as a peer: nothing behind it."""

    name: str = "discard-fs"

    def command(self, site: Site, path: Path, cache: Path) -> list[str]:
        """Return the words that mount it."""
        return [sys.executable, "-m", "benchmarks.discardfs", str(path)]

    def environment(self, site: Site) -> dict[str, str]:
        """Return its variables."""
        return site.environment()

    def is_ready(self, log: str) -> bool:
        """Return whether the kernel's settings are written."""
        return "ready" in log


DISCARD_FS = DiscardFs()


def large(bench: Bench, origin: Origin) -> None:
    """Write 1 GiB by 4 MiB and close it; with latency, wait until the bucket has it, beside boto3 without a mount."""
    competitors: list[Peer | None] = [FUSECACHE] if origin.tls else [DISCARD_FS, *WRITERS]
    if origin.latency_seconds:
        competitors.append(None)
    for peer in bench.turn(competitors):
        if peer is None:
            bench.record(f"durable {origin.name}", "raw", partial(_raw, bench, origin))
        else:
            _write_and_wait(bench, origin, peer)


def small(bench: Bench, origin: Origin) -> None:
    """Write 256 MiB by 4 KiB and close it, several times."""
    case = f"write4k {origin.name}"
    # No bar compares with the peers here: once is enough.
    peers = (FUSECACHE, DISCARD_FS) if bench.round > 1 else (DISCARD_FS, *WRITERS)
    for peer in bench.turn(peers):
        try:
            with bench.writable(peer, origin, BUCKET) as mount:
                bench.record(case, peer.name, partial(_write_small, bench, origin, peer, mount))
        except BenchmarkError as exc:
            bench.record_failure(case, peer.name, exc)


def _write_and_wait(bench: Bench, origin: Origin, peer: Peer) -> None:
    case, size = f"write {origin.name}", bench.sizes.written_bytes
    written: dict[str, Any] = {}

    def write_large(mount: Mount) -> dict[str, float]:
        mount.memory.take()
        written["cpu"] = mount.cpu_seconds()
        written.update(write("sequential", path=str(mount.path / KEY), size=size, step_bytes=LARGE_STEP))
        return {"rate": size / written["seconds"], "seconds": written["seconds"]}

    try:
        with bench.writable(peer, origin, BUCKET) as mount:
            if bench.record(case, peer.name, partial(write_large, mount)) and _is_waited_for(origin, peer):
                bench.record(
                    f"durable {origin.name}", peer.name, partial(_wait, bench, origin, mount, written)
                )
    except BenchmarkError as exc:
        bench.record_failure(case, peer.name, exc)


def _is_waited_for(origin: Origin, peer: Peer) -> bool:
    return origin.latency_seconds > 0 and peer is not DISCARD_FS


def _wait(bench: Bench, origin: Origin, mount: Mount, written: dict[str, Any]) -> dict[str, float]:
    control, size = bench.origins.control(origin), bench.sizes.written_bytes
    durable = wait_published(control, KEY, size, seconds=DURABLE_SECONDS)
    cpu, memory = mount.cpu_seconds() - written["cpu"], mount.memory.take()
    check_object(control, BUCKET, KEY, size)
    closed = durable - written["closed"]
    return {
        "whole_seconds": durable - written["began"],
        # A client that uploads in close is done before it returns.
        "after_close_seconds": max(0.0, closed),
        "after_settle_seconds": max(0.0, closed - SETTLE_SECONDS),
        "cpu_per_gib": cpu * GIB / size,
        "memory_bytes": memory,
    }


def _raw(bench: Bench, origin: Origin) -> dict[str, float]:
    path = local_file(bench)
    bench.origins.add_bucket(origin, BUCKET)
    bench.origins.reset(origin)
    drop_pages()
    with bench.origins.answering(origin, BUCKET) as site:
        answer = fetch("raw_upload", site, key=KEY, path=str(path), part_bytes=PART_BYTES)
        check_object(bench.origins.control(origin), BUCKET, KEY, bench.sizes.written_bytes)
    bench.origins.reset(origin)
    return {"whole_seconds": answer["whole_seconds"]}


def local_file(bench: Bench) -> Path:
    """Return a local file with what `writers` writes."""
    path = bench.directory / "local"
    if not path.exists():
        with open(path, "wb") as file:
            file.writelines(pieces(0, bench.sizes.written_bytes))
    return path


def _write_small(bench: Bench, origin: Origin, peer: Peer, mount: Mount) -> dict[str, float]:
    size, control = bench.sizes.written_small_bytes, bench.origins.control(origin)
    rates = []
    mount.memory.take()
    for index in range(SMALL_FILES if peer in (FUSECACHE, DISCARD_FS) else 1):
        key = f"{KEY}-{index}"
        answer = write("sequential", path=str(mount.path / key), size=size, step_bytes=SMALL_STEP)
        rates.append(size / answer["seconds"])
        if peer is FUSECACHE:
            # The next one is written undisturbed, as it is on the file system that uploads nothing.
            try:
                wait_published(control, key, size, seconds=DURABLE_SECONDS)
            except TooSlow as exc:
                raise BenchmarkError(f"{key} was not published within {exc.seconds:g} s") from exc
            check_object(control, BUCKET, key, size)
    return {"rate": statistics.median(rates), "memory_bytes": mount.memory.take()}
