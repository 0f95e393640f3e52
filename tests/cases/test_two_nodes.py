"""Two nodes with caches of their own that write one checkpoint, or one name, at the same time."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.mount.conftest import ExpectedLog
from tests.s3server import Fault, FaultAction, Rules
from tests.support.mounts import Mount, pattern, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20
FILES = [
    pytest.param(1000, None, id="a new file in one request"),
    pytest.param(66 * MIB, b"base", id="a replaced one in parts"),
]
# The second comes when the first is there.
SETTLE_SECONDS = ("0.2", "1")


@pytest.mark.case(7)
def test_a_node_that_dies_before_its_fsync_fails_it_and_publishes_nothing_of_its_shard(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: ExpectedLog
):
    """Who writes the metadata hears of it: the fsync of a rank fails, and what it says of the others is not asked."""
    expect_log("quarantined key=")
    expect_log("recovered files=")
    nodes = [mount("--fsync", "remote") for _ in range(2)]
    shards = [
        os.open(node.path / f"shard-{rank}", os.O_CREAT | os.O_WRONLY) for rank, node in enumerate(nodes)
    ]
    try:
        for shard in shards:
            os.write(shard, pattern(3 * MIB))
        os.fsync(shards[0])
        nodes[1].kill()
        with pytest.raises(OSError, match=r"[Tt]ransport endpoint|[Ss]oftware caused|not connected"):
            os.fsync(shards[1])
    finally:
        os.close(shards[0])
        with suppress(OSError):
            os.close(shards[1])
    again = mount("--fsync", "remote", cache=nodes[1].cache)
    again.sync()
    assert not (again.path / "shard-1").exists()
    assert bucket.sizes() == {"shard-0": 3 * MIB}
    for path in (nodes[0].path, again.path):
        assert (path / "shard-0").read_bytes() == pattern(3 * MIB)


@pytest.fixture
def bucket(bucket: Bucket) -> Iterator[Bucket]:
    """A prefix whose keys may be written as often as one likes: two nodes write one at the same moment."""
    bucket.control.set_rules(write_interval_seconds=0)
    yield bucket
    bucket.control.set_rules(write_interval_seconds=Rules().write_interval_seconds)


def write_on_both(
    mount: Callable[..., Mount], bucket: Bucket, name: str, one: bytes, two: bytes
) -> tuple[Mount, Mount]:
    """Write a name on two nodes before either publishes; return them once neither has anything left to do."""
    first, second = (mount("--settle-seconds", seconds) for seconds in SETTLE_SECONDS)
    bucket.control.faults(
        *(
            Fault(FaultAction.HOLD, operation=operation, key=bucket.prefix + name)
            for operation in ("PutObject", "CompleteMultipartUpload")
        )
    )
    for node in (first, second):
        (node.path / name).exists()
    (first.path / name).write_bytes(one)
    (second.path / name).write_bytes(two)
    bucket.control.clear_faults()
    for node in (first, second):
        wait_until(lambda node=node: has_published(node), "the end of the uploads", seconds=60)
    return first, second


def has_published(node: Mount) -> bool:
    """Return whether nothing is left to do. A file waits for its upload only from the release behind its close on."""
    said = node.status()
    return bool(said["dirty_files"] == said["pending_files"] == 0)


@pytest.mark.case(41)
@pytest.mark.parametrize(("size", "base"), FILES)
def test_different_bytes_of_two_nodes_both_survive(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: ExpectedLog, size: int, base: bytes | None
):
    expect_log("conflict key=")
    if base is not None:
        bucket.put("file", base)
    written = pattern(size, seed=1), pattern(size, seed=2)
    first, second = write_on_both(mount, bucket, "file", *written)
    copies = [name for name in bucket.names() if name.startswith("file.conflict-")]
    assert len(copies) == 1
    assert sorted(bucket.names()) == ["file", *copies]
    assert {bucket.get("file"), bucket.get(copies[0])} == set(written)
    wait_until(lambda: bucket.uploads() == [], "the abort of the unfinished uploads")
    told = [each for node in (first, second) for each in node.status()["conflicts"]]
    assert [(each["path"], each["kept_as"]) for each in told] == [("file", copies[0])]


@pytest.mark.case(42)
@pytest.mark.parametrize(("size", "base"), FILES)
def test_the_same_bytes_of_two_nodes_are_success_on_both(
    mount: Callable[..., Mount], bucket: Bucket, size: int, base: bytes | None
):
    if base is not None:
        bucket.put("file", base)
    data = pattern(size, seed=1)
    for node in write_on_both(mount, bucket, "file", data, data):
        node.sync()
        assert node.status()["conflicts"] == []
    assert bucket.sizes() == {"file": size}
    assert bucket.get("file") == data
    wait_until(lambda: bucket.uploads() == [], "the abort of the unfinished uploads")
