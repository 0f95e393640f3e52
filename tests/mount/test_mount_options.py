"""What a mount's options cannot be talked into: the prefix is data, and no program of a bucket gains rights."""

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.mounts import Mount, open_to_other_users, run
from tests.support.s3_buckets import Bucket


def mount_entry(path: Path) -> tuple[str, set[str], set[str]]:
    """Return source, mount options and file system options of a mount, as the kernel has them."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split(" ")[4] == str(path):
            _, source, options = rest.split(" ")
            return source, set(fields.split(" ")[5].split(",")), set(options.split(","))
    raise AssertionError(f"{path} is not mounted")


@pytest.mark.parametrize(
    "folder",
    ["lr=0.1,bs=32", "x,suid,dev,exec,allow_other", "back\\slash\\101", "suid", "é, ü"],
)
def test_any_prefix_mounts_without_changing_options(
    mount: Callable[..., Mount], bucket: Bucket, folder: str
) -> None:
    """A comma or a backslash in the prefix is part of the name, and never begins an option."""
    below = bucket.below(folder)
    below.put("file", b"1")
    one = mount(of=below)
    assert (one.path / "file").read_bytes() == b"1"
    source, options, kernel = mount_entry(one.path)
    assert {"nosuid", "nodev"} <= options
    assert "allow_other" not in kernel
    assert re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), source) == one.bucket.source


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_set_user_id_of_objects_is_dropped(mount: Callable[..., Mount], bucket: Bucket) -> None:
    """Metadata that another client stored shows no set-user-id bit, and the kernel would ignore one."""
    program = Path("/usr/bin/id").read_bytes()
    metadata = {"mode": "104755", "uid": "0", "gid": "0"}
    bucket.client.put_object(
        Bucket=bucket.service.bucket, Key=f"{bucket.prefix}id", Body=program, Metadata=metadata
    )
    one = mount("--posix-metadata", "--allow-other")
    open_to_other_users(one.path)
    assert (one.path / "id").stat().st_mode & 0o7777 == 0o755
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    assert run(one.path / "id", "-u", **nobody).stdout == "65534\n"


def test_mount_goes_on_when_service_manager_hangs(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads NOTIFY_SOCKET, and its queue is full: the mount must answer all the same."""
    bucket.put("file", b"1")
    address = f"/tmp/{os.getpid()}-notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler, suppress(BlockingIOError):
                filler.setblocking(False)  # noqa: FBT003  # takes no keyword
                while True:
                    filler.sendto(b"x", address)
            monkeypatch.setenv("NOTIFY_SOCKET", address)
            one = mount()
            assert (one.path / "file").read_bytes() == b"1"
        finally:
            os.unlink(address)
