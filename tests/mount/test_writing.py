"""Writing: readable here at once, in the bucket whole or not at all."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, pattern, run, wait_until

MIB = 2**20
HOLD_PUBLISHING = [
    Fault(FaultAction.HOLD, operation="PutObject"),
    Fault(FaultAction.HOLD, operation="CompleteMultipartUpload"),
]


def test_what_was_written_is_read_before_any_of_it_is_in_the_bucket(place: Place):
    data = pattern(300_000)
    with open(place.path / "file", "wb") as file:
        file.write(data)
        file.flush()
        assert (place.path / "file").read_bytes() == data
        assert (place.path / "file").stat().st_size == len(data)
        assert place.bucket.names() == []
    assert (place.path / "file").read_bytes() == data
    place.sync()
    assert place.bucket.get("file") == data
    assert (place.path / "file").read_bytes() == data


def test_append_adds_to_what_the_bucket_has(place: Place):
    place.bucket.put("file", b"first ")
    with open(place.path / "file", "ab") as file:
        file.write(b"second ")
    with open(place.path / "file", "ab") as file:
        file.write(b"third")
    assert (place.path / "file").read_bytes() == b"first second third"
    place.sync()
    assert place.bucket.get("file") == b"first second third"


def test_opening_with_o_trunc_replaces_everything(place: Place):
    place.bucket.put("file", b"a long old content")
    with open(place.path / "file", "wb") as file:
        assert (place.path / "file").stat().st_size == 0
        file.write(b"new")
    place.sync()
    assert place.bucket.get("file") == b"new"


def test_opening_with_o_trunc_and_closing_makes_it_empty(place: Place):
    place.bucket.put("file", b"old")
    open(place.path / "file", "wb").close()
    place.sync()
    assert place.bucket.get("file") == b""
    assert (place.path / "file").stat().st_size == 0


def test_a_random_write_changes_its_bytes_and_keeps_the_others(place: Place):
    data = bytearray(pattern(5 * MIB))
    place.bucket.put("file", bytes(data))
    with open(place.path / "file", "r+b") as file:
        for offset in (0, 4095, 1_000_000, 4 * MIB - 2, 5 * MIB - 3):
            os.pwrite(file.fileno(), b"XYZ", offset)
            data[offset : offset + 3] = b"XYZ"
        assert os.pread(file.fileno(), len(data), 0) == data
    assert (place.path / "file").read_bytes() == data
    place.sync()
    assert place.bucket.get("file") == data


def test_a_write_behind_the_end_leaves_zeros_between(place: Place):
    place.bucket.put("file", b"abc")
    with open(place.path / "file", "r+b") as file:
        os.pwrite(file.fileno(), b"xyz", 100_000)
    expected = b"abc" + b"\0" * (100_000 - 3) + b"xyz"
    assert (place.path / "file").read_bytes() == expected
    place.sync()
    assert place.bucket.get("file") == expected


@pytest.mark.case(4)
def test_ftruncate_then_half_written_has_zeros_in_the_hole(place: Place):
    with open(place.path / "file", "wb") as file:
        file.truncate(3 * MIB)
        file.write(b"h" * MIB)
    expected = b"h" * MIB + b"\0" * (2 * MIB)
    assert (place.path / "file").read_bytes() == expected
    place.sync()
    assert place.bucket.get("file") == expected


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_000, 200_000])
def test_truncate_by_path_cuts_or_extends_a_published_file(place: Place, size: int):
    data = pattern(100_000)
    place.bucket.put("file", data)
    os.truncate(place.path / "file", size)
    expected = data[:size].ljust(size, b"\0")
    assert (place.path / "file").read_bytes() == expected
    place.sync()
    assert place.bucket.get("file") == expected


def test_cut_then_extended_shows_zeros_and_not_the_old_bytes(place: Place):
    place.bucket.put("file", b"x" * 10_000)
    with open(place.path / "file", "r+b") as file:
        file.truncate(100)
        file.truncate(10_000)
    expected = b"x" * 100 + b"\0" * 9900
    assert (place.path / "file").read_bytes() == expected
    place.sync()
    assert place.bucket.get("file") == expected


def test_a_file_being_written_is_never_in_the_bucket_in_part(place: Place):
    place.bucket.put("old", b"old")
    with open(place.path / "new", "wb") as new, open(place.path / "old", "wb") as old:
        for _ in range(4):
            new.write(b"n" * MIB)
            old.write(b"o" * MIB)
            new.flush()
            old.flush()
            os.fsync(new.fileno())
            os.fsync(old.fileno())
            assert place.bucket.names() == ["old"]
            assert place.bucket.get("old") == b"old"
    place.sync()
    assert place.bucket.sizes() == {"new": 4 * MIB, "old": 4 * MIB}


@pytest.mark.s3server_only
def test_the_old_object_stays_until_the_new_one_is_whole(place: Place):
    place.bucket.put("file", b"old")
    place.bucket.control.faults(*HOLD_PUBLISHING)
    data = pattern(1000)
    (place.path / "file").write_bytes(data)
    place.bucket.control.wait_requests(1, "PutObject", place.bucket.prefix + "file", finished=False)
    assert place.bucket.get("file") == b"old"
    assert (place.second / "file").read_bytes() == b"old"
    assert (place.path / "file").read_bytes() == data
    place.bucket.control.clear_faults()
    place.sync()
    assert place.bucket.get("file") == data


@pytest.mark.case(21)
@pytest.mark.parametrize("size", [0, 1, 5 * MIB - 1, 64 * MIB])
def test_up_to_sixty_four_mebibytes_are_one_put(place: Place, size: int):
    data = pattern(size)
    (place.path / "file").write_bytes(data)
    place.sync()
    assert place.bucket.get("file") == data
    assert (place.second / "file").read_bytes() == data
    if place.bucket.service.control is not None:
        assert place.bucket.published() == [("PutObject", "file")]


@pytest.mark.case(21)
def test_one_byte_more_goes_up_in_equal_parts(place: Place):
    data = pattern(64 * MIB + 1)
    (place.path / "file").write_bytes(data)
    place.sync()
    assert place.bucket.get("file") == data
    assert place.bucket.uploads() == []
    if place.bucket.service.control is not None:
        parts = [entry for entry in place.bucket.requests("UploadPart") if entry.status == 200]
        assert sorted(entry.bytes_in for entry in parts) == [1, 64 * MIB]
        assert place.bucket.published() == [("CompleteMultipartUpload", "file")]


@pytest.mark.s3server_only
def test_close_does_not_wait_for_the_bucket(place: Place):
    place.bucket.control.faults(*HOLD_PUBLISHING)
    for turn in range(20):
        (place.path / f"f{turn}").write_bytes(b"x" * 100_000)
        (place.path / f"f{turn}").rename(place.path / f"g{turn}")
    assert place.bucket.names() == []
    place.bucket.control.clear_faults()
    place.sync()
    assert place.bucket.names() == sorted(f"g{turn}" for turn in range(20))


@pytest.mark.s3server_only
def test_a_file_rewritten_quickly_is_uploaded_once_with_its_last_bytes(mount):
    one: Mount = mount("--settle-seconds", "3600")
    for turn in range(10):
        (one.path / "file").write_bytes(f"turn {turn}".encode())
    one.unmount()
    assert one.bucket.get("file") == b"turn 9"
    assert one.bucket.published() == [("PutObject", "file")]


def test_rewritten_while_the_old_content_is_on_its_way_the_newest_wins(place: Place):
    for turn in range(4):
        (place.path / "file").write_bytes(f"turn {turn}".encode())
        place.sync() if turn % 2 else None
    assert (place.path / "file").read_bytes() == b"turn 3"
    place.sync()
    assert place.bucket.get("file") == b"turn 3"


@pytest.mark.s3server_only
def test_a_rewrite_while_the_upload_is_held_follows_it(place: Place):
    place.bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject", nth=1))
    (place.path / "file").write_bytes(b"first")
    place.bucket.control.wait_requests(1, operation="PutObject", finished=False)
    (place.path / "file").write_bytes(b"second")
    with open(place.path / "file", "ab") as file:
        file.write(b" and more")
    assert (place.path / "file").read_bytes() == b"second and more"
    place.bucket.control.clear_faults()
    place.sync()
    assert place.bucket.get("file") == b"second and more"
    assert (place.path / "file").read_bytes() == b"second and more"


def test_two_writers_of_one_file_see_each_other(place: Place):
    with (
        open(place.path / "file", "w+b", buffering=0) as one,
        open(place.path / "file", "r+b", buffering=0) as two,
    ):
        one.write(b"one..")
        two.seek(5)
        two.write(b"two..")
        assert os.pread(one.fileno(), 100, 0) == b"one..two.."
    place.sync()
    assert place.bucket.get("file") == b"one..two.."


def test_many_threads_write_many_files(place: Place):
    def write(worker: int) -> None:
        for index in range(25):
            (place.path / f"w{worker}-{index:02}").write_bytes(pattern(2000 + index, seed=worker))

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    place.sync()
    expected = {f"w{worker}-{index:02}": 2000 + index for worker in range(8) for index in range(25)}
    assert place.bucket.sizes() == expected
    assert place.bucket.get("w3-07") == pattern(2007, seed=3)


def test_creating_exclusively_fails_for_a_name_that_only_the_bucket_has(place: Place):
    place.bucket.put("file", b"theirs")
    with pytest.raises(FileExistsError):
        open(place.path / "file", "xb").close()
    assert place.bucket.get("file") == b"theirs"


@pytest.mark.case(20)
def test_a_file_larger_than_the_bucket_can_hold_is_refused(place: Place):
    with open(place.path / "file", "wb") as file:
        with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is checked below
            file.truncate(5 * 2**40)
        assert caught.value.errno == errno.EFBIG
    os.unlink(place.path / "file")


def test_the_metadata_of_an_object_tell_mode_and_time(place: Place):
    path = place.path / "file"
    path.write_bytes(b"x")
    path.chmod(0o640)
    os.utime(path, ns=(10**18, 10**18 + 123_000_000))
    place.sync()
    metadata = place.bucket.head("file")["Metadata"]
    assert int(metadata["mode"], 8) == 0o100640
    assert float(metadata["mtime"]) == pytest.approx(1e9 + 0.123, abs=1e-6)


def test_a_script_runs_on_another_node_with_the_mode_owner_and_time_that_it_was_given(
    mount: Callable[..., Mount], tmp_path: Path
):
    def facts(path: Path) -> tuple[int, int, int, int]:
        found = path.stat()
        return found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns

    script = tmp_path / "run"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o755)
    os.chown(script, 1000, 1001)
    os.utime(script, ns=(0, 1_763_764_212_123_456_789))
    first = mount()
    run("cp", "-a", script, first.path / "run")
    first.sync()
    other = mount("--posix-metadata")
    assert run(other.path / "run").stdout == "ran\n"
    assert facts(other.path / "run") == facts(script)
    assert not os.access(mount().path / "run", os.X_OK)


@pytest.mark.s3server_only
def test_status_tells_what_a_file_waits_for(place: Place):
    place.bucket.control.faults(*HOLD_PUBLISHING)

    def state() -> str:
        return str(place.first_mount.status(f"{place.name}/file")["state"])

    with open(place.path / "file", "wb") as file:
        file.write(b"x")
        file.flush()
        assert state() == "dirty"
    wait_until(lambda: state().startswith(("queued", "uploading")), "the queue")
    place.bucket.control.clear_faults()
    place.sync()
    assert state() == "clean"
