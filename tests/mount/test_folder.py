"""A run on a folder that a pull fills is the run on a mount: order and bytes."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from loader import MDSWriter
from tests.folder.test_follow import READ
from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket


def test_a_loader_reads_the_same_from_a_followed_pull_as_from_a_mount(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    with MDSWriter(tmp_path / "local", {"number": "int", "data": "bytes"}, size_limit=4096) as writer:
        for number in range(304):
            writer.write({"number": number, "data": hashlib.sha256(b"%d" % number).digest() * 17})
    for path in (tmp_path / "local").iterdir():
        bucket.put(f"data/{path.name}", path.read_bytes())
    mounted = run(sys.executable, "-c", READ, mount("--read-only").path / "data").stdout
    folder = tmp_path / "folder"
    environment = {**bucket.service.environment(), "S3_ENDPOINT_URL": bucket.service.endpoint_url}
    run(FUSECACHE, "pull", "--follow", bucket.source, folder, env=environment)
    assert run(sys.executable, "-c", READ, folder / "data").stdout == mounted
    numbers, _ = json.loads(mounted.splitlines()[1])
    assert sorted(numbers) == list(range(304))
    wait_until(lambda: not (folder / ".fusecache" / "socket").exists(), "the end of the pull")
