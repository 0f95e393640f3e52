"""The text of `fusecache status`: one line or more per group. Counts of zero are left out; `--json` shows all."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusecache.cli.endpoint_text import bucket_lines, endpoint_lines
from fusecache.model.error_text import renewal_text
from fusecache.model.format_text import (
    changes_text,
    count_text,
    left_text,
    printable,
    seconds_text,
    size_text,
)
from fusecache.model.objects import STAGING_SHARE_PERCENT
from fusecache.model.verdict import verdict_line

# Most files, jobs or conflicts that a group lists; --json has more.
_MAX_LINES = 5
_SILENT_SECONDS = 90.0
# A healthy bucket answers a read faster than this.
_LONG_WAIT_SECONDS = 5.0
# From a shorter measurement, the start of a job would count as its rate.
_RATE_SECONDS = 60.0
_CENT = 0.01
_VERBS = {
    "gets": "GET",
    "lists": "LIST",
    "heads": "HEAD",
    "puts": "PUT",
    "creates": "CREATE",
    "parts": "PART",
    "completes": "COMPLETE",
    "copies": "COPY",
    "deletes": "DELETE",
    "aborts": "ABORT",
}
_CAUSES = {"demand": "on demand", "readahead": "read-ahead", "hint": "warm-up or hints"}

Row = tuple[str, str]


def status_view(status: Mapping[str, Any]) -> str:
    """Return a status as aligned lines `group  text`; only the first line of a group has its name.

    The status of a mount begins with its verdict. The status of one path covers that path only, and names the command
    that shows the whole mount.
    """
    found = _path_rows(status) if "path" in status else _mount_rows(status)
    rows = [(printable(name), printable(words)) for name, words in found]
    width = max(len(name) for name, _ in rows)
    verdict = printable(verdict_line(status)) + "\n" if "verdict" in status and "path" not in status else ""
    return verdict + "".join(f"{name:<{width}}  {words}\n" for name, words in rows)


def _mount_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    yield from _mount(status)
    yield from _cache(
        status.get("cache", {}),
        quarantined_bytes=status.get("aside_bytes", 0),
        uptime_seconds=float(status.get("uptime_seconds", 0)),
    )
    is_s3 = str(status.get("source", "s3://")).startswith("s3://")
    yield from _requests(status.get("requests", {}), status.get("cache", {}), has_price=is_s3)
    yield from _grouped("buckets", bucket_lines(status.get("buckets", ())))
    yield from _grouped("endpoints", endpoint_lines(status.get("endpoints", ())))
    yield from _uploads(status)
    yield from _warm_ups(status.get("warming", ()))
    yield from _hints(status.get("hints", {}))
    yield from _grouped("problems", _problems(status))


def _path_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    there = status["there"]
    if "link" in status:
        yield str(status["link"]["path"]), link_text(status["link"])
    yield str(status["path"]), f"{_state_text(status)}{_counts_text(there)}"
    if "target_error" in status:
        yield "", f"the state of its target is unknown: {status['target_error']}"
    if there.get("pending_files"):
        yield from _grouped("uploads", _in_flight(there))
    yield from _grouped("problems", _problems_there(status, there))
    mountpoint = status.get("mountpoint")
    yield (
        "mount",
        f"{status.get('source')} at {mountpoint}; whole mount: fusecache status {shlex.quote(str(mountpoint))}",
    )


def _state_text(status: Mapping[str, Any]) -> str:
    target = status["there"].get("link_to")
    return str(status["state"]) + (f", a link to {target}" if target else "")


def link_text(link: Mapping[str, Any]) -> str:
    """Return the state of a symlink itself, and its target."""
    there = link["there"]
    return f"{link['state']}, a link to {there['link_to']}{_counts_text(there)}"


def _grouped(name: str, lines: Iterator[str]) -> Iterator[Row]:
    for index, line in enumerate(lines):
        yield "" if index else name, line


def _mount(status: Mapping[str, Any]) -> Iterator[Row]:
    if status.get("state", "ok") != "ok":
        yield "state", str(status["state"])
    mode = "read-only" if status.get("read_only") else "read-write"
    up = seconds_text(float(status.get("uptime_seconds", 0)))
    yield "mount", f"{status.get('source')} at {status.get('mountpoint')}, {mode}"
    yield "daemon", f"fusecache {status.get('version')}, pid {status.get('pid')}, up for {up}"
    changed = [f"{name}={_option_text(value)}" for name, value in status.get("options_changed", {}).items()]
    if changed:
        yield "options", ", ".join(changed)


def _option_text(value: Any) -> str:
    return "[" + " ".join(value) + "]" if isinstance(value, list) else str(value)


def _counts_text(there: Mapping[str, Any]) -> str:
    """Return the counts behind a path's state: pending, being written, failed, in conflict, local only."""
    words = list(_waiting_texts(there))
    if there.get("dirty_files"):
        words.append(f"{count_text(there['dirty_files'], 'file')} being written")
    for name, noun in (("failed_files", "failed"), ("conflict_files", "in conflict")):
        if there.get(name):
            words.append(f"{there[name]} {noun}")
    if there.get("local_only_files"):
        files = count_text(there["local_only_files"], "file")
        words.append(f"{files}, {size_text(there['local_only_bytes'])} local only")
    return f" ({'; '.join(words)})" if words else ""


def _waiting_texts(pending: Mapping[str, Any]) -> Iterator[str]:
    """Yield the pending changes, and the deferred deletions, which wait on purpose."""
    deferred = pending.get("deferred_files", 0)
    changes = pending.get("pending_files", 0) - deferred
    if changes:
        text = changes_text(changes, pending.get("pending_contents"), pending["pending_bytes"])
        yield f"{text} not in the bucket yet, the oldest for {seconds_text(pending['oldest_pending_seconds'])}"
    if deferred:
        yield (
            f"{count_text(deferred, 'deletion')} deferred, by delete_delay or because a process has the file open, "
            f"for at most {seconds_text(pending['deferred_seconds'])} more"
        )


def _cache(cache: Mapping[str, Any], *, quarantined_bytes: int, uptime_seconds: float) -> Iterator[Row]:
    if not cache:
        return
    limit = cache["limit_bytes"]
    used = f"{size_text(cache['used_bytes'])} of {size_text(limit)} ({cache['used_bytes'] / limit:.0%})"
    if cache["staging_bytes"] > quarantined_bytes:
        used += f", not uploaded yet {size_text(cache['staging_bytes'] - quarantined_bytes)}"
    if quarantined_bytes:
        used += f", quarantined (see `fusecache recover`) {size_text(quarantined_bytes)}"
    if cache["evicted_bytes"]:
        used += f", evicted {size_text(cache['evicted_bytes'])}"
    yield "cache", used
    reads = cache["hits"] + cache["misses"]
    if reads:
        rate = size_text(cache["bytes_read"] / max(uptime_seconds, 1e-3))
        yield (
            "reads",
            f"{count_text(reads, 'read')}, {size_text(cache['bytes_read'])}, {rate}/s since the start; "
            f"hits {cache['hits'] / reads:.1%}; p50 {seconds_text(cache['latency_p50_seconds'])}, "
            f"p99 {seconds_text(cache['latency_p99_seconds'])}",
        )
    causes = [(_CAUSES.get(name, name), size) for name, size in cache["bytes_by_cause"].items() if size]
    if causes:
        yield "fetched", ", ".join(f"{name} {size_text(size)}" for name, size in causes)
    waited = [(name, seconds) for name, seconds in cache["wait_seconds"].items() if seconds >= 0.001]
    if waited:
        waited.sort(key=lambda row: -row[1])
        yield "waited for", ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in waited)
    yield "buffers", f"{cache['buffers_in_use']} of {cache['buffers']} in use"


def _requests(requests: Mapping[str, Any], cache: Mapping[str, Any], *, has_price: bool) -> Iterator[Row]:
    made = [f"{verb} {requests[name]}" for name, verb in _VERBS.items() if requests.get(name)]
    if not made:
        return
    yield "requests", ", ".join(made)
    if cache.get("first_byte_p50_seconds"):
        yield (
            "",
            f"first byte of a GET: p50 {seconds_text(cache['first_byte_p50_seconds'])}, "
            f"p99 {seconds_text(cache['first_byte_p99_seconds'])}",
        )
    if not has_price:
        return
    yield (
        "",
        f"class A {requests['class_a']}, class B {requests['class_b']}: "
        f"about ${requests['dollars']:.4f} at R2's prices, before its free tier",
    )
    if requests["rate_seconds"] >= _RATE_SECONDS:
        kinds = requests.get("dollars_per_day_by_kind", {}).items()
        parts = ", ".join(
            f"{_VERBS.get(kind, kind)} {dollars:.2f}" for kind, dollars in kinds if dollars >= _CENT
        )
        yield (
            "",
            f"a day at the rate of the last {seconds_text(requests['rate_seconds'])}: "
            f"class A {requests['class_a_per_day']}, class B {requests['class_b_per_day']}: "
            f"about ${requests['dollars_per_day']:.2f}{f' ({parts})' if parts else ''}",
        )


def _uploads(status: Mapping[str, Any]) -> Iterator[Row]:
    if not status.get("pending_files", 0):
        yield "uploads", "none pending"
    else:
        yield from _grouped("uploads", _waiting_texts(status))
        yield from (("", line) for line in _in_flight(status))
    if status.get("exposed_bytes", 0) > status.get("pending_bytes", 0):
        yield (
            "only here",
            f"{size_text(status['exposed_bytes'])}, including files being written, rejected, or local only",
        )


def _in_flight(status: Mapping[str, Any]) -> Iterator[str]:
    rate = status.get("upload_bytes_per_second")
    if status.get("requested_files"):
        yield f"of these {_requested_text(status)}"
    if rate and status.get("pending_bytes"):
        yield f"{size_text(rate)}/s{left_text(status.get('seconds_left'))}"
    uploading = status.get("uploading", ())
    for each in uploading[:_MAX_LINES]:
        under_way = f", {size_text(each['under_way'])} in flight" if each.get("under_way") else ""
        yield f"{each['path']}: {size_text(each['sent'])} of {size_text(each['bytes'])} sent{under_way}"
    if len(uploading) > _MAX_LINES:
        yield f"and {count_text(len(uploading) - _MAX_LINES, 'other file')}"


def _requested_text(status: Mapping[str, Any]) -> str:
    """Return the files and bytes of requests in flight."""
    words = (
        f"{count_text(status['requested_files'], 'file')}, {size_text(status['requested_bytes'])} in flight"
    )
    seconds = status.get("requested_seconds", 0)
    return words + (f", the oldest request for {seconds_text(seconds)}" if seconds else "")


def _warm_ups(jobs: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for job in jobs[-_MAX_LINES:]:
        yield "warm-up", f"{', '.join(job['paths'][:3])}: {job['state']}, {warm_text(job)}"


def _hints(hints: Mapping[str, Any]) -> Iterator[Row]:
    jobs = hints.get("jobs", ())
    for job in jobs[:_MAX_LINES]:
        if job.get("ended_seconds"):
            yield (
                "hints",
                f"{job['job']}: its process exited {seconds_text(job['ended_seconds'])} ago, at step {job['step']}; "
                "prefetch stops until it starts again",
            )
            continue
        pace = f", {seconds_text(job['seconds_a_step'])} per step" if job["seconds_a_step"] else ""
        yield (
            "hints",
            f"{job['job']}: step {job['step']}{pace}; {count_text(job['horizon_steps'], 'step')} ahead "
            f"({seconds_text(job['lead_seconds'])}, {size_text(job['horizon_bytes'])}) "
            f"of {count_text(job['planned_steps'], 'planned step')}",
        )
        read = job["hit_bytes"] + job["missed_bytes"]
        words = [f"{job['hit_bytes'] / read:.1%} of {size_text(read)} read were cached"] if read else []
        # A loader sends a message at least once a minute, whatever its run does.
        if job["silent_seconds"] >= _SILENT_SECONDS:
            words.append(f"no message for {seconds_text(job['silent_seconds'])}")
        words += [
            f"{job[name]} {what}"
            for name, what in (("late", "arrived late"), ("skipped", "skipped"))
            if job[name]
        ]
        if job.get("skipped_path"):
            words[-1] += f", such as {job['skipped_path']}"
        if job.get("is_astray"):
            words.append("paused: other files are read")
        if words:
            yield "", ", ".join(words)
    if len(jobs) > _MAX_LINES:
        yield "", f"and {count_text(len(jobs) - _MAX_LINES, 'job')} more"
    if hints.get("predicted_stalls"):
        yield "", f"{count_text(hints['predicted_stalls'], 'request')} in flight will arrive too late"
    if hints.get("forgotten_jobs"):
        yield ("" if jobs else "hints"), f"{count_text(hints['forgotten_jobs'], 'silent job')} expired"


def warm_text(job: Mapping[str, Any]) -> str:
    """Return the progress of a warm-up: `3 of 10 files, 1.0 GiB of 4.0 GiB`."""
    words = (
        f"{job['files_done']} of {count_text(job['files_total'], 'file')}, "
        f"{size_text(job['bytes_done'])} of {size_text(job['bytes_total'])}"
    )
    return words + (f", {job['files_failed']} failed" if job["files_failed"] else "")


def _problems(status: Mapping[str, Any]) -> Iterator[str]:
    yield from _bucket_texts(status)
    for each in (status, *status.get("buckets", ())):
        store = f"the store of bucket {each['bucket']}" if "bucket" in each else "the store"
        if each.get("conditional_writes") in ("refused", "ignored"):
            yield f"{store} does not honour If-Match: a write may replace another client's version unnoticed"
        if each.get("conditional_writes") == "not-of-parts":
            yield (
                f"{store} takes no If-Match for a file over 64 MiB: two clients that replace it at once lose a version"
            )
    for name, task in status.get("failed_tasks", {}).items():
        yield (
            f"the daemon's task {name} failed {count_text(task['failures'], 'time')}: {task['last_error']}; "
            "please report it with the traceback in the log"
        )
    yield from _problem_lines(status)


def _problems_there(status: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of one path, and of the bucket."""
    yield from _bucket_texts(status)
    yield from _shortage_texts(there.get("shortages", {}), status.get("cache", {}))
    yield from _waiting_lines(status, there)
    for each in there.get("failed", ())[:_MAX_LINES]:
        yield f"{each['path']}: {each['cause']}" + (f": {each['remedy']}" if each["remedy"] else "")
    yield from _conflict_lines(there)


def _bucket_texts(status: Mapping[str, Any]) -> Iterator[str]:
    if status.get("journal_error"):
        yield status["journal_error"]
    of = str(status.get("there", {}).get("path", "")).partition("/")[0]
    for each in status.get("buckets", ()):
        if of in ("", each["bucket"]):
            yield from (f"bucket {each['bucket']}: {text}" for text in _bucket_texts(each))
    if status.get("state") == "auth-failed" or status.get("refused_seconds"):
        yield _refused_text(status)
    elif status.get("unanswered_seconds"):
        silence = seconds_text(status["unanswered_seconds"])
        yield (
            f"the bucket has not answered for {silence}: the mount shows cached names and sizes; no data is lost"
        )


def _refused_text(status: Mapping[str, Any]) -> str:
    seconds = status.get("refused_seconds")
    since = f", for {seconds_text(seconds)} now" if seconds else ""
    # While reads are refused, the keys for reading need renewal; else those for writing.
    source = status.get("keys_from" if seconds else "write_keys_from") or ""
    return (
        f"the bucket refuses the credentials{since}: the mount shows cached names and sizes, writes continue on this "
        f"disk, no data is lost; {renewal_text(source)}"
        + (f". The last reload failed: {status['keys_error']}" if status.get("keys_error") else "")
    )


def _shortage_texts(shortages: Mapping[str, Any], cache: Mapping[str, Any]) -> Iterator[str]:
    if not shortages.get("files"):
        return
    size, limit = shortages["bytes"], cache.get("limit_bytes")
    long_ago = f"{seconds_text(shortages['seconds'])} ago"
    remedy = "raise --cache-size, or wait for uploads"
    if limit and size * 100 > limit * STAGING_SHARE_PERCENT:
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


def _problem_lines(status: Mapping[str, Any]) -> Iterator[str]:
    cache = status.get("cache", {})
    yield from _reads_waiting(cache)
    yield from _closes_waiting(status.get("closes_waiting", {}), cache)
    yield from _shortage_texts(status.get("shortages", {}), cache)
    yield from _waiting_lines(status, status)
    for path in status.get("rejected", ())[:_MAX_LINES]:
        yield f"{path}: the bucket rejected it; run `fusecache status` on the file for the reason"
    yield from _conflict_lines(status)
    counts = (
        ("orphans", "unfinished file", "in quarantine: see `fusecache recover`"),
        ("suspects", "suspect file", "in quarantine: see `fusecache recover`"),
    )
    for name, noun, words in counts:
        if status.get(name):
            yield f"{count_text(status[name], noun)} {words}"
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
    refused = status.get("kernel", {}).get("refused", ())
    if refused:
        yield (
            f"the kernel refused {', '.join(refused)}: large reads are slower; the log has the command for root"
        )


def _waiting_lines(status: Mapping[str, Any], pending: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why uploads wait. pending: the counts of the whole mount, or of one path."""
    waiting = pending.get("waiting", ())
    bucket_texts = list(_bucket_texts(status))
    for each in waiting[:_MAX_LINES]:
        # The line about refused credentials already says how to renew them.
        is_new = each["remedy"] and not any(line.endswith(each["remedy"]) for line in bucket_texts)
        yield f"{each['path']} waits: {each['cause']}" + (f": {each['remedy']}" if is_new else "")
    if status.get("waiting_for") and not waiting and pending.get("pending_files"):
        yield f"uploads wait: {status['waiting_for']}"


def _conflict_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    for conflict in facts.get("conflicts", ())[:_MAX_LINES]:
        kept = f"our version is {conflict['kept_as']}" if conflict["kept_as"] else "our change was dropped"
        yield f"{conflict['path']}: another client changed it first; {kept}"
