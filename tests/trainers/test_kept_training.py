"""A training on a mount that outlives its daemon. Killing the daemon changes neither losses nor checkpoints.

FUSECACHE_TEST_KILLS: the training is long enough for so many; `make kept-training` sets it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusecache.keeper import _SERVICE_SECONDS
from loader import MDSWriter
from tests.support import ROOT
from tests.support.mounts import Mount, is_running, wait_until
from tests.support.s3_buckets import Bucket
from tests.trainers.workers import ENVIRONMENT

KILLS = int(os.environ.get("FUSECACHE_TEST_KILLS", "2"))
BATCH = 16
# Three seconds or more: of a kill, the next daemon's start, and its service.
STEPS_OF_KILL = 150
CONTEXT = 32


def write_dataset(folder: Path) -> None:
    draw = np.random.default_rng(7)
    with MDSWriter(folder, {"id": "int", "tokens": "ndarray:uint8"}, size_limit=1 << 16) as writer:
        for number in range(BATCH * STEPS_OF_KILL * KILLS):
            writer.write({"id": number, "tokens": draw.integers(0, 256, CONTEXT + 1, np.uint8)})


def start_training(mount: Mount, name: str, log: Path) -> "subprocess.Popen[bytes]":
    """Start two ranks that read `data` on a mount and save into `name` on it."""
    log.mkdir()
    words = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    options = {"data": mount.path / "data", "checkpoints": mount.path / name, "log-dir": log}
    numbers = {"checkpoint-every": 50, "context": CONTEXT, "global-batch-size": BATCH}
    given = [word for key, value in {**options, **numbers}.items() for word in (f"--{key}", str(value))]
    with open(log / "output", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words, "-m", "examples.demo.train", *given],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def steps_of(log: Path) -> list[dict[str, Any]]:
    """Return what each rank read and computed in each step."""
    lines = [
        json.loads(line) for path in sorted(log.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]
    kept = ("rank", "step", "ids", "crcs", "loss")
    return [{key: line[key] for key in kept} for line in lines if line["event"] == "step"]


@pytest.mark.timeout(120 + 60 * KILLS)
def test_a_training_whose_daemon_is_killed_is_the_undisturbed_one(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    """The same samples, the same losses, and the same checkpoints in the bucket."""
    made = mount("--keep-mounted", "--settle-seconds", "0.2")
    write_dataset(made.path / "data")
    made.sync()
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    with start_training(made, "calm", calm) as training:
        assert training.wait(600) == 0, (calm / "output").read_text()[-3000:]
    with start_training(made, "killed", killed) as training:
        wait_until(lambda: list(killed.glob("*.jsonl")), "its begin", seconds=60)
        kills = 0
        while training.poll() is None:
            before = made.pid
            os.kill(before, signal.SIGKILL)
            made.pid = wait_until(
                lambda before=before: None if is_running(before) else made.status()["pid"], "the next daemon"
            )
            kills += 1
            # A daemon that dies sooner has failed to start, and the pauses before the next ones get longer.
            time.sleep(2 * _SERVICE_SECONDS)
        assert training.wait(600) == 0, (killed / "output").read_text()[-3000:]
    sys.stdout.write(f"{kills} kills\n")
    assert kills >= KILLS / 2
    assert steps_of(killed) == steps_of(calm)
    assert len(steps_of(calm)) == 2 * STEPS_OF_KILL * KILLS
    made.sync()
    saved = sorted(name.removeprefix("calm/") for name in bucket.names() if name.startswith("calm/"))
    assert len(saved) >= 3 * KILLS
    assert (
        sorted(name.removeprefix("killed/") for name in bucket.names() if name.startswith("killed/")) == saved
    )
    for name in saved:
        if not name.endswith(".metadata"):  # it names each save by a random number
            assert bucket.get(f"killed/{name}") == bucket.get(f"calm/{name}"), name
