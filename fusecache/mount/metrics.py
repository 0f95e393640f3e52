"""The status of a mount as metrics of Prometheus: METRICS, and nothing that is counted for them alone.

prometheus-client writes them, as OpenMetrics or as Prometheus' older text; it is imported where it is needed, as only
the extra `metrics` brings it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fusecache.model.facts import COUNTER, FACTS, HISTOGRAM, METRICS, Metric
from fusecache.model.latency import BOUNDS_SECONDS
from fusecache.model.verdict import ACTION, DEGRADED, OK

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

PREFIX = "fusecache_"
LABELS = ("mount", "bucket")
_VERDICTS = {OK: 0, DEGRADED: 1, ACTION: 2}


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
        about = metric.about or FACTS.get(metric.key) or FACTS[metric.key.partition(".")[0]]
        if metric.kind == HISTOGRAM:
            histogram = HistogramMetricFamily(name, about, labels=names)
            for more, facts in _samples(status, metric):
                counts = zip((*map(repr, BOUNDS_SECONDS), "+Inf"), facts["counts"], strict=True)
                histogram.add_metric([*labels, *more], list(counts), facts["sum_seconds"])
            yield histogram
            continue
        kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
        family = kind(name, about, labels=names)
        for more, value in _samples(status, metric):
            family.add_metric([*labels, *more], _VERDICTS.get(value, value))
        yield family


def _samples(status: Mapping[str, Any], metric: Metric) -> Iterator[tuple[list[str], Any]]:
    """Yield the value of the metric's own label, if it has one, and the value."""
    group, _, field = metric.key.rpartition(".")
    if group == "hints":
        yield from (([job["job"]], job[field]) for job in status["hints"]["jobs"])
        return
    value: Any = status
    for part in metric.key.split("."):
        if part not in value:
            return
        value = value[part]
    if metric.label:
        yield from (([key], value[key]) for key in value)
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
