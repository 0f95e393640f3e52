"""The cases about uploads in the background: many small files, training beside a checkpoint, and starting again."""

import os
import shutil
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench import GIB, MIB, Bench, read, write
from benchmarks.origins import ORIGINS, Origin
from benchmarks.peers import CACHE, FUSECACHE, WRITERS, Mount, Peer, mounted_again
from benchmarks.processes import BenchmarkError, drop_pages, remove_folder, run_command, wait_until
from benchmarks.published import check_object, wait_files, wait_published
from benchmarks.timelines import rate_between
from benchmarks.writers import folder_name
from tests.s3server import Fault, FaultAction

FILES_BUCKET = "small-writes"
TRAIN_BUCKET = "training"
DATA = "data"
RECOVER_BUCKET = "recovery"
FILE_BYTES = 4096
FOLDERS = 10
# At the bar's rate it takes 50 s.
FILES_SECONDS = 100.0
PEER_FILES_SECONDS = 20.0
# At the bar's rate it takes 200 s.
RSYNC_SECONDS = 300.0
# One file may take long where everything does.
PATIENCE_SECONDS = 30.0
JOURNALED_SECONDS = 200.0
CHECKPOINT = "checkpoint.pt"
CHECKPOINT_SECONDS = 200.0
# More than anybody reads meanwhile.
DATASET_BYTES = 128 * GIB
WARM_SECONDS = 1.0


def files(bench: Bench, origin: Origin) -> None:
    """Write small files one after the other; count from the first write until the bucket has the last."""
    case = f"files {origin.name}"
    # No bar compares with the peers here, and they take long: once is enough.
    for peer in bench.turn(WRITERS if bench.round == 1 else (FUSECACHE,)):
        try:
            with bench.writable(peer, origin, FILES_BUCKET) as mount:
                bench.record(case, peer.name, partial(_files, bench, origin, peer, mount))
        except BenchmarkError as exc:
            bench.record_failure(case, peer.name, exc)


def rsync(bench: Bench, origin: Origin) -> None:
    """Have rsync copy small files into one directory; count from its start until the bucket has the last."""
    source = _source_of_rsync(bench)
    case = f"rsync {origin.name}"
    try:
        with bench.writable(FUSECACHE, origin, FILES_BUCKET) as mount:
            bench.record(case, FUSECACHE.name, partial(_rsync, bench, origin, mount, source))
    except BenchmarkError as exc:
        bench.record_failure(case, FUSECACHE.name, exc)


def train(bench: Bench, origin: Origin) -> None:
    """Read data that nobody has: before, while and after a checkpoint is uploaded."""
    case = f"train {origin.name}"
    try:
        with bench.writable(FUSECACHE, origin, TRAIN_BUCKET) as mount:
            bench.origins.control(origin).add_synthetic(DATA, DATASET_BYTES, 1, bucket=TRAIN_BUCKET)
            undisturbed: dict[str, float] = {}
            if bench.record(case, FUSECACHE.name, partial(_read_beside, bench, origin, mount, undisturbed)):
                bench.record(case, "undisturbed", lambda: undisturbed)
    except BenchmarkError as exc:
        bench.record_failure(case, FUSECACHE.name, exc)


def recover(bench: Bench, origin: Origin) -> None:
    """Start on small files that an earlier daemon had journaled, and not uploaded, when it was killed."""
    folder = Path(tempfile.mkdtemp(prefix="recover-", dir=bench.directory))
    bench.origins.add_bucket(origin, RECOVER_BUCKET)
    bench.origins.reset(origin)
    try:
        bench.record(f"recover {origin.name}", FUSECACHE.name, partial(_recover, bench, origin, folder))
    finally:
        remove_folder(folder)
        bench.origins.reset(origin)


def _files(bench: Bench, origin: Origin, peer: Peer, mount: Mount) -> dict[str, float]:
    sizes = bench.sizes
    if peer is FUSECACHE:
        count, seconds = sizes.written_files, FILES_SECONDS
    else:
        count = sizes.slow_peer_files if peer.name.startswith("s3fs") else sizes.peer_files
        seconds = PEER_FILES_SECONDS
    _make_folders(mount.path)
    control = bench.origins.control(origin)
    mount.memory.take()
    cpu = mount.cpu_seconds()
    written = _write_files(mount, count, seconds)
    # Who is so slow that not all are stored in time has a rate, too.
    stored = wait_files(control, count, FILE_BYTES, seconds=seconds - written["seconds"])
    if not stored:
        raise BenchmarkError(f"no file was stored within {seconds:g} s")
    return {
        "files_per_second": len(stored) / (stored[-1] - written["began"]),
        "files": count,
        "files_stored": len(stored),
        "written_per_second": written["files"] / written["seconds"],
        "cpu_seconds": mount.cpu_seconds() - cpu,
        "memory_bytes": mount.memory.take(),
    }


def _write_files(mount: Mount, count: int, seconds: float) -> dict[str, Any]:
    return write(
        "many",
        folder=str(mount.path),
        folders=FOLDERS,
        files=count,
        size=FILE_BYTES,
        duration=seconds,
        seconds=seconds + PATIENCE_SECONDS,
    )


def _source_of_rsync(bench: Bench) -> Path:
    """Return a directory of small files; made in the first round."""
    folder = bench.directory / "rsync-source"
    if not folder.exists():
        folder.mkdir()
        for index in range(bench.sizes.written_files):
            (folder / f"{index:06d}.txt").write_bytes(b"%06d\n" % index * (FILE_BYTES // 7) + b"\n")
    return folder


def _rsync(bench: Bench, origin: Origin, mount: Mount, source: Path) -> dict[str, float]:
    count, control = bench.sizes.written_files, bench.origins.control(origin)
    size = next(source.iterdir()).stat().st_size
    mount.memory.take()
    cpu, began, began_wall = mount.cpu_seconds(), time.monotonic(), time.time()
    run_command(["rsync", "-a", f"{source}/", str(mount.path / "copy")], seconds=RSYNC_SECONDS)
    copied = time.monotonic() - began
    stored = wait_files(control, count, size, seconds=RSYNC_SECONDS - copied)
    if len(stored) < count:
        raise BenchmarkError(f"{len(stored)} of {count} files were stored within {RSYNC_SECONDS:g} s")
    return {
        "files_per_second": count / (stored[-1] - began_wall),
        "files": count,
        "copied_per_second": count / copied,
        "lists": control.counts().get("ListObjectsV2", 0),
        "cpu_seconds": mount.cpu_seconds() - cpu,
        "memory_bytes": mount.memory.take(),
    }


def _make_folders(path: Path) -> None:
    for index in range(FOLDERS):
        (path / folder_name(index)).mkdir()


class _Reader:
    """A child that reads a file until told to stop; `end` returns its samples."""

    def __init__(self, path: Path, stop: Path) -> None:
        self._stop = stop
        self._answer: dict[str, Any] = {}
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(path,), name="reader")
        self._thread.start()

    def _run(self, path: Path) -> None:
        longest = CHECKPOINT_SECONDS * 2
        try:
            self._answer = read(
                "timeline", path=str(path), duration=longest, stop=str(self._stop), seconds=longest + 10
            )
        except (BenchmarkError, OSError) as exc:
            self._failure = exc

    def end(self) -> list[list[float]]:
        """Stop it. Raises what it failed with."""
        self._stop.touch()
        self._thread.join()
        self._stop.unlink()
        if self._failure is not None:
            raise self._failure
        samples: list[list[float]] = self._answer["samples"]
        return samples


def _read_beside(
    bench: Bench, origin: Origin, mount: Mount, undisturbed: dict[str, float]
) -> dict[str, float]:
    """Read all the time; undisturbed: is filled with the rates before and after.

    Of the same reader, as a disk that has been written to for a minute, and a cache that is full, are slower than
    fresh ones.
    """
    size, control = bench.sizes.checkpoint_bytes, bench.origins.control(origin)
    alone_seconds = bench.sizes.undisturbed_seconds
    mount.memory.take()
    reader = _Reader(mount.path / DATA, bench.directory / "stop")
    try:
        wait_until(lambda: bool(control.log("GetObject", DATA)), 10)
        time.sleep(WARM_SECONDS + alone_seconds)
        cpu = mount.cpu_seconds()
        written = write(
            "sequential",
            path=str(mount.path / CHECKPOINT),
            size=size,
            step_bytes=4 * MIB,
            seconds=CHECKPOINT_SECONDS,
        )
        durable = wait_published(control, CHECKPOINT, size, seconds=CHECKPOINT_SECONDS)
        cpu = mount.cpu_seconds() - cpu
        time.sleep(WARM_SECONDS + alone_seconds)
    finally:
        samples = reader.end()
    check_object(control, TRAIN_BUCKET, CHECKPOINT, size)
    began = min(entry.time for entry in control.log("UploadPart", CHECKPOINT))
    before = rate_between(samples, written["began"] - alone_seconds, written["began"])
    after = rate_between(samples, durable + WARM_SECONDS, durable + WARM_SECONDS + alone_seconds)
    undisturbed.update(rate=(before + after) / 2, before_rate=before, after_rate=after)
    return {
        "rate": rate_between(samples, began, durable),
        "after_close_rate": rate_between(samples, max(began, written["closed"]), durable),
        "upload_rate": size / (durable - began),
        "whole_seconds": durable - written["began"],
        "cpu_seconds": cpu,
        "memory_bytes": mount.memory.take(),
    }


def _recover(bench: Bench, origin: Origin, folder: Path) -> dict[str, float]:
    state = _journaled_state(bench)
    shutil.copytree(state, folder / CACHE)
    drop_pages()
    with (
        bench.origins.answering(origin, RECOVER_BUCKET) as site,
        mounted_again(FUSECACHE, site, folder) as mount,
    ):
        figures = {"seconds": mount.ready_seconds, "memory_bytes": mount.memory.take()}
        found = sum(len(os.listdir(mount.path / folder_name(index))) for index in range(FOLDERS))
        mount.kill()
    if found != bench.sizes.written_files:
        raise BenchmarkError(f"{found} of {bench.sizes.written_files} files were found again")
    return figures


def _journaled_state(bench: Bench) -> Path:
    """Return the cache directory of a killed daemon that could upload nothing; made in the first round."""
    folder = bench.directory / "journaled"
    if (folder / CACHE).exists():
        return folder / CACHE
    count, origin = bench.sizes.written_files, ORIGINS["A"]
    folder.mkdir()
    bench.origins.control(origin).faults(
        # Not the requests with which a start tests the store.
        Fault(FaultAction.ANSWER, operation="PutObject", key="[!.]*", status=503, code="ServiceUnavailable")
    )
    try:
        with (
            bench.origins.answering(origin, RECOVER_BUCKET) as site,
            mounted_again(FUSECACHE, site, folder) as mount,
        ):
            _make_folders(mount.path)
            written = _write_files(mount, count, JOURNALED_SECONDS)
            mount.kill()
        if written["files"] < count:
            raise BenchmarkError(f"only {written['files']} files were written in {JOURNALED_SECONDS:g} s")
    except BaseException:
        remove_folder(folder)
        raise
    finally:
        bench.origins.control(origin).clear_faults()
    return folder / CACHE
