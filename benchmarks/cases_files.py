"""The cases of hints for plain files: an ImageFolder, and tars of WebDataset; with hints, without, by a recording."""

import io
import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bars import US
from benchmarks.bench import Bench
from benchmarks.origins import Origin
from benchmarks.peers import FUSECACHE, SCRIPTS, Mount
from benchmarks.processes import BenchmarkError, run_child, run_command

BARE, REPLAY = "no-hints", "replay"
IMAGE_FOLDERS, IMAGE_BYTES = 40, 110_000
IMAGE_BATCH, IMAGE_WORKERS, IMAGE_STEP_SECONDS = 64, 4, 0.25
TAR_SAMPLE_BYTES, TAR_SAMPLES = 128 << 10, 128
TAR_BATCH, TAR_WORKERS, TAR_STEP_SECONDS = 32, 2, 0.1
EPOCH_SECONDS = 400.0


def images(bench: Bench, origin: Origin) -> None:
    """Single files in a random order, by a DataLoader with workers. The recording is of an epoch in the same order."""
    bucket, count = "files-images", bench.sizes.image_files
    if bench.origins.add_bucket(origin, bucket):
        control = bench.origins.control(origin)
        for number in range(count):
            name = f"train/{number % IMAGE_FOLDERS:03}/{number:06}.jpg"
            control.put(name, os.urandom(IMAGE_BYTES), bucket=bucket)
    _epochs(bench, origin, "images", bucket, "train", IMAGE_BATCH, IMAGE_WORKERS, IMAGE_STEP_SECONDS)


def tars(bench: Bench, origin: Origin) -> None:
    """Tars in a shuffled order, each read from end to end by one of the workers."""
    bucket = "files-tars"
    if bench.origins.add_bucket(origin, bucket):
        control = bench.origins.control(origin)
        for number in range(bench.sizes.tar_files):
            control.put(f"train/{number:04}.tar", _tar(number), bucket=bucket)
    _epochs(bench, origin, "tars", bucket, "train", TAR_BATCH, TAR_WORKERS, TAR_STEP_SECONDS)


def _epochs(
    bench: Bench, origin: Origin, kind: str, bucket: str, folder: str, batch: int, workers: int, pause: float
) -> None:
    case = f"{kind}-epoch {origin.name}"
    recording = bench.directory / f"{kind}.recording"
    request = {"task": kind, "batch": batch, "workers": workers, "step_seconds": pause, "seed": 1}

    def measure(path: Path, *, hints: bool) -> dict[str, float]:
        answer = run_child(
            "benchmarks.file_loading",
            {**request, "root": str(path), "hints": hints},
            seconds=EPOCH_SECONDS,
        )
        return {name: float(value) for name, value in answer.items()}

    for competitor in bench.turn((US, BARE, REPLAY)):
        try:
            if competitor == REPLAY and not recording.exists():
                with bench.mount(FUSECACHE, origin, bucket) as mount, _recording(mount, folder, recording):
                    measure(mount.path / folder, hints=False)
            with bench.mount(FUSECACHE, origin, bucket) as mount:
                path = mount.path / folder
                if competitor == REPLAY:
                    run_command(
                        [str(SCRIPTS / "fusecache"), "replay", str(recording), str(path)], seconds=60.0
                    )
                bench.record(case, competitor, partial(measure, path, hints=competitor == US))
        except BenchmarkError as exc:
            bench.record_failure(case, competitor, exc)


@contextmanager
def _recording(mount: Mount, folder: str, file: Path) -> Iterator[None]:
    """Record the reads below a folder while the body runs."""
    command: list[Any] = [SCRIPTS / "fusecache", "record", mount.path / folder, file]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # it says that it records
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.read()
    if process.returncode:
        raise BenchmarkError(f"fusecache record ended with {process.returncode}")


def _tar(number: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for sample in range(TAR_SAMPLES):
            member = tarfile.TarInfo(f"{number:04}-{sample:04}.bin")
            member.size = TAR_SAMPLE_BYTES
            tar.addfile(member, io.BytesIO(os.urandom(TAR_SAMPLE_BYTES)))
    return packed.getvalue()
