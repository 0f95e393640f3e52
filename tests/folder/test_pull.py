"""`fusecache pull`: the folder shows the bucket, whatever happens on the way, and nothing else is touched."""

import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest

from fusecache.folder import pull as pulling
from fusecache.folder.local_folder import LocalFolder
from fusecache.folder.pull import Patience, list_bucket
from fusecache.model.errors import FolderError
from tests.folder.conftest import Node, bucket_of, files_of
from tests.s3server import Fault, FaultAction, ServerProcess
from tests.support.daemons import MIB, some_bytes
from tests.support.memory_store import MemoryStore
from tests.support.mounts import wait_until

DATA = {
    "a.bin": some_bytes(20 * MIB + 17, 1),
    "empty": b"",
    "sub/b.txt": b"text",
    "sub/deep/c": some_bytes(3 * MIB, 2),
    "sub/_SUCCESS": b"yes",
}


@pytest.fixture
def data(server: ServerProcess) -> dict[str, bytes]:
    for name, content in DATA.items():
        server.control.put(name, content)
    return DATA


def test_a_folder_becomes_the_bucket_and_a_second_pull_fetches_nothing(
    node: Node, data: dict[str, bytes], tmp_path: Path
) -> None:
    node.server.control.put("hollow/", b"")
    done = node.pull(tmp_path / "new" / "folder")
    assert (done.returncode, files_of(tmp_path / "new" / "folder")) == (0, data)
    assert (tmp_path / "new" / "folder" / "hollow").is_dir()
    assert list((tmp_path / "new" / "folder" / ".fusecache" / "parts").iterdir()) == []
    node.server.control.clear_log()
    report = node.pulled(tmp_path / "new" / "folder")
    assert (report["fetched_files"], report["there_files"]) == (0, len(data))
    assert report["there_bytes"] == sum(map(len, data.values()))
    assert node.server.control.log("GetObject") == []


def test_a_prefix_without_objects_is_asked_about(node: Node, data: dict[str, bytes], tmp_path: Path) -> None:
    done = node.run("pull", f"{node.source}/typo", tmp_path)
    assert f"{node.source}/typo/ has no objects yet: is the prefix right?" in done.stderr
    assert "has no objects" not in node.pull(tmp_path / "all").stderr


@pytest.mark.parametrize(
    ("command", "operation"), [("pull", "GetObject"), ("pull", "ListObjectsV2"), ("push", "PutObject")]
)
def test_ctrl_c_ends_a_command_at_once_in_one_line(
    node: Node, data: dict[str, bytes], tmp_path: Path, command: str, operation: str
) -> None:
    """Also while a request has no answer; the same command goes on afterwards."""
    (tmp_path / "mine").write_bytes(b"mine")
    key = "mine" if operation == "PutObject" else None
    node.server.control.faults(Fault(FaultAction.HOLD, operation=operation, key=key or "*"))
    words = [node.source, tmp_path] if command == "pull" else [tmp_path, node.source]
    child = node.start(command, *words)
    node.server.control.wait_requests(1, operation, key, finished=False)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=10)
    assert child.returncode == 130
    lines = [line for line in said.splitlines() if f"{command}ing: " not in line]  # progress
    assert lines == [f"fusecache: {command} was interrupted; the same command goes on from here"]
    node.server.control.clear_faults()
    assert node.run(command, *words).returncode == 0
    assert bucket_of(node.server).get("mine", b"mine") == files_of(tmp_path)["mine"]


def test_commit_markers_come_last(node: Node, data: dict[str, bytes], tmp_path: Path) -> None:
    node.server.control.faults(Fault(FaultAction.HOLD, operation="GetObject", key="sub/deep/c"))
    child = node.start("pull", node.source, tmp_path)
    wait_until(lambda: len(files_of(tmp_path)) == len(data) - 2, "the files that are not held")
    assert "sub/_SUCCESS" not in files_of(tmp_path)
    node.server.control.clear_faults()
    assert child.wait(60) == 0
    assert files_of(tmp_path) == data


def test_a_prefix_is_a_folder_of_its_own(node: Node, data: dict[str, bytes], tmp_path: Path) -> None:
    node.source += "/sub"
    assert node.pull(tmp_path).returncode == 0
    assert set(files_of(tmp_path)) == {"b.txt", "deep/c", "_SUCCESS"}


def test_what_changed_in_the_bucket_comes_and_what_was_changed_here_stays(
    node: Node, data: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    node.server.control.put("mine", b"theirs")
    assert node.pull(tmp_path).returncode == 1
    node.server.control.put("sub/b.txt", b"newer text")
    node.server.control.put("a.bin", b"theirs")
    (tmp_path / "a.bin").write_bytes(b"ours")
    (tmp_path / "sub/deep/c").write_bytes(b"only changed here")
    done = node.pull(tmp_path)
    assert done.returncode == 1
    assert "left out: a.bin: it was changed here, and in the bucket too" in done.stderr
    assert "left out: mine: no pull wrote this file" in done.stderr
    found = files_of(tmp_path)
    assert found["sub/b.txt"] == b"newer text"
    assert (found["a.bin"], found["mine"]) == (b"ours", b"mine")
    assert found["sub/deep/c"] == b"only changed here"
    assert node.pulled(tmp_path)["changed_here"] == 1
    assert node.pull(tmp_path, "--force").returncode == 0
    assert files_of(tmp_path) == bucket_of(node.server)


def test_the_same_content_that_no_pull_wrote_is_taken_as_it_is(
    node: Node, data: dict[str, bytes], tmp_path: Path
) -> None:
    assert node.pull(tmp_path).returncode == 0
    (tmp_path / ".fusecache" / "state.jsonl").unlink()  # known by size and time
    (tmp_path / "a.bin").write_bytes(data["a.bin"])  # known by its checksum
    node.server.control.clear_log()
    assert node.pull(tmp_path).returncode == 0
    assert node.server.control.log("GetObject") == []


def test_a_pull_that_is_killed_in_many_rounds_goes_on_where_it_was(
    node: Node, tmp_path: Path, data: dict[str, bytes]
) -> None:
    server = node.server
    for number in range(24):
        server.control.put(f"many/{number:02}", some_bytes(MIB + number, number))
    whole = bucket_of(server)
    total = sum(map(len, whole.values()))
    server.control.set(bandwidth=6e6)
    for _ in range(5):
        before = len(server.control.log("GetObject"))
        child = node.start("pull", node.source, tmp_path)
        wait_until(
            lambda before=before, child=child: (
                sum(entry.status == 206 for entry in server.control.log("GetObject")[before:]) >= 6
                or child.poll() is not None
            ),
            "some pieces",
        )
        child.send_signal(signal.SIGKILL)
        child.wait()
        for name, content in files_of(tmp_path).items():
            assert whole[name] == content  # never half there under its name
    server.control.set(bandwidth=None)
    assert node.pull(tmp_path).returncode == 0
    assert files_of(tmp_path) == whole
    sent = sum(entry.bytes_out for entry in server.control.log("GetObject"))
    assert sent < 3 * total  # what was there was not fetched again


def test_an_object_that_changes_during_its_fetch_comes_whole_in_its_new_version(
    node: Node, tmp_path: Path
) -> None:
    server = node.server
    server.control.put("large", some_bytes(20 * MIB, 1))
    server.control.faults(Fault(FaultAction.HOLD, operation="GetObject", key="large", nth=3))
    child = node.start("pull", node.source, tmp_path)
    server.control.wait_requests(3, "GetObject", finished=False)
    newer = some_bytes(9 * MIB, 2)
    server.control.put("large", newer)
    server.control.clear_faults()
    assert child.wait(60) == 0
    assert files_of(tmp_path) == {"large": newer}


def test_a_failing_bucket_is_asked_again_and_a_refused_object_is_named(
    node: Node, data: dict[str, bytes], tmp_path: Path
) -> None:
    node.server.control.faults(
        Fault(FaultAction.ANSWER, operation="GetObject", key="a.bin", times=2, status=503, code="SlowDown"),
        Fault(FaultAction.SHORT_BODY, operation="GetObject", key="sub/deep/c", times=1),
        Fault(FaultAction.ANSWER, operation="GetObject", key="sub/b.txt", status=403, code="AccessDenied"),
    )
    done = node.pull(tmp_path)
    assert done.returncode == 1
    assert "failed: sub/b.txt: " in done.stderr
    assert "left out: sub/_SUCCESS: it may stand for sub/b.txt, which failed" in done.stderr
    assert files_of(tmp_path) == {name: data[name] for name in ("a.bin", "empty", "sub/deep/c")}
    node.server.control.clear_faults()
    assert node.pull(tmp_path).returncode == 0
    assert files_of(tmp_path) == data


HOSTILE = (
    "../out",
    "/absolute",
    "a//b",
    "x/../../y",
    "./dot",
    "both",
    ".fusecache/state.jsonl",
    "nul\0",
    "n" * 300,
)


def test_keys_that_are_no_file_names_are_named_and_nothing_is_written_outside(
    node: Node, tmp_path: Path
) -> None:
    for key in (*HOSTILE, "both/inner", "good"):
        node.server.control.put(key, b"data")
    folder = tmp_path / "in" / "folder"
    report = node.pulled(folder)
    assert set(report["skipped"]) == set(HOSTILE)
    assert set(files_of(tmp_path / "in")) == {"folder/good", "folder/both/inner"} | {
        name for name in files_of(tmp_path / "in") if name.startswith("folder/.fusecache/")
    }
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_symlink_that_leads_out_is_not_followed_and_a_file_in_the_way_stays(
    node: Node, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "file").write_text("mine")
    (folder / "folder").mkdir()
    for key in ("link/a", "file/b", "folder", "good"):
        node.server.control.put(key, b"data")
    report = node.pulled(folder)
    assert set(report["skipped"]) == {"link/a", "file/b", "folder"}
    assert list(outside.iterdir()) == []
    assert files_of(folder) == {"file": b"mine", "good": b"data"}


def test_symlinks_of_the_bucket_become_symlinks_unless_they_lead_out(node: Node, tmp_path: Path) -> None:
    node.server.control.put("step/data", b"data")
    for name, target in (("latest", "step"), ("bad", "../out"), ("worse", "/etc")):
        node.server.control.put(name, b"", {"mode": "120777", "symlink-target": target})
    report = node.pulled(tmp_path)
    assert set(report["skipped"]) == {"bad", "worse"}
    assert os.readlink(tmp_path / "latest") == "step"
    assert node.pulled(tmp_path)["there_files"] == 2


def test_a_folder_that_cannot_be_used_is_refused_in_one_line(node: Node, tmp_path: Path) -> None:
    node.server.control.put("a", b"1")
    (tmp_path / "file").write_text("")
    done = node.pull(tmp_path / "file")
    assert (done.returncode, done.stderr) == (
        1,
        f"fusecache: error: {tmp_path}/file is a file: give a folder\n",
    )
    assert node.pull(tmp_path / "one").returncode == 0
    other = node.run("pull", f"{node.source}/other", tmp_path / "one")
    assert other.returncode == 1
    assert f"{tmp_path}/one belongs to " in other.stderr
    inner = node.pull(tmp_path / "one" / "inner")
    assert f"lies in {tmp_path}/one, which belongs to a bucket" in inner.stderr
    assert files_of(tmp_path / "one") == {"a": b"1"}


def test_two_pulls_into_one_folder_do_not_meet(node: Node, tmp_path: Path) -> None:
    node.server.control.put("a", b"1")
    node.server.control.faults(Fault(FaultAction.HOLD, operation="GetObject"))
    first = node.start("pull", node.source, tmp_path)
    node.server.control.wait_requests(1, "GetObject", finished=False)
    second = node.pull(tmp_path)
    assert second.returncode == 1
    assert f"{tmp_path} is in use by `fusecache pull` (pid {first.pid})" in second.stderr
    node.server.control.clear_faults()
    assert first.wait(60) == 0


def test_a_bucket_that_is_away_ends_a_pull_as_soon_as_it_was_told(node: Node, tmp_path: Path) -> None:
    """Without the flag it would go on for 5 minutes, longer than the test's time for a command."""
    node.server.control.put("a", b"1")
    node.server.control.pause()
    try:
        done = node.pull(tmp_path, "--give-up-after=1s")
    finally:
        node.server.control.resume()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("fusecache: error: ")
    assert node.pull(tmp_path).returncode == 0


Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    for name in ("a", "b"):
        store.put_bytes(name, bytes(MIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * MIB, 0, 65 * MIB))
    patience = Patience(300)
    with (
        LocalFolder(tmp_path / "folder", "memory", "pull", create=True) as folder,
        pytest.raises(FolderError, match=r"free 1\.0 MiB there"),
    ):
        pulling.Pull(folder, store, list_bucket(store, "", patience), patience)


def test_the_state_survives_a_line_that_a_kill_has_cut(
    node: Node, data: dict[str, bytes], tmp_path: Path
) -> None:
    assert node.pull(tmp_path).returncode == 0
    state = tmp_path / ".fusecache" / "state.jsonl"
    with state.open("ab") as file:
        file.write(b'["have", "cut')
    assert node.pulled(tmp_path)["there_files"] == len(data)
    state.write_bytes(b"{}\n[1]\n")
    done = node.pull(tmp_path)
    assert done.returncode == 1
    assert "state.jsonl is damaged" in done.stderr
