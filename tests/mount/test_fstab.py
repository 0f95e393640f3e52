"""Lines of /etc/fstab: mount(8) itself, in a mount namespace of its own, with the helper in its /usr/sbin."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.mounts import FUSECACHE
from tests.support.s3_buckets import Bucket

HELPER = f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m fusecache.mount_helper "$@"\n'
# mount(8) looks for helpers in /sbin alone.
IN_NAMESPACE = """
mount -t tmpfs helper /usr/sbin
cp "$HELPER" /usr/sbin/mount.fusecache
mount -T "$FSTAB" "$POINT" || exit $?
trap '"$FUSECACHE" unmount "$POINT"' EXIT
cat "$POINT/file"
grep " $POINT " /proc/self/mountinfo
echo new >"$POINT/new"
"""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount namespace")


@pytest.fixture
def mounted(bucket: Bucket, tmp_path: Path):
    """Run mount(8) with a line that has these options; read a file there, write one, and unmount."""

    def run(options: str) -> subprocess.CompletedProcess[str]:
        point = tmp_path / "mnt"
        point.mkdir()
        helper = tmp_path / "helper"
        helper.write_text(HELPER)
        helper.chmod(0o755)
        own = f"endpoint_url={bucket.service.endpoint_url},cache_dir={tmp_path}/cache,cache-size=1GiB"
        fstab = tmp_path / "fstab"
        fstab.write_text(f"{bucket.source} {point} fusecache {own},{options} 0 0\n")
        places = {"HELPER": helper, "FSTAB": fstab, "POINT": point, "FUSECACHE": FUSECACHE}
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", IN_NAMESPACE],
            env={**bucket.service.environment(), **{name: str(path) for name, path in places.items()}},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def test_line_with_systemd_options_mounts(mounted, bucket: Bucket, free_port: Callable[[], int]) -> None:
    bucket.put("file", b"content\n")
    ended = mounted(
        "_netdev,nofail,x-systemd.automount,allow_other,memory=64MiB,settle_seconds=0.2,"
        f"http_address={free_port()}"
    )
    assert ended.returncode == 0, ended.stderr
    content, mount_entry = ended.stdout.splitlines()
    assert content == "content"
    assert "fuse.fusecache" in mount_entry
    assert "allow_other" in mount_entry
    assert bucket.get("new") == b"new\n"


def test_ro_is_a_read_only_mount(mounted, bucket: Bucket) -> None:
    bucket.put("file", b"content\n")
    ended = mounted("ro,_netdev")
    assert "Read-only file system" in ended.stderr
    assert bucket.names() == ["file"]


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("cachesize=1GiB", "unknown mount option 'cachesize': did you mean 'cache_size'?"),
        ("memory", "memory: it needs a value"),
        ("allow_other=maybe", "allow_other=maybe: allowed is true or false"),
    ],
)
def test_wrong_option_is_one_line(mounted, tmp_path: Path, option: str, why: str) -> None:
    ended = mounted(option)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert why in ended.stderr
    assert not (tmp_path / "cache").exists()


def test_failed_mount_has_status_32(mounted) -> None:
    ended = mounted("endpoint_url=http://127.0.0.1:9")
    assert ended.returncode == 32
    assert "cannot reach the bucket" in ended.stderr
