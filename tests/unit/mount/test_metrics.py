"""The table of metrics, and what the examples of monitoring name."""

import re
from pathlib import Path

import pytest
import trio
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fusecache.model.facts import COUNTER, FACTS, HISTOGRAM, METRICS
from fusecache.mount.metrics import PREFIX, metrics_text
from tests.support import ROOT
from tests.support.node import Bucket, running_node

EXAMPLES = ROOT / "examples" / "monitoring"
DAEMON_FACTS = {
    "version": "1",
    "mountpoint": "/data",
    "source": "s3://b",
    "request_times": {},
    "verdict": "OK",
}
# Of Prometheus itself and of node-exporter.
FOREIGN = {"up", "node_textfile_mtime_seconds"}


def sample_names() -> set[str]:
    suffixes = {COUNTER: ("_total",), HISTOGRAM: ("_bucket", "_sum", "_count")}
    return {
        f"{PREFIX}{metric.name}{suffix}" for metric in METRICS for suffix in suffixes.get(metric.kind, ("",))
    }


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_name_metrics_that_exist(path: Path) -> None:
    named = set(re.findall(r"\b(?:fusecache|node)_\w+", path.read_text()))
    assert named - FOREIGN <= sample_names()
    assert named or path.name == "prometheus.yml"


def test_every_metric_is_in_a_status(tmp_path: Path) -> None:
    async def collect() -> dict[str, object]:
        async with running_node(Bucket(), tmp_path / "cache") as user:
            return user.fs.statistics()

    status = DAEMON_FACTS | trio.run(collect)
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics_text(status, is_open_metrics=True).decode())
    }
    empty = {name.removeprefix(PREFIX) for name, family in families.items() if not family.samples}
    # No job, no request, no other node.
    assert empty == {
        "hint_horizon_bytes", "hint_lead_seconds", "request_seconds", "peer_failures", "peer_received_bytes",
        "peer_received_pieces",
    }  # fmt: skip
    assert {PREFIX + metric.name for metric in METRICS} | {"fusecache_daemon"} == set(families)


def test_keys_of_the_table_are_documented() -> None:
    assert {each.key for each in METRICS} - set(FACTS) == {
        "closes_waiting.files",
        "hints.horizon_bytes",
        "hints.lead_seconds",
        "peers.failures",
        "peers.received_bytes",
        "peers.received_pieces",
    }


def test_no_two_metrics_have_the_same_help() -> None:
    peers = {"received_bytes": {"a:1": 1}, "failures": {"a:1": 2}}
    status = {**DAEMON_FACTS, "peers": peers, "hints": {"jobs": []}}
    found = metrics_text(status, is_open_metrics=False).decode()
    helps = re.findall(r"# HELP fusecache_peer\w+ (.*)", found)
    assert len(helps) == 3
    assert len(set(helps)) == 3


def test_older_daemon_gives_fewer_metrics() -> None:
    status = {"version": "0", "mountpoint": "/data", "source": "s3://b", "verdict": "ACTION"}
    found = metrics_text({**status, "hints": {"jobs": []}}, is_open_metrics=False).decode()
    assert 'fusecache_verdict{bucket="s3://b",mount="/data"} 2.0' in found
    assert "cache_hits_total{" not in found
