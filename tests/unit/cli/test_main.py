"""The command line against a daemon's control socket: a real unix socket, a scripted daemon, no mount."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusecache import __version__
from fusecache.cli.main import main, make_parser
from fusecache.cli.recover import listing_text
from fusecache.cli.status import status_view
from fusecache.config.options import FIELDS, HELP_GROUPS
from fusecache.model.errors import MountError
from fusecache.model.format_text import seconds_text, size_text
from fusecache.mount import control_client, launch
from fusecache.mount.control_client import ServerProgress, ask, find_mount
from fusecache.mount.mount_table import root_of
from fusecache.mount.progress import ProgressView, found_text, left_texts
from tests.support import ROOT

Row = dict[str, Any]


class FakeDaemon:
    """Serves one directory's control socket: answers each request with scripted rows and remembers it."""

    def __init__(self, root: Path, rows: list[Row | bytes]) -> None:
        self.requests: list[Row] = []
        self._rows = rows
        path = root.parent / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        (root / ".fusecache").mkdir()
        (root / ".fusecache" / "socket").write_text(f"{path}\n")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # stopped
                return
            with connection, connection.makefile("rwb") as lines:
                line = lines.readline()
                if not line:  # only looked who we are
                    continue
                self.requests.append(json.loads(line))
                for row in self._rows:
                    lines.write(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a pretended mount, with a file in it."""
    root = tmp_path / "mount"
    (root / "run" / "step-1").mkdir(parents=True)
    (root / "run" / "step-1" / "model.pt").write_bytes(b"x")
    return root


@pytest.fixture
def daemon(root: Path) -> Iterator[Callable[..., FakeDaemon]]:
    """Start a daemon that answers with these rows."""
    started: list[FakeDaemon] = []

    def start(*rows: Row | bytes) -> FakeDaemon:
        started.append(FakeDaemon(root, list(rows)))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def done(result: str, message: str = "", **more: Any) -> Row:
    return {
        "pending_files": 0,
        "pending_bytes": 0,
        "uploading": [],
        "done": True,
        "result": result,
        "message": message,
    } | more


# ---- finding the mount


def test_the_mount_of_a_path_is_the_directory_above_it_with_a_control_file(
    root: Path, daemon: Callable[..., FakeDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon()
    mount, inner = find_mount(root / "run" / "step-1" / "not-yet", {})
    assert (mount.root, inner) == (root, "run/step-1/not-yet")
    assert find_mount(root, {})[1] == ""
    monkeypatch.chdir(root / "run")
    assert find_mount("step-1", {})[1] == "run/step-1"
    (root.parent / "link").symlink_to(root / "run")
    assert find_mount(root.parent / "link", {})[1] == "run"


def test_a_path_outside_every_mount_is_an_error_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"fusecache: error: {tmp_path} is not in a fusecache mount: ")


def test_in_a_container_the_variable_names_the_socket(root: Path, daemon: Callable[..., FakeDaemon]) -> None:
    daemon(done("ok"))
    control = root / ".fusecache" / "socket"
    reachable = control.read_text().strip()
    control.write_text("/host/only/socket")
    mount, _ = find_mount(root, {"FUSECACHE_SOCKET": reachable})
    assert ask(mount, "status").result == "ok"


# ---- sync


@pytest.mark.parametrize(
    ("result", "status"),
    [("durable", 0), ("ok", 0), ("timeout", 1), ("error", 2), ("conflict", 3), ("new word", 2)],
)
def test_sync_says_how_it_ended_by_its_exit_status(
    root: Path,
    daemon: Callable[..., FakeDaemon],
    capsys: pytest.CaptureFixture[str],
    result: str,
    status: int,
) -> None:
    served = daemon(
        {"pending_files": 2, "pending_bytes": 3 << 20, "uploading": ["run/a"]},
        done(result, "because of this"),
    )
    assert main(["sync", str(root / "run"), "--timeout", "2.5"]) == status
    assert served.requests == [{"command": "sync", "path": "run", "timeout_seconds": 2.5}]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fusecache: uploading: 2 changes, 3.0 MiB left"
    failed = f"fusecache: error: {root / 'run'}: {result}: because of this"
    assert lines[1:] == ["fusecache: because of this" if status == 0 else failed]


def test_sync_without_a_daemon_is_an_error_not_a_timeout(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon()
    (root / ".fusecache" / "socket").write_text(str(root / "nobody"))
    assert main(["sync", str(root)]) == 2
    assert "cannot reach the daemon" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "closed the connection"),
        ([{"pending_files": 1}], "closed the connection"),
        ([b"garbage\n"], "not JSON"),
        ([b"[1]\n"], "not a JSON object"),
    ],
)
def test_a_daemon_that_breaks_the_protocol_is_an_error(
    root: Path,
    daemon: Callable[..., FakeDaemon],
    capsys: pytest.CaptureFixture[str],
    rows: list[Row],
    words: str,
) -> None:
    daemon(*rows)
    assert main(["sync", str(root)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fusecache: error: ")
    assert words in error


def test_a_silent_daemon_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "SILENCE_SECONDS", 0.05)
    path = root.parent / "silent"
    (root / ".fusecache").mkdir()
    (root / ".fusecache" / "socket").write_text(str(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()  # accepted by the kernel, answered by nobody
        with pytest.raises(MountError, match="no answer from the daemon for"):
            ask(find_mount(root, {})[0], "sync")


# ---- status

CACHE = {
    "hits": 990,
    "misses": 10,
    "bytes_by_cause": {"demand": 1 << 20, "hint": 0, "readahead": 2 << 20},
    "bytes_from": {"memory": 56 << 20, "disk": 0, "bucket": 4 << 20},
    "wait_seconds": {"network": 1.5, "queue": 0.0, "disk": 2.25, "metadata": 0.012},
    "evicted_bytes": 0,
    "used_bytes": 3 << 30,
    "staging_bytes": 0,
    "limit_bytes": 4 << 30,
}
COSTS: Row = {
    "prices": "R2's prices",
    "dollars": 0.000013,
    "class_a_per_day": 172_800,
    "class_b_per_day": 1_000,
    "dollars_per_day": 0.77796,
    "dollars_per_day_by_kind": {"lists": 0.7, "writes": 0.0776, "heads": 0.0, "gets": 0.00036},
    "rate_seconds": 300.4,
}
RATES: Row = {
    "seconds": 60.2,
    "memory_bytes_per_second": 8.0 * (1 << 20),
    "disk_bytes_per_second": 0.0,
    "bucket_bytes_per_second": 4.0 * (1 << 20),
    "fetched_bytes_per_second": 5.0 * (1 << 20),
    "sent_bytes_per_second": 512.0,
    "requests_per_second": 0.2,
}
STATUS: Row = {
    "version": "1.0",
    "pid": 7,
    "source": "s3://bucket/data/",
    "mountpoint": "/mnt",
    "options": {"read_only": True, "fuse_library": "own"},
    "uptime_seconds": 60.0,
    "pending_files": 0,
    "cache": CACHE,
    "requests": {"gets": 12, "lists": 2, "heads": 0},
    "costs": COSTS,
    "call_times": {"read": {"p50_seconds": 0.00012, "p99_seconds": 0.041}},
    "request_times": {"get": {"p50_seconds": 0.040, "p99_seconds": 0.081}},
    "warming": [],
    "rates": RATES,
}


def test_status_for_programs_is_the_daemon_s_json(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    served = daemon(done("ok", status=STATUS))
    assert main(["status", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS
    assert served.requests == [{"command": "status", "path": "", "timeout_seconds": None}]


def test_status_for_people_is_short_and_in_groups() -> None:
    assert status_view(STATUS).splitlines() == [
        "only here    nothing: the bucket has every closed file",
        "last 60 s    read 12.0 MiB/s, from memory 8.0 MiB/s, from bucket 4.0 MiB/s",
        "             downloads 5.0 MiB/s, uploads 512 B/s, 12 requests a minute",
        "a day        about $0.78 (LIST 0.70, writes 0.08) at the rate of the last 5 min: class A 172800, "
        "class B 1000; R2's prices",
        "mount        s3://bucket/data/ at /mnt, read-only",
        "daemon       fusecache 1.0, pid 7, up for 1 min, FUSE library own",
        "cache        3.0 GiB of 4.0 GiB (75%)",
        "since start  1 000 reads, 60.0 MiB; hits 99.0%; p50 120 µs, p99 41 ms",
        "             fetched on demand 1.0 MiB, read-ahead 2.0 MiB",
        "             waited for disk 2.2 s, network 1.5 s, metadata 12 ms",
        "             GET 12, LIST 2: about $0.0000; R2's prices",
        "             time of a GET: p50 40 ms, p99 81 ms",
    ]


def test_a_store_whose_prices_are_unknown_has_no_dollars() -> None:
    kinds = dict.fromkeys(COSTS["dollars_per_day_by_kind"])
    unknown = {"prices": "", "dollars": None, "dollars_per_day": None, "dollars_per_day_by_kind": kinds}
    shown = status_view({**STATUS, "costs": {**COSTS, **unknown}})
    assert "$" not in shown
    assert "a day        at the rate of the last 5 min: class A 172800, class B 1000\n" in shown


def test_status_shows_no_daily_cost_before_a_minute() -> None:
    assert "\na day " in status_view(STATUS)
    assert "\na day " not in status_view({**STATUS, "costs": {**COSTS, "rate_seconds": 59.0}})


def test_status_for_people_names_uploads_warm_ups_and_problems_only_if_there_are_any() -> None:
    job = {"paths": ["data"], "state": "running", "files_total": 10, "files_done": 3, "files_failed": 1}
    shown = status_view(
        {
            **STATUS,
            "pending_files": 2,
            "pending_bytes": 5 << 20,
            "oldest_pending_seconds": 90.0,
            "uploading": [
                {
                    "path": "run/a",
                    "bytes": 4 << 20,
                    "sent": 1 << 20,
                    "under_way": 3 << 20,
                    "request_seconds": 3.2,
                }
            ],
            "warming": [
                {**job, "bytes_total": 8 << 20, "bytes_done": 2 << 20, "failures": [], "message": ""}
            ],
            "waiting_for": "no network",
            "waiting": [{"path": "run/a", "cause": "no network", "remedy": "wait"}],
            "upload_bytes_per_second": 1 << 20,
            "seconds_left": 4.0,
            "dirty_files": 1,
            "dirty_bytes": 1 << 20,
            "exposed_bytes": 6 << 20,
            "conflicts": [{"path": "run/b", "kept_as": "run/b.conflict-host-3"}],
            "orphans": 1,
            "request_errors": 1,
            "cache": {**CACHE, "stalls": 2},
            "kernel": {"applied": [], "refused": ["read_ahead_kb=1024 (Permission denied)"]},
        }
    ).splitlines()
    assert [
        (line[:13].strip(), line[13:]) for line in (*shown[:6], *shown[9:13], shown[16], *shown[-2:])
    ] == [
        ("only here", "6.0 MiB would be lost with this node"),
        ("", "2 changes, 5.0 MiB not in the bucket yet, the oldest for 1 min"),
        ("", "1 file, 1.0 MiB being written"),
        ("", "of these 1 file, 3.0 MiB in flight, the oldest request for 3.2 s"),
        ("", "1.0 MiB/s, about 4.0 s left"),
        ("", "run/a: 1.0 MiB of 4.0 MiB sent, 3.0 MiB in flight"),
        ("to do", "run/b: another client changed it first; our version is run/b.conflict-host-3"),
        ("", "1 unfinished file in quarantine: see `fusecache recover`"),
        ("problems", "run/a waits: no network: wait"),
        (
            "",
            "the kernel refused read_ahead_kb=1024 (Permission denied): large reads are slower; the log has the "
            "command for root",
        ),
        ("warm-up", "data: running, 3 of 10 files, 2.0 MiB of 8.0 MiB, 1 failed"),
        ("", "1 request failed"),
        ("", "2 read requests stalled and repeated"),
    ]


@pytest.mark.parametrize(
    ("source", "renewal"),
    [
        (
            "/home/u/.aws/credentials",
            "renew the keys in /home/u/.aws/credentials; the daemon reads them again every 30 s",
        ),
        ("", "renew the keys where the daemon reads them; the daemon reads them again every 30 s"),
        (
            "environment",
            "`fusecache unmount --force`, then mount with new keys, which uploads the pending files; with "
            "`credentials_file` keys are renewed without that",
        ),
    ],
)
def test_refused_keys_are_named_as_the_cause_and_where_to_renew_them(source: str, renewal: str) -> None:
    status = {**STATUS, "unanswered_seconds": 130.0, "refused_seconds": 120.0, "keys_from": source}
    problem = next(line for line in status_view(status).splitlines() if line.startswith("to do"))
    assert "the bucket has refused the keys for 2 min" in problem
    assert "has not answered" not in problem
    assert problem.endswith(renewal)


def test_options_that_are_no_defaults_are_one_line() -> None:
    changed = {"fsync": "remote", "delete_delay": 600.0, "local_only": ["tmp/", "*.bak"]}
    own = {"fuse_library": "own", "umask": "022", "cache_size": 1 << 30}
    lines = status_view({**STATUS, "options": {**own, **changed}}).splitlines()
    assert "options      fsync=remote, delete_delay=600.0, local_only=[tmp/ *.bak]" in lines
    assert not any(line.startswith("options") for line in status_view({**STATUS, "options": own}))


def test_what_is_kept_aside_would_be_lost_too_and_is_not_said_to_wait_for_its_upload() -> None:
    lines = status_view({**STATUS, "exposed_bytes": 0, "aside_bytes": 4096}).splitlines()
    assert lines[:2] == [
        "only here    4.0 KiB would be lost with this node",
        "             4.0 KiB quarantined: see `fusecache recover`",
    ]


def test_closes_that_wait_for_room_are_told_with_who_why_and_what_helps() -> None:
    named = [{"path": "run/a", "process": 12, "seconds": 90.0}, {"path": "b", "process": 13, "seconds": 1.0}]
    closes = {"files": 2, "named": named, "high_water_bytes": 42 << 30}
    status = {**STATUS, "cache": {**CACHE, "staging_bytes": 45 << 30}, "closes_waiting": closes}
    (line,) = [line for line in status_view(status).splitlines() if line.startswith("to do")]
    assert line == (
        "to do        2 closes wait for space in the cache, the longest for 1 min (run/a, process 12): pending files "
        "take 45.0 GiB, and above 42.0 GiB close waits for uploads; raise --cache-size to raise this limit"
    )
    assert "to do" not in status_view({**status, "closes_waiting": {**closes, "files": 0, "named": []}})


def test_a_listing_never_offers_to_remove_what_waits_for_its_upload() -> None:
    def footer(*kinds: str) -> list[str]:
        rows = [
            {
                "id": number,
                "kind": kind,
                "bytes": 1,
                "time": 0,
                "path": "a",
                "message": "",
                "local_path": "/p",
            }
            for number, kind in enumerate(kinds)
        ]
        listing = {"entries": rows, "count": len(rows), "bytes": len(rows)}
        things = listing_text(listing, is_mounted="waiting" not in kinds)
        return things.splitlines()[2 * len(rows) + 1 :]

    waits = "2 files wait for upload: mount the bucket again with this cache directory to upload them; to get a copy: "
    assert footer("waiting", "waiting") == [waits + "--restore ID… --to PATH"]
    assert footer("orphan") == [
        "restore: --restore ID… [--to PATH]; delete and free disk space: --delete ID… --yes"
    ]
    assert "(not files that wait for upload)" in footer("waiting", "orphan")[1]


def test_what_is_not_there_is_named_once(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(done("error", "run/none: no such file or directory"))
    path = root / "run" / "none"
    assert main(["status", str(path)]) == 1
    assert capsys.readouterr().err == f"fusecache: error: {path}: no such file or directory\n"
    assert main(["sync", str(path)]) == 2
    assert capsys.readouterr().err == f"fusecache: error: {path}: error: no such file or directory\n"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("2h", 7200), ("0.5", 0.5)])
def test_a_time_out_is_read_as_people_write_it(
    root: Path, daemon: Callable[..., FakeDaemon], text: str, seconds: float
) -> None:
    served = daemon(done("durable"))
    assert main(["sync", str(root), "--timeout", text]) == 0
    assert served.requests[-1]["timeout_seconds"] == seconds


def test_a_time_out_that_is_none_is_refused_with_what_is_allowed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["sync", str(root), "--timeout", "soon"])
    assert "'soon': allowed is 0 or more, in seconds or with a unit" in capsys.readouterr().err


def test_a_status_that_failed_is_an_error(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(done("error", "no such path"))
    assert main(["status", str(root / "x")]) == 1
    assert capsys.readouterr().err == f"fusecache: error: {root / 'x'}: no such path\n"


def test_sizes_are_written_for_people() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 5 << 30, 2 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "2048.0 TiB",
    ]


def test_durations_are_written_for_people() -> None:
    assert [seconds_text(each) for each in (0, 0.00012, 0.041, 3.21, 300, 7500, 180_000)] == [
        "0 µs",
        "120 µs",
        "41 ms",
        "3.2 s",
        "5 min",
        "2 h 5 min",
        "2 d 2 h",
    ]


# ---- the disk cache

JOB: Row = {
    "paths": ["run"],
    "state": "running",
    "files_total": 3,
    "files_done": 1,
    "files_failed": 0,
    "bytes_total": 3 << 20,
    "bytes_done": 1 << 20,
    "failures": [],
    "message": "",
}


def test_a_warm_up_shows_its_progress_and_how_it_ended(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    served = daemon({"warm": JOB}, done("ok", warm={**JOB, "state": "done", "files_done": 3}))
    assert main(["warm", "--wait", str(root / "run"), str(root / "run" / "step-1")]) == 0
    assert served.requests == [{"command": "warm", "paths": ["run", "run/step-1"], "wait": True}]
    said = capsys.readouterr()
    assert said.err == "fusecache: warming: 1 of 3 files, 1.0 MiB of 3.0 MiB\n"
    assert said.out == "3 files, 3.0 MiB: all cached\n"


def test_a_warm_up_that_failed_names_the_files_and_counts_the_rest(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(done("error", warm={**JOB, "state": "failed", "files_failed": 3, "failures": ["run/a: gone"]}))
    assert main(["warm", "--wait", str(root / "run")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["fusecache: error: run/a: gone", "fusecache: error: and 2 other files"]
    assert lines[2].startswith("fusecache: error: not everything is cached: 1 of 3 files")


def test_evict_says_what_was_freed_and_what_stayed(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(done("ok", evict={"freed_bytes": 5 << 20, "left_bytes": 1 << 20}))
    assert main(["evict", str(root)]) == 0
    assert capsys.readouterr().out == "freed 5.0 MiB; 1.0 MiB in use, not evicted\n"


CHECK: Row = {
    "blocks": 7,
    "bytes": 7 << 20,
    "damaged_files": 0,
    "damaged_bytes": 0,
    "damaged": [],
    "keys": 9,
    "unusable_keys": 0,
    "unusable": [],
    "unfollowed_links": 0,
    "unfollowed": [],
}


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ({}, 0, "7 cached blocks, 7.0 MiB read: 0 damaged files; 9 keys listed: 0 not visible in the mount"),
        ({"damaged_files": 2, "damaged": ["run/a"]}, 1, "and 1 other file"),
        ({"unusable_keys": 1, "unusable": [{"key": "a//b", "why": "so"}]}, 1, "the key 'a//b': so"),
        ({"unfollowed_links": 2, "unfollowed": [{"path": "a", "target": "/x"}]}, 1, "and 1 other symlink"),
    ],
)
def test_check_ends_with_1_if_it_found_something(
    root: Path,
    daemon: Callable[..., FakeDaemon],
    capsys: pytest.CaptureFixture[str],
    found: Row,
    status: int,
    words: str,
) -> None:
    daemon(done("ok", check={**CHECK, **found}, status={"cache": {"used_bytes": 8 << 20}}))
    assert main(["check", str(root)]) == status
    assert words in capsys.readouterr().out
    assert main(["check", str(root), "--json"]) == status
    assert json.loads(capsys.readouterr().out) == {**CHECK, **found}


@pytest.mark.parametrize(("command", "status"), [("warm", 1), ("evict", 1), ("check", 2)])
def test_what_the_daemon_refuses_is_an_error(
    root: Path,
    daemon: Callable[..., FakeDaemon],
    capsys: pytest.CaptureFixture[str],
    command: str,
    status: int,
) -> None:
    daemon(done("error", "no such file"))
    assert main([command, str(root / "x")]) == status
    assert capsys.readouterr().err == f"fusecache: error: {root}: no such file\n"


def test_more_paths_than_the_daemon_takes_are_refused_before_they_are_sent(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    served = daemon(done("ok"))
    deep = root.joinpath(*["x" * 200] * 15)
    assert main(["evict", *(str(deep / str(index)) for index in range(400))]) == 1
    assert "name their directory" in capsys.readouterr().err
    assert served.requests == []


# ---- progress


def test_a_terminal_gets_a_bar_that_grows_with_what_is_added() -> None:
    leader, follower = os.openpty()
    with open(leader, "rb", buffering=0) as screen:
        with open(follower, "w") as terminal, ProgressView(terminal, verb="uploading") as view:
            view.show_upload(ServerProgress(3, 100 << 20))
            view.show_upload(ServerProgress(2, 50 << 20))
        shown = ""
        # A terminal hands out what it has piece by piece, and says EIO once its other side is closed.
        with contextlib.suppress(OSError):
            while piece := screen.read(65536):
                shown += piece.decode()
    assert "uploading" in shown
    assert "50.0M/100M" in shown
    assert "2 changes left" in shown


def test_nothing_is_said_of_an_upload_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView(sys.stderr, verb="uploading") as view:
        view.show_upload(ServerProgress(0, 0))
        view.show_upload(ServerProgress(2, 0, deferred_files=2))
        assert capsys.readouterr().err == ""
        view.show_upload(ServerProgress(0, 0, waiting_for="503"))
    assert capsys.readouterr().err == "fusecache: uploading: nothing left; waiting: 503\n"


def test_a_log_gets_no_line_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView(sys.stderr, verb="uploading") as view:
        for _ in range(3):
            view.show_upload(ServerProgress(1, 10))
    assert capsys.readouterr().err == "fusecache: uploading: 1 change, 10 B left\n"


def test_progress_is_of_what_was_not_sent_yet_and_says_how_long_and_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProgressView(sys.stderr, verb="uploading") as view:
        view.show_upload(ServerProgress(1, 10 << 20, left_bytes=5 << 20, seconds_left=90.0))
    with ProgressView(sys.stderr, verb="uploading") as view:
        view.show_upload(ServerProgress(1, 10 << 20, left_bytes=0, waiting_for="no network"))
    assert capsys.readouterr().err.splitlines() == [
        "fusecache: uploading: 1 change, 10.0 MiB left, about 1 min",
        "fusecache: uploading: 1 change, 10.0 MiB left; waiting: no network",
    ]


# ---- recover

ORPHAN: Row = {
    "id": 7,
    "kind": "orphan",
    "path": "run/model",
    "bytes": 3 << 20,
    "time": 0,
    "reason": "killed",
    "message": "its writer was killed",
    "local_path": "/cache/orphans/7",
}
CONFLICT: Row = {
    "id": 9,
    "kind": "conflict",
    "path": "run/latest",
    "bytes": 4,
    "time": 0,
    "reason": "",
    "message": "412",
    "local_path": "",
    "kept_as": "run/latest.conflict-a-9",
    "settled": False,
}


def test_what_was_left_behind_is_listed_with_what_can_be_done(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"entries": [ORPHAN, CONFLICT], "count": 1200, "bytes": 3 << 20}
    served = daemon(done("ok", recover=found))
    assert main(["recover", str(root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "     7  orphan      3.0 MiB  time unknown  run/model",
        "        its writer was killed; /cache/orphans/7",
        "     9  conflict        4 B  time unknown  run/latest",
        "        another client changed it first; our version is run/latest.conflict-a-9",
        "and 1 198 older files",
        "1 200 files, 3.0 MiB on this disk",
        "restore: --restore ID… [--to PATH]; delete and free disk space: --delete ID… --yes",
        "conflict: to rename our version: --restore ID --to PATH, or mv it over the original name; "
        "to delete it and keep the other client's: --delete ID… --yes",
    ]
    assert served.requests == [{"command": "recover"}]
    assert main(["recover", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_a_conflict_is_offered_what_can_be_done_about_it_and_said_to_free_nothing_here(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    given_up = {**CONFLICT, "id": 10, "kept_as": ""}
    found = {"entries": [CONFLICT, given_up], "count": 2, "bytes": 0}
    daemon(done("ok", recover=found, freed_bytes=0))
    assert main(["recover", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4] == "2 files"
    assert [line.split(":")[0] for line in lines[5:]] == ["conflict", "conflict without a copy"]
    assert main(["recover", str(root), "--delete", "9", "10"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "9: would delete run/latest.conflict-a-9, 4 B, permanently",
        "10: would remove run/latest from the list",
    ]
    assert main(["recover", str(root), "--delete", "9", "10", "--yes"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "9: our version run/latest.conflict-a-9, 4 B, is deleted; the other client's version stays",
        "10: removed from the list",
    ]
    assert listing_text(found, is_mounted=False).splitlines()[5:] == [
        "conflict: mount the bucket again to resolve it"
    ]


def test_a_place_to_come_back_to_that_is_not_there_says_from_where_it_is_looked_for(
    root: Path,
    daemon: Callable[..., FakeDaemon],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    here = {**ORPHAN, "local_path": str(tmp_path / "bytes")}
    Path(here["local_path"]).write_bytes(b"x")
    daemon(done("ok", recover={"entries": [here], "count": 1, "bytes": 0}))
    monkeypatch.chdir(tmp_path)
    assert main(["recover", str(root), "--restore", "7", "--to", "checkpoints/x"]) == 1
    said = capsys.readouterr().err
    assert f"no directory {tmp_path / 'checkpoints'}" in said
    assert "begins with the mountpoint" in said


def test_nothing_is_deleted_without_a_second_word(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    served = daemon(done("ok", recover={"entries": [ORPHAN], "count": 1, "bytes": 3 << 20}, freed_bytes=5))
    assert main(["recover", str(root), "--delete", "7"]) == 1
    said = capsys.readouterr()
    assert said.out == "7: would delete run/model, 3.0 MiB, permanently\n"
    assert "--yes" in said.err
    assert [request["command"] for request in served.requests] == ["recover"]
    assert main(["recover", str(root), "--delete", "7", "--yes"]) == 0
    assert served.requests[-1] == {"command": "delete", "id": 7}
    assert main(["recover", str(root), "--delete", "8"]) == 1
    assert "8: no such entry" in capsys.readouterr().err


def test_what_comes_back_has_its_path_inside_the_mount(
    root: Path,
    daemon: Callable[..., FakeDaemon],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = daemon(done("ok", recover={"entries": [ORPHAN], "count": 1, "bytes": 0}, path="run/model.x"))
    monkeypatch.chdir(root / "run")
    for flags, path in (
        ([], ""),
        (["--to", "new"], "run/new"),
        (["--to", "step-1"], "run/step-1/model"),
        (["--to", str(root / "top")], "top"),
    ):
        assert main(["recover", "--restore", "7", *flags]) == 0
        assert served.requests[-1] == {"command": "bring-back", "id": 7, "paths": [path]}
        assert capsys.readouterr().out == f"7: {root / 'run' / 'model.x'}\n"
    assert main(["recover", str(root), "--restore", "7", "9", "--to", "new"]) == 1
    assert "directory" in capsys.readouterr().err


def test_several_things_are_named_with_blanks_commas_or_all(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    things = [{**ORPHAN, "id": number} for number in (3, 4, 7)] + [CONFLICT]
    served = daemon(
        done("ok", recover={"entries": things, "count": 4, "bytes": 0}, freed_bytes=5, path="run/model.x")
    )
    for words, numbers in (
        (["3", "4"], [3, 4]),
        (["3,4"], [3, 4]),
        (["3,", "4,3"], [3, 4]),
        (["7", "--delete", "3"], [7, 3]),
        (["all"], [3, 4, 7, 9]),
    ):
        served.requests.clear()
        assert main(["recover", str(root), "--yes", "--delete", *words]) == 0
        assert [each["id"] for each in served.requests if each["command"] == "delete"] == numbers
    assert main(["recover", str(root), "--delete", "all"]) == 1
    assert "repeat the command with --yes to delete" in capsys.readouterr().err
    served.requests.clear()
    assert main(["recover", str(root), "--restore", "all"]) == 0
    assert [each["id"] for each in served.requests if each["command"] == "bring-back"] == [3, 4, 7]
    capsys.readouterr()
    for word in ("x", "3-4", ","):
        with pytest.raises(SystemExit):
            main(["recover", str(root), "--delete", word])
        assert "allowed are numbers from the list, like 3 4 or 3,4, or all" in capsys.readouterr().err


def test_all_says_what_it_did_not_reach(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(done("ok", recover={"entries": [ORPHAN], "count": 3, "bytes": 0}, freed_bytes=5))
    assert main(["recover", str(root), "--delete", "all", "--yes"]) == 1
    said = capsys.readouterr()
    assert said.out == "7: deleted, 5 B freed\n"
    assert "not listed and still there: 2 older files" in said.err


def test_all_of_an_empty_list_is_nothing(
    root: Path, daemon: Callable[..., FakeDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(done("ok", recover={"entries": [], "count": 0, "bytes": 0}))
    assert main(["recover", str(root), "--delete", "all"]) == 0
    assert capsys.readouterr().out == "all: no entry on the list qualifies\n"


# ---- unmount


def test_what_a_start_found_of_the_last_run_is_one_line() -> None:
    point = Path("/mnt/a b")
    assert found_text(point, changes=0, orphans=0, suspects=0) == ""
    assert found_text(point, changes=28, orphans=7, suspects=0) == (
        "28 changes of the last run are pending and will be uploaded; "
        "7 unfinished files are in quarantine: fusecache recover '/mnt/a b'"
    )
    assert found_text(Path("/data"), changes=1, orphans=0, suspects=1) == (
        "1 change of the last run is pending and will be uploaded; "
        "1 suspect file is in quarantine: fusecache recover /data"
    )
    assert found_text(Path("/data"), changes=0, orphans=1, suspects=1) == (
        "1 unfinished file and 1 suspect file are in quarantine: fusecache recover /data"
    )


def test_what_the_bucket_never_gets_by_itself_is_said_when_the_mount_ends() -> None:
    status = {"options": {"cache_dir": "/nvme/c"}, "orphans": 0, "suspects": 0, "local_only_files": 0}
    assert left_texts(status) == []
    status |= {"orphans": 3, "aside_bytes": 3 << 20, "local_only_files": 2, "local_only_bytes": 5}
    assert left_texts(status) == [
        "3 unfinished files are in quarantine, 3.0 MiB: fusecache recover /nvme/c",
        "2 local-only files, 5 B, exist only in /nvme/c: the next mount with this cache directory shows them again",
    ]


def test_what_is_not_mounted_cannot_be_unmounted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unmount", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"fusecache: error: {tmp_path} is not a mount: nothing to unmount\n"
    assert main(["unmount", "--if-dead", str(tmp_path)]) == 0
    assert main(["unmount", str(tmp_path / "none")]) == 1
    assert "none is missing: nothing to unmount" in capsys.readouterr().err


def test_clearing_the_dead_is_done_where_there_is_no_mountpoint_yet(tmp_path: Path) -> None:
    config = tmp_path / "data.toml"
    config.write_text(f'source = "s3://bucket"\nmountpoint = "{tmp_path / "not-yet"}"\n')
    assert main(["unmount", "--if-dead", "--config", str(config)]) == 0


def test_unmount_needs_a_mountpoint_or_the_file_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unmount"]) == 1
    assert "no mountpoint given: name it, or the --config file" in capsys.readouterr().err


def test_another_file_system_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unmount", "/proc"]) == 1
    assert "not of fusecache" in capsys.readouterr().err


def test_a_directory_with_a_control_file_that_is_no_mount_is_none(
    root: Path, daemon: Callable[..., FakeDaemon]
) -> None:
    daemon()
    assert launch.mount_state(root) is launch.MountState.NONE


def test_a_mount_is_found_in_the_table_whatever_its_name(
    root: Path, daemon: Callable[..., FakeDaemon], tmp_path: Path
) -> None:
    daemon()
    table = tmp_path / "mountinfo"

    def state(kind: str, path: Path) -> launch.MountState:
        name = str(path).replace(" ", "\\040")
        line = f"36 35 98:0 / {name} rw,noatime shared:1 - {kind} fusecache rw\n"
        table.write_text(f"1 1 0:1 / / rw - ext4 /dev/x rw\n{line}")
        return launch.mount_state(path, mount_table=table)

    assert state("fuse", root) is launch.MountState.LIVE
    assert state("fuse.fusecache", root) is launch.MountState.LIVE
    assert state("ext4", root) is launch.MountState.FOREIGN
    odd = tmp_path / "ü with space"
    odd.mkdir()
    assert state("fuse.sshfs", odd) is launch.MountState.FOREIGN


def test_the_way_to_a_mount_takes_no_step_into_it(tmp_path: Path) -> None:
    mountpoint = tmp_path / "ü with space"
    mountpoint.mkdir()
    (tmp_path / "link").symlink_to(mountpoint / "in")
    (tmp_path / "relative").symlink_to("./link/deeper")
    (tmp_path / "round").symlink_to("round")
    table = tmp_path / "mountinfo"
    name = str(mountpoint).replace(" ", "\\040")
    table.write_text(f"36 35 98:0 / {name} rw - fuse.fusecache s3://b rw\n9 9 0:9 / /other rw - ext4 x rw\n")
    for inside in (mountpoint, mountpoint / "a" / "b", tmp_path / "link" / "x", tmp_path / "relative"):
        assert root_of(inside, table) == str(mountpoint)
    for outside in (tmp_path, tmp_path / "nothing" / "here", tmp_path / "round", Path("/other/x"), Path("/")):
        assert root_of(outside, table) is None


def test_draining_ends_well_only_if_the_daemon_says_so(root: Path, daemon: Callable[..., FakeDaemon]) -> None:
    seen: list[ServerProgress] = []
    daemon(
        {"pending_files": 5, "pending_bytes": 500}, done("timeout", "", pending_files=4, pending_bytes=400)
    )
    with pytest.raises(
        MountError, match=r"stays mounted: 4 changes, 400 B not in the bucket yet: timeout; .* --force"
    ):
        launch.drain(find_mount(root, {})[0], timeout_seconds=1.0, on_progress=seen.append)
    assert seen == [ServerProgress(5, 500)]


def test_what_is_pending_is_known_before_a_forced_unmount(
    root: Path, daemon: Callable[..., FakeDaemon]
) -> None:
    daemon(done("ok", pending_files=7, pending_bytes=70))
    assert ask(find_mount(root, {})[0], "status").progress == ServerProgress(7, 70)


# ---- starting in the background


@contextmanager
def child(text: str) -> Iterator[Callable[[int], list[str]]]:
    """A command that runs a few lines of Python with the pipe as `parent`."""
    program = (
        "import os, sys\nfrom fusecache.mount.launch import Parent\nparent = Parent(int(sys.argv[1]))\n"
        + text
    )
    yield lambda descriptor: [sys.executable, "-c", program, str(descriptor)]


def test_a_start_ends_when_the_child_is_ready_and_the_child_lives_on(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = (
        "print('hello', os.getsid(0) == os.getpid(), flush=True)\n"
        "parent.report('ready')\n"
        "parent.report('late')\n"
        f"open({str(fifo)!r}).read()\n"
    )
    with child(program) as command:
        launch.StartingDaemon(command, tmp_path / "new" / "log").wait()
    assert (tmp_path / "new" / "log").read_text() == "hello True\n"
    fifo.write_text("end")  # blocks until the child opens it: it is alive
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0


def test_what_a_ready_child_warns_of_is_handed_on(tmp_path: Path) -> None:
    with child("parent.report('ready the disk is small')") as command:
        assert launch.StartingDaemon(command, tmp_path / "log").wait() == "the disk is small"
    os.wait()


def test_a_child_s_error_is_told_in_its_words(tmp_path: Path) -> None:
    with (
        child("parent.report('error: the bucket\\nis gone')\nsys.exit(1)") as command,
        pytest.raises(MountError, match=r"^the bucket is gone$"),
    ):
        launch.StartingDaemon(command, tmp_path / "log").wait()


def test_a_child_that_dies_without_a_word_is_told_by_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("an older run\n")
    with child("print('last words', flush=True)\nos._exit(9)") as command, pytest.raises(MountError) as error:
        launch.StartingDaemon(command, log).wait()
    assert "status 9" in str(error.value)
    assert error.value.__notes__ == ["last words"]


def test_a_wrong_option_fails_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["mount", "s3://bucket", str(tmp_path), "--memory=lots", f"--cache-dir={tmp_path / 'cache'}"])
        == 1
    )
    assert capsys.readouterr().err.startswith("fusecache: error: --memory = 'lots': allowed is ")
    assert main(["mount", "s3://b", str(tmp_path / "none"), f"--cache-dir={tmp_path / 'cache'}"]) == 1
    assert "none does not exist; create it with `mkdir -p " in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("words", "status"),
    [(("uploads", "gs://b"), 1), (("clean", "az://b", "--older-than=1d"), 1), (("access", "gs://b"), 2)],
)
def test_commands_of_s3_refuse_other_stores(
    words: tuple[str, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == status
    assert f"{words[1]}: this command knows s3:// only" in capsys.readouterr().err


def test_a_foreground_start_that_fails_tells_its_parent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    status = main(["mount", "--foreground", "--ready-fd", str(writer), "no source", str(tmp_path)])
    with open(reader) as words:
        assert words.read().startswith("error: source = 'no source': allowed is s3://BUCKET")
    assert status == 1
    assert capsys.readouterr().err.startswith("fusecache: error: source = ")


# ---- usage


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"fusecache {__version__}\n"


def test_without_a_command_the_help_comes_as_for_a_wrong_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert "usage: fusecache" in said.err
    assert "mount a bucket as a directory" in said.err
    assert said.out == ""


def test_umount_is_another_word_for_unmount(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for word in ("umount", "unmount"):
        assert main([word, str(tmp_path)]) == 1
        said.append(capsys.readouterr().err)
    assert said == [f"fusecache: error: {tmp_path} is not a mount: nothing to unmount\n"] * 2


@pytest.mark.parametrize("words", [["frobnicate"], ["sync"], ["mount", "--no-such-flag"]])
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2


def test_every_command_s_help_says_what_its_exit_statuses_mean(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    (commands,) = (each.choices for each in make_parser()._actions if each.dest == "command")
    assert commands is not None
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said[command] = " ".join(capsys.readouterr().out.split())
        assert "Exit status: " in said[command]
    for words in ("1 not within --timeout", "2 an error", "3 a conflict", "a file or directory in a mount"):
        assert words in said["sync"]


def test_help_tells_every_option_and_hides_the_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mount", "--help"])
    text = capsys.readouterr().out
    assert "--cache-size" in text
    assert "80%" in text
    assert "--ready-fd" not in text
    places = [text.index(f"\n{title}:\n") for title in HELP_GROUPS]
    assert places == sorted(places)
    assert list(HELP_GROUPS) == [
        "bucket and keys",
        "cache",
        "writing",
        "sharing",
        "operating",
        "other nodes",
        "expert",
    ]
    examples = re.findall(r"^    (fusecache mount s3://.*)$", text, re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        assert make_parser().parse_args(example.split()[1:]).mountpoint


def test_each_option_is_in_one_group_of_the_help() -> None:
    assert sorted(name for names in HELP_GROUPS.values() for name in names) == sorted(FIELDS)


def test_the_command_line_starts_without_what_only_some_commands_need() -> None:
    program = "import sys, fusecache.cli.main; print({'boto3', 'tqdm', 'trio'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(("trap", "status"), [("", -signal.SIGINT), ("trap '' INT;", 0)])
def test_ctrl_c_while_the_program_is_being_loaded_ends_it_without_a_traceback(
    tmp_path: Path, trap: str, status: int
) -> None:
    """Not where it is ignored, as for a command that a shell runs in the background."""
    (tmp_path / "argparse.py").write_text(
        "import os, signal, sys\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.path.remove(os.environ['PYTHONPATH'])\n"
        "del sys.modules['argparse']\n"
        "from argparse import *\n"
    )
    ran = subprocess.run(
        ["sh", "-c", f"{trap} exec {sys.executable} -m fusecache --version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (status, "")
