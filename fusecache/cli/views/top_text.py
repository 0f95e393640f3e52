"""The text of `fusecache top`: for each mount its verdict, rates, jobs and busiest files. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusecache.cli.views.status_text import only_here_lines, rate_lines
from fusecache.model.format_text import count_text, printable, seconds_text, size_text, usable_bytes
from fusecache.model.verdict import verdict_line

# Jobs and files shown for each mount.
_ROWS = 10


def mount_lines(
    point: str, status: Mapping[str, Any] | None, before: Mapping[str, Any] | None, error: str
) -> Iterator[str]:
    """Yield the lines of one mount.

    status: its newest status; None if it has none yet. before: an earlier one, from which the rates are counted; None
    shows those of the last minute. error: why there is no newer status; "" if there is one.
    """
    if status is None:
        yield f"{point}  {error or 'waiting for the daemon'}"
        return
    yield f"{point}  {status['source']}  {error or verdict_line(status)}"
    for line in (*rate_lines(_rates(status, before)), _cache_text(status)):
        yield f"  {line}"
    jobs = status["hints"]["jobs"]
    yield from _table(("JOB", "STEP", "PER STEP", "AHEAD", "CACHED"), [_job_row(job) for job in jobs[:_ROWS]])
    yield from _table(("FILE", "DOES", "PACE"), list(_file_rows(status))[:_ROWS])


def screen_text(lines: Sequence[str], columns: int, rows: int) -> str:
    """Return lines as what a terminal of this size is sent to show them instead of what it shows."""
    shown = [printable(line)[:columns] for line in lines]
    if len(shown) > rows:
        shown = [*shown[: rows - 1], f"… {count_text(len(shown) - rows + 1, 'more line')}"[:columns]]
    # Home; each line clears what is right of it, the last one what is below. No newline at the end: it would scroll.
    return "\x1b[H" + "\x1b[K\r\n".join(shown) + "\x1b[K\x1b[J"


def _rates(status: Mapping[str, Any], before: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the rates between two statuses, with the keys of a status's own."""
    seconds = status["uptime_seconds"] - before["uptime_seconds"] if before else 0.0
    if before is None or before["pid"] != status["pid"] or seconds <= 0:
        rates: Mapping[str, Any] = status["rates"]
        return rates
    now, then = _totals(status), _totals(before)
    return {f"{name}_per_second": max(0, now[name] - then[name]) / seconds for name in now}


def _totals(status: Mapping[str, Any]) -> dict[str, int]:
    cache, requests = status["cache"], status["requests"]
    return {
        "read_bytes": cache["bytes_read"],
        **{f"{source}_bytes": nbytes for source, nbytes in cache["bytes_from"].items()},
        "fetched_bytes": requests["bytes_read"],
        "sent_bytes": requests["bytes_sent"],
        "requests": sum(requests[kind] for kind in ("class_a", "class_b", "deletes", "aborts")),
    }


def _cache_text(status: Mapping[str, Any]) -> str:
    cache = status["cache"]
    words = [f"cache {size_text(cache['used_bytes'])} of {size_text(usable_bytes(cache))}"]
    words.append(f"only here: {next(only_here_lines(status)).partition(':')[0]}")
    if cache["waiting_reads"]:
        waiting = count_text(cache["waiting_reads"], "read")
        words.append(
            f"{waiting} waiting for the bucket, the longest for {seconds_text(cache['longest_wait_seconds'])}"
        )
    return "; ".join(words)


def _job_row(job: Mapping[str, Any]) -> tuple[str, ...]:
    read = job["hit_bytes"] + job["missed_bytes"]
    return (
        job["job"],
        "ended" if job["ended_seconds"] else str(job["step"]),
        seconds_text(job["seconds_a_step"]) if job["seconds_a_step"] else "-",
        f"{count_text(job['horizon_steps'], 'step')}, {size_text(job['horizon_bytes'])}",
        f"{job['hit_bytes'] / read:.0%}" if read else "-",
    )


def _file_rows(status: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the files that upload, that wait after a failure, and that programs read, the fastest first."""
    for each in status["uploading"]:
        yield each["path"], "uploads", f"{size_text(each['sent'])} of {size_text(each['bytes'])}"
    for each in status["waiting"]:
        yield each["path"], "waits", each["cause"]
    for each in status["busy_files"]:
        yield each["path"], "is read", f"{size_text(each['read_bytes_per_second'])}/s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows under their heads, as columns; nothing without rows."""
    if rows:
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        for row in (head, *rows):
            yield (
                "  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
            )
