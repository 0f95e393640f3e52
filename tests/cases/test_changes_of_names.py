"""Symlinks, renames and removals: what the bucket shows of them, in which order, and at what price."""

import os
import shutil

import pytest

from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction, synthetic_bytes
from tests.support.mounts import Mount, pattern, wait_until
from tests.support.s3_buckets import WRITES

GIB = 2**30
SEED = 5
SIX = 6 * GIB + 12_345


@pytest.mark.case(13)
def test_a_symlink_comes_after_its_target_and_survives_a_remount_relative_and_dangling(mount, bucket):
    targets = {
        "latest.pt": "step/model.pt",
        "step/up": "../step/model.pt",
        "dangling": "nowhere/at all",
    }
    first: Mount = mount()
    (first.path / "step").mkdir()
    first.sync()
    bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key=f"{bucket.prefix}step/model.pt"))
    (first.path / "step" / "model.pt").write_bytes(pattern(100_000))
    for name, target in targets.items():
        (first.path / name).symlink_to(target)
    bucket.control.wait_requests(1, "PutObject", f"{bucket.prefix}step/model.pt", finished=False)
    assert not {"latest.pt", "step/up"} & set(bucket.names())
    bucket.control.clear_faults()
    first.sync()
    order = [name for _, name in bucket.published()]
    assert order.index("latest.pt") > order.index("step/model.pt")
    assert order.index("step/up") > order.index("step/model.pt")
    first.unmount()
    for again in (mount(cache=first.cache), mount()):
        assert {name: os.readlink(again.path / name) for name in targets} == targets
        assert (again.path / "latest.pt").read_bytes() == pattern(100_000)
        assert (again.path / "step" / "up").read_bytes() == pattern(100_000)
        assert not (again.path / "dangling").exists()


@pytest.mark.case(37)
def test_what_is_moved_and_removed_before_it_settles_is_never_uploaded(mount, bucket):
    one: Mount = mount("--settle-seconds", "3600")
    bucket.control.clear_log()
    (one.path / "a").mkdir()
    for index in range(20):
        (one.path / "a" / f"file-{index}").write_bytes(b"x" * 1000)
    (one.path / "a").rename(one.path / "b")
    shutil.rmtree(one.path / "b")
    (one.path / "last").write_bytes(b"2")
    one.unmount()  # which waits for nothing to settle
    assert bucket.sizes() == {"last": 1}
    sent = bucket.operations("PutObject", "CreateMultipartUpload", "UploadPart", "CopyObject")
    assert [each for each in sent if not each[1].endswith("/")] == [("PutObject", "last")]


@pytest.mark.case(40)
def test_a_published_object_of_six_gibibytes_is_renamed_by_copies_of_parts_alone(mount, bucket):
    bucket.control.add_synthetic(f"{bucket.prefix}first", SIX, SEED)
    one: Mount = mount()
    (one.path / "first").rename(one.path / "second")
    assert os.listdir(one.path) == ["second"]
    one.sync()
    assert bucket.sizes() == {"second": SIX}
    assert bucket.uploads() == []
    assert not bucket.requests("GetObject", "UploadPart", "CopyObject")
    copies = bucket.requests("UploadPartCopy")
    assert len(copies) >= 2  # one request copies 5 GiB at most
    assert bucket.operations(*WRITES)[-2:] == [
        ("CompleteMultipartUpload", "second"),
        ("DeleteObject", "first"),
    ]
    with open(one.path / "second", "rb", buffering=0) as file:
        for offset in (0, GIB - 100, 5 * GIB - 100, SIX - 200):
            assert os.pread(file.fileno(), 200, offset) == synthetic_bytes(SEED, offset, 200)


@pytest.mark.case(40)
def test_a_large_object_replaced_between_the_copies_of_its_parts_is_not_mixed(mount, bucket, expect_log):
    expect_log("conflict")
    bucket.control.add_synthetic(f"{bucket.prefix}first", SIX, SEED)
    one: Mount = mount()
    bucket.control.faults(Fault(FaultAction.HOLD, operation="UploadPartCopy", part=2))
    (one.path / "first").rename(one.path / "second")
    bucket.control.wait_requests(2, "UploadPartCopy", finished=False)
    bucket.control.add_synthetic(f"{bucket.prefix}first", SIX, SEED + 1)
    bucket.control.clear_faults()
    wait_until(lambda: one.status()["pending_files"] == 0, "the end of the rename")
    # The other client's object stays as it is, and nothing is made of both.
    assert bucket.sizes() == {"first": SIX}
    assert bucket.uploads() == []
    assert bucket.control.read(f"{bucket.prefix}first", GIB, 100) == synthetic_bytes(SEED + 1, GIB, 100)


@pytest.mark.case(45)
@pytest.mark.parametrize(
    "target", ["=?utf-8?q?x?=", "=?utf-8?b?eA==?=", "größe/データ/→", "100%25", "a=?b?=c"]
)
def test_a_symlink_to_anything_that_looks_like_encoded_metadata_keeps_its_target(place: Place, target: str):
    os.symlink(target, place.path / "link")
    place.sync()
    assert os.readlink(place.second / "link") == target
    # R2 decodes RFC 2047 in values: nothing in what is sent may look like it.
    (sent,) = place.bucket.requests("PutObject")
    values = [value for name, value in sent.headers.items() if name.startswith("x-amz-meta-")]
    assert values
    assert not [value for value in values if "=?" in value or not value.isascii()]
