"""The lines of a status about the endpoints of a data set, and of other nodes, and what they do to its verdict."""

from typing import Any

from fusecache.cli.status import endpoint_lines, peer_lines
from fusecache.model.verdict import judge

WELL: dict[str, Any] = {
    "endpoint": "https://a s3://data/",
    "primary": True,
    "state": "ok",
    "failing_seconds": 0.0,
    "error": "",
    "gives_names": True,
    "latency_seconds": 0.012,
    "requests": 120,
    "bytes_read": 3 << 30,
    "errors": 0,
    "unused_copies": {},
    "unused_keys": [],
}
OTHER = {**WELL, "endpoint": "https://b s3://copy/", "primary": False, "gives_names": False}
FAILING = {**OTHER, "state": "failing", "failing_seconds": 50.0, "error": "GET x: 403"}
COPIES = {
    **OTHER,
    "unused_copies": {"other bytes": 2, "missing": 1},
    "unused_keys": [{"key": "a/7", "cause": "other bytes"}],
}


def test_each_endpoint_has_a_line() -> None:
    assert list(endpoint_lines([WELL, OTHER])) == [
        "https://a s3://data/ (primary): ok, 120 requests, 3.0 GiB, 0 errors, first byte 12 ms",
        "https://b s3://copy/: ok, 120 requests, 3.0 GiB, 0 errors, first byte 12 ms",
    ]
    assert judge({"endpoints": [WELL, OTHER]}, {})["verdict"] == "OK"


def test_a_failing_endpoint_degrades_the_mount() -> None:
    assert list(endpoint_lines([FAILING]))[1] == "failing for 50.0 s: GET x: 403"
    found = judge({"endpoints": [WELL, FAILING]}, {})
    assert found["verdict"] == "DEGRADED"
    assert found["reasons"] == ["endpoint https://b s3://copy/ has failed for 50.0 s: GET x: 403"]
    assert judge({"endpoints": [WELL, {**FAILING, "failing_seconds": 3.0}]}, {})["verdict"] == "OK"


def test_names_of_another_endpoint_degrade_the_mount() -> None:
    away = {**WELL, "gives_names": False}
    (reason,) = judge({"endpoints": [away, {**OTHER, "gives_names": True}]}, {})["reasons"]
    assert reason.startswith("names come from https://b s3://copy/")


def test_copies_with_other_bytes_degrade_the_mount() -> None:
    assert list(endpoint_lines([COPIES]))[1] == (
        "copies not used: 2 other bytes, 1 missing; such as a/7 (other bytes)"
    )
    (reason,) = judge({"endpoints": [COPIES]}, {})["reasons"]
    assert (
        reason
        == "endpoint https://b s3://copy/ has other bytes under 2 keys: its copies of them are not used"
    )
    assert judge({"endpoints": [{**COPIES, "unused_copies": {"missing": 1}}]}, {})["verdict"] == "OK"


def test_other_nodes_are_shown_with_what_they_sent_and_why_one_is_not_asked() -> None:
    peers = {
        "own_address": "",
        "nodes": 2,
        "received_bytes": {"gpu1:9470": 3 << 20, "gpu2:9470": 0},
        "received_pieces": {"gpu1:9470": 2, "gpu2:9470": 0},
        "failures": {"gpu1:9470": 0, "gpu2:9470": 1},
        "refusals": {"gpu1:9470": 3, "gpu2:9470": 0},
        "resting": {"gpu2:9470": "connection refused"},
    }
    assert list(peer_lines(peers)) == [
        "gpu1:9470: 3.0 MiB in 2 pieces, 0 failures, 3 refusals: see `fusecache doctor`, with the mount's options",
        "gpu2:9470: 0 B in 0 pieces, 1 failure, not asked for now: connection refused",
        "this node is not in the list of peers: set peer_address to its own HOST:PORT in the list",
    ]
    assert list(peer_lines({})) == []
