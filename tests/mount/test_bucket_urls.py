"""`remote="s3://bucket/x"` in the loader: which mount of the node shows it, and what is never removed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from loader.base import paths
from loader.base.paths import mounted_path
from loader.errors import ArgumentError
from loader.streaming import MDSWriter
from loader.torch.streaming import StreamingStream
from loader.writing.clusters import local_folder
from tests.s3server import ServerProcess
from tests.support.mounts import FUSECACHE, Mount, run, run_python, wait_until
from tests.support.other_user import needs_root
from tests.support.s3_buckets import Bucket, Service


@needs_root
def test_a_folder_that_is_bound_elsewhere_shows_only_what_is_below_it(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container often sees nothing but such a folder of the node's mount."""
    bucket.put("train/x", b"1")
    one, bound = mount(), tmp_path / "bound"
    url = bucket.source.rstrip("/")
    bound.mkdir()
    run("mount", "--bind", one.path / "train", bound)
    try:
        assert mounted_path(f"{url}/train/x") == str(bound / "x")
        assert mounted_path(f"{url}/out") == str(one.path / "out")
        seen = tmp_path / "mountinfo"
        rows = Path("/proc/self/mountinfo").read_text().splitlines(keepends=True)
        seen.write_text("".join(row for row in rows if f" {one.path} " not in row))
        monkeypatch.setattr(paths, "_MOUNTS", str(seen))
        assert mounted_path(f"{url}/train/x") == str(bound / "x")
        assert mounted_path(f"{url}/out") is None
    finally:
        run("umount", bound)


@pytest.mark.parametrize("number", [0, 1])
def test_of_two_mounts_the_one_with_a_daemon_counts(
    mount: Callable[..., Mount], bucket: Bucket, number: int
) -> None:
    mounts = mount(), mount()
    gone, other = mounts[number], mounts[1 - number]
    os.kill(gone.pid, signal.SIGKILL)
    wait_until(lambda: not gone.is_alive(), "its end")
    assert mounted_path(f"{bucket.source.rstrip('/')}/x") == str(other.path / "x")
    gone.pid = 0
    run(FUSECACHE, "unmount", gone.path)


def test_two_buckets_of_one_name_are_an_error_that_names_both(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    with ServerProcess(bucket=bucket.service.bucket) as server:
        service = Service(
            server.endpoint_url, server.access_key, server.secret_key, server.bucket, server.control, None
        )
        there = Bucket(service, service.client(), bucket.prefix)
        here, other = mount(), mount(of=there)
        url = f"{bucket.source}data"
        for call in (mounted_path, lambda url: StreamingStream(remote=url), local_folder):
            with pytest.raises(ArgumentError) as caught:
                call(url)
            assert f"{here.path} ({bucket.service.endpoint_url})" in str(caught.value)
            assert f"{other.path} ({server.endpoint_url})" in str(caught.value)
        other.unmount()
        there.client.close()
        assert mounted_path(url) == str(here.path / "data")


def test_a_mount_that_hangs_delays_no_url_that_another_one_shows_more_closely(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    bucket.put("train/x", b"1")
    outer, inner = mount(), mount(of=bucket.below("train"))
    os.kill(outer.pid, signal.SIGSTOP)
    try:
        code = (
            f"from loader.base.paths import mounted_path; print(mounted_path({bucket.source + 'train/x'!r}))"
        )
        assert run_python(code, seconds=30).stdout == f"{inner.path}/x\n"
    finally:
        os.kill(outer.pid, signal.SIGCONT)


def test_a_writer_that_may_empty_its_folder_removes_nothing_of_a_mount_in_it(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("x", b"1")
    folder = tmp_path / "scratch"
    (folder / "deep").mkdir(parents=True)
    (folder / "old").write_bytes(b"old")
    one = mount(path=folder / "deep" / "bucket")
    with pytest.raises(ArgumentError, match=f"all that is in the mount {one.path}: choose a folder without"):
        MDSWriter(columns={"a": "int"}, out=str(folder), exist_ok=True)
    assert ((folder / "old").read_bytes(), (one.path / "x").read_bytes(), bucket.get("x")) == (
        b"old",
        b"1",
        b"1",
    )
