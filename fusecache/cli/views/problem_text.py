"""What is wrong with a mount, as lines: what a person should do, and what passes or stays without one."""

from collections.abc import Iterator, Mapping
from typing import Any

from fusecache.model.format_text import (
    PERSONS,
    count_text,
    renewal_text,
    seconds_text,
    short_text,
    size_text,
    usable_bytes,
)
from fusecache.model.objects import STAGING_SHARE_PERCENT
from fusecache.model.verdict import space_remedy

# Most files or conflicts that a group lists; --json has more.
MAX_LINES = 5
# A healthy bucket answers a read faster than this.
_LONG_WAIT_SECONDS = 5.0


def action_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a person should do about a mount, the gravest first."""
    cache = status.get("cache", {})
    if status.get("journal_error"):
        yield status["journal_error"]
    if status.get("config_not_applied"):
        yield status["config_not_applied"]
    yield from _refused_lines(status)
    yield from _waiting_lines(status, status, is_for_persons=True)
    yield from _shortage_texts(status.get("shortages", {}), status)
    yield from _closes_waiting(status.get("closes_waiting", {}), cache)
    for path in status.get("rejected", ())[:MAX_LINES]:
        yield f"{path} was not uploaded, and is not tried again: see `fusecache recover`"
    yield from _conflict_lines(status)
    for name, noun in (("orphans", "unfinished file"), ("suspects", "suspect file")):
        if status.get(name):
            yield f"{count_text(status[name], noun)} in quarantine: see `fusecache recover`"
    for name, task in status.get("failed_tasks", {}).items():
        yield (
            f"the daemon's task {name} failed {count_text(task['failures'], 'time')}: {task['last_error']}; "
            "please report it with the traceback in the log"
        )


def problem_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a mount and needs no action: it passes, or the store or the kernel is like that."""
    yield from _silent_lines(status)
    yield from _waiting_lines(status, status, is_for_persons=False)
    yield from _reads_waiting(status.get("cache", {}))
    for each in (status, *status.get("buckets", ())):
        store = f"the store of bucket {each['bucket']}" if "bucket" in each else "the store"
        if each.get("conditional_writes") in ("refused", "ignored"):
            yield f"{store} does not honour If-Match: a write may replace another client's version unnoticed"
        if each.get("conditional_writes") == "not-of-parts":
            yield (
                f"{store} takes no If-Match for a file over 64 MiB: two clients that replace it at once lose a version"
            )
    refused = status.get("kernel", {}).get("refused", ())
    if refused:
        yield (
            f"the kernel refused {', '.join(refused)}: large reads are slower; the log has the command for root"
        )


def path_problem_lines(status: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of one path, and of the bucket."""
    if status.get("journal_error"):
        yield status["journal_error"]
    yield from _refused_lines(status)
    yield from _silent_lines(status)
    yield from _shortage_texts(there.get("shortages", {}), status)
    for is_for_persons in (True, False):
        yield from _waiting_lines(status, there, is_for_persons=is_for_persons)
    for each in there.get("failed", ())[:MAX_LINES]:
        yield f"{each['path']}: {each['cause']}" + (f": {each['remedy']}" if each["remedy"] else "")
    yield from _conflict_lines(there)


def error_count_lines(cache: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of reads since the start."""
    counters = (
        ("errors", "read request failed and was retried", "read requests failed and were retried"),
        ("stalls", "read request stalled and was repeated", "read requests stalled and were repeated"),
        ("checksum_failures", "checksum mismatch in the cache", "checksum mismatches in the cache"),
        ("disk_errors", "I/O error of the cache's disk", "I/O errors of the cache's disk"),
        (
            "uncached",
            "fetch not cached, because the cache was full or its disk too slow",
            "fetches not cached, because the cache was full or its disk too slow",
        ),
    )
    for name, one, many in counters:
        if cache.get(name):
            yield f"{cache[name]} {one if cache[name] == 1 else many}"


def _buckets(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the mount, and the buckets of several that the path of this status may be in, each with its words."""
    yield "", status
    of = str(status.get("there", {}).get("path", "")).partition("/")[0]
    for each in status.get("buckets", ()):
        if of in ("", each["bucket"]):
            yield f"bucket {each['bucket']}: ", each


def _refused_lines(status: Mapping[str, Any]) -> Iterator[str]:
    for name, each in _buckets(status):
        if _is_refused(each):
            yield name + _refused_text(each)


def _is_refused(status: Mapping[str, Any]) -> bool:
    return status.get("state") == "auth-failed" or bool(status.get("refused_seconds"))


def _silent_lines(status: Mapping[str, Any]) -> Iterator[str]:
    for name, each in _buckets(status):
        if each.get("unanswered_seconds") and not _is_refused(each):
            silence = seconds_text(each["unanswered_seconds"])
            yield (
                f"{name}the bucket has not answered for {silence}: the mount shows cached names and sizes; no data is "
                "lost"
            )


def _refused_text(status: Mapping[str, Any]) -> str:
    seconds = status.get("refused_seconds")
    since = f", for {seconds_text(seconds)} now" if seconds else ""
    # While reads are refused, the keys for reading need renewal; else those for writing.
    source = status.get("keys_from" if seconds else "write_keys_from") or ""
    started = "cached files are served by name, other names fail, new ones too"
    ran = "the mount shows cached names and sizes, writes continue on this disk"
    return (
        f"the bucket refuses the credentials{since}: {started if status.get('start_failure') else ran}, "
        f"no data is lost; {renewal_text(source)}"
        + (f". The last reload failed: {status['keys_error']}" if status.get("keys_error") else "")
    )


def _shortage_texts(shortages: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[str]:
    if not shortages.get("files"):
        return
    cache = status.get("cache")
    size, limit = shortages["bytes"], usable_bytes(cache) if cache else 0
    long_ago = f"{seconds_text(shortages['seconds'])} ago"
    remedy = space_remedy(status)
    if cache and not short_text(cache) and size * 100 > limit * STAGING_SHARE_PERCENT:
        remedy = (
            f"raise --cache-size: of its {size_text(limit)}, files that wait for upload may use "
            f"{STAGING_SHARE_PERCENT} % at most"
        )
    yield (
        f"{count_text(shortages['files'], 'write')} failed with ENOSPC, the last {shortages['path']}"
        f"{f' ({size_text(size)})' if size else ''}, {long_ago}: {remedy}"
    )


def _reads_waiting(cache: Mapping[str, Any]) -> Iterator[str]:
    reads, longest = cache.get("waiting_reads", 0), cache.get("longest_wait_seconds", 0.0)
    if reads and longest >= _LONG_WAIT_SECONDS:
        verb = "waits" if reads == 1 else "wait"
        yield (
            f"{count_text(reads, 'read')} {verb} for the bucket, the longest for {seconds_text(longest)}: "
            "the bucket or the network is slow or down; after a minute without an answer, reads fail"
        )


def _closes_waiting(closes: Mapping[str, Any], cache: Mapping[str, Any]) -> Iterator[str]:
    if not closes.get("files"):
        return
    longest = closes["named"][0]
    verb = "waits" if closes["files"] == 1 else "wait"
    yield (
        f"{count_text(closes['files'], 'close')} {verb} for space in the cache, the longest for "
        f"{seconds_text(longest['seconds'])} ({longest['path']}, process {longest['process']}): pending files take "
        f"{size_text(cache['staging_bytes'])}, and above {size_text(closes['high_water_bytes'])} close waits for "
        "uploads; raise --cache-size to raise this limit"
    )


def _waiting_lines(
    status: Mapping[str, Any], pending: Mapping[str, Any], *, is_for_persons: bool
) -> Iterator[str]:
    """Yield the reasons why uploads wait. pending: the counts of the whole mount, or of one path."""
    waiting = pending.get("waiting", ())
    known = list(_refused_lines(status))
    for each in waiting[:MAX_LINES]:
        if (each.get("code") in PERSONS) is is_for_persons:
            # The line about refused credentials already says how to renew them.
            is_new = each["remedy"] and not any(line.endswith(each["remedy"]) for line in known)
            yield f"{each['path']} waits: {each['cause']}" + (f": {each['remedy']}" if is_new else "")
    cause, needs_person = status.get("waiting_for"), status.get("waiting_code") in PERSONS
    if cause and not waiting and pending.get("pending_files") and needs_person is is_for_persons:
        yield f"uploads wait: {cause}"


def _conflict_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    for conflict in facts.get("conflicts", ())[:MAX_LINES]:
        kept = f"our version is {conflict['kept_as']}" if conflict["kept_as"] else "our change was dropped"
        yield f"{conflict['path']}: another client changed it first; {kept}"
