"""`fusecache uploads`: what unfinished multipart uploads a lost node left, and how they are aborted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.s3server import Fault, FaultAction
from tests.support.mounts import FUSECACHE, Mount, run
from tests.support.s3_buckets import Bucket

DAY_SECONDS = 86_400
MIB = 1 << 20


def begin(bucket: Bucket, *names: str, days_ago: float = 0) -> None:
    """Begin uploads, as a node that is lost later does."""
    bucket.control.advance_clock(-days_ago * DAY_SECONDS)
    for name in names:
        key = bucket.prefix + name
        answer = bucket.client.create_multipart_upload(Bucket=bucket.service.bucket, Key=key)
        bucket.client.upload_part(
            Bucket=bucket.service.bucket, Key=key, UploadId=answer["UploadId"], PartNumber=1, Body=b"part"
        )
    bucket.control.advance_clock(days_ago * DAY_SECONDS)


def uploads(bucket: Bucket, place: str | Path, *flags: str) -> dict[str, Any]:
    """Return what the command says as JSON."""
    words = [FUSECACHE, "uploads", place, "--json", *flags]
    found: dict[str, Any] = json.loads(run(*words, env=environment(bucket)).stdout)
    return found


def environment(bucket: Bucket) -> dict[str, str]:
    return {**bucket.service.environment(), "S3_ENDPOINT_URL": bucket.service.endpoint_url}


def test_uploads_lists_by_key_and_age(lone_bucket: Bucket) -> None:
    begin(lone_bucket, "old one\u202e/größe+1%2B", days_ago=3)
    begin(lone_bucket, "new")
    begin(replace(lone_bucket, prefix="elsewhere/"), "x")
    lines = run(FUSECACHE, "uploads", lone_bucket.source, env=environment(lone_bucket)).stdout.splitlines()
    assert lines[0].startswith("run/new  ")
    assert lines[1] == "run/old one\\u202e/größe+1%2B  3 d 0 h old"
    assert lines[2] == (
        "2 unfinished uploads, 1 old enough to abort and not in use; nothing was aborted: add --abort --yes"
    )
    found = uploads(lone_bucket, lone_bucket.source)
    assert (found["count"], found["old_count"], found["aborted_count"]) == (2, 1, 0)
    assert [each["key"] for each in found["uploads"]] == ["run/new", "run/old one\u202e/größe+1%2B"]
    assert 3 * DAY_SECONDS <= found["uploads"][1]["age_seconds"] < 3 * DAY_SECONDS + 60


def test_uploads_aborts_old_ones_when_confirmed(lone_bucket: Bucket) -> None:
    begin(lone_bucket, "old", "older", days_ago=3)
    begin(lone_bucket, "new")
    assert uploads(lone_bucket, lone_bucket.source, "--abort")["aborted_count"] == 0
    assert (
        uploads(lone_bucket, lone_bucket.source, "--abort", "--yes", "--older-than", "4d")["aborted_count"]
        == 0
    )
    assert sorted(lone_bucket.uploads()) == ["new", "old", "older"]
    done = run(FUSECACHE, "uploads", lone_bucket.source, "--abort", "--yes", env=environment(lone_bucket))
    assert done.stdout.endswith("; 2 aborted\n")
    assert lone_bucket.uploads() == ["new"]
    refused = run(FUSECACHE, "uploads", lone_bucket.source, "--older-than", "59m", check=False)
    assert refused.returncode == 2


def test_uploads_follow_the_pages_of_the_bucket(lone_bucket: Bucket) -> None:
    names = [f"part {index:04}" for index in range(1003)]
    lone_bucket.control.advance_clock(-2 * DAY_SECONDS)
    for name in names:
        lone_bucket.client.create_multipart_upload(
            Bucket=lone_bucket.service.bucket, Key=lone_bucket.prefix + name
        )
    lone_bucket.control.advance_clock(2 * DAY_SECONDS)
    found = uploads(lone_bucket, lone_bucket.source)
    assert (found["count"], found["old_count"], len(found["uploads"])) == (1003, 1003, 50)


@pytest.mark.parametrize("by", ["mount", "source"])
def test_uploads_of_a_running_mount_are_kept(
    mount: Callable[..., Mount], lone_bucket: Bucket, by: str
) -> None:
    """Even an upload that the mount began days ago, and that waits for the network."""
    begin(lone_bucket, "left", days_ago=3)
    lone_bucket.control.faults(
        Fault(FaultAction.HOLD, operation="UploadPart", key=f"{lone_bucket.prefix}large")
    )
    lone_bucket.control.advance_clock(-3 * DAY_SECONDS)
    one = mount(of=lone_bucket)
    (one.path / "large").write_bytes(bytes(80 * MIB))
    lone_bucket.control.wait_requests(1, "UploadPart", f"{lone_bucket.prefix}large", finished=False)
    lone_bucket.control.advance_clock(3 * DAY_SECONDS)
    place = one.path if by == "mount" else lone_bucket.source
    found = uploads(lone_bucket, place, "--abort", "--yes")
    assert {each["key"]: (each["in_use"], each["aborted"]) for each in found["uploads"]} == {
        "run/large": (True, False),
        "run/left": (False, True),
    }
    assert lone_bucket.uploads() == ["large"]
    lone_bucket.control.clear_faults()
    one.sync()
    assert lone_bucket.sizes() == {"large": 80 * MIB}
