"""`fusecache push`: the bucket becomes the folder, in order; nothing that others wrote is replaced or removed."""

import os
import random
import signal
import time
from pathlib import Path
from subprocess import Popen

from tests.folder.conftest import Node, bucket_of, files_of
from tests.s3server import Fault, FaultAction
from tests.support.daemons import MIB, some_bytes
from tests.support.mounts import wait_until

PUBLISHING = ("PutObject", "CompleteMultipartUpload", "DeleteObject")


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that have been at rest for a while, as far as a push can tell: it waits for the youngest."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def watch(node: Node, folder: Path, *flags: str) -> Popen[str]:
    """Start a watch; return when it watches."""
    child = node.start("watch", folder, node.source, *flags)
    assert child.stderr is not None
    assert child.stderr.readline() == f"fusecache: watching {folder}\n"
    return child


def published(node: Node) -> list[str]:
    """Return the keys of files in the order in which the bucket showed them."""
    return [
        entry.key
        for entry in node.server.control.log()
        if entry.operation in PUBLISHING and entry.took_effect and not entry.key.endswith("/")
    ]


CHECKPOINT = {
    "step-1/model.bin": some_bytes(70 * MIB, 1),
    "step-1/rank0.pt": some_bytes(MIB, 2),
    "step-1/.metadata": b"complete",
    "step-1/empty": b"",
    "latest": b"step-1",
    "notes.txt": b"hello",
}


def test_the_bucket_becomes_the_folder_markers_last_and_a_second_push_sends_nothing(
    node: Node, tmp_path: Path
) -> None:
    write(tmp_path, CHECKPOINT)
    (tmp_path / "current").symlink_to("step-1")
    done = node.push(tmp_path)
    assert (done.returncode, bucket_of(node.server)) == (0, {**CHECKPOINT, "current": b""}), done.stderr
    order = published(node)
    assert order[-1] == "latest"
    assert order.index("step-1/.metadata") > max(
        order.index(f"step-1/{name}") for name in ("model.bin", "rank0.pt", "empty")
    )
    node.server.control.clear_log()
    again = node.push(tmp_path)
    assert again.returncode == 0
    assert published(node) == []
    # The engine's copies are gone: the folder has the content.
    cached = sum(path.stat().st_blocks for path in (tmp_path / ".fusecache" / "engine" / "cache").rglob("*"))
    assert cached * 512 < 10 * MIB


def test_what_was_pulled_goes_back_only_where_it_was_changed(node: Node, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        node.server.control.put(name, name.encode() * 10)
    assert node.pull(tmp_path).returncode == 0
    node.server.control.clear_log()
    write(tmp_path, {"b": b"changed", "new/d": b"new"})
    (tmp_path / "c").unlink()
    assert node.push(tmp_path).returncode == 0
    assert sorted(published(node)) == ["b", "new/d"]
    assert bucket_of(node.server) == {"a": b"a" * 10, "b": b"changed", "c": b"c" * 10, "new/d": b"new"}
    node.server.control.clear_log()
    report = node.pulled(tmp_path)  # c comes back, and nothing else
    assert (report["fetched_files"], report["there_files"]) == (1, 3)
    assert node.push(tmp_path).returncode == 0
    assert published(node) == []


def test_a_conflict_is_named_and_both_versions_are_kept(node: Node, tmp_path: Path) -> None:
    node.server.control.put("a", b"old")
    assert node.pull(tmp_path).returncode == 0
    node.server.control.put("a", b"theirs")
    node.server.control.put("b", b"theirs too")
    node.server.control.put("same", b"the same")
    write(tmp_path, {"a": b"ours", "b": b"ours too", "same": b"the same", "c": b"new", "last.pt": b"names a"})
    done = node.push(tmp_path)
    assert done.returncode == 1  # the marker is held back
    assert "conflict: a: another client changed it" in done.stderr
    assert "conflict: b: the bucket has another object of this name" in done.stderr
    assert "not published: last.pt: held back: it may stand for " in done.stderr
    assert bucket_of(node.server) == {"a": b"theirs", "b": b"theirs too", "same": b"the same", "c": b"new"}
    (tmp_path / "last.pt").unlink()
    assert node.push(tmp_path).returncode == 3
    assert files_of(tmp_path)["a"] == b"ours"
    assert node.push(tmp_path, "--force").returncode == 0
    assert bucket_of(node.server) == files_of(tmp_path)


def test_a_conflict_in_the_middle_of_an_upload_keeps_both_versions(node: Node, tmp_path: Path) -> None:
    write(tmp_path, {"a": b"ours"})
    node.server.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key="a"))
    child = node.start("push", tmp_path, node.source)
    node.server.control.wait_requests(1, "PutObject", key="a", finished=False)
    node.server.control.put("a", b"theirs")
    node.server.control.clear_faults()
    _, err = child.communicate(timeout=60)
    assert child.returncode == 3
    assert "conflict: a: another client changed it first" in err
    found = bucket_of(node.server)
    assert found.pop("a") == b"theirs"
    assert list(found.values()) == [b"ours"]


def test_delete_removes_only_what_this_folder_had_in_that_version(node: Node, tmp_path: Path) -> None:
    for name in ("mine/a", "mine/b", "changed", "stays"):
        node.server.control.put(name, b"old")
    assert node.pull(tmp_path).returncode == 0
    write(tmp_path, {"pushed": b"1"})
    assert node.push(tmp_path).returncode == 0
    node.server.control.put("changed", b"theirs")
    node.server.control.put("others", b"theirs")
    for name in ("mine/a", "mine/b", "changed", "pushed"):
        (tmp_path / name).unlink()
    (tmp_path / "mine").rmdir()
    assert node.push(tmp_path).returncode == 0
    assert len(bucket_of(node.server)) == 6
    done = node.push(tmp_path, "--delete")
    assert done.returncode == 3
    assert "conflict: changed: removed here, but another client changed it" in done.stderr
    assert bucket_of(node.server) == {"changed": b"theirs", "stays": b"old", "others": b"theirs"}
    assert not any(key.startswith("mine") for key in node.server.control.objects())


def test_a_push_that_is_killed_in_many_rounds_goes_on_where_it_was(node: Node, tmp_path: Path) -> None:
    control, chance = node.server.control, random.Random(5)
    files = {f"d{number % 3}/{number:02}": some_bytes(MIB + number, number) for number in range(24)}
    write(tmp_path, {**files, "large": some_bytes(70 * MIB, 99), "d1/_SUCCESS": b"", "latest": b"d1"})
    for number in range(5):
        before = len(control.log())
        child = node.start("push", tmp_path, node.source)
        wanted = chance.randrange(1, 8)
        wait_until(
            lambda before=before, child=child, wanted=wanted: (
                sum(entry.operation in ("PutObject", "UploadPart") for entry in control.log()[before:])
                >= wanted
                or child.poll() is not None
            ),
            "some uploads",
        )
        child.send_signal(signal.SIGKILL)
        child.wait()
        if number == 2:
            write(tmp_path, {"d0/00": b"changed in between"})
    done = node.push(tmp_path)
    assert done.returncode == 0, done.stderr
    assert bucket_of(node.server) == files_of(tmp_path)
    control.clear_log()
    assert node.push(tmp_path).returncode == 0
    assert published(node) == []
    # An upload without a part stays if its process ended before it had the answer, and so its id.
    assert [upload for upload in control.uploads() if upload.parts] == []


def test_an_answer_that_is_lost_with_the_process_is_no_conflict(node: Node, tmp_path: Path) -> None:
    write(tmp_path, {"a": b"1"})
    node.server.control.faults(Fault(FaultAction.SILENT_AFTER, operation="PutObject", key="a"))
    child = node.start("push", tmp_path, node.source)
    wait_until(lambda: "a" in node.server.control.objects(), "the object")
    child.send_signal(signal.SIGKILL)
    child.wait()
    node.server.control.clear_faults()
    node.server.control.drop_connections()
    write(tmp_path, {"a": b"22"})
    done = node.push(tmp_path)
    assert (done.returncode, bucket_of(node.server)) == (0, {"a": b"22"}), done.stderr


def test_a_file_that_is_open_for_writing_is_named_and_not_published(node: Node, tmp_path: Path) -> None:
    write(tmp_path, {"closed": b"1"})
    with (tmp_path / "open").open("wb") as file:
        file.write(b"half")
        file.flush()
        done = node.push(tmp_path)
    assert done.returncode == 1
    assert "not published: open: not in the bucket: it is being written" in done.stderr
    assert bucket_of(node.server) == {"closed": b"1"}
    assert node.push(tmp_path).returncode == 0
    assert bucket_of(node.server) == files_of(tmp_path)


def test_names_that_no_key_can_have_are_named_and_the_rest_is_published(node: Node, tmp_path: Path) -> None:
    write(tmp_path, {"good": b"1", ".fusecache/parts/x": b"own"})
    with open(os.fsencode(tmp_path) + b"/bad\xff", "wb"):
        pass
    os.mkfifo(tmp_path / "fifo")
    deep = "/".join(["n" * 250] * 5)
    write(tmp_path, {deep: b"long"})
    (tmp_path / "out").symlink_to("/etc/passwd")
    done = node.push(tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("not published: ") == 4
    for words in (
        "not valid Unicode",
        "fifo: not a file",
        "longer than 1024 bytes",
        "out: ",
    ):
        assert words in done.stderr
    assert bucket_of(node.server) == {"good": b"1"}


def test_names_keep_their_spelling_from_folder_to_folder(node: Node, tmp_path: Path) -> None:
    """Unicode spells `é` composed and decomposed: two files, in both folders and in the bucket."""
    files = {f"{name}/{name}.txt": name.encode() for name in ("caf\u00e9", "cafe\u0301", "\u212b", "\u00c5")}
    write(tmp_path / "from", files)
    assert node.push(tmp_path / "from").returncode == 0
    assert bucket_of(node.server) == files
    assert node.pull(tmp_path / "to").returncode == 0
    assert files_of(tmp_path / "to") == files
    (tmp_path / "to" / "caf\u00e9" / "caf\u00e9.txt").unlink()
    assert node.push(tmp_path / "to", "--delete").returncode == 0
    del files["caf\u00e9/caf\u00e9.txt"]
    assert bucket_of(node.server) == files


def test_a_folder_that_cannot_be_pushed_is_refused_in_one_line(node: Node, tmp_path: Path) -> None:
    done = node.push(tmp_path / "none")
    assert (done.returncode, done.stderr) == (
        1,
        f"fusecache: error: {tmp_path}/none does not exist: give an existing folder\n",
    )
    node.server.control.faults(
        *(
            Fault(FaultAction.ANSWER, operation=operation, status=403, code="AccessDenied")
            for operation in ("PutObject", "UploadPart")
        )
    )
    write(tmp_path / "one", {"a": b"1"})
    done = node.push(tmp_path / "one")
    assert done.returncode == 1
    assert "the keys may read, but not write" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bucket_that_fails_for_a_while_gets_everything(node: Node, tmp_path: Path) -> None:
    write(tmp_path, {"a": b"1", "b": b"2", "c": some_bytes(3 * MIB, 3)})
    node.server.control.faults(
        Fault(FaultAction.ANSWER, operation="PutObject", key="a", times=1),
        Fault(FaultAction.DROP_AFTER, operation="PutObject", key="c", times=1),
    )
    assert node.push(tmp_path).returncode == 0
    assert bucket_of(node.server) == files_of(tmp_path)


def test_watch_publishes_what_is_closed_markers_last_and_keeps_what_is_open(
    node: Node, tmp_path: Path
) -> None:
    watching = watch(node, tmp_path)
    log = (tmp_path / "train.log").open("ab")
    log.write(b"line")
    log.flush()
    write(
        tmp_path, {"step-1/model.bin": some_bytes(9 * MIB, 1), "step-1/.metadata": b"m", "latest": b"step-1"}
    )
    write(tmp_path, {"half.tmp": b"a temporary name"})
    wait_until(lambda: "latest" in node.server.control.objects(), "the first checkpoint")
    write(
        tmp_path, {"step-2/model.bin": some_bytes(9 * MIB, 2), "step-2/.metadata": b"m", "latest": b"step-2"}
    )
    wait_until(lambda: bucket_of(node.server).get("latest") == b"step-2", "the second checkpoint")
    order = published(node)
    assert order == [
        *("step-1/model.bin", "step-1/.metadata", "latest"),
        *("step-2/model.bin", "step-2/.metadata", "latest"),
    ]
    log.close()
    (tmp_path / "half.tmp").rename(tmp_path / "whole")
    watching.send_signal(signal.SIGTERM)  # with it the rest is published
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 0, err
    assert bucket_of(node.server) == files_of(tmp_path)


def test_watch_ends_within_its_deadline_and_names_what_is_missing_and_the_next_one_has_it(
    node: Node, tmp_path: Path
) -> None:
    node.server.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key="stuck"))
    watching = watch(node, tmp_path, "--sync-deadline", "4s")
    write(tmp_path, {"stuck": b"1", "free": b"2"})
    node.server.control.wait_requests(1, "PutObject", key="stuck", finished=False)
    wait_until(lambda: "free" in node.server.control.objects(), "the other file")
    write(tmp_path, {"young": b"closed just before the signal"})
    began = time.monotonic()
    watching.send_signal(signal.SIGTERM)
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 1
    assert time.monotonic() - began < 40  # 4 s, on a machine that may be slow
    assert "not published: stuck: not in the bucket yet" in err
    assert bucket_of(node.server).keys() >= {"free"}
    node.server.control.clear_faults()
    node.server.control.drop_connections()
    again = watch(node, tmp_path)
    wait_until(lambda: bucket_of(node.server) == files_of(tmp_path), "the rest", seconds=60)
    again.send_signal(signal.SIGTERM)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err


def test_what_was_closed_while_a_watch_was_dead_is_found(node: Node, tmp_path: Path) -> None:
    watching = watch(node, tmp_path)
    write(tmp_path, {"a": b"1"})
    wait_until(lambda: "a" in node.server.control.objects(), "the file")
    watching.send_signal(signal.SIGKILL)
    watching.wait()
    write(tmp_path, {"a": b"changed", "b": b"2", "latest": b"b"})
    again = watch(node, tmp_path, "--delete")
    wait_until(lambda: bucket_of(node.server) == files_of(tmp_path), "what changed meanwhile", seconds=60)
    (tmp_path / "b").unlink()
    wait_until(lambda: "b" not in node.server.control.objects(), "the removal", seconds=60)
    again.send_signal(signal.SIGTERM)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
