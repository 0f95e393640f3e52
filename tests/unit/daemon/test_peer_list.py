"""The nodes that `peers` names, in each of its forms."""

import logging
from pathlib import Path

import pytest
import trio

from fusecache.config.options import load_options
from fusecache.daemon.peer_list import (
    SLURM_VARIABLE,
    PeerList,
    check_entries,
    nodes_of,
    one_kind,
    slurm_hosts,
)
from fusecache.disk.cache_files import granule_checksums
from fusecache.model.errors import ConfigError
from fusecache.model.objects import ObjectId
from fusecache.remote.http.peers import PeerNodes


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[08-10,3],login", ["gpu08", "gpu09", "gpu10", "gpu3", "login"]),
        ("rack1-n[1-2]-ib,rack2-n5", ["rack1-n1-ib", "rack1-n2-ib", "rack2-n5"]),
    ],
)
def test_node_lists_of_slurm(text: str, hosts: list[str]) -> None:
    assert slurm_hosts(text) == hosts


def test_malformed_node_list_is_refused() -> None:
    with pytest.raises(ValueError, match="not a list of nodes"):
        slurm_hosts("gpu[1-")
    with pytest.raises(ValueError, match="more than 4096 nodes"):
        slurm_hosts("gpu[1-999999999]")


def test_each_form(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("10.0.0.1:9470  # the first\n\n[fd00::1]:9470\n")
    found = list(
        nodes_of(
            ["gpu1:9470", f"file:{file}", "slurm:9471", "dns:127.0.0.1:9472"],
            {SLURM_VARIABLE: "a[1-2]"},
        )
    )
    assert found == [
        "gpu1:9470", "10.0.0.1:9470", "[fd00::1]:9470", "a1:9471", "a2:9471", "127.0.0.1:9472",
    ]  # fmt: skip


def test_node_with_addresses_of_both_kinds_is_one_node() -> None:
    assert one_kind([("10.0.0.1", "9470"), ("fd00::1", "9470")]) == [("10.0.0.1", "9470")]
    assert one_kind([("fd00::1", "9470")]) == [("fd00::1", "9470")]


def test_entries_that_name_no_nodes_are_refused() -> None:
    check_entries(["gpu1:9470", "[::1]:1", "file:/x", "dns:name:1", "slurm:1"])
    for wrong in ("gpu1", "dns:name", "slurm:x", "file:", "http://gpu1:1"):
        with pytest.raises(ConfigError, match="allowed is HOST:PORT"):
            check_entries([wrong])


def test_list_outside_of_a_job_says_so() -> None:
    with pytest.raises(ValueError, match="within the job"):
        list(nodes_of(["slurm:1"], {}))


def test_file_with_another_line_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("gpu1\n")
    with pytest.raises(ValueError, match="HOST:PORT"):
        list(nodes_of([f"file:{file}"], {}))


def test_node_that_is_not_in_the_list_evicts_as_if_there_were_no_peers() -> None:
    """Else all that it has counts as kept elsewhere, and goes in random order, whatever was read lately."""
    peers = PeerNodes("bucket", "secret", granule_checksums)
    peers.set_nodes(("a:1", "b:1"), "")
    assert all(peers.is_own(ObjectId("key", "etag"), group) for group in range(20))
    peers.set_nodes(("a:1", "b:1"), "a:1")
    assert {peers.is_own(ObjectId("key", "etag"), group) for group in range(20)} == {True, False}
    peers.close()


@pytest.mark.parametrize(
    ("peers", "address", "warning"),
    [
        (["127.0.0.1:1", "192.0.2.1:1"], None, None),
        (["127.0.0.1:1", "127.0.0.1:2"], "127.0.0.1:2", None),
        (["127.0.0.1:1", "127.0.0.1:2"], None, "several of them are at 127.0.0.1: set peer_address"),
        (["192.0.2.1:1"], None, "this node is not among them: set peer_address"),
        (["192.0.2.1:1"], "192.0.2.1:2", "this node is not among them: peer_address=192.0.2.1:2 is none"),
    ],
)
def test_doubt_which_node_this_one_is_is_warned_of(
    peers: list[str], address: str | None, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    options = load_options(
        {
            "source": "s3://b",
            "mountpoint": "/m",
            "peers": peers,
            "peers_key_file": "/k",
            "peer_address": address,
        },
        {},
    )
    trio.run(PeerList(PeerNodes("b", "", granule_checksums), options, {}).look)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]
