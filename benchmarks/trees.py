"""What `cp -r`, `mv` and `rm -rf` of directories cost, far from the bucket: `python -m benchmarks.trees`.

Each runs on a mount whose bucket answers after 40 ms. Prints, as JSON, the seconds until the command returned and until
the bucket followed, and how many requests of each kind the bucket saw.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import BenchmarkError
from tests.s3server import Control, ServerProcess
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket, Service

LATENCY_SECONDS = 0.04


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--folders", type=int, default=5, help="that the files lie in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ServerProcess() as server:
        service = Service(
            server.endpoint_url, server.access_key, server.secret_key, server.bucket, server.control
        )
        mount = Mount(Bucket(service, service.client(), ""), Path(folder) / "mount", Path(folder) / "cache")
        local = Path(folder) / "tree"
        for index in range(options.files):
            (local / f"{index % options.folders}").mkdir(parents=True, exist_ok=True)
            (local / f"{index % options.folders}" / f"{index:06d}").write_bytes(b"1")
        mount.path.mkdir()
        mount.start()
        server.control.set(latency=LATENCY_SECONDS)
        top = mount.path
        result: dict[str, Any] = {"files": options.files, "latency_seconds": LATENCY_SECONDS}
        try:
            result["cp -r onto the mount"] = _measure(mount, server.control, "cp", "-r", local, top / "a")
            result["cp -r on the mount"] = _measure(mount, server.control, "cp", "-r", top / "a", top / "b")
            result["mv"] = _measure(mount, server.control, "mv", top / "a", top / "c")
            result["rm -rf"] = _measure(mount, server.control, "rm", "-rf", top / "c")
            shutil.copytree(local, top / "d")
            result["rm -rf at once"] = _measure(mount, server.control, "rm", "-rf", top / "d")
            if left := [name for name in mount.bucket.names() if not name.startswith("b/")]:
                raise BenchmarkError(f"left in the bucket: {left[:5]}")
        finally:
            mount.remove()
    print(json.dumps(result, indent=2))  # noqa: T201 -- the result


def _measure(mount: Mount, control: Control, *words: str | Path) -> dict[str, Any]:
    began = _clock()
    control.clear_log()
    subprocess.run(words, check=True)
    called = began()
    mount.sync()
    return {"seconds": called, "bucket_seconds": began(), "requests": control.counts()}


def _clock() -> Callable[[], float]:
    began = time.monotonic()
    return lambda: round(time.monotonic() - began, 2)


if __name__ == "__main__":
    main()
