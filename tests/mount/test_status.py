"""`fusecache status PATH` and `sync` on real mounts: symlinks, one path's own lines, what found no room."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20
pytestmark = pytest.mark.s3server_only


def status(path: Path | str) -> list[str]:
    """Return the lines of a path's status, in words."""
    return [" ".join(line.split()) for line in run(FUSECACHE, "status", path).stdout.splitlines()]


def facts(path: Path) -> dict[str, Any]:
    """Return a path's status for programs."""
    said: dict[str, Any] = json.loads(run(FUSECACHE, "status", path, "--json").stdout)
    return said


def test_a_symlink_is_told_itself_and_then_its_target(mount, bucket: Bucket, tmp_path: Path):
    one: Mount = mount("--symlinks", "all")
    (one.path / "run" / "step-1").mkdir(parents=True)
    (one.path / "run" / "step-1" / "model").write_bytes(b"1")
    best, gone, away = (one.path / "run" / name for name in ("best", "gone", "away"))
    best.symlink_to("step-1")
    gone.symlink_to("nothing")
    away.symlink_to(tmp_path)
    run(FUSECACHE, "sync", one.path)
    hint = f"mount {bucket.source} at {one.path}; whole mount: fusecache status {one.path}"
    assert status(best) == ["run/best clean, a link to step-1", "run/step-1 clean", hint]
    assert status(f"{best}/") == ["run/step-1 clean", hint]
    assert status(best / "model") == ["run/step-1/model clean", hint]
    assert status(gone)[:2] == [
        "run/gone clean, a link to nothing",
        f"the state of its target is unknown: {gone}: no such file or directory",
    ]
    assert status(away)[0] == f"run/away clean, a link to {tmp_path}"
    said = facts(best)
    assert (said["path"], said["state"], said["link"]["path"]) == ("run/step-1", "clean", "run/best")
    assert facts(one.path).keys() <= said.keys()
    outside = tmp_path / "shortcut"
    outside.symlink_to(one.path)
    assert facts(outside).keys() == facts(one.path).keys()
    assert "there" not in facts(outside)
    outside.unlink()
    outside.symlink_to(best)
    assert status(outside)[0] == "run/step-1 clean"


def test_a_checkpoint_that_is_renamed_while_it_uploads_is_counted_under_its_new_name(mount, bucket: Bucket):
    one: Mount = mount()
    bucket.control.set(upload_bandwidth=MIB // 32)  # minutes: longer than the commands below take to start
    try:
        (one.path / "a").mkdir()
        for name in ("one", "two"):
            (one.path / "a" / name).write_bytes(bytes(6 * MIB))
        wait_until(lambda: len(one.status()["uploading"]) == 2, "two uploads under way")
        (one.path / "a").rename(one.path / "b")
        there = facts(one.path / "b")["there"]
        assert (there["pending_contents"], there["pending_bytes"]) == (2, 12 * MIB)
        assert sorted(each["path"] for each in there["uploading"]) == ["b/one", "b/two"]
        assert "12.0 MiB not in the bucket yet" in status(one.path / "b")[0]
        with subprocess.Popen(
            [FUSECACHE, "sync", one.path / "b"], stderr=subprocess.PIPE, text=True
        ) as syncing:
            assert syncing.stderr is not None
            said = syncing.stderr.readline()
            bucket.control.set(upload_bandwidth=None)
            syncing.communicate(timeout=60)
        assert syncing.returncode == 0
    finally:
        bucket.control.set(upload_bandwidth=None)
    assert re.match(r"fusecache: uploading: \d changes, (12|6)\.0 MiB left", said)
    assert status(one.path / "b")[0] == "b clean"
