"""The cases of hints for plain files: an ImageFolder, and tars of WebDataset, with hints and without."""

import io
import os
import tarfile
from functools import partial
from pathlib import Path

from benchmarks.bars import US
from benchmarks.bench import Bench
from benchmarks.origins import Origin
from benchmarks.peers import FUSECACHE
from benchmarks.processes import BenchmarkError, run_child

BARE = "no-hints"
IMAGE_FOLDERS, IMAGE_BYTES = 40, 110_000
IMAGE_BATCH, IMAGE_WORKERS, IMAGE_STEP_SECONDS = 64, 4, 0.5
TAR_SAMPLE_BYTES, TAR_SAMPLES = 128 << 10, 128
TAR_BATCH, TAR_WORKERS, TAR_STEP_SECONDS = 32, 0, 0.1
EPOCH_SECONDS = 400.0


def images(bench: Bench, origin: Origin) -> None:
    """Single files in a random order, by a DataLoader with workers."""
    bucket, count = "files-images", bench.sizes.image_files
    if bench.origins.add_bucket(origin, bucket):
        control = bench.origins.control(origin)
        for number in range(count):
            name = f"train/{number % IMAGE_FOLDERS:03}/{number:06}.jpg"
            control.put(name, os.urandom(IMAGE_BYTES), bucket=bucket)
    _epochs(bench, origin, "images", bucket, "train", IMAGE_BATCH, IMAGE_WORKERS, IMAGE_STEP_SECONDS)


def tars(bench: Bench, origin: Origin) -> None:
    """Tars in a shuffled order, each read from end to end by the process that trains."""
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
    request = {"task": kind, "batch": batch, "workers": workers, "step_seconds": pause, "seed": bench.round}

    def measure(path: Path, *, hints: bool) -> dict[str, float]:
        answer = run_child(
            "benchmarks.file_loading", {**request, "root": str(path), "hints": hints}, seconds=EPOCH_SECONDS
        )
        return {name: float(value) for name, value in answer.items()}

    for competitor in bench.turn((US, BARE)):
        try:
            with bench.mount(FUSECACHE, origin, bucket) as mount:
                bench.record(case, competitor, partial(measure, mount.path / folder, hints=competitor == US))
        except BenchmarkError as exc:
            bench.record_failure(case, competitor, exc)


def _tar(number: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for sample in range(TAR_SAMPLES):
            member = tarfile.TarInfo(f"{number:04}-{sample:04}.bin")
            member.size = TAR_SAMPLE_BYTES
            tar.addfile(member, io.BytesIO(os.urandom(TAR_SAMPLE_BYTES)))
    return packed.getvalue()
