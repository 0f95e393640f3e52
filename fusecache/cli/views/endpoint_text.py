"""The lines of `fusecache status` about the buckets of a mount, and the endpoints of a data set."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusecache.model.format_text import count_text, seconds_text, size_text


def bucket_lines(buckets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each bucket of a mount of several."""
    for each in buckets:
        is_away = each["unanswered_seconds"] or each["start_failure"]
        refused = each["refused_seconds"] or each["denied_seconds"]
        state = "keys refused" if refused else "no answer" if is_away else "ok"
        words = [f"{each['bucket']}: {state}", each["source"]]
        if each["read_only"]:
            words.append("read-only")
        if each["pending_files"]:
            words.append(f"{count_text(each['pending_files'], 'change')} not in the bucket yet")
        yield ", ".join(words)


def endpoint_lines(endpoints: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each endpoint, and one for the copies that it has and that are not used."""
    for each in endpoints:
        words = [
            f"{each['endpoint']}{' (primary)' if each['primary'] else ''}: {each['state']}",
            count_text(each["requests"], "request"),
            size_text(each["bytes_read"]),
            count_text(each["errors"], "error"),
        ]
        if each["latency_seconds"]:
            words.append(f"first byte {seconds_text(each['latency_seconds'])}")
        if each["gives_names"] and not each["primary"]:
            words.append("gives the names")
        yield ", ".join(words)
        if each["error"]:
            yield f"failing for {seconds_text(each['failing_seconds'])}: {each['error']}"
        if each["unused_copies"]:
            causes = ", ".join(f"{number} {cause}" for cause, number in each["unused_copies"].items())
            newest = each["unused_keys"][0]
            yield f"copies not used: {causes}; such as {newest['key']} ({newest['cause']})"
