"""What a mount asks of the bucket, and what it makes of odd objects and forgotten uploads."""

import errno
import gzip
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from fusecache.remote.s3.store import PROBE_NAME
from tests.crash.test_kill import shows
from tests.mount.conftest import ExpectedLog, Place
from tests.s3server import Account, Fault, FaultAction, ServerProcess
from tests.support.daemons import MIB, Daemon, some_bytes
from tests.support.mounts import Mount, pattern, wait_until
from tests.support.s3_buckets import Bucket

EIGHT_DAYS = 8 * 86_400
FIVE_TEBIBYTES = 5 * 2**40
LARGE = some_bytes(70 * MIB, 1)
# What a token for objects may do, and all that R2 has.
ALLOWED = {
    "ListObjectsV2",
    "HeadObject",
    "GetObject",
    "PutObject",
    "CopyObject",
    "DeleteObject",
    "CreateMultipartUpload",
    "UploadPart",
    "UploadPartCopy",
    "CompleteMultipartUpload",
    "AbortMultipartUpload",
}


@pytest.mark.case(20)
def test_a_file_of_five_tebibytes_is_refused_however_it_is_made_so_large(
    place: Place, expect_log: ExpectedLog
):
    expect_log("larger than the largest object")
    place.bucket.put("file", b"old")
    file = os.open(place.path / "file", os.O_RDWR)
    steps: list[Callable[[], object]] = [
        lambda: os.ftruncate(file, FIVE_TEBIBYTES),
        lambda: os.pwrite(file, b"x", FIVE_TEBIBYTES - 1) and os.fsync(file),
        lambda: os.close(file),  # told once more to who did not ask before
    ]
    try:
        for step in steps:
            with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
                step()
            assert caught.value.errno == errno.EFBIG
    finally:
        with suppress(OSError):
            os.close(file)
    (place.path / "other").write_bytes(b"1")
    place.sync()
    assert place.bucket.sizes() == {"file": 3, "other": 1}


@pytest.mark.case(22)
def test_a_small_file_follows_an_empty_one_without_a_pause(mount: Callable[..., Mount], bucket: Bucket):
    one: Mount = mount("--settle-seconds", "0")
    for turn in range(10):
        (one.path / f"{turn}-empty").write_bytes(b"")
        (one.path / f"{turn}-small").write_bytes(pattern(1024, seed=turn))
        one.sync()  # so that a machine that stands still does so in one turn alone
    assert bucket.sizes() == {
        f"{turn}-{kind}": size for turn in range(10) for kind, size in (("empty", 0), ("small", 1024))
    }
    puts = bucket.requests("PutObject")
    assert {entry.status for entry in puts} == {200}
    after_empty = [
        entry
        for before, entry in pairwise(sorted(puts, key=lambda put: (put.connection, put.number)))
        if entry.connection == before.connection and before.headers["content-length"] == "0"
    ]
    assert statistics.median(entry.seconds for entry in after_empty) < 0.9  # one that waits does so each time


@pytest.mark.case(26)
@pytest.mark.parametrize("is_killed", [True, False], ids=["daemon gone", "bucket gone"])
def test_an_upload_that_expired_in_eight_days_is_sent_again_whole(
    server: ServerProcess,
    daemon: Daemon,
    is_killed: bool,  # noqa: FBT001  # a parameter set
):
    server.control.faults(Fault(FaultAction.HOLD, operation="CompleteMultipartUpload", key="file"))
    (daemon.path / "file").write_bytes(LARGE)
    server.control.wait_requests(1, "CompleteMultipartUpload", "file", finished=False)
    (upload,) = server.control.uploads()
    if is_killed:
        daemon.kill()
    server.control.advance_clock(EIGHT_DAYS)
    assert server.control.uploads() == []
    server.control.clear_faults()
    if is_killed:
        daemon.mount()
    assert daemon.sync() == 0
    assert shows(server) == {"file": LARGE}
    assert server.control.uploads() == []
    assert "NoSuchUpload" in {entry.code for entry in server.control.log("CompleteMultipartUpload")}
    (done,) = [entry for entry in server.control.log("CompleteMultipartUpload") if entry.status == 200]
    assert done.query["uploadId"] != upload.upload_id


@pytest.mark.case(32)
def test_a_token_for_the_objects_of_a_prefix_is_enough_for_everything(
    mount: Callable[..., Mount], bucket: Bucket
):
    narrow = Account("narrow", "narrow-secret" * 3, prefix=bucket.prefix, bucket_calls=False)
    bucket.control.add_account(narrow)
    service = replace(bucket.service, access_key=narrow.access_key, secret_key=narrow.secret_key)
    bucket.put("there", b"1")
    bucket.put("dir/old", b"2")
    one: Mount = mount("--settle-seconds", "0.1", of=replace(bucket, service=service))
    assert (one.path / "there").read_bytes() == b"1"
    assert sorted(os.listdir(one.path)) == ["dir", "there"]
    assert not (one.path / "missing").exists()
    (one.path / "new").write_bytes(b"3")
    (one.path / "large").write_bytes(pattern(66 * MIB))
    (one.path / "link").symlink_to("new")
    (one.path / "made").mkdir()
    one.sync()
    (one.path / "there").rename(one.path / "made" / "there")
    (one.path / "dir").rename(one.path / "moved")
    (one.path / "new").unlink()
    one.sync()
    (one.path / "made" / "there").unlink()
    (one.path / "made").rmdir()
    one.unmount()
    assert [name for name in bucket.names() if not name.endswith("/")] == ["large", "link", "moved/old"]
    mine = [entry for entry in bucket.control.log() if entry.access_key in ("", narrow.access_key)]
    # Behind the test of the store, for an upload whose answer was lost; where it is refused, that stays.
    mine = [entry for entry in mine if entry.operation != "ListMultipartUploads"]
    assert {entry.operation for entry in mine} >= ALLOWED - {
        "GetObject",
        "UploadPartCopy",
        "AbortMultipartUpload",
    }
    assert {entry.operation for entry in mine} <= ALLOWED
    # The mount asks once whether the store honours If-Match: by a write that must fail.
    assert {entry.status for entry in mine if PROBE_NAME not in entry.key} <= {200, 204, 206, 404}
    # Not of this test alone, but of all that this server was ever asked.
    assert bucket.control.offences() == []


@pytest.mark.case(46)
def test_a_gzip_encoded_object_shows_its_stored_bytes_whatever_a_proxy_does_to_some_answers(place: Place):
    packed = gzip.compress(pattern(100_000) + bytes(300_000), mtime=0)
    client, key = place.bucket.client, f"{place.bucket.prefix}data.gz"
    client.put_object(Bucket=place.bucket.service.bucket, Key=key, Body=packed, ContentEncoding="gzip")
    place.bucket.control.faults(Fault(FaultAction.DECOMPRESS, operation="GetObject", key=key, times=2))
    assert (place.path / "data.gz").stat().st_size == len(packed)
    assert (place.path / "data.gz").read_bytes() == packed
    assert [entry.fault for entry in place.bucket.requests("GetObject")][:2] == ["decompress"] * 2
    # Renamed, it is still what it was.
    (place.path / "data.gz").rename(place.path / "moved.gz")
    place.sync()
    assert place.bucket.head("moved.gz")["ContentEncoding"] == "gzip"
    assert (place.second / "moved.gz").read_bytes() == packed


WAIT_FOR_LATEST = """
import os, sys, time
end = time.monotonic() + float(sys.argv[2])
print("at it", flush=True)
while time.monotonic() < end:
    try:
        os.stat(sys.argv[1])
    except FileNotFoundError:
        pass
    else:
        print("there", flush=True)
        break
    time.sleep(0.2)
"""


@pytest.mark.case(48)
def test_eight_ranks_that_wait_for_a_missing_file_cost_one_request_a_time_out(place: Place):
    words = [sys.executable, "-c", WAIT_FOR_LATEST, str(place.path / "latest"), "30"]
    ranks = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "at it\n"
        wait_until(lambda: len(place.bucket.requests()) >= 6, "six requests of all ranks together")
        asked = place.bucket.requests()
        assert {entry.operation for entry in asked} <= {"ListObjectsV2", "HeadObject"}
        # They look forty times a second; one answer is believed for a second.
        assert len(asked) <= asked[-1].time - asked[0].time + 2
        place.bucket.put("latest", b"step-1")
        assert {rank.communicate(timeout=30)[0] for rank in ranks} == {"there\n"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
