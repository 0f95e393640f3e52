"""The examples with Debian's Prometheus: promtool accepts them, a server scrapes a mount. `make test-monitoring`."""

import json
import os
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.mounts import Mount, run, wait_until

EXAMPLES = ROOT / "examples" / "monitoring"
PANELS = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
pytestmark = pytest.mark.skipif(
    not os.environ.get("FUSECACHE_TEST_PROMETHEUS"), reason="needs Prometheus: make test-monitoring"
)


def test_promtool_accepts_the_examples() -> None:
    run("promtool", "check", "rules", EXAMPLES / "alerts.yml")
    run("promtool", "check", "config", EXAMPLES / "prometheus.yml")


def test_prometheus_scrapes_a_mount(
    mount: Callable[..., Mount], free_port: Callable[[], int], tmp_path: Path
) -> None:
    made = mount("--http-address", str(port := free_port()))
    (made.path / "file").write_bytes(bytes(1000))
    made.sync()
    place = f"127.0.0.1:{free_port()}"
    config = (EXAMPLES / "prometheus.yml").read_text().replace("15s", "1s").replace(":9469", f":{port}")
    (tmp_path / "prometheus.yml").write_text(config)
    (tmp_path / "alerts.yml").write_text((EXAMPLES / "alerts.yml").read_text())
    command = [
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address={place}",
        "--log.level=error",
    ]

    def ask(path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://{place}/api/v1/{path}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:  # not up yet
            return {}

    def query(text: str) -> Any:
        return ask(f"query?{urllib.parse.urlencode({'query': text})}")["result"]

    process = subprocess.Popen(command)
    try:
        (target,) = wait_until(
            lambda: [each for each in ask("targets").get("activeTargets", []) if each["lastScrape"] > "1"],
            "the first scrape",
            seconds=60,
        )
        assert (target["health"], target["lastError"]) == ("up", "")
        (row,) = query("fusecache_uptime_seconds")
        assert row["metric"]["mount"] == str(made.path)
        assert row["metric"]["bucket"] == made.bucket.source
        rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == set(
            re.findall(r"alert: (\w+)", (EXAMPLES / "alerts.yml").read_text())
        )
        for panel in PANELS:
            for shown in panel["targets"]:
                text = shown["expr"].replace("$__rate_interval", "1m").replace("$mount", ".*")
                assert isinstance(query(text), list), panel["title"]
    finally:
        process.terminate()
        process.wait(timeout=30)
