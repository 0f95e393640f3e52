"""A cache directory that is emptied or removed below its mount: the mount says so, and acknowledges nothing any more.

The log goes with the directory, so no line of it is expected.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

WIPED = "was emptied, removed or replaced while the mount uses it"


def health(mount: Mount) -> str:
    return run(FUSECACHE, "health", mount.path, check=False).stdout.strip()


def removed(directory: Path) -> bool:
    """Remove a directory; False if its daemon made a file in it meanwhile, as `rm -rf` then fails too."""
    try:
        shutil.rmtree(directory)
    except OSError as failure:
        if failure.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def wipe(directory: Path, how: str) -> None:
    wait_until(lambda: removed(directory), "the end of the directory")
    if how == "emptied":
        directory.mkdir()


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_an_idle_mount_says_what_happened_and_how_to_go_on(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path, how: str
) -> None:
    one = mount()
    (one.path / "file").write_bytes(b"1")
    one.sync()
    wipe(one.cache, how)
    wait_until(lambda: health(one).startswith("ACTION"), "the verdict")
    said = health(one)
    assert WIPED in said
    assert str(one.cache) in said
    assert "rejected" not in said
    command = f"fusecache unmount {one.path} --force"
    assert f"`{command}`" in said
    with pytest.raises(OSError) as refused:  # noqa: PT011
        (one.path / "new").write_bytes(b"1")
    assert refused.value.errno == errno.EROFS
    other = tmp_path / "other"
    other.mkdir()
    second = Mount(bucket, other, one.cache)
    again = run(*second.command(), check=False, env=bucket.service.environment())
    assert again.returncode == 1
    assert "was emptied or removed while a daemon" in again.stderr
    run(FUSECACHE, *command.split()[1:])
    wait_until(lambda: not one.is_alive(), "the end")
    assert bucket.get("file") == b"1"


def test_no_close_is_acknowledged_from_the_moment_on(mount: Callable[..., Mount], bucket: Bucket) -> None:
    one = mount("--settle-seconds", "600")
    file = os.open(one.path / "new", os.O_CREAT | os.O_WRONLY)
    os.write(file, b"1")
    wipe(one.cache, "removed")
    with pytest.raises(OSError, match=r"Read-only|Input/output|No such file"):
        os.close(file)
    assert bucket.names() == []
    run(FUSECACHE, "unmount", one.path, "--force", check=False)


def test_a_file_that_lost_its_bytes_here_was_not_rejected_by_the_bucket(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: Any
) -> None:
    expect_log("rejected|No such file|gone|missing")
    one = mount("--settle-seconds", "2")
    (one.path / "model").write_bytes(b"1")
    for each in (one.cache / "staging").iterdir():
        each.unlink()
    wait_until(lambda: health(one).startswith("ACTION"), "the verdict")
    assert health(one) == (
        f"ACTION: 1 file cannot be read from the cache directory for upload: see `fusecache recover {one.path}`"
    )
    assert "by the bucket" not in run(FUSECACHE, "status", one.path).stdout
    run(FUSECACHE, "recover", one.path, "--delete", "all", "--yes")
    wait_until(lambda: health(one) == "OK", "the end of it")
