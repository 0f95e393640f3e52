"""The text of `fusecache top`, from statuses."""

from typing import Any

from fusecache.cli.top import mount_lines, screen_text
from tests.unit.cli.test_main import CACHE, RATES
from tests.unit.cli.test_status_of_hints import JOB

MIB = 1 << 20
SOURCES = {"memory": 40 * MIB, "disk": 0, "bucket": 20 * MIB}
REQUESTS = {"puts": 2, "gets": 12, "deletes": 0, "aborts": 0}
STATUS: dict[str, Any] = {
    "pid": 7,
    "source": "s3://bucket/data",
    "verdict": "OK",
    "reasons": [],
    "uptime_seconds": 60.0,
    "cache": {**CACHE, "bytes_from": SOURCES},
    "reads_waiting": {"reads": 0, "seconds": 0.0},
    "received_bytes": 20 * MIB,
    "upload_bytes_per_second": 0,
    "requests": REQUESTS,
    "rates": RATES,
    "hints": {"jobs": [{**JOB, "ended_seconds": 0.0}]},
    "writing": [{"path": "next", "bytes": 2 * MIB}],
    "uploading": [{"path": "ckpt", "bytes": 4 * MIB, "sent": MIB}],
    "waiting": [{"path": "late", "cause": "503"}],
    "busy_files": [{"path": "shard", "read_bytes_per_second": 3 * MIB}],
}


def later(seconds: float, **more: Any) -> dict[str, Any]:
    cache = {**STATUS["cache"], "bytes_from": {**SOURCES, "disk": 20 * MIB}}
    requests = {**REQUESTS, "gets": 32}
    return {**STATUS, "uptime_seconds": 60.0 + seconds, "cache": cache, "requests": requests, **more}


def test_a_mount_has_its_verdict_rates_jobs_and_files() -> None:
    assert list(mount_lines("/mnt", STATUS, None, "")) == [
        "/mnt  s3://bucket/data  OK",
        "  read 12.0 MiB/s, from memory 8.0 MiB/s, from bucket 4.0 MiB/s",
        "  downloads 5.0 MiB/s, uploads 512 B/s, 12 requests a minute",
        "  cache 3.0 GiB of 4.0 GiB; only here: nothing",
        "  JOB      STEP  PER STEP  AHEAD              CACHED",
        "  llama-0  120   250 ms    40 steps, 3.0 MiB  75%",
        "  FILE   DOES        PACE",
        "  next   is written  2.0 MiB so far",
        "  ckpt   uploads     1.0 MiB of 4.0 MiB",
        "  late   waits       503",
        "  shard  is read     3.0 MiB/s",
    ]


def test_rates_are_those_between_two_views() -> None:
    lines = list(mount_lines("/mnt", later(10.0), STATUS, ""))
    assert lines[1:3] == [
        "  read 2.0 MiB/s, from disk 2.0 MiB/s",
        "  downloads 0 B/s, uploads 0 B/s, 2.0 requests/s",
    ]


def test_counts_of_another_daemon_or_no_time_are_not_compared() -> None:
    for newest in (later(0.0), later(10.0, pid=8)):
        assert "read 12.0 MiB/s" in list(mount_lines("/mnt", newest, STATUS, ""))[1]


def test_a_mount_without_an_answer_is_one_line() -> None:
    assert list(mount_lines("/mnt", None, None, "")) == ["/mnt  waiting for the daemon"]
    assert list(mount_lines("/mnt", None, None, "it has exited")) == ["/mnt  it has exited"]
    assert next(mount_lines("/mnt", STATUS, None, "no answer for 9 s")).endswith("  no answer for 9 s")


def test_a_screen_is_never_larger_than_the_terminal() -> None:
    shown = screen_text([f"line {number} \x1b[31m" for number in range(10)], 8, 4)
    lines = shown.removeprefix("\x1b[H").removesuffix("\x1b[K\x1b[J").split("\x1b[K\r\n")
    assert lines == ["line 0 \\", "line 1 \\", "line 2 \\", "… 7 more"]
