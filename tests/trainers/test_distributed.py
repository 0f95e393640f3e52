"""torch.distributed.checkpoint: two ranks under torchrun, one node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, wait_until
from tests.trainers.checks import arrivals, assert_last, assert_once, assert_tidy
from tests.trainers.kills import SLEEPY, Kills
from tests.trainers.workers import Worker

SHARDS = ["__0_0.distcp", "__1_0.distcp"]
MANY = 2_500  # of each rank
FEW = 20


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Two ranks that wait for calls."""
    launcher = ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "-m")
    with Worker("jobs_distributed", tmp_path_factory.mktemp("ranks"), launcher=launcher) as worker:
        yield worker


@pytest.mark.case(6)
def test_metadata_of_5000_tensors_come_after_both_shards_and_another_node_loads_them(
    mount, bucket, ranks: Worker
):
    """Case 6."""
    node: Mount = mount()
    ranks.call("save", path=f"{node.path}/step-1", tensors=MANY, value=1.5)
    node.sync()
    assert sorted(arrivals(bucket)) == sorted(f"step-1/{name}" for name in [*SHARDS, ".metadata"])
    assert_last(bucket, ".metadata", "step-1")
    assert_tidy(bucket)
    other: Mount = mount()
    loaded = ranks.call("load", path=f"{other.path}/step-1", tensors=MANY)
    assert loaded == ranks.call("digest_of", tensors=MANY, value=1.5)


def test_metadata_wait_while_one_shard_is_on_its_way(mount, bucket, ranks: Worker):
    held = f"{bucket.prefix}step-1/{SHARDS[1]}"
    bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key=held))
    node: Mount = mount()
    ranks.call("save", path=f"{node.path}/step-1", tensors=FEW, value=1.0)
    (node.path / "elsewhere").write_bytes(b"1")
    wait_until(lambda: "elsewhere" in bucket.names(), "a file elsewhere, which does not wait")
    assert "step-1/.metadata" not in arrivals(bucket)
    bucket.control.clear_faults()
    node.sync()
    assert_last(bucket, ".metadata", "step-1")


@pytest.mark.case(9)
def test_a_previous_checkpoint_is_deleted_after_the_metadata_of_an_asynchronous_one(
    mount, bucket, ranks: Worker
):
    """Case 9."""
    node: Mount = mount()
    ranks.call("save", path=f"{node.path}/step-1", tensors=FEW, value=1.0)
    node.sync()
    held = f"{bucket.prefix}step-2/{SHARDS[0]}"
    bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key=held))
    ranks.call(
        "save_and_go_on", path=f"{node.path}/step-2", tensors=FEW, value=2.0, previous=f"{node.path}/step-1"
    )
    assert not (node.path / "step-1").exists()
    (node.path / "elsewhere").write_bytes(b"1")
    wait_until(lambda: "elsewhere" in bucket.names(), "a file elsewhere, which does not wait")
    assert bucket.operations("DeleteObject") == []
    bucket.control.clear_faults()
    node.sync()
    names = arrivals(bucket)
    deletes = [f"step-1/{name}" for name in [*SHARDS, ".metadata"]]
    assert sorted(arrivals(bucket, "DeleteObject")) == sorted(deletes)
    assert min(names.index(each, names.index("step-2/.metadata")) for each in deletes)
    assert_tidy(bucket)
    assert_once(bucket)
    other: Mount = mount()
    assert sorted(path.name for path in other.path.iterdir()) == ["elsewhere", "step-2"]
    loaded = ranks.call("load", path=f"{other.path}/step-2", tensors=FEW)
    assert loaded == ranks.call("digest_of", tensors=FEW, value=2.0)


@pytest.mark.case(8)
def test_a_node_killed_at_any_request_of_an_overwrite_never_takes_the_metadata_away(
    mount, bucket, ranks: Worker, kills: Kills, tmp_path: Path
):
    """Case 8."""
    node: Mount = mount()
    ranks.call("save", path=f"{node.path}/step", tensors=FEW, value=1.0)
    node.unmount()
    old = {name: bucket.get(f"step/{name}") for name in [*SHARDS, ".metadata"]}
    again: Mount = mount(*SLEEPY, cache=node.cache)
    ranks.call("save", path=f"{again.path}/step", tensors=FEW, value=2.0, overwrite=True)
    new = {name: (again.path / "step" / name).read_bytes() for name in old}
    assert all(new[name] != old[name] for name in old)

    frozen = kills.freeze(again)
    for found in kills.at_every_request(frozen, "step"):
        step = found.below("step")
        assert sorted(step) == sorted(old), found.request
        assert all(step[name] in (old[name], new[name]) for name in old), found.request
        if step[".metadata"] == new[".metadata"]:
            assert step == new, found.request
    assert kills.count == len(old)  # two shards and the metadata: no DELETE, nothing twice
    assert bucket.get("step/.metadata") == new[".metadata"]
    assert_tidy(bucket)
    other: Mount = mount()
    loaded = ranks.call("load", path=f"{other.path}/step", tensors=FEW)
    assert loaded == ranks.call("digest_of", tensors=FEW, value=2.0)


@pytest.mark.case(7)
def test_metadata_never_come_if_a_node_dies_before_its_shard_is_in_the_bucket(
    mount, bucket, expect_log, ranks: Worker
):
    """Case 7: every rank's fsync waits for the bucket, so rank 0 learns of the loss before it writes the metadata."""
    bucket.put(
        "step/"
    )  # else both nodes make the same marker, and the bucket bears one write a second to a key
    nodes: list[Mount] = [mount("--fsync", "remote"), mount("--fsync", "remote")]
    paths = [f"{node.path}/step" for node in nodes]
    held = f"{bucket.prefix}step/{SHARDS[1]}"
    bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key=held))
    ranks.begin("save_on_two_nodes", paths=paths, tensors=FEW, value=1.0)
    wait_until(lambda: f"step/{SHARDS[1]}" in arrivals(bucket), "the fsync of the second rank")
    nodes[1].kill()
    failures = ranks.result()
    assert all(failures)
    nodes[0].sync()
    assert "step/.metadata" not in arrivals(bucket)


def test_two_nodes_save_one_checkpoint_that_a_third_loads(mount, bucket, ranks: Worker):
    bucket.put(
        "step/"
    )  # else both nodes make the same marker, and the bucket bears one write a second to a key
    nodes: list[Mount] = [mount("--fsync", "remote"), mount("--fsync", "remote")]
    paths = [f"{node.path}/step" for node in nodes]
    assert ranks.call("save_on_two_nodes", paths=paths, tensors=FEW, value=1.0) == ["", ""]
    # Nothing is left to wait for when the last fsync has returned, but the rename of the metadata.
    nodes[0].sync()
    assert_last(bucket, ".metadata", "step")
    assert_tidy(bucket)
    third: Mount = mount()
    loaded = ranks.call("load", path=f"{third.path}/step", tensors=FEW)
    assert loaded == ranks.call("digest_of", tensors=FEW, value=1.0)
