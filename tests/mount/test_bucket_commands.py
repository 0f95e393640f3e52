"""`fusecache access` and `fusecache clean` on any store: the test server, or one that the environment names."""

import json
import os
import uuid
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from tests.support.mounts import FUSECACHE, run, wait_until
from tests.support.s3_buckets import Bucket


@pytest.fixture
def lone(whole_bucket: Bucket, lone_bucket: Bucket) -> Bucket:
    """A part of a bucket that no mount is on."""
    return lone_bucket if whole_bucket.service.control else whole_bucket.below(uuid.uuid4().hex)


def command(bucket: Bucket, name: str, *flags: str | Path) -> list[str | Path]:
    return [FUSECACHE, name, bucket.source, "--endpoint-url", bucket.service.endpoint_url, *flags]


def without_mounts(words: list[str | Path]) -> list[str | Path]:
    """A command on a node without mounts: one of several buckets whose daemon is dead may need any key."""
    if os.geteuid():
        return words
    script = 'umount --all --lazy --no-canonicalize --internal-only --types fuse.fusecache && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *words]


def test_key_that_may_everything_is_found(lone: Bucket) -> None:
    lone.put("kept", b"data")
    environment = lone.service.environment()
    done = run(*command(lone, "access", "--json"), env=environment, check=False)
    (row,) = json.loads(done.stdout)["keys"]
    assert (done.returncode, set(row["can"].values()), row["role"]) == (0, {True}, "read and write"), row
    assert (lone.names(), lone.uploads()) == (["kept"], [])
    done = run(*command(lone, "access", "--json", "--read-only"), env=environment, check=False)
    (row,) = json.loads(done.stdout)["keys"]
    assert (done.returncode, row["wrong"]) == (1, ["put", "delete", "multipart", "conditional"])
    assert (lone.names(), lone.uploads()) == (["kept"], [])


def test_unknown_key_is_not_allowed(lone: Bucket) -> None:
    environment = {**lone.service.environment(), "AWS_ACCESS_KEY_ID": "unknown"}
    done = run(*command(lone, "access", "--json"), env=environment, check=False)
    (row,) = json.loads(done.stdout)["keys"]
    assert (done.returncode, row["can"]["list"], row["can"]["put"]) == (1, False, False)


def test_missing_bucket_is_unknown(lone: Bucket) -> None:
    words = [FUSECACHE, "access", f"s3://{uuid.uuid4().hex}", "--endpoint-url", lone.service.endpoint_url]
    done = run(*words, env=lone.service.environment(), check=False)
    assert (done.returncode, "NoSuchBucket" in done.stdout) == (2, True)


def test_whole_checkpoints_go_then_everything(lone: Bucket, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        for name in ("a.pt", "größe +%2B.pt", ".metadata"):
            lone.put(f"step-{step}/{name}", b"data")
    lone.put("train.log", b"text")
    newest = lone.head("train.log")["LastModified"].timestamp()

    def is_later() -> bool:
        headers = lone.head("train.log")["ResponseMetadata"]["HTTPHeaders"]
        return parsedate_to_datetime(headers["date"]).timestamp() >= newest + 2

    wait_until(is_later, "the store's clock")
    flags = ["--delete", "--even-recent", "--log", tmp_path / "log"]
    environment = lone.service.environment()
    run(*without_mounts(command(lone, "clean", "--keep-checkpoints", "2", *flags)), env=environment)
    assert {name.partition("/")[0] for name in lone.names()} == {"step-2", "step-3", "train.log"}
    name = f"{lone.service.bucket}/{lone.prefix}".rstrip("/")
    wipe = command(lone, "clean", "--wipe", "--yes-wipe", name, *flags)
    run(*without_mounts(wipe), env=environment)
    assert lone.names() == []
