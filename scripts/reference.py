"""Writes docs/reference.md from the code: commands, options of a mount, exit statuses, JSON keys of `status`.

`python -m scripts.reference`; a test compares the page with what the code says now.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import trio

from fusecache.cli.main import make_parser
from fusecache.config.bucket_options import TABLE_KEYS as BUCKET_KEYS
from fusecache.config.endpoint_options import TABLE_KEYS
from fusecache.config.options import FIELDS, VARIABLE_PREFIX, add_flags
from tests.support import ROOT
from tests.support.node import Bucket, running_node

PAGE = ROOT / "docs" / "reference.md"

# When to change each option of a mount. An option that is missing here, or is no option any more, fails a test.
REASONS = {
    "source": "Always given, except with several buckets.",
    "mountpoint": "Always given.",
    "endpoint_url": "Set it for a store that is not AWS, if no variable names its endpoint.",
    "region": "Set it if AWS answers that the bucket is in another region.",
    "profile": "Set it if the keys are in a profile of ~/.aws that is not the default.",
    "write_profile": "Set it if one pair of keys may only read and another one may write.",
    "credentials_file": "Set it for keys that expire, or that a service reads from a file.",
    "cache_dir": "Set it to a directory on the node's fastest local disk.",
    "cache_size": "Set it if other programs need the disk, or if several mounts share it.",
    "memory": "Raise it if `status` shows that all `buffers` are in use; lower it on a small node.",
    "read_only": "Set it for jobs that only read, or if the keys may only read.",
    "allow_other": "Set it if users other than the one who mounts read the files.",
    "uid": "Set it if root mounts for another user.",
    "gid": "Set it if a group works with the files.",
    "umask": "Set it to 002 if a group may write, to 077 if others may not read.",
    "attribute_seconds": "Raise it if other clients rarely write: fewer LISTs; lower it to see their files sooner.",
    "immutable": "Set it for data sets: names that are known then cost no LISTs.",
    "posix_metadata": "Set it if programs need the times or modes that other nodes set.",
    "pin": "Set it for files that a job must find in the cache when it starts again, such as its newest checkpoint.",
    "symlinks": "Set it to all if you trust each writer of the bucket, to none to follow no symlink.",
    "fuse_library": "Set it to pyfuse3 if the daemon's own library fails on your kernel.",
    "keep_mounted": "Turn it off if something else starts the daemon again.",
    "settle_seconds": "Lower it if other nodes wait for files; raise it for programs that rewrite files at once.",
    "temp_names": "Set it if your programs rename from names that the list lacks.",
    "order_last": "Set it if your programs mark complete directories with names that the list lacks.",
    "delete_delay": "Set it for trainers that delete the old checkpoint before the new one is complete.",
    "drain_timeout": "Lower it if the node goes away some minutes after the stop.",
    "conflict": "Set it to last-wins if the store knows no `If-Match`, or the newest version always counts.",
    "fsync": "Set it to remote if another node goes on as soon as fsync returns.",
    "local_only": "Set it for logs and scratch files that only this node needs.",
    "credentials_from": "Set it if variables like `X_BUCKET_NAME` describe the bucket.",
    "start_without": "Set it to keys for a service, to nothing if a job must not begin without the bucket.",
    "unsigned": "Set it for public data, if you have no keys.",
    "requester_pays": "Set it if the bucket's owner asks for it.",
    "sse": "Set it if a rule demands another encryption than the bucket's default.",
    "storage_class": "Set it for data that is rarely read.",
    "upload_rate": "Set it if uploads take the bandwidth of other programs.",
    "download_rate": "Set it if reads take the bandwidth of other programs or nodes.",
    "read_timeout": "Raise it if a job shall outlive longer outages of the bucket; lower it if it shall fail soon.",
    "log_level": "Set it to debug to report a problem.",
    "log_format": "Set it to json if a collector reads the log.",
    "metrics_port": "Set it if a Prometheus scrapes this node.",
}

# What each key of `fusecache status --json` means. A key that is missing here, or is no key any more, fails a test.
STATUS_KEYS = {
    "verdict": "`OK`, `DEGRADED` (it works, but something is wrong) or `ACTION` (you must act)",
    "reasons": "why it is not `OK`, the gravest first",
    "state": "the mount: `ok`, `auth-failed` or `journal-failed`; with a path: the state of that path",
    "version": "version of the daemon",
    "pid": "process id of the daemon",
    "source": "the bucket and prefix",
    "mountpoint": "where it is mounted",
    "read_only": "whether the mount refuses writes",
    "endpoint": "URL of the bucket's endpoint, or `AWS`; of several endpoints the one that takes the writes; empty "
    "for several buckets",
    "keys_from": "where the keys for reading come from",
    "write_keys_from": "where the keys for writing come from",
    "config_not_applied": "why the configuration file does not count for this mount; empty if it counts",
    "keys_error": "why refused keys could not be reloaded; empty if nothing failed",
    "denied_seconds": "how long the bucket has refused the keys",
    "start_failure": "why the mount started without the bucket; empty once the bucket answered",
    "writes_held": "why the mount writes nothing to the bucket: it started without it, and it has not answered, "
    "or failed a check of the start; empty if it writes",
    "failed_tasks": "background tasks that failed unexpectedly: failures and last error by name",
    "conditional_writes": "what the store does with If-Match of a write: `kept`, `refused`, `ignored`, "
    "`not-of-parts` (ignored for a file that is uploaded in parts), `unknown`; "
    "empty if the mount is read-only",
    "endpoints": "a row for each endpoint, if there are several. `state` is `ok`, `slow` or `failing`; "
    "`gives_names`: it answers LIST and HEAD; `latency_seconds`: mean time to the first byte; `unused_copies`: "
    "objects not read there, by cause",
    "request_times": "time of the requests to the bucket, by kind, with the same keys as `call_times`",
    "buckets": "a row for each bucket of a mount of several, with its own `state`, `read_only`, `keys_from`, "
    "`denied_seconds`, `refused_seconds`, `unanswered_seconds`, `start_failure`, `conditional_writes`, `writes_held`, "
    "`pending_files`, `waiting_for`; `oldest_pending_seconds` counts changes that fail",
    "options": "every option in force",
    "options_changed": "options that differ from their default",
    "fuse_library": "what serves the mount: `own` or `pyfuse3`",
    "outlives_daemon": "whether a keeper starts the daemon again if it dies, and the mount goes on",
    "kernel": "kernel settings that were applied, and settings that the kernel refused",
    "uptime_seconds": "since the mount began",
    "pending_files": "changes that the bucket does not have yet: files and changes of names",
    "pending_contents": "how many of them are files with their bytes",
    "pending_bytes": "bytes of those files",
    "left_bytes": "bytes of them that were not sent yet",
    "deferred_files": "deletes that wait on purpose: `delete_delay`, or a program here has the file open",
    "deferred_seconds": "how long they wait at most",
    "oldest_pending_seconds": "age of the oldest pending change that does not wait on purpose",
    "requested_files": "changes in requests right now",
    "requested_bytes": "bytes of those requests",
    "requested_seconds": "age of the longest of those requests",
    "uploading": "files that are being uploaded: path, bytes sent, bytes in all",
    "waiting": "changes that failed and are retried: path, cause, code (as `waiting_code`), remedy",
    "dirty_files": "files that are being written",
    "dirty_bytes": "their bytes",
    "exposed_bytes": "bytes that exist only on this node: dirty, pending, rejected and local-only",
    "upload_bytes_per_second": "upload rate of the last 10 s",
    "seconds_left": "estimate until everything is uploaded; null while an error holds something up",
    "local_only_files": "files that match `local_only`",
    "local_only_bytes": "their bytes",
    "local_only": "the first of their paths",
    "waiting_for": "an error that keeps a change from the bucket, preferably one that a person can fix; or empty",
    "waiting_code": "that error in one word, such as `auth-failed` or `unavailable`; or empty",
    "rejected": "changes that the bucket refused, and files that cannot be read back for upload: the newest paths",
    "rejected_files": "how many there are",
    "rejected_contents": "how many of them are files whose content the bucket refused",
    "unreadable_files": "how many of them are files that cannot be read back from the cache directory",
    "conflicts": "names that another client changed first: path, name of our copy, cause",
    "conflict_files": "how many there are",
    "shortages": "writes of the last hour that found no space (ENOSPC)",
    "orphans": "quarantined files whose writer never closed them",
    "suspects": "quarantined files that a power cut may have damaged",
    "aside_bytes": "bytes of quarantined files",
    "call_times": "time of each `read`, `open` and `close` of programs: `p50_seconds`, `p99_seconds`, `sum_seconds`; "
    "`counts`: how many took at most 64 µs, 256 µs and so on, each bound 4 times the one before; the last counts all",
    "inodes": "inodes in the daemon's memory",
    "passed_through_files": "open files that the kernel reads by itself, so that their reads are not counted",
    "hidden_keys": "keys in the directories listed so far that the mount does not show, as no path can name them",
    "handed_out_files": "cache files that `loader` reads by itself, so that their reads are not counted",
    "cache.hits": "reads served from memory or disk",
    "cache.misses": "reads that waited for the bucket",
    "cache.requests": "GETs of the cache, retries included",
    "cache.bytes_by_cause": "bytes fetched, by cause: `demand`, `hint`, `readahead`",
    "cache.bytes_read": "bytes that readers got",
    "cache.bytes_from": "of these, by where they were when the read came: `memory`, `disk`, `bucket`",
    "cache.wait_seconds": "seconds that readers waited, by cause: `network`, `queue`, `disk`, `metadata`",
    "cache.waiting_reads": "reads that wait for the bucket right now",
    "cache.longest_wait_seconds": "the longest of them",
    "cache.evicted_blocks": "blocks evicted from the disk",
    "cache.evicted_bytes": "their bytes",
    "cache.used_bytes": "bytes of cached blocks on the disk",
    "cache.reserved_bytes": "bytes reserved for blocks that are being written",
    "cache.staging_bytes": "bytes of files that the bucket does not have yet",
    "cache.limit_bytes": "`cache_size`",
    "cache.usable_bytes": "what of it the disk has space for, bytes in use included",
    "cache.buffers": "memory buffers",
    "cache.buffers_in_use": "memory buffers in use",
    "cache.errors": "GETs that failed",
    "journal_error": 'why writes are refused until the journal can be written; "" if it can',
    "listings.memory_bytes": "bytes of listings that the cache disk refused, which are in memory",
    "listings.refused": "writes and reads of listings that the cache disk refused",
    "listings.dropped": "listings dropped because the cache disk lost them, or for lack of memory",
    "cache.disk_errors": "errors of the cache disk",
    "cache.checksum_failures": "cached blocks that failed their checksum and were fetched again",
    "cache.uncached": "fetches that could not be kept on the disk",
    "cache.not_admitted": "fetches not kept because those on the disk are worth more",
    "cache.stalls": "GETs that went silent and were repeated on another connection",
    "cache.latency_p50_seconds": "median time of a read",
    "cache.latency_p99_seconds": "99th percentile of the time of a read",
    "cache.first_byte_p50_seconds": "median time to the first byte of a GET",
    "cache.first_byte_p99_seconds": "99th percentile of the time to the first byte of a GET",
    "requests.lists": "ListObjectsV2",
    "requests.heads": "HeadObject",
    "requests.gets": "GetObject",
    "requests.puts": "PutObject",
    "requests.creates": "CreateMultipartUpload",
    "requests.parts": "UploadPart",
    "requests.completes": "CompleteMultipartUpload",
    "requests.aborts": "AbortMultipartUpload",
    "requests.copies": "CopyObject and UploadPartCopy",
    "requests.deletes": "DeleteObject",
    "requests.errors": "requests that failed",
    "requests.bytes_read": "bytes of the bodies of GETs",
    "requests.bytes_written": "bytes of objects that the bucket accepted",
    "requests.bytes_sent": "bytes of bodies sent, those of requests under way included",
    "requests.class_a": "requests that stores bill as class A",
    "requests.class_b": "requests that stores bill as class B",
    "requests.prices": "whose prices all dollars are; empty if this store's are unknown: all dollars are null then",
    "requests.dollars": "their cost in dollars",
    "requests.class_a_per_day": "class A requests of a day at the rate of the last 5 minutes",
    "requests.class_b_per_day": "class B requests of a day at that rate",
    "requests.dollars_per_day": "their cost in dollars",
    "requests.dollars_per_day_by_kind.lists": "of these, LISTs",
    "requests.dollars_per_day_by_kind.writes": "of these, the other class A requests",
    "requests.dollars_per_day_by_kind.heads": "of these, HEADs",
    "requests.dollars_per_day_by_kind.gets": "of these, GETs",
    "requests.rate_seconds": "how long the rate was measured: less than 300 after a start",
    "warming": "warm-ups that run or ended lately",
    "hints.jobs": "jobs that sent hints: rate, distance, hits",
    "hints.predicted_stalls": "pieces under way that will come after their step has begun",
    "hints.exact_bytes": "bytes in memory that were fetched as exact ranges",
    "hints.forgotten_jobs": "jobs dropped because they were silent",
    "rates.seconds": "how long these rates were measured: the last minute, or since the start",
    "rates.reads_per_second": "reads of programs",
    "rates.read_bytes_per_second": "their bytes",
    "rates.memory_bytes_per_second": "of these, bytes that were in memory",
    "rates.disk_bytes_per_second": "bytes that were in the disk cache",
    "rates.bucket_bytes_per_second": "bytes for which the reader waited for the bucket",
    "rates.fetched_bytes_per_second": "bytes of the bodies of GETs",
    "rates.sent_bytes_per_second": "bytes of bodies sent",
    "rates.requests_per_second": "requests to the bucket",
    "busy_files": "the files that programs read most in the last 10 to 20 s: path, read_bytes_per_second",
    "closes_waiting.files": "closes that wait for space",
    "closes_waiting.named": "the first of them: path, process, seconds",
    "closes_waiting.high_water_bytes": "staged bytes above which a close waits",
    "unanswered_seconds": "how long the bucket has not answered; 0 while it does",
    "refused_seconds": "how long the bucket has refused the keys; 0 while it does not",
}
# Those that the daemon adds to the engine's.
DAEMON_KEYS = frozenset(list(STATUS_KEYS)[: list(STATUS_KEYS).index("uptime_seconds")])
# Keys whose values are taken as a whole: their own keys are names, causes or paths.
_WHOLE = (
    "call_times",
    "request_times",
    "failed_tasks",
    "options",
    "options_changed",
    "kernel",
    "cache.bytes_by_cause",
    "cache.bytes_from",
    "cache.wait_seconds",
    "shortages",
)

# Commands that take every option of a mount.
_MOUNTING = ("mount", "run", "doctor")


def page() -> str:
    """The page as the code says it now."""
    return "\n".join(
        [
            "# Reference",
            "",
            "Written from the code by `python -m scripts.reference`. Do not edit.",
            "",
            *_commands(),
            *_options(),
            *_table_keys(
                "endpoint",
                TABLE_KEYS,
                "one table for each other endpoint of the same data set:",
                "[read from several endpoints](how-to/several-endpoints.md).",
            ),
            *_table_keys(
                "bucket",
                BUCKET_KEYS,
                "one table for each bucket, instead of `source`:",
                "[mount several buckets at once](how-to/several-buckets.md).",
            ),
            *_json_keys(),
        ]
    )


def status_keys() -> set[str]:
    """The keys that the engine of a node really has; those of the daemon around it are not among them."""

    async def collect() -> Mapping[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            async with running_node(Bucket(), Path(directory) / "cache") as user:
                return user.fs.statistics()

    return set(flat(trio.run(collect)))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in _WHOLE:
            yield from flat(value, f"{name}.")
        else:
            yield name


def _commands() -> Iterator[str]:
    yield "## Commands"
    yield ""
    (choices,) = (each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
    for name, parser in choices.choices.items():
        yield f"### fusecache {name}"
        yield ""
        yield str(parser.description)
        yield ""
        yield "| argument | meaning |"
        yield "|---|---|"
        options = _option_flags() if name in _MOUNTING else set()
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or action.dest == "help":
                continue
            if not options & set(action.option_strings):
                yield f"| `{_spelling(action)}` | {_cell(action.help or '')} |"
        yield ""
        if name in _MOUNTING:
            yield "And every [option of a mount](#options-of-a-mount), as a flag."
            yield ""
        yield _exit_status(str(parser.epilog))
        yield ""


def _option_flags() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def _exit_status(epilog: str) -> str:
    return epilog[epilog.index("Exit status") :]


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(action.option_strings) + value


def _options() -> Iterator[str]:
    yield "## Options of a mount"
    yield ""
    yield "Each is a flag (`--cache-size`), a key of the TOML file (`cache_size`), and a variable"
    yield f"(`{VARIABLE_PREFIX}CACHE_SIZE`). A flag wins over the variable, the variable over the file."
    yield ""
    yield "| option | meaning [default] | when to change it |"
    yield "|---|---|---|"
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    helps = {action.dest: action.help or "" for action in parser._actions}
    assert REASONS.keys() == FIELDS.keys(), REASONS.keys() ^ FIELDS.keys()
    for name, item in FIELDS.items():
        text = helps.get(name) or item.metadata["help"]
        yield f"| `{name}` | {_cell(text)} | {REASONS[name]} |"
    yield ""


def _table_keys(table: str, keys: Mapping[str, Any], what: str, page: str) -> Iterator[str]:
    yield f"## Keys of {'an' if table[0] == 'e' else 'a'} [[{table}]] table"
    yield ""
    yield f"In the TOML file, {what}"
    yield page
    yield ""
    yield "| key | meaning [default] |"
    yield "|---|---|"
    for name, item in keys.items():
        default = item.metadata["default_text"] or (
            {False: "no", (): "none"}.get(item.default) or f"{item.default:g}"
        )
        yield f"| `{name}` | {_cell(item.metadata['help'])} [{default}] |"
    yield ""


def _json_keys() -> Iterator[str]:
    yield "## JSON keys of status"
    yield ""
    yield "`<mount>/.fusecache/stats.json` has the same. Counters count since the mount began; sizes are in bytes."
    yield ""
    yield "| key | meaning |"
    yield "|---|---|"
    for name, text in STATUS_KEYS.items():
        yield f"| `{name}` | {text} |"
    yield ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("%%", "%").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
