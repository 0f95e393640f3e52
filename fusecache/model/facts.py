"""What a status says of a mount: each fact once, with its meaning. A key ends in its unit; a count has none.

`fusecache status --json` has these keys, those with a dot in a group. `docs/reference.md` is written from the table,
and the metrics of Prometheus take their help from it.
"""

from typing import NamedTuple

# What the daemon knows around the engine.
DAEMON_FACTS = {
    "verdict": "`OK`, `DEGRADED` (it works, but something is wrong) or `ACTION` (you must act)",
    "reasons": "why it is not `OK`, the gravest first",
    "state": "the mount: `ok`, `auth-failed` or `journal-failed`; with a path: the state of that path",
    "version": "version of the daemon",
    "pid": "process id of the daemon",
    "source": "the bucket and prefix",
    "mountpoint": "where it is mounted",
    "log": "file of the daemon's log, or the command that shows it; empty on a terminal",
    "endpoint": "URL of the bucket's endpoint, or `AWS`; of several endpoints the one that takes the writes",
    "keys_from": "where the keys come from; while writes alone are refused, those for writing",
    "config_not_applied": "why the configuration file does not count for this mount; empty if it counts",
    "keys_error": "why refused keys could not be reloaded; empty if nothing failed",
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
    "peers": "the other nodes. `own_address`: this one in their list, empty if it is "
    "not; `nodes`: how many there are; `list_error`: why the list cannot be read, empty if it can; by address: "
    "`received_bytes`, `received_pieces` (each saved a GET of the bucket), `requests`, `refusals` (a node had too much "
    "to do, or the bucket lost the version), `failures`; `resting`: nodes that are not asked now, and why; "
    "`failing`: how many of them failed the last time",
    "request_times": "time of the requests to the bucket, by kind, with the same keys as `call_times`",
    "options": "every option in force; `fuse_library`: what serves the mount; `keep_mounted`: whether a keeper starts "
    "the daemon again if it dies, and the mount goes on",
    "kernel": "kernel settings that were applied, and settings that the kernel refused",
}
# Kinds of requests, as the text of a status names them.
REQUEST_VERBS = {
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
ENGINE_FACTS = {
    "uptime_seconds": "since the mount began",
    "exposed_bytes": "bytes that exist only on this node: dirty, pending, rejected and local-only",
    "pending_files": "changes that the bucket does not have yet: files and changes of names",
    "pending_contents": "how many of them are files with their bytes",
    "pending_bytes": "bytes of those files",
    "deferred_files": "deletes that wait on purpose: `delete_delay`, or a program here has the file open",
    "deferred_seconds": "how long they wait at most",
    "oldest_pending_seconds": "age of the oldest pending change that does not wait on purpose",
    "uploading": "files that are being uploaded: path, bytes, sent, under_way (bytes in requests right now), "
    "request_seconds (age of the oldest of these requests)",
    "pending_checkpoints": "checkpoints of which the bucket lacks files still, at most 20: path; files, bytes and sent "
    "of these files",
    "waiting": "changes that failed and are retried: path, cause, code (as `waiting_code`), remedy",
    "waiting_for": "an error that keeps a change from the bucket, preferably one that a person can fix; or empty",
    "waiting_code": "that error in one word, such as `auth-failed` or `unavailable`; or empty",
    "upload_bytes_per_second": "upload rate of the last 10 s",
    "seconds_left": "estimate until everything is uploaded; null while an error holds something up",
    "writing": "files that programs write now, at most 50: path, bytes",
    "dirty_files": "files that are being written",
    "dirty_bytes": "their bytes",
    "local_only_files": "files that match `local_only`",
    "local_only_bytes": "their bytes",
    "rejected": "changes that the bucket refused, and files that cannot be read back for upload, with the same keys as "
    "`waiting`: the newest",
    "rejected_files": "how many there are",
    "conflicts": "names that another client changed first: path, name of our copy, cause",
    "conflict_files": "how many there are",
    "orphans": "quarantined files whose writer never closed them",
    "suspects": "quarantined files that a power cut may have damaged",
    "aside_bytes": "bytes of quarantined files, which only this node has",
    "shortages": "writes of the last hour that found no space (ENOSPC)",
    "closes_waiting": "closes that wait for space: `files`, the first of them (`named`: path, process, seconds), and "
    "the staged bytes above which a close waits",
    "journal_error": 'why writes are refused until the journal can be written; "" if it can',
    "unanswered_seconds": "how long the bucket has not answered; 0 while it does",
    "refused_seconds": "how long the bucket has refused the keys, for reading or for writing; 0 while it does not",
    "call_times": "time of each `read`, `open` and `close` of programs: `p50_seconds`, `p99_seconds`, `sum_seconds`; "
    "`counts`: how many took at most 64 µs, 256 µs and so on, each bound 4 times the one before; the last counts all",
    "cache.hits": "reads served from memory or disk",
    "cache.misses": "reads that waited for the bucket or a peer",
    "cache.bytes_from": "bytes that readers got, by where they were when the read came: `memory`, `disk`, `peer` "
    "(another node), `bucket`",
    "served_bytes": "bytes that the daemon handed to `fusecache serve`, by who asked there: `peers`, `programs`",
    "cache.bytes_by_cause": "bytes fetched, by cause: `demand`, `hint`, `readahead`",
    "cache.wait_seconds": "seconds that readers waited, by cause: `network`, `queue`, `disk`, `metadata`",
    "cache.limit_bytes": "what the cache may use: `cache_size`, or less if the disk has no space for that",
    "cache.used_bytes": "bytes of cached blocks on the disk, bytes being written included",
    "cache.staging_bytes": "bytes of files that the bucket does not have yet",
    "cache.evicted_bytes": "bytes evicted from the disk",
    "cache.stalls": "GETs that went silent and were repeated on another connection",
    "cache.checksum_failures": "cached blocks that failed their checksum and were fetched again",
    "cache.disk_errors": "errors of the cache disk",
    "cache.uncached": "fetches that could not be kept on the disk",
    "read_directly": "open files that the `kernel`, and cache files that `loader` reads by itself: these reads are not "
    "counted, nor are files that are closed and still mapped, as weights are",
    "reads_waiting": "reads that wait for the bucket right now: `reads`, and `seconds` of the longest",
    "hidden_keys": "keys in the directories listed so far that the mount does not show, as no path can name them",
    "in_memory": "what the daemon's memory has: `inodes`, and `listing_bytes` that the cache disk refused",
    "requests": "requests to the bucket, by kind: " + ", ".join(f"`{kind}`" for kind in REQUEST_VERBS),
    "request_errors": "requests that failed",
    "received_bytes": "bytes of the bodies of GETs",
    "written_bytes": "bytes of objects that the bucket accepted",
    "costs": "of these requests: `prices`, whose they are; `dollars`; and for a day at the rate of the last 5 minutes "
    "(`rate_seconds`, less after a start) `class_a_per_day`, `class_b_per_day`, `dollars_per_day` and "
    "`dollars_per_day_by_kind`. All dollars are null if this store's prices are unknown",
    "rates": "of the last minute (`seconds`, less after a start): bytes that programs read, by where they were, as "
    "`memory_`, `disk_`, `peer_` and `bucket_bytes_per_second`; traffic with the bucket as `fetched_` and "
    "`sent_bytes_per_second`, and `requests_per_second`",
    "busy_files": "the files that programs read most in the last 10 to 20 s: path, read_bytes_per_second",
    "warming": "warm-ups that run or ended lately",
    "hints": "jobs that sent hints: rate, distance, hits",
}
FACTS = DAEMON_FACTS | ENGINE_FACTS

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


class Metric(NamedTuple):
    """A fact as a metric. own_name: if it is not the key's. label: each entry of the mapping there is one sample.

    about: its meaning, if it is not that of the fact.
    """

    key: str
    kind: str = GAUGE
    own_name: str = ""
    label: str = ""
    about: str = ""

    @property
    def name(self) -> str:
        """The metric's name, without the prefix of all."""
        return self.own_name or self.key.replace(".", "_")


METRICS = (
    Metric("verdict"),
    Metric("uptime_seconds"),
    Metric("refused_seconds"),
    Metric("unanswered_seconds"),
    Metric("exposed_bytes"),
    Metric("aside_bytes", own_name="quarantined_bytes"),
    Metric("pending_files", own_name="pending_changes"),
    Metric("pending_bytes"),
    Metric("oldest_pending_seconds"),
    Metric("dirty_bytes"),
    Metric("upload_bytes_per_second"),
    Metric("rejected_files"),
    Metric("conflict_files"),
    Metric("closes_waiting.files", own_name="closes_waiting"),
    Metric("cache.limit_bytes"),
    Metric("cache.used_bytes"),
    Metric("cache.staging_bytes"),
    Metric("cache.hits", COUNTER),
    Metric("cache.misses", COUNTER),
    Metric("cache.evicted_bytes", COUNTER),
    Metric("cache.disk_errors", COUNTER),
    Metric("cache.checksum_failures", COUNTER),
    Metric("cache.bytes_by_cause", COUNTER, "cache_fetched_bytes", "cause"),
    Metric("cache.wait_seconds", COUNTER, label="cause"),
    Metric("cache.bytes_from", COUNTER, "cache_read_bytes", "source"),
    Metric("requests", COUNTER, label="kind"),
    Metric("request_errors", COUNTER),
    Metric("received_bytes", COUNTER, "request_received_bytes"),
    Metric("written_bytes", COUNTER, "request_sent_bytes"),
    Metric(
        "peers.received_bytes", COUNTER, "peer_received_bytes", "peer", "bytes that each other node has sent"
    ),
    Metric(
        "peers.received_pieces",
        COUNTER,
        "peer_received_pieces",
        "peer",
        "pieces that each other node has sent: each saved a GET of the bucket",
    ),
    Metric("served_bytes", COUNTER, label="requester"),
    Metric(
        "peers.failures",
        COUNTER,
        "peer_failures",
        "peer",
        "requests that each other node did not answer well",
    ),
    Metric("hints.horizon_bytes", GAUGE, "hint_horizon_bytes", "job"),
    Metric("hints.lead_seconds", GAUGE, "hint_lead_seconds", "job"),
    Metric("call_times", HISTOGRAM, "call_seconds", "call"),
    Metric("request_times", HISTOGRAM, "request_seconds", "kind"),
)
