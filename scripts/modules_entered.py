"""Counts the modules that a read, a write, a close and a HEAD enter: a reader opens them to follow the operation.

    python -m scripts.modules_entered

A daemon runs in this process under a profile hook, on a real mount of the test server. Each operation is done several
times; a module counts if each of these entered it, so what only happened to run at the time does not.
"""

import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fusecache.config.options import load_options
from fusecache.daemon.connect import connect, endpoint_of
from fusecache.daemon.keeping import DaemonStart
from fusecache.daemon.main import run
from fusecache.remote.endpoints import Transport
from tests.s3server import ServerProcess
from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from fusecache.remote.store import Store

ROUNDS = 5
_PRODUCT = (str(ROOT / "fusecache"), str(ROOT / "loader"))


class Entered:
    """The modules that were entered since the last `clear`, in the order of their first call."""

    def __init__(self) -> None:
        self._files: dict[str, None] = {}

    def hook(self, frame: "FrameType", event: str, _: object) -> None:
        """For sys.setprofile."""
        if event == "call":
            self._files.setdefault(frame.f_code.co_filename)

    def clear(self) -> None:
        """Begin an operation."""
        self._files.clear()

    def modules(self) -> list[str]:
        """Return what belongs to the product."""
        return [os.path.relpath(file, ROOT) for file in list(self._files) if file.startswith(_PRODUCT)]


def measure(server: ServerProcess, store: "Store", mount: Path, entered: Entered) -> dict[str, list[str]]:
    """Do each operation, and return the modules that it entered each time."""
    for number in range(ROUNDS):
        server.control.put(f"data/{number}", os.urandom(1 << 20))
        server.control.put(f"named/{number}", b"x")

    def published(key: str) -> None:
        while key not in server.control.objects():
            time.sleep(0.01)

    def close_until_published(number: int) -> None:
        fd = opened.pop(number)
        entered.clear()
        os.close(fd)
        published(f"new/{number}")

    def write(number: int) -> None:
        # Past the page cache, which would take the bytes first.
        fd = opened[number] = os.open(mount / "new" / str(number), os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        entered.clear()
        os.write(fd, page)

    def read(number: int) -> None:
        fd = os.open(mount / "data" / str(number), os.O_RDONLY)
        entered.clear()
        os.pread(fd, 4096, 512 << 10)
        os.close(fd)

    opened: dict[int, int] = {}
    page = mmap.mmap(-1, mmap.PAGESIZE)
    (mount / "new").mkdir()
    published("new/")
    operations: dict[str, Callable[[int], object]] = {
        "cold read": read,
        "write": write,
        "close until published": close_until_published,
        "stat": lambda number: os.stat(mount / "named" / str(number)),
        "HEAD": lambda number: store.head(f"named/{number}"),
    }
    found = {}
    for name, operation in operations.items():
        rounds = []
        for number in range(ROUNDS):
            time.sleep(0.5)  # what the one before left to do
            entered.clear()
            operation(number)
            rounds.append(entered.modules())
        found[name] = [module for module in rounds[0] if all(module in each for each in rounds)]
    return found


def main() -> None:
    """Print the counts and the modules."""
    entered = Entered()
    with tempfile.TemporaryDirectory() as folder, ServerProcess() as server:
        mount = Path(folder, "mount")
        mount.mkdir()
        os.environ |= {
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "S3_ENDPOINT_URL": server.endpoint_url,
        }
        flags = {
            "source": f"s3://{server.bucket}",
            "mountpoint": str(mount),
            "cache_dir": str(Path(folder, "cache")),
            "cache_size": "1GiB",
            "settle_seconds": "0s",
            "log_level": "warning",
        }
        options = load_options(flags, os.environ)
        start, store = (
            DaemonStart(options, None, ""),
            connect(options, endpoint_of(options), transport=Transport(4), was_used=False).remote,
        )
        found: dict[str, list[str]] = {}
        driver = threading.Thread(target=lambda: found.update(measure(server, store, mount, entered)))

        def drive() -> None:
            driver.start()
            driver.join()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.setprofile(entered.hook)
        sys.setprofile(entered.hook)
        run(start, lambda _: threading.Thread(target=drive).start())
        sys.setprofile(None)
    for name, modules in found.items():
        sys.stdout.write(f"{len(modules):3d}  {name}: {', '.join(modules)}\n")


if __name__ == "__main__":
    main()
