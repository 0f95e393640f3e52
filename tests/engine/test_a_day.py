"""A day of work under a virtual clock: outages, refused keys, rotating checkpoints. No table of the engine grows."""

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from fusecache.engine.namespace import tree
from fusecache.engine.prefetch import sibling_readahead
from fusecache.engine.publish import schedule
from fusecache.model.errors import AccessDenied, FusecacheError
from fusecache.policy.cache import stall_timeout
from tests.support.node import Bucket, User, listed, running_node

HOUR = 3600.0
# After this time every table has been full once: 20 minutes is the longest time that anything is kept.
WARM_HOURS = 4
HOURS = 24
SAVE_EVERY, KEPT = 700.0, 3
# Of half an hour the bucket is away for this long; of an hour the keys are refused for this long.
OUTAGE_SECONDS, REFUSED_SECONDS = 240.0, 90.0
SHARDS = 40
DIRECTORIES = 3
# Tables with a bound of their own: how many entries at most.
BOUNDED = {
    "PublishSchedule._last_write": schedule._KEYS_REMEMBERED + 1,
    "Tree._tombstones": tree._TOMBSTONES_KEPT + 1,
    "WaitHistory._waits": stall_timeout.REMEMBERED,
    "_Directory.scans": DIRECTORIES * sibling_readahead._SCANS,
    "_DirectoryScan.positions": DIRECTORIES * sibling_readahead._SCANS * SHARDS,
}


class Refusing:
    """A bucket that refuses the keys for a while each hour."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._bucket, name)
        if not callable(call):
            return call

        def passed(*args: Any, **options: Any) -> Any:
            if self.refuses and name != "statistics":
                raise AccessDenied(f"{name}: the keys are refused")
            return call(*args, **options)

        return passed


async def train(user: User, failed: Counter[str]) -> None:
    """Save, log, read and list until cancelled; a call that fails is counted, and its step is left alone."""
    saved: deque[int] = deque()
    for step in itertools.count():
        try:
            await user.mkdir(f"run/step-{step}")
            for name in ("model", "optimizer"):
                await user.write(f"run/step-{step}/{name}", bytes(1000))
            await user.write("run/latest", b"%d" % step)
            saved.append(step)
            await user.write(f"log/{step}", b"log")
            if step >= KEPT:
                await user.unlink(f"log/{step - KEPT}")
            for shard in range(step, step + 5):
                await user.read(f"data/{shard % SHARDS}")
            await listed(user, "data")
            await listed(user, "run")
            while len(saved) > KEPT:
                old = saved.popleft()
                for name in ("model", "optimizer"):
                    await user.unlink(f"run/step-{old}/{name}")
                await user.rmdir(f"run/step-{old}")
        except FusecacheError as exc:
            failed[type(exc).__name__] += 1
        await trio.sleep(SAVE_EVERY)


async def disturb(bucket: Bucket, keys: Refusing) -> None:
    """Take the bucket away twice an hour, and refuse the keys once."""
    while True:
        for half in range(2):
            await trio.sleep(HOUR / 2 - OUTAGE_SECONDS - (REFUSED_SECONDS if half else 0))
            bucket.is_cut_off = True
            await trio.sleep(OUTAGE_SECONDS)
            bucket.is_cut_off = False
            if half:
                keys.refuses = True
                await trio.sleep(REFUSED_SECONDS)
                keys.refuses = False


def tables(top: object) -> Counter[str]:
    """Return how many entries the containers of an object hold, by `Class.attribute`, for all objects below it."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[object] = [top]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for name, value in _fields(each):
            label = f"{type(each).__name__}.{name}"
            todo += _inside(value, label, found, seen)
    return found


def _inside(value: object, label: str, found: Counter[str], seen: set[int]) -> Iterator[object]:
    if isinstance(value, (dict, list, set, frozenset, deque, tuple)):
        if id(value) in seen:
            return
        seen.add(id(value))
        if not isinstance(value, tuple):
            found[label] += len(value)
        for item in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from _inside(item, label + "[]", found, seen)
    elif type(value).__module__.startswith("fusecache"):
        yield value


def _fields(each: object) -> Iterator[tuple[str, object]]:
    yield from getattr(each, "__dict__", {}).items()
    for kind in type(each).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(each, name):
                yield name, getattr(each, name)


async def test_no_table_grows_in_a_day(bucket: Bucket, cache: Path, autojump_clock: MockClock) -> None:
    for shard in range(SHARDS):
        bucket.memory.put_bytes(f"data/{shard}", bytes(2000))
    keys, failed = Refusing(bucket), Counter[str]()
    async with running_node(keys, cache) as user, trio.open_nursery() as nursery:
        await user.mkdir("run")
        await user.mkdir("log")
        nursery.start_soon(train, user, failed)
        nursery.start_soon(disturb, bucket, keys)
        by_hour: list[Counter[str]] = []
        for hour in range(HOURS):
            await trio.sleep(HOUR)
            if hour < WARM_HOURS or hour >= HOURS - WARM_HOURS:
                by_hour.append(tables(user.fs))
            bucket.states.clear()
            bucket.requests.clear()
        nursery.cancel_scope.cancel()
    early = {name: max(hour[name] for hour in by_hour[:WARM_HOURS]) for name in by_hour[-1]}
    late = {name: min(hour[name] for hour in by_hour[-WARM_HOURS:]) for name in by_hour[-1]}
    grown = {
        name: (early[name], late[name])
        for name in late
        if late[name] > early[name] and late[name] > BOUNDED.get(name, 0)
    }
    assert failed
    assert not grown
