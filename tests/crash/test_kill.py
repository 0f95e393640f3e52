"""kill -9 of the daemon: nothing that was closed is lost, nothing is published twice or partly."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fusecache.index.journal import Journal
from tests.s3server import Fault, FaultAction, LogEntry, ServerProcess
from tests.support.daemons import MIB, Daemon, some_bytes
from tests.support.mounts import wait_until

PUBLISHING = ("PutObject", "CompleteMultipartUpload", "CopyObject", "DeleteObject")
LARGE = some_bytes(70 * MIB, 1)


def published(server: ServerProcess) -> list[tuple[str, str]]:
    """Return (operation, key) of the requests that changed what the bucket shows, in order."""
    return [
        (entry.operation, entry.key)
        for entry in server.control.log()
        if entry.operation in PUBLISHING and entry.took_effect
    ]


def shows(server: ServerProcess) -> dict[str, bytes]:
    return {key: server.control.read(key) for key in server.control.objects()}


def part_of(entry: LogEntry) -> tuple[str, int]:
    """Return the upload and the number of a part that was sent."""
    return entry.query["uploadId"], int(entry.query["partNumber"])


def answered_parts(server: ServerProcess) -> list[tuple[str, int]]:
    """Return upload and number of each part that was answered well, or is just being so."""
    return [part_of(entry) for entry in server.control.log("UploadPart") if entry.status == 200]


def wait_until_journaled(server: ServerProcess, daemon: Daemon, parts: list[tuple[str, int]]) -> None:
    """Return once the journal has all these parts of unfinished uploads: each a moment after its answer."""

    def missing() -> set[tuple[str, int]]:
        unfinished = {upload.upload_id for upload in server.control.uploads()}
        held = {
            (row.upload_id, number)
            for row in journal.files()
            for number, etag in enumerate(row.part_etags, 1)
            if etag
        }
        return {part for part in parts if part[0] in unfinished} - held

    with Journal(daemon.cache / "journal") as journal:  # LMDB: read beside the daemon's process
        wait_until(lambda: not missing(), "the journal's rows of the parts")


def test_five_closed_checkpoints_are_all_published_after_a_kill(
    server: ServerProcess, daemon: Daemon
) -> None:
    server.control.set(upload_bandwidth=2e6)
    sizes = {"a": 70 * MIB, "b": 3 * MIB, "c": 130 * MIB, "d": 100, "e": 20 * MIB}
    files = {
        f"step/{name}": some_bytes(size, seed) for seed, (name, size) in enumerate(sizes.items(), start=1)
    }
    (daemon.path / "step").mkdir()
    for name, data in files.items():
        (daemon.path / name).write_bytes(data)
    server.control.wait_requests(1, "UploadPart", finished=False)
    daemon.kill()
    with Journal(daemon.cache / "journal") as journal:
        known = {row.upload_id for row in journal.files() if row.upload_id}
    assert known
    # One that was created as the daemon died belongs to no daemon: `fusecache uploads` finds it.
    strays = {upload.upload_id for upload in server.control.uploads()} - known
    assert len([key for key in server.control.objects() if key in files]) < 3
    server.control.set(upload_bandwidth=None)
    daemon.mount()
    for name, data in files.items():
        assert (daemon.path / name).read_bytes() == data
    assert daemon.sync() == 0
    assert shows(server) == {"step/": b"", **files}
    # Each file once. A directory marker whose answer the daemon did not live to note is put again, as it was.
    assert sorted(key for _, key in published(server) if key != "step/") == [*files]
    assert {upload.upload_id for upload in server.control.uploads()} <= strays


def test_a_file_that_was_not_closed_is_kept_aside(server: ServerProcess, daemon: Daemon) -> None:
    file = os.open(daemon.path / "file", os.O_CREAT | os.O_WRONLY)
    os.write(file, b"half a checkpoint")
    os.fsync(file)
    daemon.kill()
    with pytest.raises(OSError, match="not connected"):
        os.fsync(file)
    with suppress(OSError):
        os.close(file)
    daemon.mount()
    assert daemon.sync() == 0
    assert list(daemon.path.iterdir()) == []
    assert server.control.objects() == {}
    assert daemon.orphans() == [b"half a checkpoint"]


def test_parts_that_the_bucket_has_are_not_sent_again(server: ServerProcess, daemon: Daemon) -> None:
    server.control.faults(Fault(FaultAction.HOLD, operation="UploadPart", key="file", nth=2))
    (daemon.path / "file").write_bytes(LARGE)
    server.control.wait_requests(2, "UploadPart", "file", finished=False)
    server.control.wait_requests(1, "UploadPart", "file")
    before = answered_parts(server)
    wait_until_journaled(server, daemon, before)
    daemon.kill()
    server.control.clear_faults()
    daemon.mount()
    assert daemon.sync() == 0
    assert shows(server) == {"file": LARGE}
    sent = [part_of(entry) for entry in server.control.log("UploadPart")]
    assert [sent.count(part) for part in before] == [1]
    assert server.control.uploads() == []


@pytest.mark.parametrize("effect", [FaultAction.DROP_BEFORE, FaultAction.DROP_AFTER], ids=["before", "after"])
@pytest.mark.parametrize("operation", PUBLISHING)
def test_a_kill_while_an_answer_is_missing_changes_nothing(
    server: ServerProcess, daemon: Daemon, operation: str, effect: FaultAction
) -> None:
    """The request took effect or not; its answer never came; the daemon ends before it can ask again."""
    (daemon.path / "old").write_bytes(b"old")
    assert daemon.sync() == 0
    server.control.clear_log()
    server.control.faults(
        Fault(effect, operation=operation, nth=1), Fault(FaultAction.HOLD, operation=operation)
    )
    match operation:
        case "PutObject":
            (daemon.path / "new").write_bytes(b"new")
            wanted = {"old": b"old", "new": b"new"}
        case "CompleteMultipartUpload":
            (daemon.path / "new").write_bytes(LARGE)
            wanted = {"old": b"old", "new": LARGE}
        case "CopyObject":
            (daemon.path / "old").rename(daemon.path / "new")
            wanted = {"new": b"old"}
        case _:
            (daemon.path / "old").unlink()
            wanted = {}
    server.control.wait_requests(2, operation, finished=False)
    daemon.kill()
    server.control.clear_faults()
    daemon.mount()
    assert {path.name for path in daemon.path.iterdir()} == set(wanted)
    assert daemon.sync() == 0
    assert shows(server) == wanted
    assert {path.name: path.read_bytes() for path in daemon.path.iterdir()} == wanted
    assert server.control.uploads() == []
    effects = [entry for entry in published(server) if entry[0] == operation]
    assert len(effects) == 1


@pytest.mark.case(26)
@pytest.mark.parametrize(
    ("operation", "nth"),
    [("CreateMultipartUpload", 1), ("UploadPart", 1), ("UploadPart", 2), ("CompleteMultipartUpload", 1)],
    ids=["create", "first part", "second part", "all parts"],
)
def test_a_kill_at_any_point_of_a_multipart_upload_loses_nothing(
    server: ServerProcess, daemon: Daemon, operation: str, nth: int
) -> None:
    server.control.faults(Fault(FaultAction.HOLD, operation=operation, nth=nth))
    (daemon.path / "file").write_bytes(LARGE)
    # Of this key: a mount begins an upload, too, to see whether it may write.
    server.control.wait_requests(nth, operation, "file", finished=False)
    daemon.kill()
    server.control.clear_faults()
    daemon.mount()
    assert (daemon.path / "file").read_bytes() == LARGE
    assert daemon.sync() == 0
    assert shows(server) == {"file": LARGE}
    assert [key for _, key in published(server)] == ["file"]
    left = [upload.parts for upload in server.control.uploads()]
    if operation == "CreateMultipartUpload":
        # What the dead daemon asked for may take effect now. Nobody knows that upload: R2 drops it after a week.
        assert left in ([], [{}])
    else:
        assert left == []


def test_changes_of_names_made_in_an_outage_survive_a_kill(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = make_daemon("--attribute-seconds", "600")
    daemon.mount()
    top = daemon.path
    (top / "made").mkdir()
    for folder in ("stays", "goes", "moves"):
        (top / folder).mkdir()
        (top / folder / "file").write_bytes(folder.encode())
    (top / "published").write_bytes(b"published")
    assert daemon.sync() == 0
    assert list((top / "made").iterdir()) == []
    assert len(list(top.iterdir())) == 5
    server.control.pause()
    (top / "published").rename(top / "stays" / "renamed")
    (top / "goes" / "file").unlink()
    (top / "stays" / "file").unlink()
    (top / "made" / "one.tmp").write_bytes(b"1")
    (top / "made" / "one.tmp").rename(top / "made" / "one")
    (top / "link").symlink_to("made/one")
    (top / "empty").mkdir()
    daemon.kill()
    server.control.resume()
    daemon.mount()
    assert daemon.sync() == 0
    assert shows(server) == {
        "stays/": b"",
        "stays/renamed": b"published",
        "goes/": b"",
        "moves/": b"",
        "moves/file": b"moves",
        "made/": b"",
        "made/one": b"1",
        "link": b"",
        "empty/": b"",
    }
    assert os.readlink(top / "link") == "made/one"
    assert (top / "link").read_bytes() == b"1"


def test_a_dead_mount_is_cleared_at_once(daemon: Daemon) -> None:
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    in_the_background = [word for word in daemon.mount_words() if word != "--foreground"]
    refused = daemon.command(*in_the_background)
    assert refused.returncode == 1
    assert f"clean up with `fusecache unmount {daemon.path}`" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    done = daemon.command("unmount", daemon.path)
    assert done.returncode == 0
    assert f"no daemon served {daemon.path}: files not uploaded are in its cache directory" in done.stderr
    daemon.mount()


# ---- what a start refuses


def test_a_cache_directory_in_a_mount_of_ours_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    done = daemon.command(
        "mount", "s3://bucket/other", other, "--cache-dir", daemon.path / "c", "--cache-size", "1GiB"
    )
    assert done.returncode == 1
    assert "lies in a fusecache mount; choose a local disk" in done.stderr


def test_a_cache_directory_is_for_its_owner_alone(daemon: Daemon) -> None:
    assert daemon.cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_directory_of_another_bucket_is_refused_and_left_alone(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
) -> None:
    daemon = make_daemon()
    daemon.mount("--settle-seconds", "3600")  # so that the file is not published before the kill
    (daemon.path / "file").write_bytes(b"1")
    daemon.kill()
    words = [f"{word}/prefix" if str(word).startswith("s3://") else word for word in daemon.mount_words()]
    done = daemon.command(*words)
    assert done.returncode == 1
    assert "belongs to" in done.stderr
    assert "It holds 1 file, 1 B, not in the bucket yet" in done.stderr
    daemon.mount()
    assert daemon.sync() == 0
    assert shows(server) == {"file": b"1"}
