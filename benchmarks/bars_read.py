"""The bars of the read path: which figure must be how good, beside what was measured. Pure."""

from collections.abc import Mapping

from benchmarks.bars import US, Bar, Judge, against, bars_of, ratio, seconds_at_most
from benchmarks.results import Results

MOUNTED_PEERS = ("rclone", "rclone-tuned", "s3fs")
RCLONES = ("rclone", "rclone-tuned")
MEMORY_BYTES = 768e6
# The raw limit that a mount can reach: without latency the CPU is the bound, with it the connections are.
RAW_SHARE = {"A": 0.33, "B": 0.45, "C": 0.45}
LATENCY_SECONDS = 0.040


def read_bars(results: Results) -> list[Bar]:
    """Return every bar of the cases that were measured."""
    found = bars_of(results, JUDGES)
    return [*found, _memory(results)] if results.rows else found


def _cold(results: Results, case: str, origin: str) -> list[Bar]:
    share = RAW_SHARE[origin]
    ours, theirs = results.median(case, US, "cpu_per_gib"), results.median(case, "rclone", "cpu_per_gib")
    return [
        against(results, case, "rate", MOUNTED_PEERS, 3.0, "speed / best mounted peer"),
        against(results, case, "rate", ("crt",), 1.0, "speed / CRT client"),
        against(results, case, "rate", ("raw",), share, "speed / raw boto3"),
        Bar(case, "CPU of the daemon a GiB; rclone's", ours, theirs, at_least=False, unit="s"),
    ]


def _streams(results: Results, case: str, origin: str) -> list[Bar]:
    single = results.median(f"cold {origin}", US, "rate")
    aggregate = ratio(results.median(case, US, "rate"), single)
    spread = results.median(case, US, "unevenness")
    return [
        Bar(case, "four streams together / one stream", aggregate, 0.9, at_least=True),
        Bar(case, "farthest share from the mean", spread, 0.25, at_least=False, unit="of it"),
    ]


def _requests64(results: Results, case: str, origin: str) -> list[Bar]:
    few, many = (results.median(f"requests{threads} {origin}", US, "cpu_us") for threads in (8, 64))
    return [Bar(case, "CPU a file, 64 threads / 8", ratio(many, few), 1.15, at_least=False)]


def _disk(results: Results, case: str, origin: str) -> list[Bar]:
    return [
        against(results, case, "rate", RCLONES, 3.0, "speed / better rclone"),
        against(results, case, "rate", ("fio",), 0.9, "speed / fio O_DIRECT"),
    ]


def _pages(results: Results, case: str, origin: str) -> list[Bar]:
    return [
        against(results, case, "rate", ("empty-fs",), 0.95, "speed / empty pyfuse3 file system"),
        against(results, case, "rate", RCLONES, 4.0, "speed / better rclone"),
    ]


def _random128k(results: Results, case: str, origin: str) -> list[Bar]:
    base = results.median(case, "first-byte", "mean_seconds")
    mean = ratio(results.median(case, US, "mean_seconds"), base)
    return [
        Bar(case, "mean latency / origin's first byte", mean, 1.2, at_least=False),
        Bar(case, "bytes fetched / asked", results.median(case, US, "amplification"), 2.0, at_least=False),
    ]


def _random8k(results: Results, case: str, origin: str) -> list[Bar]:
    return [against(results, case, "reads_per_second", ("raw",), 0.8, "reads/s / raw boto3, 64 threads")]


def _endpoints(results: Results, case: str, origin: str) -> list[Bar]:
    return [against(results, case, "rate", ("one-endpoint",), 1.8, "speed of two endpoints / of one")]


def _million_first(results: Results, case: str, origin: str) -> list[Bar]:
    first = results.median(case, US, "first_seconds")
    return [Bar(case, "seconds to the first name", first, 0.5, at_least=False, unit="s")]


def _million_all(results: Results, case: str, origin: str) -> list[Bar]:
    return [against(results, case, "names_per_second", ("raw",), 0.8, "names/s / raw LIST")]


def _million_open(results: Results, case: str, origin: str) -> list[Bar]:
    opened, lists = results.median(case, US, "open_seconds"), results.median(case, US, "list_names")
    return [
        Bar(case, "seconds to open", opened, 3 * LATENCY_SECONDS, at_least=False, unit="s"),
        Bar(case, "names listed meanwhile", lists, 10, at_least=False, unit=""),
    ]


def _memory(results: Results) -> Bar:
    highest = results.highest(US, "memory_bytes")
    megabytes = None if highest is None else highest / 1e6
    return Bar(
        "memory", "highest RssAnon + RssShmem", megabytes, MEMORY_BYTES / 1e6, at_least=False, unit="MB"
    )


JUDGES: Mapping[str, Judge] = {
    "cold": _cold,
    "streams": _streams,
    "requests64": _requests64,
    "disk": _disk,
    "pages": _pages,
    "random128k": _random128k,
    "random8k": _random8k,
    "ls": seconds_at_most(0.15),
    "find": seconds_at_most(3.0),
    "find-again": seconds_at_most(0.5),
    "small": seconds_at_most(1.5),
    "endpoints": _endpoints,
    "million-first": _million_first,
    "million-all": _million_all,
    "million-open": _million_open,
}
