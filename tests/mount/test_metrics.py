"""The numbers of a real mount for Prometheus: by command, on a port, and in a file for node-exporter."""

import contextlib
import json
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from fusecache.daemon.http_server import LONGEST_SECONDS, MOST_CONNECTIONS
from fusecache.model.latency import BOUNDS_SECONDS
from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

Samples = dict[str, float]


def samples(families, **labels: str) -> Samples:
    """Return the value of each sample that has these labels."""
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if labels.items() <= sample.labels.items()
    }


def test_command_prints_what_the_mount_did(mount: Callable[..., Mount], bucket: Bucket) -> None:
    made = mount("--settle-seconds", "600")
    (made.path / "waits").write_bytes(bytes(1000))
    assert (made.path / "waits").read_bytes() == bytes(1000)
    text = run(FUSECACHE, "metrics", made.path).stdout
    assert text.endswith("# EOF\n")
    families = list(text_string_to_metric_families(text))
    found = samples(families, mount=str(made.path), bucket=bucket.source)
    assert found["fusecache_pending_bytes"] == found["fusecache_exposed_bytes"] == 1000
    assert found["fusecache_oldest_pending_seconds"] > 0
    assert found["fusecache_verdict"] == 0
    for call in ("open", "close"):
        calls = samples(families, call=call)
        assert calls["fusecache_call_seconds_count"] == 2
        assert 0 < calls["fusecache_call_seconds_sum"] < 60
    listed = samples(families, kind="list")
    assert listed["fusecache_request_seconds_count"] >= 1
    assert samples(families, kind="lists")["fusecache_requests_total"] >= 1


def test_buckets_of_a_histogram_are_fixed(mount: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put("cold", bytes(3000))
    made = mount()
    assert (made.path / "cold").read_bytes() == bytes(3000)
    families = list(text_string_to_metric_families(run(FUSECACHE, "metrics", made.path).stdout))
    (calls,) = [family for family in families if family.name == "fusecache_call_seconds"]
    reads = {
        float(sample.labels["le"]): sample.value
        for sample in calls.samples
        if sample.labels["call"] == "read" and "le" in sample.labels
    }
    assert list(reads) == [*BOUNDS_SECONDS, float("inf")]
    assert list(reads.values()) == sorted(reads.values())
    assert reads[float("inf")] >= 1


def test_port_answers_until_the_end(mount: Callable[..., Mount], free_port: Callable[[], int]) -> None:
    port = free_port()
    made = mount("--http-address", f"127.0.0.1:{port}")

    def uptime() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            families = text_families(answer.read().decode())
        return samples(families, mount=str(made.path))["fusecache_uptime_seconds"]

    wait_until(lambda: uptime() > 0, "an age of the daemon")
    made.unmount()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_port_in_use_refuses_the_mount(bucket: Bucket, tmp_path: Path) -> None:
    made = Mount(bucket, tmp_path, tmp_path.parent / "cache")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = made.command("--http-address", f"127.0.0.1:{port}")
        refused = run(*command, check=False, env=bucket.service.environment())
    assert refused.returncode == 1
    assert f"127.0.0.1:{port} cannot be used" in refused.stderr
    assert "choose another --http-address" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_textfile_is_replaced_whole(mount: Callable[..., Mount], tmp_path: Path) -> None:
    made = mount()
    path = tmp_path / "fusecache.prom"
    path.write_text("old")
    with path.open() as reader:
        run(FUSECACHE, "metrics", made.path, "--textfile", path)
        assert reader.read() == "old"
    found = samples(text_families(path.read_text()), mount=str(made.path))
    assert found["fusecache_cache_hits_total"] >= 0
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["fusecache.prom"]


@pytest.mark.parametrize(
    ("name", "why"), [("metrics.txt", "only files named"), ("no/such/folder.prom", "No such file")]
)
def test_bad_textfile_leaves_nothing(mount, tmp_path: Path, name: str, why: str) -> None:
    ended = run(FUSECACHE, "metrics", mount().path, "--textfile", tmp_path / name, check=False)
    assert ended.returncode == 1
    assert why in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_log_of_a_mount_is_json(mount: Callable[..., Mount]) -> None:
    made = mount("--log-format", "json")
    made.unmount()
    rows = [json.loads(line) for line in made.log().splitlines()]
    assert {"time", "level", "logger", "message"} == {key for row in rows for key in row}
    assert any(row["message"].startswith("mounted source=") for row in rows)


def test_silent_connections_are_bounded(mount: Callable[..., Mount], free_port: Callable[[], int]) -> None:
    port = free_port()
    mount("--http-address", f"127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            for _ in range(MOST_CONNECTIONS + 1)
        ]
        assert held[-1].recv(1) == b""
    wait_until(lambda: _scraped(port), "a free connection")


def test_slow_connections_of_another_user_do_not_shut_the_port(
    mount: Callable[..., Mount], free_port: Callable[[], int]
) -> None:
    """Some say nothing; some send a request letter by letter, which no time limit on silence ends."""
    port = free_port()
    mount("--http-address", f"127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:
        for number in range(2 * MOST_CONNECTIONS):
            held = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            held.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: " if number % 2 else b"")
        for _ in range(20):
            assert _scraped(port)


def test_a_connection_ends_in_time_however_slowly_it_sends_or_reads(
    mount: Callable[..., Mount], free_port: Callable[[], int]
) -> None:
    port = free_port()
    mount("--http-address", f"127.0.0.1:{port}")
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=1) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        wait_until(lambda: not _sends(slow), "the end of the connection", seconds=3 * LONGEST_SECONDS)
    assert LONGEST_SECONDS - 1 < time.monotonic() - began < 2 * LONGEST_SECONDS


def _sends(connection: socket.socket) -> bool:
    """Send one more letter of a request; return whether the connection is still open."""
    try:
        connection.sendall(b"x")
    except OSError:
        return False
    return True


def _scraped(port: int) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            body: bytes = answer.read()
            return body
    except OSError:
        return b""
