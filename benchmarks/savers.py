"""What programs write, on a mount with the kernel's writeback cache and on one without, in turns, in one run.

`python -m benchmarks.savers` prints a table: seconds until the last close has returned, medians over rounds. Uploads
wait meanwhile. Without that cache each write(2) is a request to the daemon, and passthrough would be possible on a
mount that writes, too. Needs root.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from loader import MDSWriter
from tests.s3server import ServerProcess
from tests.support.mounts import FUSECACHE, Mount
from tests.support.s3_buckets import Bucket, Service

MIB = 2**20
KIB = 2**10
# Starts the daemon without the cache. No option does that.
WITHOUT = """#!{python}
import sys
from fusecache.cli.main import main
from fusecache.fs.operations import Operations
Operations.enable_writeback_cache = False
sys.exit(main())
"""


class UncachedMount(Mount):
    """A mount without the kernel's writeback cache."""

    def command(self, *flags: str) -> list[str | Path]:
        """Return the words of the command line that mounts it, with another program."""
        program = self.cache.with_name("fusecache-uncached")
        program.write_text(WITHOUT.format(python=sys.executable))
        program.chmod(0o755)
        return [program if word == FUSECACHE else word for word in super().command(*flags)]


def _write(path: Path, piece: bytes, count: int) -> None:
    with open(path, "wb", buffering=0) as file:
        for _ in range(count):
            file.write(piece)


def _write_samples(folder: Path, nbytes: int, count: int) -> None:
    with MDSWriter(str(folder), {"data": "bytes"}) as writer:
        for index in range(count):
            writer.write({"data": index.to_bytes(8, "little") * (nbytes // 8)})


def programs(scratch: Path) -> dict[str, Callable[[Path], object]]:
    """Return what is measured: a name, and a function that writes below a new folder."""
    tensors = {f"layer{index}": torch.rand(MIB) for index in range(64)}  # 256 MiB
    files = scratch / "files"
    files.mkdir()
    for index in range(500):
        (files / f"{index:04}").write_bytes(os.urandom(4 * KIB))
    return {
        "torch.save, 256 MiB": lambda folder: torch.save(tensors, folder / "model.pt"),
        "safetensors, 256 MiB": lambda folder: save_file(tensors, folder / "model.safetensors"),
        "torch.distributed.checkpoint, 256 MiB": lambda folder: dcp.save(
            tensors, checkpoint_id=folder / "step"
        ),
        "MDSWriter, 16 000 samples of 4 KiB": lambda folder: _write_samples(
            folder / "train", 4 * KIB, 16_000
        ),
        "a log, 20 000 lines of 100 B": lambda folder: _write(folder / "log", b"x" * 99 + b"\n", 20_000),
        "write(2) of 4 KiB, 64 MiB": lambda folder: _write(folder / "small", b"x" * 4 * KIB, 16_384),
        "write(2) of 1 MiB, 256 MiB": lambda folder: _write(folder / "large", b"x" * MIB, 256),
        "rsync -a, 500 files of 4 KiB": lambda folder: subprocess.run(
            ["rsync", "-a", files, folder], check=True
        ),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.savers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch, ServerProcess() as server:
        service = Service(
            server.endpoint_url, server.access_key, server.secret_key, server.bucket, server.control
        )
        bucket = Bucket(service, service.client(), "")
        mounts = [
            kind(bucket.below(name), Path(scratch, name), Path(scratch, f"{name}-cache"))
            for kind, name in ((Mount, "cached"), (UncachedMount, "uncached"))
        ]
        with ExitStack() as stack:
            for mount in mounts:
                mount.path.mkdir()
                stack.callback(mount.remove)
                mount.start("--cache-size", "16GiB", "--settle-seconds", "3600", "--no-keep-mounted")
            say("| program | with, s | without, s | without / with |", "|---|---|---|---|")
            for name, program in programs(Path(scratch)).items():
                say(f"| {name} | {compare(mounts, program, options.rounds)} |")


def compare(mounts: list[Mount], program: Callable[[Path], object], rounds: int) -> str:
    """Return a program's seconds on each of two mounts, and their ratio, of rounds in turns."""
    seconds: list[list[float]] = [[] for _ in mounts]
    for number in range(rounds + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            folder = mounts[index].path / f"round{number}"
            folder.mkdir()
            os.sync()
            began = time.perf_counter()
            program(folder)
            if number:  # the first brings in what the program needs
                seconds[index].append(time.perf_counter() - began)
            subprocess.run(["rm", "-rf", folder], check=True)
    ratio = statistics.median(without / cached for cached, without in zip(*seconds, strict=True))
    cached, without = (statistics.median(found) for found in seconds)
    return f"{cached:.3f} | {without:.3f} | {ratio:.2f}"


def say(*lines: str) -> None:
    """Print lines."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
