"""How the facts of a mount are judged: OK, DEGRADED (it works, but something is wrong), ACTION (you must act).

Each finding has its reason for the verdict, and its lines for `fusecache status`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fusecache.model.format_text import (
    PERSONS,
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
# A healthy bucket answers a read faster than this.
_LONG_WAIT_SECONDS = 5.0
# What counters count, with what follows: if anything does, a growth degrades the mount for RECENT_SECONDS.
EVENTS = {
    "request_errors": ("request", "failed", ""),
    "stalls": ("read request", "stalled and repeated", ""),
    "checksum_failures": ("block", "of the cache fetched again, because of a wrong checksum", ""),
    "disk_errors": ("I/O error", "of the cache's disk", ": reads go on, uncached"),
    "uncached": ("GET", "not cached, because the cache was full or its disk too slow", ": reads go on"),
    "failed_tasks": ("failure", "of background tasks of the daemon", ", see its log"),
}
RECENT_COUNTS = tuple(name for name, event in EVENTS.items() if event[2])
# Long enough for a probe that runs every few minutes.
RECENT_SECONDS = 600.0
# Quarantined files that take more than 1/4 of the space for written files degrade a mount: sized as documented, that
# has space for two checkpoints and a little more.
QUARANTINE_SHARE = 4
_RECOVER = "see `fusecache recover`"
# Most files or conflicts that a group lists; --json has more.
MAX_LINES = 5
# Codes of files that cannot be read back for upload.
_UNREADABLE = frozenset({"local-disk", "damaged"})
# What the findings of one path take of the mount's status.
_OF_PATHS = (
    "journal_error", "waiting_for", "waiting_code", "refused_seconds", "unanswered_seconds",
    "start_failure", "keys_from", "keys_error", "cache", "options",
)  # fmt: skip


class Judgement(NamedTuple):
    """Something that is wrong. line: for `status`. reason: why the verdict is `level`, if that is not "".

    is_to_do: the line is for a person; else it passes by itself, or is a property of the store or the kernel.
    """

    line: str
    level: str = ""
    reason: str = ""
    is_to_do: bool = True


def judge(status: Mapping[str, Any], recent: Mapping[str, int]) -> dict[str, Any]:
    """Return `verdict` and `reasons`, the gravest first. recent: growth of RECENT_COUNTS in RECENT_SECONDS."""
    found = [*findings(status), *_recent(recent)]
    reasons = {level: [each.reason for each in found if each.level == level] for level in (ACTION, DEGRADED)}
    verdict = next((level for level, texts in reasons.items() if texts), OK)
    return {"verdict": verdict, "reasons": [*reasons[ACTION], *reasons[DEGRADED]]}


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


def event_lines(counts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the events since the start."""
    for name, (noun, words, _) in EVENTS.items():
        if counts.get(name) and name != "failed_tasks":
            yield f"{count_text(counts[name], noun)} {words}"


def findings_of_path(status: Mapping[str, Any]) -> Iterator[Judgement]:
    """Yield what is wrong with one path, and with its bucket."""
    return findings({name: status[name] for name in _OF_PATHS if name in status} | status["there"])


def findings(status: Mapping[str, Any]) -> Iterator[Judgement]:
    """Yield what is wrong with a mount, or with a path of it."""
    if error := status.get("journal_error"):
        yield Judgement(error, ACTION, f"nothing can be written: {error}")
    yield from (*_access(status), *_uploads(status), *_store(status))
    if text := status.get("config_not_applied"):
        yield Judgement(text, DEGRADED, text)
    yield from _waiting(status, _refused_text(status) if status.get("refused_seconds") else "")
    yield from _space(status)
    yield from _changes(status)
    yield from _quarantine(status)
    for name, task in status.get("failed_tasks", {}).items():
        failures = f"failed {count_text(task['failures'], 'time')}: {task['last_error']}"
        yield Judgement(
            f"the daemon's task {name} {failures}; please report it with the traceback in the log"
        )
    yield from (
        Judgement("", DEGRADED, reason) for row in status.get("endpoints", ()) for reason in _endpoint(row)
    )
    yield from _peers(status.get("peers", {}))
    if refused := ", ".join(status.get("kernel", {}).get("refused", ())):
        line = f"the kernel refused {refused}: large reads are slower; the log has the command for root"
        yield Judgement(line, is_to_do=False)


# ---- the bucket


def _access(status: Mapping[str, Any]) -> Iterator[Judgement]:
    """Yield whether the bucket answers, takes the keys, and may be written."""
    failure, silent = status.get("start_failure"), status.get("unanswered_seconds", 0)
    if failure:
        yield Judgement("", DEGRADED, f"started without the bucket: {failure}")
    elif status.get("writes_held"):
        yield Judgement("", ACTION, f"nothing is uploaded: {status['writes_held']}")
    level = "" if failure else DEGRADED
    if status.get("state") == "auth-failed":
        yield Judgement(
            _refused_text(status),
            ACTION,
            f"{_refused_since(status)}: {renewal_text(status.get('keys_from', ''))}",
        )
    elif status.get("refused_seconds"):
        yield Judgement(_refused_text(status), level, _refused_since(status))
    elif silent:
        reason = f"the bucket has not answered for {seconds_text(silent)}"
        line = f"{reason}: the mount shows cached names and sizes; no data is lost"
        yield Judgement(line, level, reason, is_to_do=False)
    if error := status.get("keys_error"):
        yield Judgement("", DEGRADED, f"keys could not be read again: {error}")


def _refused_since(status: Mapping[str, Any]) -> str:
    return f"the bucket has refused the keys for {seconds_text(status.get('refused_seconds', 0))}"


def _refused_text(status: Mapping[str, Any]) -> str:
    names = "the mount shows cached names and sizes" if status.get("unanswered_seconds") else "files are read"
    works = f"{names}, writes continue on this disk"
    if status.get("start_failure"):
        works = "cached files are served by name, other names fail, new ones too"
    error = f". The last reload failed: {status['keys_error']}" if status.get("keys_error") else ""
    return f"{_refused_since(status)}: {works}, no data is lost; {renewal_text(status.get('keys_from', ''))}{error}"


def _uploads(status: Mapping[str, Any]) -> Iterator[Judgement]:
    """Yield what keeps uploads back, unless the bucket does not answer at all."""
    known = ("start_failure", "writes_held", "refused_seconds", "unanswered_seconds")
    cause = status.get("waiting_for")
    if not cause or status.get("state") == "auth-failed":
        return
    if status.get("waiting_code") in ("bucket-missing", "refused"):
        yield Judgement("", ACTION, f"uploads stopped: {cause}")
    elif status.get("oldest_pending_seconds", 0) > _WAITING_SECONDS and not any(map(status.get, known)):
        yield Judgement("", DEGRADED, f"uploads wait: {cause}")


def _store(status: Mapping[str, Any]) -> Iterator[Judgement]:
    if status.get("conditional_writes") in ("refused", "ignored"):
        line = "the store does not honour If-Match: a write may replace another client's version unnoticed"
        yield Judgement(line, is_to_do=False)
    if status.get("conditional_writes") == "not-of-parts":
        line = "takes no If-Match for a file over 64 MiB: two clients that replace it at once lose a version"
        yield Judgement(f"the store {line}", is_to_do=False)


def _endpoint(endpoint: Mapping[str, Any]) -> Iterator[str]:
    name, seconds = endpoint["endpoint"], endpoint["failing_seconds"]
    if seconds > _WAITING_SECONDS:
        yield f"endpoint {name} has failed for {seconds_text(seconds)}: {endpoint['error']}"
    if endpoint["gives_names"] and not endpoint["primary"]:
        yield f"names come from {name}, because the primary endpoint fails: the newest files may be missing"
    if others := endpoint["unused_copies"].get("other bytes", 0):
        yield f"endpoint {name} has other bytes under {count_text(others, 'key')}: its copies of them are not used"


def _peers(peers: Mapping[str, Any]) -> Iterator[Judgement]:
    """Yield why no other node is asked."""
    others = len(peers.get("received_bytes", ()))
    if error := peers.get("list_error"):
        stays = "the nodes known before are asked" if peers["nodes"] else "every read goes to the bucket"
        yield Judgement(
            f"{error}: {stays}; correct it, and it is read again within 10 s",
            DEGRADED,
            f"the list of peers cannot be read: {error}",
        )
    elif others and peers.get("failing") == others:
        # Degrades nothing: the first node that starts has none yet, and `health` decides whether a job begins.
        node, cause = next(iter(peers["resting"].items()))
        yield Judgement(
            f"none of {count_text(others, 'peer')} answers, {node} for one: {cause}; reads go to the bucket: "
            "see `fusecache doctor`"
        )


# ---- reads and writes


def _waiting(status: Mapping[str, Any], known: str) -> Iterator[Judgement]:
    """Yield the changes and the reads that wait. known: the line that says how to renew keys."""
    waiting = status.get("waiting", ())
    for each in waiting[:MAX_LINES]:
        is_new = each["remedy"] not in known
        line = f"{each['path']} waits: {_error_text(each) if is_new else each['cause']}"
        yield Judgement(line, is_to_do=each.get("code") in PERSONS)
    if (cause := status.get("waiting_for")) and not waiting and status.get("pending_files"):
        yield Judgement(f"uploads wait: {cause}", is_to_do=status.get("waiting_code") in PERSONS)
    reads = status.get("reads_waiting", {"reads": 0, "seconds": 0.0})
    if reads["reads"] and reads["seconds"] >= _LONG_WAIT_SECONDS:
        line = (
            f"{_wait_text(reads['reads'], 'read')} for the bucket, the longest for {seconds_text(reads['seconds'])}: "
            "the bucket or the network is slow or down; after a minute without an answer, reads fail"
        )
        yield Judgement(line, is_to_do=False)


def _error_text(change: Mapping[str, str]) -> str:
    return change["cause"] + (f": {change['remedy']}" if change["remedy"] else "")


def _wait_text(count: int, noun: str) -> str:
    return f"{count_text(count, noun)} {'waits' if count == 1 else 'wait'}"


def _space(status: Mapping[str, Any]) -> Iterator[Judgement]:
    """Yield the writes that found no space, and the closes that wait for it."""
    shortages, closes = status.get("shortages", {}), status.get("closes_waiting", {})
    if shortages.get("files"):
        level = ACTION if shortages["seconds"] < RECENT_SECONDS else ""
        reason = f"no space for {count_text(shortages['files'], 'write')}: {space_remedy(status)}"
        yield Judgement(_shortage_text(shortages, status), level, reason)
    if closes.get("files"):
        longest = closes["named"][0]
        yield Judgement(
            f"{_wait_text(closes['files'], 'close')} for space in the cache, the longest for "
            f"{seconds_text(longest['seconds'])} ({longest['path']}, process {longest['process']}): pending files take "
            f"{size_text(status['cache']['staging_bytes'])}, and above {size_text(closes['high_water_bytes'])} close "
            "waits for uploads; raise --cache-size to raise this limit"
        )


def _shortage_text(shortages: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    cache, size, remedy = status.get("cache"), shortages["bytes"], space_remedy(status)
    if cache and not short_text(status) and size * 100 > cache["limit_bytes"] * STAGING_SHARE_PERCENT:
        share = f"files that wait for upload may use {STAGING_SHARE_PERCENT} % at most"
        remedy = f"raise --cache-size: of its {size_text(cache['limit_bytes'])}, {share}"
    return (
        f"{count_text(shortages['files'], 'write')} failed with ENOSPC, the last {shortages['path']}"
        f"{f' ({size_text(size)})' if size else ''}, {seconds_text(shortages['seconds'])} ago: {remedy}"
    )


def space_remedy(status: Mapping[str, Any]) -> str:
    """Return what gives writes space again."""
    short = short_text(status)
    grow = "free space on the disk of the cache" if short else "raise --cache-size"
    if _hold_space(status):
        return f"{grow}, or restore or delete unfinished files: see `fusecache recover`{short}"
    return f"{grow}, or wait for uploads{short}"


def _hold_space(status: Mapping[str, Any]) -> bool:
    """Return whether quarantined files may soon leave writers without space."""
    return bool(status.get("aside_bytes", 0) * QUARANTINE_SHARE > _staging_bytes(status))


def _staging_bytes(status: Mapping[str, Any]) -> int:
    return int(status.get("cache", {}).get("limit_bytes", 0)) * STAGING_SHARE_PERCENT // 100


def refused_changes(status: Mapping[str, Any]) -> int:
    """Return how many of the rejected changes the bucket refused; the others cannot be read here for upload."""
    unreadable = sum(each["code"] in _UNREADABLE for each in status.get("rejected", ()))
    return int(status.get("rejected_files", 0)) - unreadable


def _changes(status: Mapping[str, Any]) -> Iterator[Judgement]:
    """Yield the changes that the bucket will not have without a person. failed: those of a path."""
    rejected, conflicts = status.get("rejected", ()), status.get("conflict_files", 0)
    if refused := refused_changes(status):
        yield Judgement("", ACTION, f"the bucket rejected {count_text(refused, 'change')}: {_RECOVER}")
    if unreadable := status.get("rejected_files", 0) - refused:
        files = count_text(unreadable, "file")
        reason = f"{files} cannot be read from the cache directory for upload: {_RECOVER}"
        yield Judgement("", ACTION, reason)
    for each in rejected[:MAX_LINES]:
        yield Judgement(f"{each['path']} was not uploaded, and is not tried again: {_RECOVER}")
    for each in status.get("failed", ())[:MAX_LINES]:
        yield Judgement(f"{each['path']}: {_error_text(each)}")
    if conflicts:
        yield Judgement("", ACTION, f"{count_text(conflicts, 'conflict')} with another client: {_RECOVER}")
    for each in status.get("conflicts", ())[:MAX_LINES]:
        kept = f"our version is {each['kept_as']}" if each["kept_as"] else "our change was dropped"
        yield Judgement(f"{each['path']}: another client changed it first; {kept}")


def _quarantine(status: Mapping[str, Any]) -> Iterator[Judgement]:
    orphans, suspects = status.get("orphans", 0), status.get("suspects", 0)
    if orphans:
        yield Judgement(f"{count_text(orphans, 'unfinished file')} in quarantine: {_RECOVER}")
    if suspects:
        line = f"{count_text(suspects, 'suspect file')} in quarantine: {_RECOVER}"
        yield Judgement(line, ACTION, f"{count_text(suspects, 'file')} damaged by a crash: {_RECOVER}")
    if _hold_space(status):
        holds = f"{count_text(orphans + suspects, 'unfinished file')} {'holds' if orphans + suspects == 1 else 'hold'}"
        space = f"{size_text(status['aside_bytes'])} of the {size_text(_staging_bytes(status))}"
        yield Judgement("", DEGRADED, f"{holds} {space} for files that wait for upload: {_RECOVER}")


def _recent(recent: Mapping[str, int]) -> Iterator[Judgement]:
    for name in RECENT_COUNTS:
        if count := recent.get(name):
            noun, words, consequence = EVENTS[name]
            yield Judgement("", DEGRADED, f"{count_text(count, noun)} {words}{consequence}")
