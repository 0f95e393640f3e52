"""The bars of the write path: which figure must be how good, beside what was measured. Pure."""

from collections.abc import Mapping

from benchmarks.bars import US, Bar, Judge, against, bars_of, ratio, seconds_at_most
from benchmarks.results import Results

MOUNTED_PEERS = ("rclone", "rclone-tuned", "s3fs", "s3fs-tuned")


def write_bars(results: Results) -> list[Bar]:
    """Return every bar of the cases that were measured."""
    return bars_of(results, JUDGES)


def _write(results: Results, case: str, origin: str) -> list[Bar]:
    if origin == "C":
        return []  # only how long it takes to be durable is asked there
    return [
        against(results, case, "rate", MOUNTED_PEERS, 3.0, "speed / best mounted peer"),
        against(results, case, "rate", ("discard-fs",), 0.7, "speed / file system that throws away"),
    ]


def _write4k(results: Results, case: str, origin: str) -> list[Bar]:
    return [against(results, case, "rate", ("discard-fs",), 0.8, "speed / file system that throws away")]


def _blocked(results: Results, case: str, origin: str) -> list[Bar]:
    """The trainer waits no longer than twice as long as the same save takes until a local disk has it."""
    local = results.median(case, "local", "whole_seconds")
    blocked = ratio(results.median(case, US, "blocked_seconds"), local)
    return [Bar(case, "seconds blocked / local write + fdatasync", blocked, 2.0, at_least=False)]


def _durable(results: Results, case: str, origin: str) -> list[Bar]:
    raw = results.median(case, "raw", "whole_seconds")
    closed = ratio(results.median(case, US, "after_settle_seconds"), raw)
    whole = ratio(results.median(case, US, "whole_seconds"), raw)
    return [
        Bar(case, "close to durable, less settling / raw boto3", closed, 1.25, at_least=False),
        Bar(case, "first write to durable / raw boto3", whole, 1.4, at_least=False),
    ]


def _files(results: Results, case: str, origin: str) -> list[Bar]:
    rate = results.median(case, US, "files_per_second")
    return [Bar(case, "files durable a second", rate, 200.0, at_least=True, unit="/s")]


def _rsync(results: Results, case: str, origin: str) -> list[Bar]:
    rate = results.median(case, US, "files_per_second")
    return [Bar(case, "files by rsync durable a second", rate, 50.0, at_least=True, unit="/s")]


def _train(results: Results, case: str, origin: str) -> list[Bar]:
    share = ratio(results.median(case, US, "rate"), results.median(case, "undisturbed", "rate"))
    return [Bar(case, "speed of reading / undisturbed", share, 0.7, at_least=True)]


JUDGES: Mapping[str, Judge] = {
    "write": _write,
    "write4k": _write4k,
    "torch": _blocked,
    "dcp": _blocked,
    "dcp-async": _blocked,
    "durable": _durable,
    "files": _files,
    "rsync": _rsync,
    "train": _train,
    "recover": seconds_at_most(2.0),
}
