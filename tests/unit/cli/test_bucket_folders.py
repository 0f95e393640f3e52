"""The folder of several buckets, and the commands that are for each bucket in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusecache.cli import bucket_daemons, endings
from fusecache.cli.bucket_daemons import BucketDaemons
from fusecache.mount.bucket_folders import make_bucket_folder, remove_bucket_folder
from tests.support import ROOT
from tests.support.mounts import FUSECACHE, run
from tests.unit.config.test_bucket_options import TWO, load

NAMES = [f"bucket-{number}" for number in range(6)]
REMOVE = """
import sys
from pathlib import Path
from fusecache.mount.bucket_folders import remove_bucket_folder
sys.stdin.read()
remove_bucket_folder(Path(sys.argv[1]))
"""


def test_commands_that_end_at_once_leave_no_folder(tmp_path: Path) -> None:
    """As `fusecache unmount FOLDER` has one for each bucket."""
    top = tmp_path / "top"
    for name in NAMES:
        make_bucket_folder(top / name, allow_other=False)
    removing = [
        subprocess.Popen([sys.executable, "-c", REMOVE, top / name], stdin=subprocess.PIPE) for name in NAMES
    ]
    for each in removing:
        assert each.stdin is not None
        each.stdin.close()
    assert [each.wait(60) for each in removing] == [0] * len(NAMES)
    assert not top.exists()


def test_a_folder_that_a_user_made_stays(tmp_path: Path) -> None:
    make_bucket_folder(tmp_path / "a", allow_other=False)
    remove_bucket_folder(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


def test_a_command_that_is_killed_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "own_program", lambda: ["sh", "-c", '[ "$1" = /m/b ] || kill -9 $$', "sh"])
    assert endings.in_each([Path("/m/a"), Path("/m/b")], []) == 128 + 9


def test_a_daemon_that_cannot_be_started_is_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bucket_daemons, "own_program", lambda: [str(tmp_path / "missing")])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("signal.set_wakeup_fd", lambda *_, **__: None)
    mounts = load(f'cache_dir = "{tmp_path}/c"\n{TWO}', tmp_path, mountpoint=tmp_path / "m")
    assert BucketDaemons(mounts, []).run() == 1
    assert "bucket b: its daemon cannot be started: [Errno 2]" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("command", ["status", "health"])
def test_a_shell_in_a_removed_directory_may_name_a_path(tmp_path: Path, command: str) -> None:
    gone = tmp_path / "gone"
    script = 'mkdir "$1" && cd "$1" && rmdir "$1" && exec "$2" "$3" "$4"'
    done = run("sh", "-c", script, "sh", gone, FUSECACHE, command, tmp_path, check=False)
    assert "is not in a fusecache mount" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ['name = "../outside"', 'name = ""', 'source = "s3://b"'])
def test_a_service_readies_nothing_for_a_bucket_without_a_folder(tmp_path: Path, name: str) -> None:
    """The daemon says what is wrong with the name; the helper that readies folders runs as root, and before it."""
    config = tmp_path / "fusecache.toml"
    config.write_text(f'mountpoint = "{tmp_path}/m"\n[[bucket]]\n{name}\n')
    try:
        run(sys.executable, ROOT / "systemd/fusecache-mountpoint", config)
        assert sorted(os.listdir(tmp_path)) == ["fusecache.toml", "m"]
    finally:
        run("chattr", "-i", tmp_path / "m", check=False)
