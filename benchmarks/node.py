"""How fast one mount could be on a large node, measured on two cores: `make bench-node`, `python -m benchmarks.node`.

On two cores, the reader and the server end before the daemon does. So the case `loop` leaves out what they and the disk
do: GETs and stores only wait (`node_waits.py`), a reply has its first 4 KiB alone, and 12 readers read with O_DIRECT.
What is left is the daemon's own work for each GiB, and its movers'. The other cases move all bytes, with one reader:
`cold` from the server, `disk` from the disk cache.

For each case and number of movers: GiB a second; processor seconds a GiB of the daemon's main process, of its loop's
thread alone, and of its movers; and the ceiling, which is one GiB through the loop's seconds.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.driver import DIRECTORY
from benchmarks.node_waits import serve
from benchmarks.processes import ROOT, end, is_mounted, remove_folder, start, tree, unmount, wait_until
from tests.s3server import ServerProcess

MIB, GIB = 1 << 20, 1 << 30
READERS = 12
_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 30.0
BARS = {("loop", "main"): 0.15, ("cold", "main"): 0.30}


# ---- one mount


class Daemon:
    """A mount of all objects of the server."""

    def __init__(
        self, server: ServerProcess, folder: Path, movers: int, *, has_bytes: bool, memory: str
    ) -> None:
        self.path = folder / "mount"
        self.path.mkdir()
        module = ["fusecache"] if has_bytes else ["benchmarks.node", "--serve"]
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "FUSECACHE_KEEP_MOUNTED": "no",
            "PYTHONPATH": str(ROOT),
            "FUSECACHE_MOVERS": str(movers),
        }
        words = ["mount", f"s3://{server.bucket}", str(self.path), "--endpoint-url", server.endpoint_url]
        words += [
            "--cache-dir",
            str(folder / "cache"),
            "--cache-size",
            "64GiB",
            "--memory",
            memory,
            "--foreground",
        ]
        self._log = folder / "log"
        self._process = start([sys.executable, "-m", *module, *words], environment, self._log)
        if not wait_until(lambda: is_mounted(self.path), _START_SECONDS):
            raise RuntimeError(f"the daemon did not mount: {self._log.read_text()[-2000:]}")
        os.stat(self.path)
        time.sleep(1.0)  # buffers are touched, movers start
        self._pid = self._process.pid

    def seconds(self) -> dict[str, float]:
        """Return the processor time so far: of the main process, of its first thread, of its movers."""
        return {
            "main": _seconds(f"/proc/{self._pid}/stat"),
            "loop": _seconds(f"/proc/{self._pid}/task/{self._pid}/stat"),
            "movers": sum(_seconds(f"/proc/{pid}/stat") for pid in tree(self._pid)[1:]),
        }

    def close(self) -> None:
        """Unmount, and see it end."""
        unmount(self.path)
        end(self._process)


def _seconds(path: str) -> float:
    # proc(5): the name is in parentheses; utime is field 14, stime field 15.
    fields = Path(path).read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


# ---- the readers, in a process of their own


def read(paths: list[str], *, is_direct: bool) -> None:
    """Read each file from start to end in a thread of its own, in steps of a MiB; print the bytes."""
    total = [0] * len(paths)

    def one(index: int) -> None:
        fd = os.open(paths[index], os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
        size, buffer = os.fstat(fd).st_size, mmap.mmap(-1, MIB)
        for offset in range(0, size, MIB):
            if not os.preadv(fd, [buffer], offset):
                raise EOFError(paths[index])
            total[index] += min(MIB, size - offset)
        # So that the next reader of it asks the daemon.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write(f"{sum(total)}\n")


def measured(daemon: Daemon, names: list[str], *, is_direct: bool) -> dict[str, float]:
    """Return the figures of one reading of these files."""
    before, began = daemon.seconds(), time.monotonic()
    request = json.dumps([[str(daemon.path / name) for name in names], is_direct])
    reader = [sys.executable, "-m", "benchmarks.node", "--read", request]
    done = subprocess.run(reader, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=170)
    seconds, gib = time.monotonic() - began, int(done.stdout) / GIB
    found = {key: (after - before[key]) / gib for key, after in daemon.seconds().items()}
    return {"rate": gib / seconds, **found, "ceiling": 1 / max(found["loop"], 1e-3)}


def one_round(options: argparse.Namespace, number: int, movers: int) -> dict[str, dict[str, float]]:
    """Return the figures of each case for one number of movers."""
    found: dict[str, dict[str, float]] = {}
    with ServerProcess() as server, tempfile.TemporaryDirectory(dir=options.directory) as name:
        size = int(options.gib * GIB)
        names = [f"part-{each}" for each in range(READERS)]
        for each in names:
            server.control.add_synthetic(each, -(-size // READERS // MIB) * MIB, number)
        server.control.add_synthetic("whole", size, number)
        for case in options.cases:
            folder = Path(name) / case
            folder.mkdir()
            daemon = Daemon(server, folder, movers, has_bytes=case != "loop", memory=options.memory)
            try:
                if case == "loop":
                    found["loop"] = measured(daemon, names, is_direct=True)
                else:
                    found["cold"] = measured(daemon, ["whole"], is_direct=False)
                    time.sleep(1.0)  # the last stores
                    found["disk"] = measured(daemon, ["whole"], is_direct=False)
            finally:
                daemon.close()
                remove_folder(folder)
    return found


def main() -> int:
    """Measure, print the table; return 1 if a bar is missed."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2:])
    if sys.argv[1:2] == ["--read"]:
        paths, is_direct = json.loads(sys.argv[2])
        read(paths, is_direct=is_direct)
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.node", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--movers", type=int, nargs="*", default=[0, 1], help="numbers that are compared")
    parser.add_argument("--gib", type=float, default=3.0, help="that each case reads")
    parser.add_argument("--memory", default="256MiB", help="of the daemon")
    parser.add_argument("--cases", nargs="*", default=["loop", "bytes"], choices=["loop", "bytes"])
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where caches are made")
    options = parser.parse_args()
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for movers in options.movers if number % 2 else reversed(options.movers):
            for case, figures in one_round(options, number, movers).items():
                rounds.setdefault((case, movers), []).append(figures)
    columns = ("rate", "main", "loop", "movers", "ceiling")
    sys.stdout.write("| case | movers | GiB/s | main, s a GiB | loop's thread | movers | ceiling, GiB/s |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    is_met = True
    for (case, movers), measured in sorted(rounds.items()):
        medians = {key: statistics.median(each[key] for each in measured) for key in columns}
        sys.stdout.write(f"| {case} | {movers} | {' | '.join(f'{medians[key]:.2f}' for key in columns)} |\n")
        is_met = is_met and not (movers and medians["main"] > BARS.get((case, "main"), 1e9))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
