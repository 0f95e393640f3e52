"""The cases in which a trainer saves: torch.save, and DCP on two ranks, beside the same on the local disk."""

import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench import GIB, Bench, save
from benchmarks.origins import Origin
from benchmarks.peers import FUSECACHE, FUSECACHE_REMOTE, Mount, Peer, has_option
from benchmarks.processes import BenchmarkError, drop_pages
from benchmarks.published import wait_published
from benchmarks.report import NOT_AVAILABLE

BUCKET = "checkpoints"
KEY = "checkpoint.pt"
LOCAL = "local"
SAVE_SECONDS = 180.0
DCP_SAVES = {"dcp": "sync", "dcp-async": "async"}


def torch_save(bench: Bench, origin: Origin) -> None:
    """Save 2 GiB by torch.save: on the mount without a word more, as trainers do; locally with fdatasync."""
    case = f"torch {origin.name}"
    for name in _competitors(bench):
        if name == LOCAL:
            bench.record(case, name, partial(_torch_locally, bench))
            continue
        peer, sync = (FUSECACHE, "") if name == FUSECACHE.name else (FUSECACHE_REMOTE, "fsync")
        _on_mount(bench, origin, peer, [case], partial(_torch_on_mount, bench, origin, case, sync))


def dcp(bench: Bench, origin: Origin) -> None:
    """Save 2 GiB by DCP, which fsyncs every file: in step with training, and asynchronously."""
    cases = {f"{kind} {origin.name}": save_name for kind, save_name in DCP_SAVES.items()}
    for name in _competitors(bench):
        if name == LOCAL:
            try:
                _record_dcp(bench, cases, name, _dcp_locally(bench))
            except BenchmarkError as exc:
                for case in cases:
                    bench.record_failure(case, name, exc)
            continue
        peer = FUSECACHE if name == FUSECACHE.name else FUSECACHE_REMOTE
        _on_mount(bench, origin, peer, list(cases), partial(_dcp_on_mount, bench, origin, cases, name))


def _competitors(bench: Bench) -> list[str]:
    # No bar asks for the mode that waits for the bucket: once is enough.
    remote = [FUSECACHE_REMOTE.name] if bench.round == 1 else []
    return bench.turn([LOCAL, FUSECACHE.name, *remote])


def _on_mount(
    bench: Bench, origin: Origin, peer: Peer, cases: list[str], measure: Callable[[Mount], None]
) -> None:
    """Run `measure` with a mount; what keeps it from beginning is every case's failure."""
    try:
        if peer is FUSECACHE_REMOTE and not has_option("--fsync"):
            raise BenchmarkError(NOT_AVAILABLE)
        with bench.writable(peer, origin, BUCKET) as mount:
            measure(mount)
    except BenchmarkError as exc:
        for case in cases:
            bench.record_failure(case, peer.name, exc)


def _torch_locally(bench: Bench) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="torch-", dir=bench.directory))
    try:
        drop_pages()
        answer = save("torch_save", path=str(folder / KEY), size=bench.sizes.saved_bytes, sync="fdatasync")
    finally:
        shutil.rmtree(folder)
    return _blocked(answer)


def _torch_on_mount(bench: Bench, origin: Origin, case: str, sync: str, mount: Mount) -> None:
    size, control = bench.sizes.saved_bytes, bench.origins.control(origin)

    def measure() -> dict[str, float]:
        mount.memory.take()
        cpu = mount.cpu_seconds()
        path = mount.path / KEY
        answer = save("torch_save", path=str(path), size=size, sync=sync)
        durable = wait_published(control, KEY, path.stat().st_size, seconds=SAVE_SECONDS)
        return {
            **_blocked(answer),
            "durable_seconds": durable - answer["began"],
            "cpu_per_gib": (mount.cpu_seconds() - cpu) * GIB / size,
            "memory_bytes": mount.memory.take(),
        }

    name = FUSECACHE_REMOTE.name if sync else FUSECACHE.name
    bench.record(case, name, measure)


def _dcp_locally(bench: Bench) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="dcp-", dir=bench.directory))
    try:
        drop_pages()
        return save(
            "dcp", root=str(folder), size=bench.sizes.saved_bytes, between=["sync"], seconds=SAVE_SECONDS
        )
    finally:
        shutil.rmtree(folder)


def _dcp_on_mount(bench: Bench, origin: Origin, cases: dict[str, str], name: str, mount: Mount) -> None:
    size = bench.sizes.saved_bytes
    mount.memory.take()
    cpu = mount.cpu_seconds()
    sync = [sys.executable, "-m", "fusecache", "sync", str(mount.path)]
    answer = save("dcp", root=str(mount.path), size=size, between=sync, seconds=SAVE_SECONDS)
    for folder in DCP_SAVES.values():
        wait_published(
            bench.origins.control(origin),
            f"{folder}/.metadata",
            (mount.path / folder / ".metadata").stat().st_size,
            seconds=SAVE_SECONDS,
        )
    costs = {
        "cpu_per_gib": (mount.cpu_seconds() - cpu) * GIB / (size * len(DCP_SAVES)),
        "memory_bytes": mount.memory.take(),
    }
    _check_checkpoints(bench, origin, size)
    _record_dcp(bench, cases, name, {each: {**answer[each], **costs} for each in answer})


def _check_checkpoints(bench: Bench, origin: Origin, size: int) -> None:
    """Raise BenchmarkError unless the bucket holds both checkpoints, and nothing under a temporary name."""
    objects = bench.origins.control(origin).objects(bucket=BUCKET)
    for folder in DCP_SAVES.values():
        stored = sum(view.size for key, view in objects.items() if key.startswith(f"{folder}/"))
        if stored < size:
            raise BenchmarkError(f"{folder}: the bucket has {stored} bytes of a checkpoint of {size}")
    if any(".tmp" in key for key in objects):
        raise BenchmarkError(f"temporary names in the bucket: {', '.join(objects)}")


def _record_dcp(bench: Bench, cases: dict[str, str], name: str, answer: dict[str, Any]) -> None:
    for case, save_name in cases.items():
        bench.record(case, name, partial(dict, answer[save_name]))


def _blocked(answer: dict[str, Any]) -> dict[str, float]:
    return {name: answer[name] for name in ("blocked_seconds", "whole_seconds")}
