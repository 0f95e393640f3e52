"""The real StreamingDataset on compressed shards below a writable mount: nothing of it reaches the bucket."""

import errno
from collections.abc import Callable
from pathlib import Path

from loader import MDSWriter
from tests.support import ROOT
from tests.support.mounts import Mount, run_python
from tests.support.s3_buckets import Bucket

SAMPLES = 60


def test_streaming_dataset_does_not_publish_the_shards_that_it_decompresses(
    mount: Callable[..., Mount], bucket: Bucket, expect_log, tmp_path: Path
):
    """It writes them beside the compressed ones: refused. With `local` on a disk it reads the same samples."""
    made = tmp_path / "made"
    with MDSWriter(made, {"n": "int"}, compression="zstd", size_limit=256) as out:
        for number in range(SAMPLES):
            out.write({"n": number})
    files = {f"data/{path.name}": path.read_bytes() for path in made.iterdir()}
    for name, data in files.items():
        bucket.put(name, data)
    expect_log("not created, as data/ is immutable; write elsewhere .StreamingDataset: local=")
    one: Mount = mount("--immutable", "data/")
    read = run_python(READ, one.path / "data", tmp_path / "local", cwd=ROOT, seconds=600)
    assert read.stdout.splitlines()[-2:] == [str(errno.EROFS), str(sum(range(SAMPLES)))]
    one.sync()
    assert {name: bucket.get(name) for name in bucket.names()} == files


READ = """
import sys
from tests.support.real_streaming import import_streaming

def total(**where):
    data = import_streaming().StreamingDataset(**where, batch_size=1)
    return sum(int(data[n]["n"]) for n in range(len(data)))

mounted, local = sys.argv[1:]
try:
    total(local=mounted)
except OSError as exc:
    print(exc.errno)
print(total(local=local, remote=mounted))
"""
