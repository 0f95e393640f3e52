"""The words of `status` and `sync`: one path apart from the mount, names apart from files, waits apart from hangs."""

from typing import Any

import pytest

from fusecache.cli.status import status_view
from fusecache.model.errors import AccessDenied
from fusecache.model.format_text import remedy
from fusecache.model.verdict import judge
from fusecache.mount.control_client import ServerProgress
from fusecache.mount.progress import awaited_text, pending_text

MIB = 1 << 20
MOUNT: dict[str, Any] = {
    "version": "1.0",
    "pid": 7,
    "source": "s3://bucket/data",
    "mountpoint": "/mnt",
    "uptime_seconds": 60.0,
    "pending_files": 9,
    "pending_bytes": 90 * MIB,
    "oldest_pending_seconds": 300.0,
    "uploading": [{"path": "other", "bytes": 4, "sent": 1, "under_way": 0}],
    "waiting": [],
}
THERE: dict[str, Any] = {
    "pending_files": 3,
    "pending_contents": 2,
    "pending_bytes": 30 * MIB,
    "oldest_pending_seconds": 4.0,
    "uploading": [{"path": "run/a", "bytes": 15 * MIB, "sent": MIB, "under_way": 8 * MIB}],
}
HINT = "mount  s3://bucket/data at /mnt; whole mount: fusecache status /mnt"


def view(there: dict[str, Any], state: str = "queued", **more: Any) -> list[str]:
    """Return the lines about the path `run`."""
    return status_view({**MOUNT, "path": "run", "state": state, "there": there, **more}).splitlines()


def test_the_view_of_a_path_is_about_that_path_alone_and_says_where_the_rest_is() -> None:
    assert view({"pending_files": 0}, "clean") == ["run    clean", HINT]
    waiting = [{"path": "run/a", "cause": "no network", "remedy": "wait"}]
    failed = [{"path": "run/b", "cause": "locked", "remedy": "see the bucket"}]
    conflicts = [{"path": "run/c", "kept_as": ""}]
    lines = view({**THERE, "waiting": waiting, "failed": failed, "conflicts": conflicts, "dirty_files": 2})
    assert [line.split("  ", 1)[1].strip() for line in lines] == [
        "queued (3 changes, 30.0 MiB not in the bucket yet, the oldest for 4.0 s; 2 files being written)",
        "run/a: 1.0 MiB of 15.0 MiB sent, 8.0 MiB in flight",
        "run/a waits: no network: wait",
        "run/b: locked: see the bucket",
        "run/c: another client changed it first; our change was dropped",
        HINT.split("  ", 1)[1],
    ]


def test_removals_that_are_put_off_do_not_look_like_an_upload_that_hangs() -> None:
    there = {
        "pending_files": 2,
        "pending_contents": 0,
        "pending_bytes": 0,
        "oldest_pending_seconds": 0.0,
        "deferred_files": 2,
        "deferred_seconds": 540.0,
    }
    words = (
        "2 deletions deferred, by delete_delay or because a process has the file open, for at most 9 min more"
    )
    assert view(there)[0] == f"run    queued ({words})"
    lines = status_view({**MOUNT, **there, "uploading": []}).splitlines()
    assert lines[0] == f"only here  {words}"
    lines = status_view({**MOUNT, **there, "pending_files": 3, "uploading": []}).splitlines()
    assert lines[:2] == [
        "only here  1 change of names not in the bucket yet, the oldest for 0 µs",
        f"           {words}",
    ]


def test_a_time_left_of_nothing_and_a_pace_of_nothing_are_not_said() -> None:
    status = {**MOUNT, "upload_bytes_per_second": 5 * MIB, "seconds_left": 0.0, "uploading": []}
    assert "           5.0 MiB/s" in status_view(status).splitlines()
    assert "/s" not in status_view({**status, "upload_bytes_per_second": 0})


@pytest.mark.parametrize("source", ["environment", "/home/u/.aws/credentials", ""])
def test_keys_that_are_refused_are_renewed_in_one_way_only(source: str) -> None:
    renewal = remedy(AccessDenied("403"), source)
    assert ("unmount --force" in renewal) == (source == "environment")
    assert ("30 s" in renewal) == (source != "environment")
    status = {**MOUNT, "keys_from": source}
    waiting = [{"path": "run/a", "cause": "403", "remedy": renewal}]
    shown = status_view({**status, "refused_seconds": 20.0, "waiting": waiting})
    assert shown.count(renewal) == 1
    assert "run/a waits: 403\n" in shown
    assert f"run/a waits: 403: {renewal}\n" in status_view({**status, "waiting": waiting})


def test_what_found_no_room_is_told_with_what_helps() -> None:
    shortages = {"files": 2, "path": "run/model", "bytes": 120 * MIB, "seconds": 120.0, "cause": "full"}
    shown = view(
        {"pending_files": 0, "shortages": shortages}, "error:no-space", cache={"limit_bytes": 64 * MIB}
    )
    words = "2 writes failed with ENOSPC, the last run/model (120.0 MiB), 2 min ago"
    assert (
        shown[1]
        == f"problems  {words}: raise --cache-size: of its 64.0 MiB, files that wait for upload may use 70 % at most"
    )
    shown = view({"pending_files": 0, "shortages": shortages}, cache={"limit_bytes": 1 << 30})
    assert shown[1] == f"problems  {words}: raise --cache-size, or wait for uploads"


def test_what_found_no_room_on_a_full_disk_is_not_helped_by_a_larger_cache() -> None:
    shortages = {"files": 1, "path": "run/model", "bytes": 60 * MIB, "seconds": 9.0, "cause": "full"}
    cache, options = {"limit_bytes": 64 * MIB}, {"cache_size": 1 << 40}
    shown = view(
        {"pending_files": 0, "shortages": shortages}, "error:no-space", cache=cache, options=options
    )[1]
    assert "free space on the disk of the cache, or wait for uploads" in shown
    assert "raise --cache-size" not in shown
    (action, *_) = judge({"shortages": shortages, "cache": cache, "options": options}, {})["reasons"]
    assert "free space on the disk of the cache" in action


def test_a_symlink_is_told_before_its_target() -> None:
    link = {"path": "best", "state": "queued", "there": {**THERE, "pending_contents": 0, "link_to": "run"}}
    assert view({"pending_files": 0}, "clean", link=link) == [
        "best   queued, a link to run (3 changes of names not in the bucket yet, the oldest for 4.0 s)",
        "run    clean",
        HINT,
    ]
    dangling = view({"pending_files": 0, "link_to": "gone"}, "clean", target_error="/mnt/run: no such file")
    assert dangling[:2] == [
        "run    clean, a link to gone",
        "       the state of its target is unknown: /mnt/run: no such file",
    ]


def test_sync_and_unmount_count_changes_as_status_does() -> None:
    assert pending_text(ServerProgress(28, 5 * MIB, pending_contents=3)) == "28 changes, 5.0 MiB"
    assert pending_text(ServerProgress(2, 0, pending_contents=0)) == "2 changes of names"
    assert awaited_text(ServerProgress(5, MIB, pending_contents=1, deferred_files=2)) == "3 changes, 1.0 MiB"


@pytest.mark.parametrize(
    ("reads", "seconds", "words"),
    [
        (1, 12.0, ["1 read waits for the bucket, the longest for 12.0 s"]),
        (3, 45.0, ["3 reads wait for the bucket, the longest for 45.0 s"]),
        (3, 0.5, []),
        (0, 0.0, []),
    ],
)
def test_reads_that_wait_for_long_are_a_problem_that_is_named(
    reads: int, seconds: float, words: list[str]
) -> None:
    waiting = {"reads": reads, "seconds": seconds}
    lines = status_view({**MOUNT, "reads_waiting": waiting}).splitlines()
    said = [line.removeprefix("problems").strip() for line in lines if "for the bucket" in line]
    assert [line.partition(":")[0] for line in said] == words
