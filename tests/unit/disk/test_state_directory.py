"""A cache directory has one daemon and one bucket; whatever is wrong with it is said, and nothing of it is touched."""

import json
import os
import shutil
from pathlib import Path

import pytest

from fusecache.disk import state_directory
from fusecache.disk.state_directory import StateDirectory, recorded_identity
from fusecache.model.errors import LocalDiskError, StateError


def test_it_is_made_and_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        with StateDirectory(tmp_path / "new" / "cache", "here s3://bucket/") as state:
            assert state.directory.is_dir()


def test_a_second_daemon_is_refused_and_told_whose_it_is(tmp_path: Path) -> None:
    with StateDirectory(tmp_path, "id"), pytest.raises(StateError, match=f"pid {os.getpid()}"):
        StateDirectory(tmp_path, "id")
    with StateDirectory(tmp_path, "id"):
        pass


def test_a_directory_belongs_to_a_bucket_once_that_has_answered(tmp_path: Path) -> None:
    with StateDirectory(tmp_path, "") as directory:
        assert recorded_identity(tmp_path) == ""
        directory.add("here s3://one/")
    assert recorded_identity(tmp_path) == "here s3://one/"
    for other, words in (("", "the source of this mount"), ("here s3://two/", "here s3://two/")):
        with pytest.raises(StateError, match=rf"belongs to here s3://one/, not to {words}; choose another"):
            StateDirectory(tmp_path, other)


def test_another_bucket_is_refused_and_the_directory_is_free_again(tmp_path: Path) -> None:
    with StateDirectory(tmp_path, "here s3://one/"):
        pass
    with pytest.raises(StateError, match=r"belongs to here s3://one/, not to here s3://two/"):
        StateDirectory(tmp_path, "here s3://two/")
    with StateDirectory(tmp_path, "here s3://one/"):
        pass


@pytest.mark.parametrize("text", ["", "{", "\x00"])
def test_unreadable_facts_are_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "fusecache.json").write_text(text)
    with pytest.raises(StateError, match="nothing was changed"):
        StateDirectory(tmp_path, "id")
    assert (tmp_path / "fusecache.json").read_text() == text


@pytest.mark.parametrize("row", [[], "text", 1, None])
def test_facts_of_another_shape_are_refused_and_kept(tmp_path: Path, row: object) -> None:
    (tmp_path / "fusecache.json").write_text(json.dumps(row))
    with pytest.raises(StateError, match="nothing was changed"):
        StateDirectory(tmp_path, "id")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fusecache.json").write_text(json.dumps({"format": 2, "identity": "id"}))
    with pytest.raises(StateError, match="has format 2"):
        StateDirectory(tmp_path, "id")


def test_a_directory_that_cannot_be_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalDiskError, match="choose another"):
        StateDirectory(tmp_path / "file" / "cache", "id")


def test_the_lock_is_free_once_its_holder_is_killed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        StateDirectory(tmp_path, "id")
        os.write(writer, b"locked")
        os.kill(os.getpid(), 9)
    os.read(reader, 6)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    with StateDirectory(tmp_path, "id"):
        pass


def test_who_only_looks_at_one_in_use_is_sent_to_its_mount(tmp_path: Path) -> None:
    with StateDirectory(tmp_path, "id", mountpoint=Path("/mnt/a b")):
        with pytest.raises(
            StateError, match=rf"mounted at /mnt/a b \(pid {os.getpid()}\).*`fusecache recover '/mnt/a b'`"
        ):
            StateDirectory(tmp_path, None)
        with pytest.raises(StateError, match=rf"another daemon \(pid {os.getpid()}, mounted at /mnt/a b\)"):
            StateDirectory(tmp_path, "id")
    with StateDirectory(tmp_path, None), pytest.raises(StateError, match="`fusecache recover MOUNTPOINT`"):
        StateDirectory(tmp_path, None)


def test_a_directory_in_a_fusecache_mount_whose_name_has_a_blank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = tmp_path / "my bücket"
    text = str(point).replace(" ", "\\040")
    table = tmp_path / "mountinfo"
    table.write_text(
        f"22 1 8:1 / / rw - ext4 /dev/root rw\n23 22 0:39 / {text} rw - fuse.fusecache s3://bucket/ rw\n"
    )
    monkeypatch.setattr(state_directory, "_MOUNT_TABLE", table)
    with pytest.raises(StateError, match="lies in a fusecache mount; choose a local disk"):
        StateDirectory(point / "cache", "id")
    with StateDirectory(tmp_path / "cache", "id"):
        pass


@pytest.mark.parametrize("wiped", ["lock", "content", "directory"])
def test_a_directory_whose_lock_is_gone_is_still_in_use(tmp_path: Path, wiped: str) -> None:
    directory = tmp_path / "cache"
    with StateDirectory(directory, "id"):
        if wiped == "lock":
            (directory / "lock").unlink()
        else:
            shutil.rmtree(directory)
        if wiped == "content":
            directory.mkdir()
        with pytest.raises(
            StateError, match=rf"emptied or removed while a daemon \(pid {os.getpid()}\) uses it"
        ):
            StateDirectory(directory, "id")
        with StateDirectory(tmp_path / "other", "id"):
            pass
    with StateDirectory(directory, "id"):
        pass


def test_a_name_that_another_user_took_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = StateDirectory(tmp_path, "id")
    (tmp_path / "lock").unlink()
    monkeypatch.setattr(state_directory, "_TRUSTED", frozenset())
    with held, StateDirectory(tmp_path, "id"):
        pass
