"""Two nodes with caches of their own that write one name at the same time."""

from collections.abc import Callable

import pytest

from tests.mount.buckets import Bucket
from tests.mount.conftest import ExpectedLog
from tests.mount.mounts import Mount, pattern, wait_until

MIB = 2**20
SIZES = [pytest.param(1000, id="one request"), pytest.param(66 * MIB, id="parts")]
BASES = [pytest.param(None, id="new"), pytest.param(b"base", id="replaced")]
# Both are written before either is published; the second then meets the first, and not R2's one write a second.
SETTLE_SECONDS = ("1", "3")


def write_on_both(mount: Callable[..., Mount], name: str, one: bytes, two: bytes) -> tuple[Mount, Mount]:
    """Write a name on two nodes before either publishes; return them once neither has anything left to do."""
    first, second = (mount("--settle-seconds", seconds) for seconds in SETTLE_SECONDS)
    for node in (first, second):
        (node.path / name).exists()
    (first.path / name).write_bytes(one)
    (second.path / name).write_bytes(two)
    for node in (first, second):
        wait_until(
            lambda node=node: node.status()["pending_files"] == 0, "the end of the uploads", seconds=60
        )
    return first, second


@pytest.mark.case(41)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("size", SIZES)
def test_different_bytes_of_two_nodes_both_survive(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: ExpectedLog, size: int, base: bytes | None
):
    expect_log("conflict key=")
    if base is not None:
        bucket.put("file", base)
    written = pattern(size, seed=1), pattern(size, seed=2)
    first, second = write_on_both(mount, "file", *written)
    copies = [name for name in bucket.names() if name.startswith("file.conflict-")]
    assert len(copies) == 1
    assert sorted(bucket.names()) == ["file", *copies]
    assert {bucket.get("file"), bucket.get(copies[0])} == set(written)
    assert bucket.uploads() == []
    told = [each for node in (first, second) for each in node.status()["conflicts"]]
    assert [(each["path"], each["kept_as"]) for each in told] == [("file", copies[0])]


@pytest.mark.case(42)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("size", SIZES)
def test_the_same_bytes_of_two_nodes_are_success_on_both(
    mount: Callable[..., Mount], bucket: Bucket, size: int, base: bytes | None
):
    if base is not None:
        bucket.put("file", base)
    data = pattern(size, seed=1)
    for node in write_on_both(mount, "file", data, data):
        node.sync()
        assert node.status()["conflicts"] == []
    assert bucket.sizes() == {"file": size}
    assert bucket.get("file") == data
    assert bucket.uploads() == []
