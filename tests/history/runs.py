"""Runs whole histories: a program's lives on the real engine under a virtual clock, and what the bucket showed."""

import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from fusecache.disk import direct_reads
from fusecache.index import journal
from fusecache.model.objects import MIB
from fusecache.policy.writeback import multipart
from tests.history.bucket import PART_BYTES, WatchedBucket
from tests.history.checkpoints import Checkpoints
from tests.history.crashes import COMMIT, Crash, Reaper
from tests.history.machine import Machine
from tests.history.past import Past
from tests.history.programs import KILL, STOP, Program, Step, choose_moments, make_program, shrink
from tests.history.rules import Rules, Violation
from tests.support.node import running_node
from tests.support.threads import SlowThreads


class HistoryFailed(AssertionError):
    """A program whose history breaks a promise; its text repeats it."""


@dataclass
class Findings:
    """What was run. histories: with at least one end of a node; labels: of the moments at which nodes ended."""

    histories: int = 0
    clean: int = 0
    requests: int = 0
    labels: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Outcome:
    """counts: of each kind of moment in the first life. why: what was broken; "": nothing."""

    counts: dict[str, int]
    labels: Counter[str]
    requests: int
    why: str = ""


def run_program(program: Program) -> Outcome:
    """Run all lives of a program."""
    reaper = Reaper()
    bucket = WatchedBucket(reaper)
    counts: dict[str, int] = {}
    memory = Path("/dev/shm")  # a life makes some folders and files: quick there

    async def main() -> None:
        checkpoints = Checkpoints()
        past = Past(checkpoints.see_node)
        bucket.rules = Rules(past, trio.current_time, checkpoints)
        machine = Machine(bucket, past, checkpoints, is_slow=program.slow_threads)
        steps = iter(program.steps)
        place = directory / "0"
        for life in itertools.count():
            moment = program.moments[life] if life < len(program.moments) else None
            next_place = directory / str(life + 1)
            reaper.begin(moment, place, next_place)
            try:
                offload = SlowThreads(program.seed) if program.slow_threads else None
                async with running_node(bucket, place, buffer_bytes=24 * MIB, offload=offload) as user:
                    await machine.start(user)
                    if await _live(machine, steps, reaper):
                        return
            except BaseException as exc:
                # Of a node that is gone, all that its tasks say afterwards means nothing.
                if not reaper.is_dead or not all(
                    isinstance(leaf, Crash | Exception) for leaf in leaves_of(exc)
                ):
                    raise
                place = next_place
            finally:
                if life == 0:
                    counts.update(reaper.counts)

    why = ""
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name,
        small_scale(),
        reaper.watching(),
    ):
        directory = Path(name)
        repeatable(program.seed)
        try:
            trio.run(main, clock=MockClock(autojump_threshold=0))
        except BaseException as exc:
            why = _reason(exc, bucket)
            if not why:
                raise
    if not why and bucket.violation is not None:
        why = str(bucket.violation)
    return Outcome(counts, reaper.labels, bucket.requests, why)


async def _live(machine: Machine, steps: Iterator[Step], reaper: Reaper) -> bool:
    """Take steps until the node stops, and return False; after the last step drain, and return True. Raises Crash."""
    for step in steps:
        if step == STOP:
            reaper.labels["stop"] += 1
            return False
        if step == KILL:
            reaper.die("kill")
        await machine.take(step)
    await machine.finish()
    return True


def run_histories(
    seeds: Iterator[int],
    wanted: int,
    findings: Findings,
    *,
    moments_a_program: int = 6,
    slow_threads: bool = False,
) -> None:
    """Run programs, each at several moments, until so many nodes ended. Raises HistoryFailed with a short program."""
    while findings.histories < wanted:
        seed = next(seeds)
        program = make_program(seed, slow_threads=slow_threads)
        outcome = run_program(program)
        findings.clean += 1
        findings.requests += outcome.requests
        if outcome.why:
            raise_failed(program, outcome.why)
        if not outcome.counts.get(COMMIT):
            continue  # it did nothing
        rng = random.Random(seed)
        for _ in range(min(moments_a_program, wanted - findings.histories)):
            run_one(replace(program, moments=choose_moments(rng, outcome.counts)), findings)


def run_one(program: Program, findings: Findings) -> None:
    """Run one history and count it. Raises HistoryFailed."""
    outcome = run_program(program)
    findings.histories += bool(outcome.labels)
    findings.requests += outcome.requests
    findings.labels += outcome.labels
    if outcome.why:
        raise_failed(program, outcome.why)


def raise_failed(program: Program, why: str) -> None:
    """Shorten a program that fails, and raise HistoryFailed with what it broke and how to repeat it."""
    kind = _kind(why)
    short = shrink(program, lambda candidate: _kind(run_program(candidate).why) == kind)
    last = run_program(short).why or why
    raise HistoryFailed(f"{last}\nfirst seen: {why}\nseed {program.seed}, shortest program:\n{short.text()}")


@contextmanager
def small_scale() -> Iterator[None]:
    """Files above 64 KiB are cut into parts, as those above 64 MiB are; lives are short, and begin and end cheaply.

    Buffers are not touched before their use. Journals reserve little disk space ahead: each death copies one.
    """
    changes: list[tuple[Any, str, Any]] = [
        (multipart, "SINGLE_PUT_BYTES_MAX", PART_BYTES),
        (multipart, "_PART_BYTES_MIN", PART_BYTES),
        (multipart, "_PART_STEP", PART_BYTES),
        (direct_reads, "populate", lambda _memory: None),
        (journal, "RESERVE_BYTES", MIB),
    ]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)


def seeds_from(first: int) -> Iterator[int]:
    """Return seeds without end."""
    return itertools.count(first)


def repeatable(seed: int) -> None:
    """Let pauses and the order of trio's tasks be the seed's."""
    random.seed(seed)
    scheduler: Any = trio._core._run  # type: ignore[attr-defined]
    scheduler._r.seed(seed)


def _reason(exc: BaseException, bucket: WatchedBucket) -> str:
    """Return what was broken, of whatever the nurseries made of it; "": the run was interrupted."""
    if bucket.violation is not None:
        return str(bucket.violation)
    leaves = list(leaves_of(exc))
    for leaf in leaves:
        if isinstance(leaf, Violation):
            return str(leaf)
    for leaf in leaves:
        if isinstance(leaf, Exception):
            import traceback

            buffers = traceback.extract_tb(leaf.__traceback__)[-3:]
            places = " < ".join(
                f"{Path(buffer.filename).name}:{buffer.lineno} {buffer.name}" for buffer in reversed(buffers)
            )
            return f"unexpected {type(leaf).__name__}: {leaf} at {places}"
    return ""


def _kind(why: str) -> frozenset[str]:
    """Return which kind of promise was broken: a shorter program must break the same."""
    words = (
        "after a restart", "after a drain", "on the node", "left behind", "never held", "still shows", "moved to",
        "moved with", "temporary name", "not durable", "did not return", "unexpected", "directory", "is None", "speaks",
        "checkpoint",
    )  # fmt: skip
    return frozenset(word for word in words if word in why)


def leaves_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield what nurseries have put into groups, however deep."""
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from leaves_of(inner)
    else:
        yield exc
