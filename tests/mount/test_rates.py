"""`upload_rate` and `download_rate`: what the server saw, beside the time that passed."""

import time

import pytest

from tests.support.mounts import FUSECACHE, Mount, run
from tests.support.s3_buckets import Bucket

MIB = 2**20
RATE = 8e6
FILE = 24 * MIB
# Most bytes that go at once: one GET, or one call that sends.
PIECE = 8 * MIB
pytestmark = pytest.mark.s3server_only


def test_reads_ask_for_no_more_bytes_a_second_than_the_download_rate(mount, bucket: Bucket):
    bucket.put("data", bytes(FILE))
    one: Mount = mount("--download-rate", "8MB/s")
    began = time.monotonic()
    assert (one.path / "data").read_bytes() == bytes(FILE)
    seconds = time.monotonic() - began
    ranges = [
        entry.headers["range"].removeprefix("bytes=").split("-")
        for entry in bucket.control.log("GetObject")
        if entry.key == f"{bucket.prefix}data"
    ]
    seen = sum(int(last) - int(first) + 1 for first, last in ranges)
    assert seen >= FILE
    assert seen <= RATE * seconds + PIECE


def test_uploads_send_no_more_bytes_a_second_than_the_upload_rate(mount, bucket: Bucket):
    one: Mount = mount("--upload-rate", "8MB/s", "--settle-seconds", "0")
    began = time.monotonic()
    for name in "abc":
        (one.path / name).write_bytes(bytes(FILE // 3))
    one.sync()
    seconds = time.monotonic() - began
    seen = sum(len(bucket.get(name)) for name in "abc")
    assert seen == FILE
    # Uploads in flight take turns, and each sends a first piece before its turn is due.
    assert seen <= RATE * seconds + PIECE
    assert one.status()["options"]["upload_rate"] == RATE


@pytest.mark.parametrize("value", ["200Mbit/s", "200Mb/s", "fast", "10kB/s", "-1"])
def test_a_wrong_unit_is_one_clear_line(bucket: Bucket, tmp_path, value):
    done = run(FUSECACHE, "mount", bucket.source, tmp_path, f"--upload-rate={value}", check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"fusecache: error: --upload-rate = {value!r}: allowed is bytes a second, 1MB/s or more, like 200MB/s or "
        "1GiB/s; 1 Gbit/s is 125MB/s\n"
    )
