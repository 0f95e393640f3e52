"""`status`, `warm`, `evict`, `check` against real mounts: what they do, what they say, how they end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fusecache.cli.main import main
from fusecache.model.facts import FACTS
from fusecache.mount import control_client
from scripts.reference import flat
from tests.support.frozen import frozen
from tests.support.mounts import FUSECACHE, Mount, open_to_other_users, pattern, run, tree_of, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20
pytestmark = pytest.mark.s3server_only

FILES = {"data/a": 3 * MIB, "data/b": 9 * MIB + 1, "data/deep/c": 7, "other": 100_000}


@pytest.fixture
def full(bucket: Bucket) -> Bucket:
    """A bucket with a few files."""
    for name, size in FILES.items():
        bucket.put(name, pattern(size, seed=size))
    return bucket


def fusecache(*words: str | Path, status: int = 0, **more: object) -> "subprocess.CompletedProcess[str]":
    """Run a command; fails the test if its exit status is another."""
    done = run(FUSECACHE, *words, check=False, **more)
    assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def gets(bucket: Bucket) -> int:
    return len(bucket.requests("GetObject"))


def has_right_bytes(mount: Mount) -> bool:
    """Read everything below `data`, past the kernel's pages."""
    for name, size in FILES.items():
        with open(mount.path / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if name.startswith("data/") and file.read() != pattern(size, seed=size):
                return False
    return True


# ---- warm


def test_what_was_warmed_is_read_without_a_get_also_by_the_next_daemon(mount, full: Bucket):
    one: Mount = mount()
    done = fusecache("warm", "--wait", one.path / "data")
    assert done.stdout == "3 files, 12.0 MiB: all cached\n"
    asked = gets(full)
    assert asked == 4  # the larger file in two pieces
    assert has_right_bytes(one)
    assert gets(full) == asked
    one.unmount()
    one.start()
    assert has_right_bytes(one)
    assert gets(full) == asked


def test_without_wait_it_goes_on_in_the_background_and_status_shows_it(mount, full: Bucket):
    one: Mount = mount()
    done = fusecache("warm", one.path / "data", one.path / "other")
    assert "in the background" in done.stdout

    def job() -> dict:
        return json.loads(fusecache("status", one.path, "--json").stdout)["warming"][0]

    wait_until(lambda: job()["state"] == "done", "the end of the warm-up")
    assert job()["paths"] == ["data", "other"]
    assert (job()["files_done"], job()["bytes_done"]) == (4, sum(FILES.values()))
    assert re.search(r"warm-up +data, other: done, 4 of 4 files", fusecache("status", one.path).stdout)


def test_what_the_cache_cannot_hold_is_said_before_anything_is_fetched(mount, full: Bucket):
    one: Mount = mount("--cache-size", "64MiB", "--memory", "64MiB")
    full.put("data/large", b"x" * (60 * MIB))
    for flags in ((), ("--wait",)):
        done = fusecache("warm", *flags, one.path / "data", status=1)
        assert "needs 72.0 MiB" in done.stderr
        assert "limit 64.0 MiB" in done.stderr
    assert gets(full) == 0


def test_a_warm_up_that_fails_names_the_files_and_ends_with_1(mount, full: Bucket, expect_log):
    one: Mount = mount()
    missing = fusecache("warm", "--wait", one.path / "nothing", status=1)
    assert "nothing" in missing.stderr
    assert "no such file" in missing.stderr


def test_an_interrupt_stops_the_warm_up(mount, full: Bucket):
    one: Mount = mount()
    full.control.set(bandwidth=500_000)
    try:
        # A shell has what it starts in the background ignore interrupts, and all below inherits that.
        with subprocess.Popen(
            ["env", "--default-signal=INT", FUSECACHE, "warm", "--wait", one.path / "data"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            wait_until(lambda: gets(full), "a GET")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)
        assert process.returncode == 130
        wait_until(lambda: one.status()["warming"][0]["state"] == "stopped", "the end of the warm-up")
    finally:
        full.control.set(bandwidth=None)
    assert has_right_bytes(one)


def test_progress_is_lines_where_there_is_no_terminal(mount, full: Bucket):
    one: Mount = mount()
    full.control.set(bandwidth=3_000_000)
    try:
        done = fusecache("warm", "--wait", one.path / "data")
    finally:
        full.control.set(bandwidth=None)
    lines = done.stderr.splitlines()
    assert lines
    assert all(line.startswith("fusecache: warming: ") for line in lines)


# ---- evict


def test_evicted_files_are_fetched_again_and_the_others_are_not(mount, full: Bucket):
    one: Mount = mount()
    fusecache("warm", "--wait", one.path)
    assert tree_of(one.path / "data")["a"] == pattern(3 * MIB, seed=3 * MIB)
    with open(one.path / "data" / "a", "rb") as opened:
        assert opened.read(1)
        done = fusecache("evict", one.path / "data" / "a", one.path / "data" / "deep")
        assert done.stdout == "freed 3.0 MiB\n"
        asked = gets(full)
        # The kernel's pages are gone too, and an open file goes on.
        assert opened.read() == pattern(3 * MIB, seed=3 * MIB)[1:]
        assert gets(full) > asked
    asked = gets(full)
    assert (one.path / "data" / "b").read_bytes() == pattern(9 * MIB + 1, seed=9 * MIB + 1)
    assert gets(full) == asked


def test_evict_never_touches_what_is_not_uploaded(mount, bucket: Bucket, expect_log):
    expect_log("stopped with pending uploads")
    one: Mount = mount("--settle-seconds", "3600")
    (one.path / "new").write_bytes(b"only here")
    assert fusecache("evict", one.path).stdout == "freed 0 B\n"
    assert (one.path / "new").read_bytes() == b"only here"
    one.unmount("--force")


def as_nobody(*words: str | Path) -> tuple[int, str]:
    """Run a command in a child that is another user; return its exit status and what it said on stderr."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.chdir("/")
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
            status = main([str(word) for word in words])
        os._exit(status)
    os.close(writer)
    with open(reader) as said:
        words_said = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), words_said


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_other_users_may_ask_and_wait_only(mount, full: Bucket):
    one: Mount = mount("--allow-other")
    open_to_other_users(one.path)
    assert as_nobody("status", one.path) == (0, "")
    assert as_nobody("sync", one.path) == (0, "")
    for command in ("warm", "check", "recover", "evict"):
        status, said = as_nobody(command, one.path)
        assert status != 0
        assert f"`{command}` is allowed only for root, the user who mounted" in said


# ---- check


def test_a_check_of_a_sound_mount_ends_with_0_and_says_what_it_saw(mount, full: Bucket):
    one: Mount = mount()
    fusecache("warm", "--wait", one.path)
    said = fusecache("check", one.path)
    assert said.stdout.endswith("0 damaged files; 4 keys listed: 0 not visible in the mount\n")
    facts = json.loads(fusecache("check", one.path, "--json").stdout)
    assert (facts["blocks"], facts["damaged_files"], facts["keys"]) == (3 + 10 + 1 + 1, 0, 4)


def test_a_check_names_damage_and_unusable_keys_and_ends_with_1(mount, full: Bucket, expect_log):
    expect_log("cached granules are damaged")
    one: Mount = mount()
    full.put("data//twice", b"x")
    fusecache("warm", "--wait", one.path)
    for path in (one.cache / "cache" / "files").rglob("*"):
        if path.is_file() and path.stat().st_size > 8 * MIB:
            with open(path, "r+b") as file:
                file.seek(MIB)
                file.write(b"damage")
    said = fusecache("check", one.path, status=1)
    assert "damaged in the cache, evicted: data/b\n" in said.stdout
    assert "'data//twice'" in said.stdout
    facts = json.loads(fusecache("check", one.path, "--json", status=1).stdout)
    assert (facts["damaged_files"], facts["unusable_keys"]) == (0, 1)
    assert has_right_bytes(one)


# ---- wrong paths, dead daemons


@pytest.mark.parametrize(
    ("command", "status"),
    [("warm", 1), ("evict", 1), ("check", 2), ("status", 1), ("sync", 2), ("recover", 1)],
)
def test_a_path_that_is_not_in_a_mount_or_whose_daemon_died_is_one_clear_line(
    mount, full: Bucket, tmp_path: Path, command: str, status: int
):
    done = fusecache(command, tmp_path, status=status)
    assert done.stderr.startswith(f"fusecache: error: {tmp_path} is not in a fusecache mount: ")
    one: Mount = mount()
    if command != "recover":  # it is about the mount, whatever the path in it
        missing = fusecache(command, one.path / "nothing" / "here", status=status)
        assert "no such file" in missing.stderr
        assert missing.stderr.count("\n") == 1
    os.kill(one.pid, signal.SIGKILL)
    wait_until(lambda: not one.is_alive(), "the daemon's end")
    for path in (one.path, one.path / "nothing" / "here"):
        dead = fusecache(command, path, status=status)
        assert dead.stderr.endswith(f"fusecache unmount {one.path}\n")


IMPATIENT = """
import sys
from fusecache.cli.main import main
from fusecache.mount import mount_table
mount_table.ANSWER_SECONDS = 0.3
for words in sys.argv[2:]:
    print(main(words.split("|")), flush=True)
"""


def test_beside_a_mount_that_hangs_no_command_waits_and_on_it_each_says_so(
    mount, full: Bucket, tmp_path: Path
):
    sound: Mount = mount()
    hung: Mount = mount()
    point = str(hung.path)
    commands = [
        "status",
        "sync",
        "warm",
        "evict",
        "check",
        "recover",
        "unmount",
        "unmount|--force",
        "mount|s3://b",
    ]
    with frozen(hung.pid):
        done = run(sys.executable, "-c", IMPATIENT, "-", *(f"{words}|{point}" for words in commands))
        for command in ("status", "sync", "warm", "evict", "check", "recover"):
            fusecache(command, sound.path, seconds=20)
        sound.unmount()
    assert done.stdout.split() == ["1", "2", "1", "1", "2", "1", "1", "1", "1"]
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands)
    assert all(line.startswith(f"fusecache: error: {point}: the daemon has not answered") for line in lines)
    assert has_right_bytes(hung)


def test_a_status_that_waits_for_a_slow_bucket_is_not_taken_for_a_silent_daemon(
    mount, full: Bucket, monkeypatch: pytest.MonkeyPatch
):
    one: Mount = mount()
    # It reports twice a second; a machine may pause for longer.
    monkeypatch.setattr(control_client, "SILENCE_SECONDS", 5)
    full.control.set(latency=7)
    try:
        found, _ = control_client.find_mount(one.path, os.environ)
        answer = control_client.ask(found, "status", "deep/never/seen")
    finally:
        full.control.set(latency=0)
    assert "no such file" in answer.message


# ---- status


def test_the_statistics_file_shows_what_status_shows(mount, full: Bucket):
    one: Mount = mount()
    (one.path / "other").read_bytes()
    said = json.loads(fusecache("status", one.path, "--json").stdout)
    shown = json.loads((one.path / ".fusecache" / "stats.json").read_text())
    assert said.keys() == shown.keys()
    assert shown["requests"]["gets"] == gets(full)
    assert (
        shown["cache"]["bytes_by_cause"]["demand"] + shown["cache"]["bytes_by_cause"]["readahead"] == 100_000
    )
    assert shown["cache"]["wait_seconds"]["network"] > 0
    assert shown["request_times"]["get"]["p99_seconds"] >= shown["request_times"]["get"]["p50_seconds"] > 0
    assert shown["kernel"].keys() == {"applied", "refused"}
    assert shown["options"]["fuse_library"] in ("own", "pyfuse3")  # never auto
    assert set(flat(shown)) == set(FACTS)


def test_status_for_people_fits_a_terminal(mount, full: Bucket):
    one: Mount = mount()
    (one.path / "other").read_bytes()
    lines = fusecache("status", one.path).stdout.splitlines()
    assert len(lines) <= 16
    refused = ["problems"] if one.status()["kernel"]["refused"] else []
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        "OK",
        "only",
        "last",
        *refused,
        "mount",
        "daemon",
        "if",
        "log",
        "options",
        "cache",
        "since",
    ]


def test_a_large_file_on_a_slow_link_shows_its_pace_and_a_forced_unmount_waits_for_none_of_it(
    mount, bucket: Bucket, expect_log
):
    expect_log("stopped with pending uploads")
    expect_log("recovered files=")
    one: Mount = mount("--delete-delay", "1")
    content = pattern(70 * MIB, seed=3)
    bucket.control.set(upload_bandwidth=MIB // 4)  # minutes
    try:
        (one.path / "model").write_bytes(content)

        def moving() -> dict[str, Any] | None:
            said = one.status()
            is_seen = said["uploading"] and 0 < said["uploading"][0]["sent"] < 64 * MIB
            return said if is_seen and said["upload_bytes_per_second"] else None

        said = wait_until(moving, "bytes that move")
        assert not any(entry.status == 200 for entry in bucket.requests("UploadPart"))
        assert 0 < said["seconds_left"] < 600
        assert said["pending_bytes"] == 70 * MIB
        assert said["uploading"][0]["request_seconds"] > 0
        assert said["options"]["delete_delay"] == 1
        began = time.monotonic()
        done = fusecache("unmount", "--force", one.path)
        assert "still shutting down" not in done.stderr
        assert time.monotonic() < began + 30
        wait_until(lambda: not one.is_alive(), "the daemon's end")
    finally:
        bucket.control.set(upload_bandwidth=None)
    expect_log.seen += one.new_alarms()
    one.start()
    one.sync()
    assert bucket.get("model") == content
    assert bucket.uploads() == []


def test_df_shows_what_is_cached_as_used_and_as_available(mount, full: Bucket):
    one: Mount = mount("--cache-size", "1GiB")
    fusecache("warm", "--wait", one.path)
    facts = os.statvfs(one.path)
    used = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
    assert facts.f_blocks * facts.f_frsize == 1 << 30
    assert sum(FILES.values()) <= used <= sum(FILES.values()) + 4 * 4096
    assert 0 < facts.f_bavail * facts.f_frsize <= (1 << 30) * 70 // 100


def test_a_path_that_is_no_utf8_is_refused_and_ends_nothing(mount, full: Bucket):
    seen: Mount = mount()
    for command in ("warm", "evict", "check", "status"):
        words = [FUSECACHE, command, os.fsencode(seen.path) + b"/caf\xe9"]
        more = ["--wait"] if command == "warm" else []
        done = subprocess.run([*words, *more], capture_output=True, check=False)
        assert done.returncode == (2 if command == "check" else 1), (command, done)
        assert b"no such file" in done.stderr, (command, done.stderr)
    assert has_right_bytes(seen)
