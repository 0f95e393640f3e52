"""`fusecache status`: asks the daemon about a mount or one path, and shows its answer as text.

The text has one line or more per group. Counts of zero are left out; `--json` shows all.

For a mount: the verdict; what would be lost with this node; what happened in the last minute; what a person should do;
how the mount is set up; counts since the start.

The lines of `fusecache status` about the endpoints of a data set.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fusecache.cli.say import say_error
from fusecache.config.options import changed_options
from fusecache.model.errors import MountError
from fusecache.model.facts import REQUEST_VERBS
from fusecache.model.format_text import (
    at_mount,
    count_text,
    printable,
    seconds_text,
    short_text,
    size_text,
)
from fusecache.model.status_text import only_here_lines, shown_jobs, upload_lines, waiting_texts
from fusecache.model.verdict import (
    MAX_LINES,
    event_lines,
    findings,
    findings_of_path,
    verdict_line,
)
from fusecache.mount.bucket_folders import mounts_meant
from fusecache.mount.control_client import Mount, ask
from fusecache.mount.launch import resolve_in_mount
from fusecache.mount.progress import warm_text


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


def peer_lines(peers: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each other node."""
    for node, nbytes in peers.get("received_bytes", {}).items():
        pieces = peers.get("received_pieces", {}).get(node, 0)
        words = [f"{size_text(nbytes)} in {count_text(pieces, 'piece')}"]
        words.append(count_text(peers["failures"][node], "failure"))
        if refusals := peers["refusals"][node]:
            words.append(
                f"{count_text(refusals, 'refusal')}: see `fusecache doctor`, with the mount's options"
            )
        if node in peers["resting"]:
            words.append(f"not asked for now: {peers['resting'][node]}")
        yield f"{node}: {', '.join(words)}"
    if peers.get("nodes") and not peers["own_address"]:
        yield "this node is not in the list of peers: set peer_address to its own HOST:PORT in the list"


def _served_lines(served: Mapping[str, int]) -> Iterator[str]:
    if any(served.values()):
        yield ", ".join(f"to {name} {size_text(nbytes)}" for name, nbytes in served.items() if nbytes)


_SILENT_SECONDS = 90.0
# From a shorter measurement, the start of a job would count as its rate of a day.
_RATE_SECONDS = 60.0
_CENT = 0.01
_CAUSES = {"demand": "on demand", "readahead": "read-ahead", "hint": "warm-up or hints"}
_SOURCES = ("memory", "disk", "peer", "bucket")

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
    found = [each for each in findings(status) if each.line]
    yield from _grouped("only here", only_here_lines(status))
    rates = status.get("rates", {})
    if rates:
        yield from _grouped(f"last {rates['seconds']:.0f} s", rate_lines(rates))
    yield from _grouped("a day", _day_lines(status.get("costs", {})))
    yield from _grouped("to do", [each.line for each in found if each.is_to_do])
    yield from _grouped("problems", [each.line for each in found if not each.is_to_do])
    yield from _mount(status)
    yield from _grouped("cache", _cache_lines(status))
    yield from _grouped("endpoints", endpoint_lines(status.get("endpoints", ())))
    yield from _grouped("peers", peer_lines(status.get("peers", {})))
    yield from _grouped("served", _served_lines(status.get("served_bytes", {})))
    yield from _warm_ups(status.get("warming", ()))
    yield from _hints(status.get("hints", {}))
    yield from _grouped("since start", _count_lines(status))


def _path_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    there = status["there"]
    if "link" in status:
        yield str(status["link"]["path"]), link_text(status["link"])
    yield str(status["path"]), f"{_state_text(status)}{_counts_text(there)}"
    if "target_error" in status:
        yield "", f"the state of its target is unknown: {status['target_error']}"
    if there.get("pending_files"):
        yield from _grouped("uploads", upload_lines(there))
    yield from _grouped("problems", [each.line for each in findings_of_path(status) if each.line])
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


def _grouped(name: str, lines: Iterable[str]) -> Iterator[Row]:
    for index, line in enumerate(lines):
        yield "" if index else name, line


def _counts_text(there: Mapping[str, Any]) -> str:
    """Return the counts behind a path's state: pending, being written, failed, in conflict, local only."""
    words = list(waiting_texts(there))
    if there.get("dirty_files"):
        words.append(f"{count_text(there['dirty_files'], 'file')} being written")
    for name, noun in (("failed_files", "failed"), ("conflict_files", "in conflict")):
        if there.get(name):
            words.append(f"{there[name]} {noun}")
    if there.get("local_only_files"):
        files = count_text(there["local_only_files"], "file")
        words.append(f"{files}, {size_text(there['local_only_bytes'])} local only")
    return f" ({'; '.join(words)})" if words else ""


# ---- rates


def rate_lines(rates: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rates of the last minute: reads by where the bytes were, the traffic with the bucket, requests."""
    # The daemon of a version before says nothing of peers.
    places = {name: rates.get(f"{name}_bytes_per_second", 0.0) for name in _SOURCES}
    if any(places.values()):
        yield f"read {size_text(sum(places.values()))}/s, " + ", ".join(
            f"from {name} {size_text(rate)}/s" for name, rate in places.items() if rate
        )
    else:
        yield "no reads"
    often = rates["requests_per_second"]
    requests = f"{often:.1f} requests/s" if often >= 1 else f"{often * 60:.0f} requests a minute"
    yield (
        f"downloads {size_text(rates['fetched_bytes_per_second'])}/s, "
        f"uploads {size_text(rates['sent_bytes_per_second'])}/s, {requests}"
    )


def _day_lines(costs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the requests of a day at the present rate, with their cost where the prices are known."""
    if costs.get("rate_seconds", 0.0) < _RATE_SECONDS:
        return
    class_a, class_b = costs["class_a_per_day"], costs["class_b_per_day"]
    words = (
        f"at the rate of the last {seconds_text(costs['rate_seconds'])}: class A {class_a}, class B {class_b}"
    )
    if not costs["prices"]:
        yield from [words] if class_a or class_b else ()
        return
    kinds = costs["dollars_per_day_by_kind"].items()
    parts = ", ".join(
        f"{REQUEST_VERBS.get(kind, kind)} {dollars:.2f}" for kind, dollars in kinds if dollars >= _CENT
    )
    if class_a or class_b:
        yield f"about ${costs['dollars_per_day']:.2f}{f' ({parts})' if parts else ''} {words}; {costs['prices']}"


# ---- how it is set up

_OUTLIVES = "a keeper starts it again; programs wait, and see no error"
_ENDS = "the mount ends with its daemon, and open files fail: it has no keeper"


def _mount(status: Mapping[str, Any]) -> Iterator[Row]:
    if status.get("state", "ok") != "ok":
        yield "state", str(status["state"])
    options = status.get("options", {})
    mode = "read-only" if options.get("read_only") else "read-write"
    up = seconds_text(float(status.get("uptime_seconds", 0)))
    yield "mount", f"{status.get('source')} at {status.get('mountpoint')}, {mode}"
    served = f", FUSE library {options['fuse_library']}" if options else ""
    yield "daemon", f"fusecache {status.get('version')}, pid {status.get('pid')}, up for {up}{served}"
    if "keep_mounted" in options:
        yield "if it dies", _OUTLIVES if options["keep_mounted"] else _ENDS
    if status.get("log"):
        yield "log", str(status["log"])
    changed = [f"{name}={_option_text(value)}" for name, value in changed_options(options).items()]
    if changed:
        yield "options", ", ".join(changed)


def _option_text(value: Any) -> str:
    return "[" + " ".join(value) + "]" if isinstance(value, list) else str(value)


def _cache_lines(status: Mapping[str, Any]) -> Iterator[str]:
    if cache := status.get("cache"):
        limit = cache["limit_bytes"]
        share = f" ({cache['used_bytes'] / limit:.0%})" if limit else ""
        waiting = f", not uploaded {size_text(cache['staging_bytes'])}" if cache["staging_bytes"] else ""
        yield (f"{size_text(cache['used_bytes'])} of {size_text(limit)}{share}{short_text(status)}{waiting}")


# ---- since the start


def _count_lines(status: Mapping[str, Any]) -> Iterator[str]:
    cache, requests, costs = (status.get(name, {}) for name in ("cache", "requests", "costs"))
    reads = cache["hits"] + cache["misses"] if cache else 0
    if reads:
        size = size_text(sum(cache["bytes_from"].values()))
        times = _times_text(status["call_times"]["read"])
        yield f"{count_text(reads, 'read')}, {size}; hits {cache['hits'] / reads:.1%}; {times}"
    if cache:
        causes = [
            f"{_CAUSES.get(name, name)} {size_text(size)}"
            for name, size in cache["bytes_by_cause"].items()
            if size
        ]
        causes += [f"evicted {size_text(cache['evicted_bytes'])}"] if cache["evicted_bytes"] else []
        if causes:
            yield f"fetched {', '.join(causes)}"
        waited = [(name, seconds) for name, seconds in cache["wait_seconds"].items() if seconds >= 0.001]
        if waited:
            waited.sort(key=lambda row: -row[1])
            yield "waited for " + ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in waited)
    made = [f"{verb} {requests[name]}" for name, verb in REQUEST_VERBS.items() if requests.get(name)]
    if made:
        cost = f": about ${costs['dollars']:.4f}; {costs['prices']}" if costs.get("prices") else ""
        yield f"{', '.join(made)}{cost}"
    if gets := status.get("request_times", {}).get("get"):
        yield f"time of a GET: {_times_text(gets)}"
    yield from event_lines({**status, **cache})


def _times_text(times: Mapping[str, Any]) -> str:
    return f"p50 {seconds_text(times['p50_seconds'])}, p99 {seconds_text(times['p99_seconds'])}"


# ---- warm-ups and hints


def _warm_ups(jobs: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for job in jobs[-MAX_LINES:]:
        yield "warm-up", f"{', '.join(job['paths'][:3])}: {job['state']}, {warm_text(job)}"


def _hints(hints: Mapping[str, Any]) -> Iterator[Row]:
    jobs = shown_jobs(hints)
    for job in jobs[:MAX_LINES]:
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
    if len(jobs) > MAX_LINES:
        yield "", f"and {count_text(len(jobs) - MAX_LINES, 'job')} more"


def status(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the status of a path, of the only mount, or of each mount in a folder; return the exit status."""
    places, is_folder = mounts_meant(arguments.path)
    if not is_folder:
        found = status_of(places[0])
        text = at_mount(status_view(found), found["mountpoint"])
        sys.stdout.write(json.dumps(found, indent=2) + "\n" if arguments.json else text)
        return 0
    rows, failures = [], 0
    for place in places:
        try:
            found = status_of(place)
        except MountError as exc:
            failures += 1
            say_error(exc)
            continue
        rows.append(found)
        if not arguments.json:
            sys.stdout.write(f"{printable(str(place))}: {at_mount(status_view(found), found['mountpoint'])}")
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    return int(failures > 0)


def status_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the status of a path. For a symlink in a mount: the target's status, with the link's own as `link`.

    If the target has no status, return the link's own, with the reason as `target_error`. Raises MountError.
    """
    mount, inner = resolve_in_mount(path, follows=False)
    own = _ask(path, mount, inner)
    if "link_to" not in own.get("there", {}):
        return own
    if not own["there"].get("link_followed", True):
        return {**own, "target_error": "the link is not followed (option symlinks)"}
    try:
        target = _ask(path, *resolve_in_mount(path))
    except MountError as exc:
        return {**own, "target_error": str(exc)}
    return {**target, "link": {name: own[name] for name in ("path", "state", "there")}}


def _ask(path: str | os.PathLike[str], mount: Mount, inner: str) -> dict[str, Any]:
    answer = ask(mount, "status", inner)
    if answer.result not in ("ok", "durable"):
        # The error below starts with the full path.
        message = answer.message.removeprefix(f"{inner}: ") if inner else answer.message
        raise MountError(f"{path}: {message or answer.result}")
    return answer.status
