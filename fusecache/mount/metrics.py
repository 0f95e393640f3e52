"""The status of a mount as metrics of Prometheus: one table, and nothing that is counted for them alone.

prometheus-client writes them, as OpenMetrics or as Prometheus' older text; it is imported where it is needed, as only
the extra `metrics` brings it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fusecache.model.latency import BOUNDS_SECONDS
from fusecache.model.verdict import ACTION, DEGRADED, OK

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

PREFIX = "fusecache_"
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
LABELS = ("mount", "bucket")
_VERDICTS = {OK: 0, DEGRADED: 1, ACTION: 2}


class Metric(NamedTuple):
    """A metric, and where the status has it.

    key: dotted key of the status. label: one sample for each entry of the mapping there, under this label.
    """

    kind: str
    name: str
    help: str
    key: str
    label: str = ""


METRICS = (
    Metric(GAUGE, "verdict", "0 OK, 1 DEGRADED: something is wrong, 2 ACTION: you must act.", "verdict"),
    Metric(GAUGE, "uptime_seconds", "Time since the mount began.", "uptime_seconds"),
    Metric(GAUGE, "denied_seconds", "How long the bucket has refused the keys.", "denied_seconds"),
    Metric(GAUGE, "unanswered_seconds", "How long the bucket has not answered.", "unanswered_seconds"),
    # What only this node has.
    Metric(GAUGE, "exposed_bytes", "Bytes that exist only on this node.", "exposed_bytes"),
    Metric(
        GAUGE, "quarantined_bytes", "Bytes of unfinished or doubtful files, only on this node.", "aside_bytes"
    ),
    Metric(GAUGE, "pending_changes", "Changes that the bucket does not have yet.", "pending_files"),
    Metric(GAUGE, "pending_bytes", "Bytes of files that wait for upload.", "pending_bytes"),
    Metric(
        GAUGE,
        "oldest_pending_seconds",
        "Age of the oldest change that does not wait on purpose.",
        "oldest_pending_seconds",
    ),
    Metric(GAUGE, "dirty_bytes", "Bytes of files that are being written.", "dirty_bytes"),
    Metric(GAUGE, "upload_bytes_per_second", "Upload rate of the last 10 s.", "upload_bytes_per_second"),
    Metric(GAUGE, "rejected_files", "Changes that the bucket refused for good.", "rejected_files"),
    Metric(GAUGE, "conflict_files", "Names that another client changed first.", "conflict_files"),
    Metric(GAUGE, "closes_waiting", "Closes that wait for space.", "closes_waiting.files"),
    # The cache.
    Metric(GAUGE, "cache_limit_bytes", "Size of the cache.", "cache.limit_bytes"),
    Metric(GAUGE, "cache_used_bytes", "Bytes of cached blocks on the disk.", "cache.used_bytes"),
    Metric(GAUGE, "cache_staging_bytes", "Bytes of files that wait for upload.", "cache.staging_bytes"),
    Metric(COUNTER, "cache_hits", "Reads that did not wait for the bucket.", "cache.hits"),
    Metric(COUNTER, "cache_misses", "Reads that waited for the bucket.", "cache.misses"),
    Metric(COUNTER, "cache_evicted_bytes", "Bytes evicted from the disk.", "cache.evicted_bytes"),
    Metric(COUNTER, "cache_disk_errors", "Errors of the cache disk.", "cache.disk_errors"),
    Metric(COUNTER, "cache_checksum_failures", "Cached blocks fetched again.", "cache.checksum_failures"),
    Metric(COUNTER, "cache_fetched_bytes", "Bytes fetched, by cause.", "cache.bytes_by_cause", "cause"),
    Metric(COUNTER, "cache_wait_seconds", "Time that readers waited.", "cache.wait_seconds", "cause"),
    Metric(
        COUNTER,
        "cache_read_bytes",
        "Bytes that programs read, by where they were.",
        "cache.bytes_from",
        "source",
    ),
    Metric(COUNTER, "read_bytes", "Bytes that programs read.", "cache.bytes_read"),
    # Requests.
    Metric(COUNTER, "requests", "Requests to the bucket, by kind.", "requests", "kind"),
    Metric(COUNTER, "request_errors", "Requests that failed.", "requests.errors"),
    Metric(COUNTER, "request_received_bytes", "Bytes of the bodies of GETs.", "requests.bytes_read"),
    Metric(COUNTER, "request_sent_bytes", "Bytes of objects that the bucket took.", "requests.bytes_written"),
    # Hints.
    Metric(GAUGE, "hint_horizon_bytes", "Bytes fetched ahead of a job.", "hints.jobs.horizon_bytes", "job"),
    Metric(GAUGE, "hint_lead_seconds", "How far ahead of a job.", "hints.jobs.lead_seconds", "job"),
    Metric(GAUGE, "hint_predicted_stalls", "Pieces that will come too late.", "hints.predicted_stalls"),
    # Times.
    Metric(HISTOGRAM, "call_seconds", "Time of a read, open or close of a program.", "call_times", "call"),
    Metric(HISTOGRAM, "request_seconds", "Time of a request to the bucket.", "request_times", "kind"),
)
# The counts of `requests` that are kinds of requests; the others are sums, bytes and prices.
REQUEST_KINDS = (
    "lists", "heads", "gets", "puts", "creates", "parts", "completes", "aborts", "copies", "deletes",
)  # fmt: skip


def families(status: Mapping[str, Any]) -> "Iterator[Family]":
    """Yield the metrics of a status. A key that this daemon's status does not have gives no sample."""
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )

    labels = [str(status["mountpoint"]), str(status["source"])]
    info = InfoMetricFamily(f"{PREFIX}daemon", "The daemon.", labels=LABELS)
    info.add_metric(labels, {"version": str(status["version"])})
    yield info
    for metric in METRICS:
        name, names = PREFIX + metric.name, (*LABELS, metric.label) if metric.label else LABELS
        if metric.kind == HISTOGRAM:
            histogram = HistogramMetricFamily(name, metric.help, labels=names)
            for more, facts in _samples(status, metric):
                counts = zip((*map(repr, BOUNDS_SECONDS), "+Inf"), facts["counts"], strict=True)
                histogram.add_metric([*labels, *more], list(counts), facts["sum_seconds"])
            yield histogram
            continue
        kind = GaugeMetricFamily if metric.kind == GAUGE else CounterMetricFamily
        family = kind(name, metric.help, labels=names)
        for more, value in _samples(status, metric):
            family.add_metric([*labels, *more], _VERDICTS.get(value, value))
        yield family


def _samples(status: Mapping[str, Any], metric: Metric) -> Iterator[tuple[list[str], Any]]:
    """Yield the value of the metric's own label, if it has one, and the value."""
    group, _, field = metric.key.rpartition(".")
    if group == "hints.jobs":
        yield from (([job["job"]], job[field]) for job in status["hints"]["jobs"])
        return
    value: Any = status
    for part in metric.key.split("."):
        if part not in value:
            return
        value = value[part]
    if metric.label:
        chosen = REQUEST_KINDS if metric.key == "requests" else value
        yield from (([key], value[key]) for key in chosen)
    else:
        yield [], value


class StatusCollector:
    """What a registry asks for the metrics of a mount."""

    def __init__(self, read_status: Callable[[], Mapping[str, Any]]) -> None:
        """read_status: returns the status of now."""
        self._read_status = read_status

    def collect(self) -> "Iterator[Family]":
        """Yield the metrics of now."""
        return families(self._read_status())


def metrics_text(status: Mapping[str, Any], *, is_open_metrics: bool) -> bytes:
    """Return the metrics of a status: as OpenMetrics, or as the text that node-exporter reads."""
    from prometheus_client import CollectorRegistry, exposition
    from prometheus_client.openmetrics import exposition as open_metrics

    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: status))
    text: bytes = (open_metrics if is_open_metrics else exposition).generate_latest(registry)
    return text
