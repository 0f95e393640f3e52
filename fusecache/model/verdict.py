"""The verdict on a mount, from its status: OK, DEGRADED (it works, but something is wrong), ACTION (you must act)."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fusecache.model.format_text import (
    changes_text,
    count_text,
    renewal_text,
    seconds_text,
    short_text,
    size_text,
)
from fusecache.model.objects import STAGING_SHARE_PERCENT

OK, DEGRADED, ACTION = "OK", "DEGRADED", "ACTION"
# A request that fails once and is retried is no news. Uploads that wait for longer than this are.
_WAITING_SECONDS = 10.0
# Counters whose growth degrades a mount for a while, and what they count.
RECENT_COUNTS = {"disk_errors": "I/O error", "uncached": "fetch", "failed_tasks": "failure"}
# How long that is: long enough for a probe that runs every few minutes.
RECENT_SECONDS = 600.0
# Quarantined files that take more than 1/4 of the space for written files degrade a mount: sized as documented, that
# has space for two checkpoints and a little more.
QUARANTINE_SHARE = 4
_RECENT_TEXTS = {
    "disk_errors": "of the cache's disk: reads go on, uncached",
    "uncached": "not cached, because the cache was full or its disk too slow",
    "failed_tasks": "of background tasks of the daemon, see its log",
}


def judge(status: Mapping[str, Any], recent: Mapping[str, int]) -> dict[str, Any]:
    """Return `verdict` and `reasons`, the gravest first. recent: growth of RECENT_COUNTS in RECENT_SECONDS."""
    buckets = status.get("buckets", ())
    # What a bucket of several waits for is in its row.
    whole = {**status, "waiting_for": "", "waiting_code": ""} if buckets else status
    actions = [*_actions(whole), *(text for each in buckets for text in _of_bucket(each, _actions))]
    endpoints = [text for each in status.get("endpoints", ()) for text in _endpoint_faults(each)]
    faults = [
        *_faults(whole),
        *(text for each in buckets for text in _of_bucket(each, _faults)),
        *endpoints,
        *_recent_faults(recent),
    ]
    verdict = ACTION if actions else DEGRADED if faults else OK
    return {"verdict": verdict, "reasons": [*actions, *faults]}


def verdict_line(status: Mapping[str, Any]) -> str:
    """Return the verdict of a status in one line: the reasons, or what is being uploaded, and what is not shown."""
    line = str(status["verdict"])
    pending = status.get("pending_files", 0) - status.get("deferred_files", 0)
    if status["reasons"]:
        line += f": {'; '.join(status['reasons'])}"
    elif pending:
        changes = changes_text(pending, status.get("pending_contents"), status["pending_bytes"])
        line += f", uploading {changes}"
    if hidden := status.get("hidden_keys"):  # no fault of the mount: it degrades nothing
        line += f", {count_text(hidden, 'key')} not visible in the mount: see `fusecache check`"
    return line


def space_remedy(status: Mapping[str, Any]) -> str:
    """Return what gives writes space again."""
    short = short_text(status["cache"]) if "cache" in status else ""
    grow = "free space on the disk of the cache" if short else "raise --cache-size"
    if _hold_space(status):
        return f"{grow}, or restore or delete unfinished files: see `fusecache recover`{short}"
    return f"{grow}, or wait for uploads{short}"


def _hold_space(status: Mapping[str, Any]) -> bool:
    """Return whether quarantined files may soon leave writers without space."""
    return bool(status.get("aside_bytes", 0) * QUARANTINE_SHARE > _staging_bytes(status))


def _staging_bytes(status: Mapping[str, Any]) -> int:
    return int(status.get("cache", {}).get("limit_bytes", 0)) * STAGING_SHARE_PERCENT // 100


def _of_bucket(
    bucket: Mapping[str, Any], judge_it: Callable[[Mapping[str, Any]], Iterator[str]]
) -> Iterator[str]:
    return (f"bucket {bucket['bucket']}: {text}" for text in judge_it(bucket))


def _actions(status: Mapping[str, Any]) -> Iterator[str]:
    if status.get("journal_error"):
        yield f"nothing can be written: {status['journal_error']}"
    if status.get("writes_held") and not status.get("start_failure"):
        yield f"nothing is uploaded: {status['writes_held']}"
    if status.get("state") == "auth-failed":
        source = status.get("keys_from" if status.get("refused_seconds") else "write_keys_from") or ""
        denied = seconds_text(status.get("denied_seconds", 0))
        yield f"the bucket has refused the keys for {denied}: {renewal_text(source)}"
    elif status.get("waiting_code") in ("bucket-missing", "refused"):
        yield f"uploads stopped: {status['waiting_for']}"
    shortages = status.get("shortages", {})
    if shortages.get("files") and shortages["seconds"] < RECENT_SECONDS:
        yield f"no space for {count_text(shortages['files'], 'write')}: {space_remedy(status)}"
    unreadable = status.get("unreadable_files", 0)
    if status.get("rejected_files", 0) > unreadable:
        count = count_text(status["rejected_files"] - unreadable, "change")
        yield f"the bucket rejected {count}: see `fusecache recover`"
    if unreadable:
        files = count_text(unreadable, "file")
        yield f"{files} cannot be read from the cache directory for upload: see `fusecache recover`"
    if status.get("conflict_files"):
        yield f"{count_text(status['conflict_files'], 'conflict')} with another client: see `fusecache recover`"
    if status.get("suspects"):
        yield f"{count_text(status['suspects'], 'file')} damaged by a crash: see `fusecache recover`"


def _faults(status: Mapping[str, Any]) -> Iterator[str]:
    if status.get("start_failure"):
        yield f"started without the bucket: {status['start_failure']}"
    elif status.get("state") == "auth-failed":
        pass  # an action says it
    elif status.get("denied_seconds") or status.get("refused_seconds"):
        seconds = max(status.get("denied_seconds", 0), status.get("refused_seconds", 0))
        yield f"the bucket has refused the keys for {seconds_text(seconds)}"
    elif status.get("unanswered_seconds"):
        yield f"the bucket has not answered for {seconds_text(status['unanswered_seconds'])}"
    elif status.get("writes_held"):
        pass  # an action says it
    elif status.get("waiting_for") and status.get("oldest_pending_seconds", 0) > _WAITING_SECONDS:
        yield f"uploads wait: {status['waiting_for']}"
    if _hold_space(status):
        files = count_text(status["orphans"] + status["suspects"], "unfinished file")
        verb = "holds" if status["orphans"] + status["suspects"] == 1 else "hold"
        yield (
            f"{files} {verb} {size_text(status['aside_bytes'])} of the {size_text(_staging_bytes(status))} for files "
            "that wait for upload: see `fusecache recover`"
        )
    if status.get("config_not_applied"):
        yield str(status["config_not_applied"])
    if status.get("keys_error"):
        yield f"keys could not be read again: {status['keys_error']}"


def _endpoint_faults(endpoint: Mapping[str, Any]) -> Iterator[str]:
    name = endpoint["endpoint"]
    if endpoint["failing_seconds"] > _WAITING_SECONDS:
        yield f"endpoint {name} has failed for {seconds_text(endpoint['failing_seconds'])}: {endpoint['error']}"
    if endpoint["gives_names"] and not endpoint["primary"]:
        yield f"names come from {name}, because the primary endpoint fails: the newest files may be missing"
    others = endpoint["unused_copies"].get("other bytes", 0)
    if others:
        yield f"endpoint {name} has other bytes under {count_text(others, 'key')}: its copies of them are not used"


def _recent_faults(recent: Mapping[str, int]) -> Iterator[str]:
    for name, noun in RECENT_COUNTS.items():
        if recent.get(name):
            yield f"{count_text(recent[name], noun)} {_RECENT_TEXTS[name]}"
