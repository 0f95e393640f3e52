"""Traces on the engine, under a virtual clock, against a bucket in memory; and the lives after a crash.

The node is not ended: at each chosen moment its cache directory is photographed and the bucket copied. A later life
starts on each such pair.
"""

import random
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from tests.history.bucket import PART_BYTES
from tests.history.runs import repeatable, small_scale
from tests.support.inline_offload import InlineOffload, T
from tests.support.memory_store import MemoryStore
from tests.support.node import PUBLISHING, WRITING, Bucket, User, photograph, running_node
from tests.traces.oracle import Broken, Moment, Oracle, Past
from tests.traces.replay import Node, replay
from tests.traces.trace import Mark

BUFFER_BYTES = 24 << 20
# Photographs are in memory, and those of a long trace are many.
_PHOTOS_AT_ONCE = 100


@dataclass(frozen=True)
class Pace:
    """How a trace is slowed down. line_seconds: before each line; mark_seconds: after each checkpoint besides.

    request_seconds: of each request that writes; is_shuffled: a random part of it. None of them: everything is there
    before the first request.
    """

    line_seconds: float = 0.0
    mark_seconds: float = 0.0
    request_seconds: float = 0.0
    is_shuffled: bool = False


PACES = {
    "at once": Pace(),
    # Publishing follows a few calls behind.
    "slowly": Pace(line_seconds=0.4),
    # The next checkpoint is there before the bucket has the one before: rotation faster than the uplink.
    "slow uplink": Pace(mark_seconds=10.0, request_seconds=8.0, is_shuffled=True),
    # Each checkpoint reaches the bucket before the next begins.
    "long steps": Pace(mark_seconds=90.0),
}


class SlowUplink(InlineOffload):
    """Every request that writes takes some virtual seconds."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        self._random = random.Random(1)

    async def upload(self, call: Callable[..., T], *args: object) -> T:
        """Run the call inline, after a while."""
        factor = self._random.random() if self._pace.is_shuffled else 1.0
        await trio.sleep(self._pace.request_seconds * factor)
        return call(*args)


class WatchedBucket(Bucket):
    """Shows every state to an oracle; `on_request` is told before a request takes effect, `on_effect` after.

    broken: the oracle's first objection. It is not raised here: the engine would take it for a failed request.
    """

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self.memory = MemoryStore(part_minimum_bytes=PART_BYTES)
        self.oracle = oracle
        self.broken: Broken | None = None
        self.on_effect: Callable[[str, str], None] = lambda _method, _key: None

    def duplicate(self) -> "WatchedBucket":
        """Return a bucket that shows the same, for another life."""
        other = WatchedBucket(self.oracle.copy())
        other.memory = self.memory.duplicate()
        return other

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        passed = super().__getattr__(name)
        if name not in WRITING:
            return passed

        def call(key, *args, **options):  # type: ignore[no-untyped-def]
            result = passed(key, *args, **options)
            if name in PUBLISHING:
                self._see()
            self.on_effect(name, key)
            return result

        return call

    def see_end(self, moments: list[Moment]) -> None:
        """Everything is published. Raises Broken, also for what was seen before."""
        if self.broken is not None:
            raise self.broken
        self.oracle.see_end(self.shows(), moments)

    def _see(self) -> None:
        try:
            self.oracle.see(self.states[-1])
        except Broken as exc:
            self.broken = self.broken or exc


@dataclass(frozen=True)
class Photo:
    """What a crash leaves. label: when it happened. moments: what was promised right before and right after."""

    label: str
    moments: list[Moment]
    directory: Path
    bucket: WatchedBucket


@dataclass(frozen=True)
class Outcome:
    """Counts. requests: that wrote; moments: when the node could end; crashes: moments at which it ended."""

    requests: int
    moments: int
    crashes: int


def run(past: Past, pace: Pace, *, every: int = 0, first: int = 0, **options: Any) -> Outcome:
    """Carry a trace out, and end the node at every so many moments (0: never), from the first on. Raises Broken.

    options: of the node.
    """
    start, crashes = first, 0
    while True:
        stop = start + every * _PHOTOS_AT_ONCE
        life = _Run(past, pace, range(start, stop, every) if every else (), options)
        with _place() as directory:
            _run_virtual(life.carry_out, directory)
            for photo in life.photos:
                try:
                    _run_virtual(life.live_on, photo)
                except BaseException as exc:
                    exc.add_note(f"after a crash {photo.label}")
                    raise
                shutil.rmtree(photo.directory)  # by now with a journal's reserve
        crashes += len(life.photos)
        if not every or stop >= life.moments:
            return Outcome(life.requests, life.moments, crashes)
        start = stop


class _Run:
    """One run of a trace. moments: at which a node could end: after each line, before and after each request."""

    def __init__(self, past: Past, pace: Pace, chosen: Container[int], options: dict[str, Any]) -> None:
        self.photos: list[Photo] = []
        self.moments = self.requests = 0
        self._past = past
        self._pace = pace
        self._chosen = chosen
        self._options = {"buffer_bytes": BUFFER_BYTES, **options}
        self._done = self._begun = 0

    async def carry_out(self, directory: Path) -> None:
        """Carry the trace out to its end, and wait until the bucket has all of it."""
        bucket = WatchedBucket(Oracle(self._past, seconds_a_line=self._pace.line_seconds))
        place = directory / "node"
        is_over = False

        def moment(label: str) -> None:
            if is_over:
                return
            number, self.moments = self.moments, self.moments + 1
            if number in self._chosen:
                copy = directory / f"photo-{number}"
                photograph(place, copy)
                promised = self._past.moments[self._done : self._begun + 1]
                self.photos.append(Photo(label, promised, copy, bucket.duplicate()))

        def before_request(method: str, key: str) -> None:
            self.requests += 1
            moment(f"before {method} {key}, after line {self._done}")

        bucket.on_request = before_request
        bucket.on_effect = lambda method, key: moment(f"after {method} {key}, line {self._done}")

        async def before(line: int) -> None:
            await trio.sleep(self._pace.line_seconds)
            self._begun = line + 1

        async def after(line: int) -> None:
            self._done = line + 1
            moment(f"after line {line}: {self._past.trace.lines[line]}")
            if isinstance(self._past.trace.lines[line], Mark):
                await trio.sleep(self._pace.mark_seconds)

        async with running_node(bucket, place, offload=SlowUplink(self._pace), **self._options) as user:
            await replay(self._past.trace, Node(user), before=before, after=after)
            await _drain(user)
            is_over = True
        bucket.see_end(self._past.moments[-1:])

    async def live_on(self, photo: Photo) -> None:
        """Start a node on what a crash left, and wait until the bucket has all of it."""
        async with running_node(photo.bucket, photo.directory, **self._options) as user:
            await _drain(user)
        photo.bucket.see_end(photo.moments)


async def _drain(user: User) -> None:
    result, rejections = await user.drained(3600), user.fs.publisher.rejections
    if result != "durable" or rejections.conflicts or rejections.rejected:
        rejected = [(item.changed_keys(), item.error) for item in rejections.rejected]
        raise Broken(f"drained: {result}, conflicts {rejections.conflicts}, rejected {rejected}")


def _run_virtual(function, argument) -> None:  # type: ignore[no-untyped-def]
    repeatable(1)
    with small_scale():
        trio.run(function, argument, clock=MockClock(autojump_threshold=0))


@contextmanager
def _place() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)
