"""A mount that outlives its daemon (`--keep-mounted`): programs wait while the next daemon starts, and see no error."""

import ctypes
import errno
import json
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fusecache import __version__
from fusecache.daemon.connect import START_SECONDS
from fusecache.keeper import ADDRESS
from fusecache.model.hints import TO_THE_END, encode_plan
from fusecache.mount import launch
from fusecache.mount.control_client import find_mount, request_stream
from fusecache.mount.mount_table import our_entries
from tests.mount.conftest import ExpectedLog, Mounts
from tests.s3server import Account
from tests.support import BASE_PYTHON, ROOT
from tests.support.mounts import (
    FUSECACHE,
    NEEDS_OWN_SESSION,
    Mount,
    is_running,
    mounted_at,
    pattern,
    refusal,
    run,
    wait_until,
)
from tests.support.other_user import as_nobody, needs_root
from tests.support.s3_buckets import Bucket

MakeMount = Callable[..., Mount]

pytestmark = NEEDS_OWN_SESSION


def kill(mount: Mount) -> None:
    """Kill the daemon; return when the next one answers."""
    before = mount.pid
    os.kill(before, signal.SIGKILL)
    mount.pid = wait_until(
        lambda: None if is_running(before) else mount.status()["pid"], "the next daemon", seconds=60
    )
    assert mount.pid != before


def stored(mount: Mount, name: str) -> bytes:
    mount.sync()
    return mount.bucket.get(name)


@pytest.fixture(scope="module")
def shared_kept(mounts: Mounts, whole_bucket: Bucket) -> Iterator[tuple[Mount, Iterator[str]]]:
    """A mount whose daemons may be killed, and names of its directories that no test has used."""
    bucket, names = whole_bucket.below("kept"), [f"{index:02}" for index in range(40)]
    for name in names:
        bucket.put(f"{name}/")
    made = mounts.make(bucket, "--keep-mounted")
    yield made, iter(names)
    alarms: list[str] = []
    assert mounts.remove([made], alarms) == alarms == []


@pytest.fixture
def kept(shared_kept: tuple[Mount, Iterator[str]], quiet_daemons: None) -> Iterator[Mount]:
    """A directory of this test's own in that mount, as if it were a mount."""
    made, names = shared_kept
    mine, name = copy(made), next(names)
    mine.path, mine.bucket, mine.pid = made.path / name, made.bucket.below(name), made.status()["pid"]
    yield mine
    made.sync()
    made.pid = made.status()["pid"]


LONG_NAMES = [f"{index:04}-" + "x" * 200 for index in range(400)]
# inode, offset, length, type (getdents64(2)); then the name
DIRENT = struct.Struct("=QqHB")


def next_entries(directory: int, size: int = 32768) -> list[tuple[str, int]]:
    """Return the names of one system call, each with the offset behind it. size: of its buffer, in bytes.

    A page takes some 17 of the above names; the C library would read all at once.
    """
    buffer = ctypes.create_string_buffer(size)
    used = ctypes.CDLL(None, use_errno=True).getdents64(directory, buffer, len(buffer))
    assert used >= 0, os.strerror(ctypes.get_errno())
    entries, at = [], 0
    while at < used:
        _, offset, length, _ = DIRENT.unpack_from(buffer, at)
        entries.append((os.fsdecode(buffer.raw[at + DIRENT.size : at + length].rstrip(b"\0")), offset))
        at += length
    return [each for each in entries if each[0] not in {".", ".."}] or (
        next_entries(directory, size) if entries else []
    )


def next_names(directory: int, size: int = 32768) -> list[str]:
    return [name for name, _ in next_entries(directory, size)]


def read_with_kills(mount: Mount, change: Callable[[list[str]], object]) -> list[str]:
    """Return the names of the directory `many`. The daemon dies after the first two calls.

    change: called with the first names.
    """
    directory = os.open(mount.path / "many", os.O_RDONLY)
    try:
        seen = next_names(directory)
        assert 0 < len(seen) < len(LONG_NAMES)
        change(seen)
        kill(mount)
        seen += next_names(directory)
        kill(mount)
        while names := next_names(directory):
            seen += names
    finally:
        os.close(directory)
    return seen


# ---- reading


def test_open_files_and_mappings_are_read_on(kept: Mount) -> None:
    data = pattern(5_000_000)
    kept.bucket.put("shard", data)
    with open(kept.path / "shard", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert file.read(1000) == data[:1000]
        kill(kept)
        assert file.read() == data[1000:]
        assert mapped[:] == data
        kill(kept)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), 4096, 4_000_000) == data[4_000_000:4_004_096]
        assert os.fstat(file.fileno()).st_size == len(data)


def test_a_directory_is_read_on_where_its_reader_was(kept: Mount) -> None:
    for name in LONG_NAMES:
        kept.bucket.put(f"many/{name}", b"")
    assert sorted(read_with_kills(kept, lambda _: None)) == LONG_NAMES


def test_names_that_are_removed_while_a_directory_is_read_hide_no_others(kept: Mount) -> None:
    for name in LONG_NAMES:
        kept.bucket.put(f"many/{name}", b"")
    seen = read_with_kills(kept, lambda names: [os.unlink(kept.path / "many" / name) for name in names])
    assert sorted(seen) == LONG_NAMES


def test_a_program_with_a_small_buffer_may_remove_what_it_reads(kept: Mount) -> None:
    """The kernel asks for a page, passes on what fits, and asks for the rest again by its position."""
    for name in LONG_NAMES[:100]:
        kept.bucket.put(f"many/{name}", b"")
    directory = os.open(kept.path / "many", os.O_RDONLY)
    try:
        seen: list[str] = []
        while names := next_names(directory, 1024):
            seen += names
            for name in names:
                os.unlink(kept.path / "many" / name)
            if len(seen) == 40:
                kill(kept)
    finally:
        os.close(directory)
    assert sorted(seen) == LONG_NAMES[:100]


def test_files_and_directories_whose_names_begin_alike_come_once(
    kept: Mount, expect_log: Callable[[str], None]
) -> None:
    """`a-1` comes between the file `a` and the directory `a/`, of which a mount shows the directory alone."""
    expect_log("removed, as the directory of its name is key=")
    for key in ("a", "a-1", "a.txt", "a/x", "b", "b-1", "b/x", "c-", "c/x", "d"):
        kept.bucket.put(f"many/{key}", b"")
    os.unlink(kept.path / "many" / "b" / "x")
    os.rmdir(kept.path / "many" / "b")
    (kept.path / "many" / "b").write_bytes(b"in its place")
    directory = os.open(kept.path / "many", os.O_RDONLY)
    try:
        seen = []
        while names := next_names(directory, 32):
            seen += names
            if len(seen) in {2, 5, 8}:
                kill(kept)
    finally:
        os.close(directory)
    assert sorted(seen) == ["a", "a-1", "a.txt", "b", "b-1", "c", "c-", "d"]


def test_a_position_in_a_directory_is_behind_its_name(mount: MakeMount, bucket: Bucket) -> None:
    """Also behind an object that has the name of the control directory, and is not shown."""
    for name in (".fusecache", "a", "b", "c"):
        bucket.put(name, b"")
    made = mount()
    directory = os.open(made.path, os.O_RDONLY)
    try:
        behind = dict(next_entries(directory))
        assert next_entries(directory) == []
        for position, rest in ((behind["a"], ["b", "c"]), (behind["c"], []), (behind["b"], ["c"])):
            os.lseek(directory, position, os.SEEK_SET)
            assert next_names(directory) == rest
    finally:
        os.close(directory)


@pytest.mark.parametrize(
    ("in_the_bucket", "published"),
    [
        pytest.param(LONG_NAMES[:200:2], LONG_NAMES[81:200:2], id="the reader is behind the bucket's names"),
        pytest.param(
            LONG_NAMES[::2] + LONG_NAMES[201::2], LONG_NAMES[1:200:2], id="the reader is among them"
        ),
    ],
)
def test_names_that_are_published_while_a_directory_is_read_come_once(
    kept: Mount, in_the_bucket: list[str], published: list[str]
) -> None:
    """Names that the bucket has and names that only this node has come in one order."""
    for name in in_the_bucket:
        kept.bucket.put(f"many/{name}", b"")
    folder = kept.path / "many"
    folder.mkdir(exist_ok=True)
    with ExitStack() as unfinished:
        only_here = {*LONG_NAMES} - {*in_the_bucket}
        files = {name: unfinished.enter_context(open(folder / name, "wb")) for name in only_here}

        def publish(_: list[str]) -> None:
            assert {*kept.bucket.names()} - {"many/"} == {f"many/{name}" for name in in_the_bucket}
            for name in published:
                files[name].close()
            kept.sync()
            assert {*kept.bucket.names()} >= {f"many/{name}" for name in published}

        assert sorted(read_with_kills(kept, publish)) == LONG_NAMES


def test_a_process_works_on_in_its_directory(kept: Mount) -> None:
    kept.bucket.put("a/b/c", b"there")
    program = "import os, sys\nfor line in sys.stdin: print(open('c').read(), os.listdir('..'), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=kept.path / "a/b",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "there ['b']\n"
            kill(kept)
        process.stdin.close()


def test_names_that_were_known_are_found_again(mount: MakeMount, bucket: Bucket) -> None:
    for name in ("a/one", "a/two", "b/three"):
        bucket.put(name, name.encode())
    made = mount("--keep-mounted", "--attribute-seconds", "0.05")
    before = [path.stat() for path in [made.path, *sorted(made.path.rglob("*"))]]
    kill(made)
    after = [path.stat() for path in [made.path, *sorted(made.path.rglob("*"))]]
    assert [(each.st_mode, each.st_size, each.st_mtime_ns) for each in after] == [
        (each.st_mode, each.st_size, each.st_mtime_ns) for each in before
    ]
    assert (made.path / "b/three").read_bytes() == b"b/three"


@pytest.mark.whole_machine
def test_a_file_open_by_passthrough_is_read_while_there_is_no_daemon(
    mount: MakeMount, bucket: Bucket
) -> None:
    data = pattern(4_000_000)
    bucket.put("whole", data)
    made = mount("--keep-mounted", "--read-only")
    (made.path / "whole").read_bytes()
    wait_until(lambda: made.status()["cache"]["used_bytes"] >= len(data), "the whole file in the cache")
    with open(made.path / "whole", "rb", buffering=0) as file:
        if not made.status()["read_directly"]["kernel"]:
            pytest.skip("this kernel or cache directory has no passthrough; the log of the mount says why")
        keeper = made.keeper()
        os.kill(keeper, signal.SIGSTOP)
        try:
            os.kill(made.pid, signal.SIGKILL)
            assert file.read() == data
        finally:
            os.kill(keeper, signal.SIGCONT)
        wait_until(lambda: made.status()["pid"] != made.pid, "the next daemon", seconds=60)
        made.pid = made.status()["pid"]
        assert made.status()["read_directly"]["kernel"] == 1
        file.seek(0)
        assert file.read() == data
    wait_until(lambda: made.status()["read_directly"]["kernel"] == 0, "the close of the file")


# ---- writing


def test_a_file_is_written_on_and_arrives_whole(kept: Mount) -> None:
    data = pattern(3_000_000)
    with open(kept.path / "checkpoint", "wb", buffering=0) as file:
        file.write(data[:1_000_000])
        kill(kept)
        file.write(data[1_000_000:2_000_000])
        os.fsync(file.fileno())
        kill(kept)
        file.write(data[2_000_000:])
    assert stored(kept, "checkpoint") == data
    assert not list((kept.cache / "orphans").iterdir())


def test_what_was_appended_and_overwritten_in_a_known_file_arrives(kept: Mount) -> None:
    kept.bucket.put("log", b"one\n")
    with open(kept.path / "log", "ab", buffering=0) as file:
        kill(kept)
        file.write(b"two\n")
        kill(kept)
        file.write(b"three\n")
    with open(kept.path / "log", "r+b", buffering=0) as file:
        file.write(b"ONE")
        kill(kept)
    assert stored(kept, "log") == b"ONE\ntwo\nthree\n"


def test_an_open_file_keeps_the_name_that_it_was_given(kept: Mount) -> None:
    (kept.path / "d").mkdir()
    with open(kept.path / "tmp-file", "wb", buffering=0) as file:
        file.write(b"first ")
        os.rename(kept.path / "tmp-file", kept.path / "d/final")
        os.rename(kept.path / "d", kept.path / "e")
        kill(kept)
        file.write(b"second")
    assert stored(kept, "e/final") == b"first second"
    assert sorted(kept.bucket.names()) == ["e/", "e/final"]


def test_a_file_without_a_name_stays_readable_and_leaves_nothing(kept: Mount) -> None:
    with open(kept.path / "scratch", "w+b", buffering=0) as file:
        file.write(b"scratch")
        os.unlink(kept.path / "scratch")
        kill(kept)
        file.write(b" more")
        file.seek(0)
        assert file.read() == b"scratch more"
    kept.sync()
    assert kept.bucket.names() == []
    assert os.listdir(kept.path) == []


def test_a_closed_file_whose_upload_waits_is_open_for_reading(mount: MakeMount, bucket: Bucket) -> None:
    made = mount("--keep-mounted", "--settle-seconds", "3600")
    (made.path / "pending").write_bytes(b"closed")
    with open(made.path / "pending", "rb", buffering=0) as file:
        kill(made)
        assert file.read() == b"closed"
        assert (made.path / "pending").read_bytes() == b"closed"


def test_a_file_made_again_after_it_was_removed_arrives(mount: MakeMount, bucket: Bucket) -> None:
    bucket.put("f", b"old")
    made = mount("--keep-mounted", "--settle-seconds", "5")
    assert (made.path / "f").read_bytes() == b"old"
    (made.path / "f").unlink()
    with open(made.path / "f", "wb", buffering=0) as file:
        file.write(b"new ")
        kill(made)  # the removal still waits
        file.write(b"content")
    assert stored(made, "f") == b"new content"


def test_a_temporary_file_that_a_rename_has_just_left_may_be_made_again(
    mount: MakeMount, bucket: Bucket
) -> None:
    made = mount("--keep-mounted", "--settle-seconds", "5")
    (made.path / "work").write_bytes(b"first")
    made.sync()
    os.rename(made.path / "work", made.path / "final")
    with open(made.path / "work", "wb", buffering=0) as file:
        file.write(b"sec")
        kill(made)
        file.write(b"ond")
    os.rename(made.path / "work", made.path / "final")
    assert stored(made, "final") == b"second"


def test_a_rename_of_a_file_that_is_written_is_carried_out_by_the_successor(kept: Mount) -> None:
    with open(kept.path / "tmp", "wb", buffering=0) as file:
        file.write(b"before ")
        kept.stop()
        renamer = threading.Thread(target=os.rename, args=(kept.path / "tmp", kept.path / "final"))
        renamer.start()
        time.sleep(0.2)  # the request is there, whether it was read or not
        kill(kept)
        renamer.join()
        file.write(b"after")
    assert stored(kept, "final") == b"before after"
    assert kept.bucket.names() == ["final"]


@pytest.mark.whole_machine
def test_a_directory_that_was_forgotten_and_found_again_is_one(
    mount: MakeMount, bucket: Bucket, forget_names: Callable[[], None]
) -> None:
    made = mount("--keep-mounted", "--attribute-seconds", "0")
    (made.path / "d").mkdir()
    (made.path / "d/one").write_bytes(b"1")
    made.sync()
    forget_names()
    with open(made.path / "d/two", "wb", buffering=0) as file:
        file.write(b"be")
        kill(made)
        file.write(b"fore")
    made.sync()
    assert bucket.get("d/two") == b"before"
    assert sorted(os.listdir(made.path / "d")) == ["one", "two"]


def test_writes_after_an_upload_of_the_open_file_are_kept(mount: MakeMount, bucket: Bucket) -> None:
    made = mount("--keep-mounted", "--fsync", "remote")
    with open(made.path / "log", "wb", buffering=0) as file:
        file.write(b"one ")
        os.fsync(file.fileno())  # in the bucket, and the file stays open
        kill(made)
        file.write(b"two")
    assert stored(made, "log") == b"one two"


def test_a_close_by_a_child_publishes_nothing_of_a_file_that_is_still_written(
    mount: MakeMount, bucket: Bucket
) -> None:
    made = mount("--keep-mounted", "--settle-seconds", "2")
    with open(made.path / "f", "wb", buffering=0) as file:
        file.write(b"half, ")
        subprocess.run(["true"], pass_fds=[file.fileno()], check=True)
        kill(made)
        time.sleep(5)  # longer than it waits before an upload: nothing may happen
        assert bucket.names() == []
        file.write(b"whole")
    assert stored(made, "f") == b"half, whole"


def test_what_a_killed_writer_left_unfinished_is_not_published_by_a_successor(
    kept: Mount, expect_log: Callable[[str], None]
) -> None:
    """Its child has the same open file, so the file's end comes when another daemon serves."""
    expect_log("its writer was killed before it closed the file")
    kept.bucket.put("file", b"whole")
    write = (
        "import os, sys, time\n"
        "file = open(sys.argv[1], 'wb', buffering=0)\n"
        "file.write(b'half')\n"
        "child = os.fork()\n"
        "if child:\n"
        "    print(child, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", write, str(kept.path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        child = int(writer.stdout.readline())
        writer.kill()
        writer.wait()
        kill(kept)
        os.kill(child, signal.SIGTERM)
    wait_until(lambda: "was killed before" in kept.log(), "what becomes of the file")
    assert stored(kept, "file") == b"whole"


def test_a_removed_file_is_readable_to_the_end(kept: Mount) -> None:
    data = pattern(3_000_000)
    kept.bucket.put("f", data)
    with open(kept.path / "f", "rb", buffering=0) as file:
        assert file.read(100) == data[:100]
        os.unlink(kept.path / "f")
        kill(kept)
        run(FUSECACHE, "evict", kept.path)
        time.sleep(2)  # the removal must wait for this reader
        assert os.pread(file.fileno(), 100, 2_000_000) == data[2_000_000:2_000_100]
    kept.sync()
    assert kept.bucket.names() == []


def test_no_name_is_made_or_moved_twice_and_none_is_lost(kept: Mount) -> None:
    stop, wrong, rounds = threading.Event(), [], [0]

    def work() -> None:
        while not stop.is_set():
            number = rounds[0]
            folder, moved = kept.path / f"n{number}", kept.path / f"m{number}"
            try:
                folder.mkdir()
                (folder / "x").write_bytes(b"%d" % number)
                os.symlink("x", folder / "link")
                os.rename(folder / "x", folder / "y")
                os.rename(folder, moved)
                assert (moved / "y").read_bytes() == b"%d" % number
                if number % 2:
                    os.unlink(moved / "link")
                    os.unlink(moved / "y")
                    os.rmdir(moved)
            except Exception as exc:  # noqa: BLE001  # each is one too many
                wrong.append(exc)
            rounds[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            seen = rounds[0]
            wait_until(lambda seen=seen: rounds[0] > seen + 2, "some rounds", seconds=60)
            kill(kept)
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    kept.sync()
    stay = [f"m{number}/y" for number in range(0, rounds[0], 2)]
    assert sorted(key for key in kept.bucket.names() if key.endswith("y")) == sorted(stay)


def test_no_pipe_is_made_twice(kept: Mount) -> None:
    """Each program makes one after the other, so that a kill comes while the journal has some of them."""
    stop, wrong, counts = threading.Event(), [], Counter()

    def work(name: str) -> None:
        folder = kept.path / name
        while not stop.is_set():
            try:
                os.mkfifo(folder / f"{counts[name]}")
            except Exception as exc:  # noqa: BLE001  # each is one too many
                wrong.append(exc)
            counts[name] += 1

    threads = [threading.Thread(target=work, args=(f"d{number}",)) for number in range(8)]
    for number, thread in enumerate(threads):
        (kept.path / f"d{number}").mkdir()
        thread.start()
    try:
        for _ in range(3):
            seen = counts.total()
            wait_until(lambda seen=seen: counts.total() > seen + 100, "some pipes", seconds=60)
            kill(kept)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    for name, count in counts.items():
        assert {path.name for path in (kept.path / name).iterdir() if path.is_fifo()} == set(
            map(str, range(count))
        )


def test_open_control_files_of_two_daemons_are_not_mixed_up(kept: Mount) -> None:
    control = kept.path.parent / ".fusecache"
    hint = encode_plan(
        window=0, step=0, paths=["file"], path=[0], start=[0], length=[TO_THE_END], first=[0], span=[0]
    )
    with (
        open(control / "stats.json", "rb", buffering=0) as old_counters,
        open(control / "hints/old.plan", "wb", buffering=0) as old_hint,
    ):
        old_hint.write(b"half")
        kill(kept)
        with (
            open(control / "stats.json", "rb", buffering=0) as counters,
            open(control / "hints/new.plan", "wb", buffering=0) as new_hint,
        ):
            new_hint.write(hint)
            # The message is lost with the daemon that had it in memory.
            assert refusal(lambda: old_hint.write(b"the other half")) == errno.ESTALE
            old_hint.close()
            old_counters.close()
            assert json.loads(counters.read())["pid"] == kept.pid
    assert [each["job"] for each in kept.status()["hints"]["jobs"]] == ["new"]


def test_the_file_that_names_the_socket_is_read_although_the_daemon_died_after_the_open(kept: Mount) -> None:
    """So does a trainer that waits for its uploads."""
    name = kept.path.parent / ".fusecache/socket"
    with open(name, "rb", buffering=0) as file:
        kill(kept)
        assert file.read() == name.read_bytes()


# ---- the bucket


@pytest.mark.s3server_only
def test_a_successor_does_not_wait_for_a_bucket_that_is_silent(mount: MakeMount, bucket: Bucket) -> None:
    for name in ("read", "by name"):
        bucket.put(name, b"cached")
    made = mount()
    assert (made.path / "by name").read_bytes() == (made.path / "read").read_bytes() == b"cached"
    made.unmount()  # the cache directory lists both now
    made = mount("--keep-mounted", "--immutable", "/read", cache=made.cache)
    with open(made.path / "read", "rb", buffering=0) as read, open(made.path / "new", "wb") as written:
        bucket.control.pause("blackhole")
        began = time.monotonic()
        kill(made)
        written.write(b"new")
        written.flush()
        assert read.read() == b"cached"
        assert time.monotonic() - began < START_SECONDS
        assert (made.path / "by name").read_bytes() == b"cached"
        bucket.control.resume()
    assert stored(made, "new") == b"new"


@pytest.mark.s3server_only
def test_a_successor_whose_keys_may_not_write_any_more_serves(
    mount: MakeMount, bucket: Bucket, expect_log: Callable[[str], None]
) -> None:
    expect_log("publish failed, will retry .* AccessDenied")
    bucket.put("read", b"in the bucket")
    made = mount("--keep-mounted")
    account = Account(bucket.service.access_key, bucket.service.secret_key)
    bucket.control.add_account(replace(account, writable=False))
    kill(made)
    assert (made.path / "read").read_bytes() == b"in the bucket"
    (made.path / "new").write_bytes(b"new")
    wait_until(lambda: "AccessDenied" in made.log(), "an upload that is refused")
    kill(made)
    assert (made.path / "new").read_bytes() == b"new"
    bucket.control.add_account(account)
    assert stored(made, "new") == b"new"


# ---- the end of a mount


def test_a_standby_takes_over_and_leaves_with_daemon_and_keeper(mount: MakeMount, bucket: Bucket) -> None:
    made = mount("--keep-mounted")
    (made.path / "f").write_bytes(b"content")
    first = made.standby()
    kill(made)
    assert made.pid == first
    assert (made.path / "f").read_bytes() == b"content"
    others = made.keeper(), made.standby()
    made.unmount()
    wait_until(lambda: not any(map(is_running, others)), "the end of the keeper and the standby")
    assert bucket.get("f") == b"content"


def test_a_standby_holds_nothing_of_the_mount(mount: MakeMount, bucket: Bucket) -> None:
    """It is a copy of the daemon: with the mount's descriptor it would keep a mount alive that nothing serves."""
    made = mount("--keep-mounted")
    for _ in range(2):
        kill(made)
        standby = Path(f"/proc/{made.standby()}/fd")
        held = {os.readlink(each) for each in standby.iterdir()}
        assert {name.partition(":")[0] for name in held - {str(made.log_path), os.devnull}} == {"socket"}


def test_a_standby_that_died_is_not_missed(kept: Mount) -> None:
    kept.bucket.put("f", b"content")
    os.kill(kept.standby(), signal.SIGKILL)
    kill(kept)
    assert (kept.path / "f").read_bytes() == b"content"


def test_a_signal_to_the_keeper_ends_the_mount_in_good_order(mount: MakeMount, bucket: Bucket) -> None:
    made = mount("--keep-mounted")
    (made.path / "file").write_bytes(b"bytes")
    keeper = made.keeper()
    os.kill(keeper, signal.SIGTERM)
    wait_until(lambda: not is_running(keeper), "the end of the keeper", seconds=30)
    assert not mounted_at(made.path)
    assert bucket.get("file") == b"bytes"


def test_a_signal_that_was_ignored_at_the_start_stays_so(mount: MakeMount, bucket: Bucket) -> None:
    """As `nohup` has it for SIGHUP."""
    bucket.put("file", b"bytes")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        made = mount("--keep-mounted")
    finally:
        signal.signal(signal.SIGHUP, before)
    pids = made.pid, made.keeper()
    for pid in pids:
        os.kill(pid, signal.SIGHUP)
    assert (made.path / "file").read_bytes() == b"bytes"
    assert (made.status()["pid"], made.keeper()) == pids


# ---- a daemon that cannot start


def kept_table_of(keeper: int) -> int:
    """Open the memory in which a daemon leaves what its successor must know."""
    for fd in Path(f"/proc/{keeper}/fd").iterdir():
        if "memfd:fuse-table" in os.readlink(fd):
            return os.open(fd, os.O_RDWR)
    raise AssertionError("the keeper holds no table")


@needs_root
@pytest.mark.parametrize("folder", ["mount", "a mount of mine"])
def test_the_calls_of_a_daemon_that_can_never_start_again_fail_and_write_nothing_below_the_mount(
    mount: MakeMount, bucket: Bucket, expect_log: ExpectedLog, tmp_path: Path, folder: str
) -> None:
    """Below it lies a local directory: a trainer's checkpoints would go there, and be lost with the node."""
    expect_log("recovered files=")
    made = mount("--keep-mounted", path=tmp_path / folder)
    (made.path / "closed").write_bytes(b"bytes")
    keeper = made.keeper()
    table = kept_table_of(keeper)
    os.pwrite(table, b"otherone", 0)
    os.close(table)
    os.kill(made.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(keeper), "the end of the keeper", seconds=60)
    lines = [line for line in made.log().splitlines() if line.startswith("keeper:")]
    assert re.match(
        r"keeper: the daemon cannot go on with the mount of its predecessor: shared memory of another version of the "
        rf"program \(\d+ bytes\): every call on the mount {made.path} fails from now on",
        lines[-1],
    )
    for call in (lambda: os.listdir(made.path), lambda: (made.path / "step-2").write_bytes(b"lost")):
        with pytest.raises(OSError, match="endpoint is not connected"):
            call()
    status = run(FUSECACHE, "status", made.path, check=False)
    assert f"clean up with: fusecache unmount {made.path}" in status.stderr
    made.pid = 0
    run(FUSECACHE, "unmount", made.path)
    assert os.listdir(made.path) == []
    made.start()
    made.sync()
    assert bucket.get("closed") == b"bytes"


def has_failed_twice(mount: Mount) -> bool:
    return "It has failed 2 times" in mount.log()


@dataclass
class Unserved:
    """A mount without a daemon, and its keeper. None can start: a file of the cache directory is no JSON."""

    mount: Mount
    keeper: int
    cause: Path
    right: str

    def reason(self) -> str:
        """Return what `health` says, once the keeper knows more than that a daemon starts."""
        return str(
            wait_until(lambda: "cannot start" in (text := health(self.mount)) and text, "why", seconds=30)
        )


@pytest.fixture
def unserved(mount: MakeMount, bucket: Bucket) -> Iterator[Unserved]:
    bucket.put("file", b"bytes")
    made = mount("--keep-mounted")
    made.standby()
    cause = made.cache / "fusecache.json"
    found = Unserved(made, made.keeper(), cause, cause.read_text())
    cause.write_text("{")
    os.kill(made.pid, signal.SIGKILL)
    wait_until(lambda: "It has failed 2 times" in made.log(), "two starts that fail", seconds=60)
    made.pid = 0
    yield found
    cause.write_text(found.right)
    if is_running(found.keeper):
        os.kill(found.keeper, signal.SIGTERM)
        wait_until(lambda: not is_running(found.keeper), "the end of the keeper", seconds=60)


def health(mount: Mount) -> str:
    done = run(FUSECACHE, "health", mount.path, check=False)
    assert done.returncode == 2, done.stdout
    return done.stdout


def test_health_and_status_say_why_no_daemon_can_start_and_a_keeper_tells_no_other_user(
    unserved: Unserved,
) -> None:
    path = unserved.mount.path
    said = unserved.reason()
    status = run(FUSECACHE, "status", path, check=False)
    assert status.returncode == 1
    for text in (said.removeprefix("ACTION: "), status.stderr.removeprefix("fusecache: error: ")):
        assert text.startswith(f"{path}: the daemon cannot start: {unserved.cause} cannot be read ")
        assert f"the keeper (process {unserved.keeper}) tries again every 10 s" in text
        assert text.endswith(f"To end the mount instead: fusecache unmount {path}\n")
    assert "cannot start" in told_by_keeper(unserved.mount)
    if os.geteuid() == 0:
        assert as_nobody(lambda: told_by_keeper(unserved.mount)) == ""


def test_a_mount_goes_on_soon_after_the_cause_is_gone(unserved: Unserved) -> None:
    made = unserved.mount
    wait_until(lambda: "is started again in 8 s" in made.log(), "a long pause", seconds=60)
    began = time.monotonic()
    unserved.cause.write_text(unserved.right)
    assert (made.path / "file").read_bytes() == b"bytes"
    assert time.monotonic() - began < 20
    made.pid = made.status()["pid"]


def told_by_keeper(mount: Mount) -> str:
    """Return what the keeper answers, asked at its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(10)
        asker.connect(keeper_address(mount))
        return asker.recv(1 << 16).decode()


def keeper_address(mount: Mount) -> str:
    (entry,) = [entry for entry in our_entries() if entry.point == str(mount.path)]
    return ADDRESS + entry.device.partition(":")[2]


@needs_root
def test_commands_believe_no_other_user_that_no_daemon_serves(mount: MakeMount, bucket: Bucket) -> None:
    made = mount("--keep-mounted")
    address = keeper_address(made)

    def lie() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen()
            with listener.accept()[0] as asker:
                asker.send(b"the daemon cannot start")

    keeper = made.keeper()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not is_running(keeper), "the end of the keeper, which has the address")
    with ThreadPoolExecutor(1) as pool:
        lied = pool.submit(as_nobody, lie)
        wait_until(lambda: f"@{address[1:]}" in Path("/proc/net/unix").read_text(), "the listener")
        made.stop()
        said = run(FUSECACHE, "status", made.path, check=False).stderr
        lied.result(timeout=30)
    assert "the daemon has not answered" in said
    made.kill()


@pytest.mark.parametrize("by", ["kill", "fusermount3"])
def test_a_mount_that_no_daemon_serves_is_ended_in_good_order(unserved: Unserved, by: str) -> None:
    if by == "kill":
        os.kill(unserved.keeper, signal.SIGTERM)
    else:
        run("fusermount3", "-u", unserved.mount.path)
    wait_until(lambda: not is_running(unserved.keeper), "the end of the keeper", seconds=60)
    assert not mounted_at(unserved.mount.path)


def test_an_unmount_ends_a_mount_that_no_daemon_serves_and_the_programs_that_wait(unserved: Unserved) -> None:
    unserved.reason()
    with subprocess.Popen(["cat", unserved.mount.path / "file"], stderr=subprocess.DEVNULL) as reader:
        try:
            wait_until(lambda: Path(f"/proc/{reader.pid}/comm").read_text() == "cat\n", "its start")
            said = run(FUSECACHE, "unmount", unserved.mount.path).stderr
            assert reader.wait(30)
        finally:
            reader.kill()
    assert "files not uploaded are in its cache directory, for the next mount" in said
    assert not is_running(unserved.keeper)
    assert not mounted_at(unserved.mount.path)


def test_a_mount_waits_for_a_python_that_is_installed_again(
    mount: MakeMount, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("file", b"bytes")
    made = mount()
    made.unmount()
    python = tmp_path / "python"
    python.symlink_to(BASE_PYTHON)
    environment = {**made.bucket.service.environment(), "PYTHONPATH": sysconfig.get_path("purelib")}
    _, *words = made.command("--keep-mounted")
    run(python, "-m", "fusecache", *words, cwd=ROOT, env=environment)
    made.pid = made.status()["pid"]
    standby = made.standby()
    python.unlink()
    for pid in (standby, made.pid):
        os.kill(pid, signal.SIGKILL)
    said = wait_until(lambda: "cannot start" in (text := health(made)) and text, "the reason", seconds=30)
    assert f"{made.path}: the daemon cannot start: cannot start {python}: " in said
    python.symlink_to(BASE_PYTHON)
    assert (made.path / "file").read_bytes() == b"bytes"
    made.pid = made.status()["pid"]


# ---- the configuration of a mount


class InConfig(Bucket):
    """A bucket that the configuration file names."""

    @property
    def source(self) -> str:
        """Nothing for the command line."""
        return ""


@pytest.fixture
def configured(mount: MakeMount, bucket: Bucket, tmp_path: Path) -> tuple[Mount, Path, str]:
    """A mount of the folder `one` of the bucket, its configuration file, and the file's text."""
    for folder in ("one", "two"):
        bucket.put(f"{folder}/name", folder.encode())
    config = tmp_path / "mount.toml"
    text = f'source = "{bucket.source}one"\nendpoint_url = "{bucket.service.endpoint_url}"\n'
    config.write_text(text)
    of = InConfig(bucket.service, bucket.client, bucket.prefix)
    return mount("--keep-mounted", "--config", str(config), of=of), config, text


def upgrade(mount: Mount) -> None:
    run(FUSECACHE, "upgrade", mount.path)
    mount.pid = mount.status()["pid"]


def test_a_running_mount_never_changes_what_it_shows(
    configured: tuple[Mount, Path, str], expect_log: ExpectedLog
) -> None:
    expect_log("This mount goes on with the configuration that it had before")
    made, config, text = configured
    before = (made.path / "name").stat()
    for replace_daemon, change, why in (
        (kill, ('/one"', '/two"'), "changes source: to apply it, unmount and mount again"),
        (kill, ('/one"', '/two"'), "changes source: "),  # nor does the successor of a successor
        (upgrade, ("", "read_only = true\n"), "changes read_only: "),
        (kill, ("", 'umask = "077"\n'), "changes umask: "),
        (upgrade, ("", "cache_sise = 1\n"), "unknown key 'cache_sise'"),
        (kill, ("source", "source ="), "is not valid TOML"),
    ):
        config.write_text(text.replace(*change, 1))
        replace_daemon(made)
        assert (made.path / "name").read_bytes() == b"one"
        after = (made.path / "name").stat()
        assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)
        (made.path / "new").write_bytes(b"new")
        status = made.status()
        assert status["verdict"] == "DEGRADED"
        assert any(why in reason for reason in status["reasons"]), why
    config.write_text(text)
    kill(made)
    assert made.status()["reasons"] == []


def test_a_changed_source_applies_to_the_next_mount(configured: tuple[Mount, Path, str]) -> None:
    made, config, text = configured
    config.write_text(text.replace('/one"', '/two"'))
    made.unmount()
    made.cache = made.cache.with_name("another")
    made.log_path = made.cache / "fusecache.log"
    made.start("--config", str(config))
    assert (made.path / "name").read_bytes() == b"two"


def test_an_option_that_changes_nothing_to_see_applies_to_the_next_daemon(
    configured: tuple[Mount, Path, str],
) -> None:
    made, config, text = configured
    assert made.status()["options"]["download_rate"] is None
    config.write_text(text + 'download_rate = "100MiB"\n')
    kill(made)
    assert made.status()["options"]["download_rate"] == 100 * 2**20
    assert made.status()["reasons"] == []


# ---- the end of a mount, and its keeper


def test_without_its_keeper_a_mount_goes_on_and_ends_with_its_daemon(
    mount: MakeMount, bucket: Bucket
) -> None:
    bucket.put("file", b"bytes")
    made = mount("--keep-mounted")
    os.kill(made.keeper(), signal.SIGKILL)
    assert (made.path / "file").read_bytes() == b"bytes"
    made.kill()


def test_status_says_whether_the_mount_outlives_its_daemon(mount: MakeMount, kept: Mount) -> None:
    assert kept.status()["options"]["keep_mounted"]
    other = mount()
    assert not other.status()["options"]["keep_mounted"]
    assert "ends with its daemon" in run(FUSECACHE, "status", other.path).stdout


def test_an_upgrade_replaces_the_daemon_under_its_users(kept: Mount) -> None:
    with open(kept.path / "file", "wb", buffering=0) as file:
        file.write(b"before ")
        began = time.monotonic()
        said = run(FUSECACHE, "upgrade", kept.path.parent).stderr
        assert re.search(r"is served by version \S+ now", said)
        assert time.monotonic() - began < 60
        file.write(b"after")
        assert kept.status()["pid"] != kept.pid
        kept.pid = kept.status()["pid"]
    assert stored(kept, "file") == b"before after"


def test_upgrades_at_the_same_time_are_one_upgrade(kept: Mount) -> None:
    kept.standby()
    before = len(kept.log())
    with ThreadPoolExecutor(6) as pool:
        for ended in [pool.submit(launch.replace_daemon, kept.path.parent, __version__) for _ in range(6)]:
            ended.result()
    said = kept.log()[before:]
    assert said.count("the daemon ends, for its successor") == 1
    assert "is not ready to serve" not in said
    kept.pid = kept.status()["pid"]


def test_an_upgrade_to_a_program_that_does_not_get_ready_leaves_the_daemon_serving(
    kept: Mount,
) -> None:
    kept.bucket.put("file", b"bytes")
    at, _ = find_mount(kept.path.parent, os.environ)
    answer = request_stream(at, {"command": "upgrade", "program": "/bin/false"})
    assert answer["result"] == "error"
    assert answer["message"].startswith(
        f"{kept.path.parent}: /bin/false is not ready to serve, so the daemon goes on: it ended at its start"
    )
    assert kept.status()["pid"] == kept.pid
    kill(kept)
    assert (kept.path / "file").read_bytes() == b"bytes"


def test_a_checkout_that_is_not_installed_outlives_its_daemon_too(mount: MakeMount, bucket: Bucket) -> None:
    """`python -m fusecache` in it: only the working directory has the package."""
    bucket.put("file", b"bytes")
    made = mount()
    made.unmount()
    requirements = sysconfig.get_path("purelib")  # no site directory there: its .pth files do not count
    environment = {**made.bucket.service.environment(), "PYTHONPATH": requirements}
    elsewhere = run(BASE_PYTHON, "-m", "fusecache", "version", cwd="/", env=environment, check=False)
    assert "No module named fusecache" in elsewhere.stderr
    _, *words = made.command("--keep-mounted")
    run(BASE_PYTHON, "-m", "fusecache", *words, cwd=ROOT, env=environment)
    made.pid = made.status()["pid"]
    kill(made)
    assert (made.path / "file").read_bytes() == b"bytes"


@pytest.mark.parametrize("namespace", [["--mount"], ["--pid", "--fork", "--mount-proc"]])
def test_a_container_may_not_name_the_program_of_the_next_daemon(kept: Mount, namespace: list[str]) -> None:
    words = ["unshare", *namespace, "--propagation", "slave"]
    if run(*words, "true", check=False).returncode:
        pytest.skip("unshare is not permitted here")
    done = run(*words, FUSECACHE, "upgrade", kept.path.parent, check=False)
    assert done.returncode
    assert "from its own system, not from a container" in done.stderr


def test_a_mount_without_a_keeper_refuses_the_upgrade(mount: MakeMount, bucket: Bucket) -> None:
    done = run(FUSECACHE, "upgrade", mount().path, check=False)
    assert done.returncode
    assert "no keeper holds this mount" in done.stderr
