"""What the daemon sets on the kernel's side: all of it as root, and a clear note where it is refused."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.config.node_limits import request_memory
from fusecache.fs import kernel
from fusecache.model.objects import MIB
from tests.support import ROOT
from tests.support.s3_buckets import Bucket

NOBODY = 65534
# In a mount namespace of its own, with a /dev/fuse that everybody may use, and with the packages at a path that
# everybody may enter (the checkout may be below /root): another user mounts, reads and unmounts.
PROGRAM = """
set -e
folder=$1 packages=$2
shift 2
mknod -m 666 "$folder/fuse" c 10 229
mount --bind "$folder/fuse" /dev/fuse
number=0 IFS=:
for package in $packages; do
    mkdir "$folder/packages$number"
    mount --bind "$package" "$folder/packages$number"
    PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$folder/packages$number
    number=$((number + 1))
done
export PYTHONPATH
exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
"""
STEPS = """
import json, os, sys
from fusecache.cli.main import main
source, point, cache, endpoint = sys.argv[1:]
assert main(["mount", source, point, "--cache-dir", cache, "--endpoint-url", endpoint, "--memory", "64MiB"]) == 0
try:
    content = open(point + "/file").read()
    with open(point + "/new", "w") as file:
        file.write("new")
    stats = json.load(open(point + "/.fusecache/stats.json"))
finally:
    assert main(["unmount", point]) == 0
print(json.dumps({"content": content, "kernel": stats["kernel"], "log": open(cache + "/fusecache.log").read()}))
"""


def test_as_root_the_settings_are_applied_and_said_once(mount):
    one = mount()
    said = one.status()["kernel"]
    settings = {**_values(said["applied"]), **_values(said["refused"])}
    background = kernel.background_requests(request_memory())
    assert background <= request_memory() / MIB or background == 12
    assert settings == {
        "read_ahead_kb": kernel.READ_AHEAD_KIB,
        "max_background": background,
        "congestion_threshold": background * 3 // 4,
    }
    device = os.stat(one.path).st_dev
    read_ahead = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    if "read_ahead_kb" in _values(said["applied"]):
        assert int(read_ahead.read_text()) == kernel.READ_AHEAD_KIB
    assert one.log().count("kernel applied=") == 1
    assert one.log().count("kernel settings refused") == (1 if said["refused"] else 0)


def _values(settings: list[str]) -> dict[str, int]:
    return {name: int(rest.split(" ")[0]) for name, _, rest in (each.partition("=") for each in settings)}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter; pytest closes its own to them whenever a run begins."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_than_root_mounts_reads_and_writes_and_is_told_what_was_refused(
    bucket: Bucket, open_folder: Path
):
    tmp_path = open_folder
    python = _python_for_nobody()
    if python is None:
        pytest.skip("no Python of this version that other users may run")
    bucket.put("file", b"content")
    for folder in (tmp_path / "mnt", tmp_path / "cache", tmp_path / "tmp"):
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
    packages = ":".join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    words = [
        "unshare", "--mount", "--propagation", "private", "sh", "-c", PROGRAM, "sh", tmp_path, packages,
        python, "-c", STEPS, bucket.source, tmp_path / "mnt", tmp_path / "cache", bucket.service.endpoint_url,
    ]  # fmt: skip
    environment = {
        **bucket.service.environment(),
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": "",
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [str(word) for word in words],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare" in done.stderr or "mknod" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["content"] == "content"
    assert bucket.get("new") == b"new"
    # The others are its own to set, where the control file system of FUSE is mounted.
    reasons = (
        "Permission denied",
        "Read-only file system",
    )  # the second where /sys is read-only, as in containers
    read_ahead = [f"read_ahead_kb={kernel.READ_AHEAD_KIB} ({reason})" for reason in reasons]
    assert set(read_ahead) & set(said["kernel"]["refused"])
    assert len(said["kernel"]["applied"]) + len(said["kernel"]["refused"]) == 3
    (note,) = [line for line in said["log"].splitlines() if "kernel settings refused" in line]
    assert "mount as root (as the systemd unit does" in note
    assert f"echo {kernel.READ_AHEAD_KIB} > /sys/class/bdi/" in note


def _python_for_nobody() -> str | None:
    """Return a Python of our version that another user may run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, shutil.which(version, path="/usr/local/bin:/usr/bin:/bin")):
        if python is None:
            continue
        try:
            subprocess.run(
                [python, "-c", ""], user=NOBODY, group=NOBODY, extra_groups=[], check=True, cwd="/"
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None
