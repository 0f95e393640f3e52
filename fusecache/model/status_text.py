"""What a status says in words, for all that shows it: `fusecache status`, `top`, and the web page.

Pure functions of a status (`facts.FACTS`), or of two.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fusecache.model.format_text import changes_text, count_text, left_text, seconds_text, size_text
from fusecache.model.verdict import MAX_LINES, refused_changes

# Long enough to notice the end of a job, and for a trainer to start again.
_ENDED_SECONDS = 60.0


# ---- what would be lost with this node


def only_here_lines(status: Mapping[str, Any], *, most_files: int = MAX_LINES) -> Iterator[str]:
    """Yield what would be lost with this node, why it is not in the bucket yet, and how its upload goes."""
    lost = status.get("exposed_bytes", status.get("pending_bytes", 0)) + status.get("aside_bytes", 0)
    reasons = [*waiting_texts(status), *_exposed_texts(status)]
    if lost:
        yield f"{size_text(lost)} would be lost with this node"
    elif not reasons:
        yield "nothing: the bucket has every closed file"
    yield from reasons
    if status.get("pending_files"):
        yield from upload_lines(status, most_files=most_files)


def _exposed_texts(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what only this node has, besides what waits for upload."""
    counts = (
        ("dirty_files", "dirty_bytes", "being written"),
        ("local_only_files", "local_only_bytes", "local only, by option"),
    )
    for files, nbytes, words in counts:
        if status.get(files):
            yield f"{count_text(status[files], 'file')}, {size_text(status[nbytes])} {words}"
    if refused := refused_changes(status):
        yield f"{count_text(refused, 'change')} rejected by the bucket"
    if status.get("aside_bytes"):
        yield f"{size_text(status['aside_bytes'])} quarantined: see `fusecache recover`"


def waiting_texts(pending: Mapping[str, Any]) -> Iterator[str]:
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


def upload_lines(status: Mapping[str, Any], *, most_files: int = MAX_LINES) -> Iterator[str]:
    """Yield how uploads go: those in flight, their rate, and each file. most_files: 0 for none of these lines."""
    rate, uploading = status.get("upload_bytes_per_second"), status.get("uploading", ())
    requested = [each for each in uploading if each.get("request_seconds")]
    if requested:
        size = size_text(sum(each["under_way"] for each in requested))
        oldest = seconds_text(max(each["request_seconds"] for each in requested))
        yield f"of these {count_text(len(requested), 'file')}, {size} in flight, the oldest request for {oldest}"
    if rate and status.get("pending_bytes"):
        yield f"{size_text(rate)}/s{left_text(status.get('seconds_left'))}"
    for each in uploading[:most_files]:
        under_way = f", {size_text(each['under_way'])} in flight" if each.get("under_way") else ""
        yield f"{each['path']}: {size_text(each['sent'])} of {size_text(each['bytes'])} sent{under_way}"
    if len(uploading) > most_files > 0:
        yield f"and {count_text(len(uploading) - most_files, 'other file')}"


# ---- rates


def rates_between(status: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the rates between two statuses, with the keys of a status's own."""
    seconds = status["uptime_seconds"] - before["uptime_seconds"] if before else 0.0
    if before is None or before["pid"] != status["pid"] or seconds <= 0:
        return dict(status["rates"])
    now, then = _totals(status), _totals(before)
    rates = {f"{name}_per_second": max(0, now[name] - then[name]) / seconds for name in now}
    return {**rates, "sent_bytes_per_second": status["upload_bytes_per_second"]}


def _totals(status: Mapping[str, Any]) -> dict[str, int]:
    return {
        **{f"{source}_bytes": nbytes for source, nbytes in status["cache"]["bytes_from"].items()},
        "fetched_bytes": status["received_bytes"],
        "requests": sum(status["requests"].values()),
    }


# ---- jobs


def shown_jobs(hints: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the jobs that run, and jobs that ended in the last minute."""
    return [job for job in hints.get("jobs", ()) if job.get("ended_seconds", 0.0) <= _ENDED_SECONDS]
