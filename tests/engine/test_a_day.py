"""Hours of work under a virtual clock: outages, refused keys, rotating checkpoints. No table of the engine grows.

FUSECACHE_TEST_HOURS=24 makes it a whole day; `pytest -s` shows the largest tables.
"""

import gc
import itertools
import logging
import math
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import trio

from fusecache.engine.admin import warmup
from fusecache.engine.namespace import lister, tree
from fusecache.engine.namespace.nodes import DirectoryHandle, Kind
from fusecache.engine.prefetch import sibling_readahead
from fusecache.engine.publish import schedule
from fusecache.model.errors import AccessDenied, FusecacheError, NotFound
from fusecache.model.hints import TO_THE_END, encode_cursor, encode_plan
from fusecache.policy.cache import stall_timeout
from tests.support.node import Bucket, User, listed, running_node

HOUR = 3600.0
HOURS = int(os.environ.get("FUSECACHE_TEST_HOURS", "6"))
# After this time every table has been full once: 20 minutes is the longest time that anything is kept.
WARM_HOURS = 3 if HOURS < 24 else 4
# The tables are counted in the last hours until then, and in the last ones of all. What is under way at that very
# moment differs by a few entries; what grows does so with each outage at least, twice an hour.
COUNTED_HOURS, UNDER_WAY = 2, 3
STEP_SECONDS, KEPT = 500.0, 3
# A job ends without a word after so many steps, and the next one has another name.
JOB_STEPS = 3
# Of half an hour the bucket is away for this long; of an hour the keys are refused for this long.
OUTAGE_SECONDS, REFUSED_SECONDS = 240.0, 90.0
# So long after a disturbance, and right before the next, nothing waits for it any more: then the tables are counted.
QUIET_SECONDS = 1400.0
SHARDS = 40
DIRECTORIES = 8
# Tables with a bound of their own: how many entries at most.
_INODE_RANGES = DIRECTORIES * (lister._INODE_RANGES_USED + 1)
BOUNDED = {
    "ListingState.inode_ranges": _INODE_RANGES,
    "Lister._inode_ranges": _INODE_RANGES,
    "_InodeRange objects": _INODE_RANGES,
    "_Tombstone objects": tree._TOMBSTONES_KEPT + 1,
    "PublishSchedule._last_write": schedule._KEYS_REMEMBERED + 1,
    "Tree._tombstones": tree._TOMBSTONES_KEPT + 1,
    "WaitHistory._waits": 2 * stall_timeout.REMEMBERED,
    "WarmupRunner._jobs": warmup._JOBS_REMEMBERED,
    "Warmup objects": warmup._JOBS_REMEMBERED,
    "_DirectoryScan objects": DIRECTORIES * sibling_readahead._SCANS,
    "ScanPattern objects": DIRECTORIES * sibling_readahead._SCANS,
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


class Trainer:
    """One run: saves, logs, reads, lists and sends hints. A call that fails is counted, and its step is left alone."""

    def __init__(self, bucket: Bucket, user: User) -> None:
        self._bucket, self._user = bucket, user
        self.failed: Counter[str] = Counter()

    async def run(self) -> None:
        """Work until cancelled."""
        user = self._user
        for name in ("run", "log"):
            await user.mkdir(name)
        log = await user.open("log/train.log")  # never closed
        for step in itertools.count():
            self._change_data(step)
            for work in (self._hint, self._read, self._save, self._log, self._rotate, self._look):
                try:
                    await work(step)
                except FusecacheError as exc:
                    self.failed[type(exc).__name__] += 1
            for node in [each for each in user.fs.tree.nodes.values() if each.parent is None]:
                if node is not user.fs.tree.root:
                    user.fs.tree.forget(node.number, node.lookups)  # as the kernel does
            await user.fs.file_io.write(log, log.node.size, b"line\n")
            if log.node.size > 100:
                await user.fs.file_io.truncate(log.node, 0)
            await trio.sleep(STEP_SECONDS)

    def _change_data(self, step: int) -> None:
        """Another client replaces shards, adds one and removes one."""
        memory = self._bucket.memory
        memory.put_bytes(f"data/{step % SHARDS}", b"%d" % step * 300)
        memory.put_bytes(f"data/extra-{step}", b"extra")
        with suppress(FusecacheError):
            memory.delete(f"data/extra-{step - KEPT}")

    async def _hint(self, step: int) -> None:
        job, at = f"job-{step // JOB_STEPS}", step % JOB_STEPS
        if not at:
            steps = range(JOB_STEPS)
            plan = encode_plan(
                window=0,
                step=0,
                paths=sorted(f"data/{(step + each) % SHARDS}" for each in steps),
                path=steps,
                start=[0] * JOB_STEPS,
                length=[TO_THE_END] * JOB_STEPS,
                first=steps,
                span=[0] * JOB_STEPS,
            )
            await self._user.fs.hints.receive(f"{job}.plan", plan)
            self._user.fs.warmup.start(["data"])
        with suppress(NotFound):
            await self._user.fs.hints.receive(f"{job}.cursor", encode_cursor(at))

    async def _read(self, step: int) -> None:
        user = self._user
        for directory in ("data", "run", "log", ""):
            await listed(user, directory)
        for shard in range(step, step + 5):
            await user.read(f"data/{shard % SHARDS}")
        await user.read(f"data/extra-{step}")
        with suppress(NotFound):
            await user.read(f"data/none-{step}")

    async def _save(self, step: int) -> None:
        """Save as trainers do: under a temporary name, renamed when it is whole; the marker last."""
        user, folder = self._user, f"run/step-{step}"
        await user.mkdir(f"{folder}.tmp")
        for name in ("model", "optimizer"):
            await user.write(f"{folder}.tmp/{name}", bytes(1000))
        await user.rename(f"{folder}.tmp", folder)
        replaced = user.fs.tree.find("run/latest")
        await user.write("run/.latest.tmp", b"%d" % step)
        await user.rename("run/.latest.tmp", "run/latest")
        if replaced is not None:
            user.fs.tree.forget(replaced.number, replaced.lookups)
        with suppress(NotFound):
            await self._remove("run/best")
        await user.symlink(f"step-{step}", "run/best")

    async def _log(self, step: int) -> None:
        await self._user.write(f"log/{step}", b"log")

    async def _rotate(self, step: int) -> None:
        """Remove what is older than the last steps, also what a failure left unfinished."""
        for folder in ("run", "log"):
            for name in await self._names(folder):
                if _step_of(name) <= step - KEPT:
                    await self._remove(f"{folder}/{name}")

    async def _names(self, path: str) -> list[str]:
        directory = await self._user.fs.resolve(path)
        found = await self._user.fs.lookup.reader.next_entries(DirectoryHandle(directory), 1000)
        return [each.shown.name for each in found]

    async def _look(self, step: int) -> None:
        """Ask as a monitor and a person do."""
        self._user.fs.statistics()
        for path in ("", "run", f"run/step-{step}"):
            await self._user.fs.status.path_status(path)
        with trio.move_on_after(10):
            await self._user.fs.wait_durable("", None)
        for name, node in list((await self._user.fs.resolve("data")).children.items()):
            if name.startswith("extra-"):  # the kernel forgets what it has not used for a while
                self._user.fs.tree.forget(node.number, node.lookups)

    async def _remove(self, path: str) -> None:
        """Remove a file, or a directory with what is in it; then the kernel forgets it."""
        node = await self._user.fs.resolve(path)
        if node.kind is Kind.DIRECTORY:
            for name in await self._names(path):
                await self._remove(f"{path}/{name}")
            await self._user.rmdir(path)
        else:
            await self._user.unlink(path)
        self._user.fs.tree.forget(node.number, node.lookups)


def _step_of(name: str) -> float:
    """Return the step in the name of a checkpoint or a log; others have none."""
    number = name.removeprefix("step-").removesuffix(".tmp")
    return int(number) if number.isdecimal() else math.inf


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


# ---- what there is


def counted(top: object) -> Counter[str]:
    """Return the entries of all containers below an object and in fusecache's modules, by `Class.attribute`.

    Also the objects of each class in the whole process, whoever holds them, and the tasks.
    """
    gc.collect()
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[object] = [top]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fusecache":
            for attribute, value in list(vars(module).items()):
                if not attribute.startswith("__"):
                    todo += _inside(value, f"{name}.{attribute}", found, seen)
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for name, value in _fields(each):
            todo += _inside(value, f"{type(each).__name__}.{name}", found, seen)
    found.update(f"{type(each).__name__} objects" for each in gc.get_objects() if _is_ours(each))
    root = trio.lowlevel.current_root_task()
    assert root is not None
    found["trio tasks"] = sum(1 for _ in _tasks(root))
    return found


def _inside(value: object, label: str, found: Counter[str], seen: set[int]) -> Iterator[object]:
    """Count what a value holds; yield the objects in it that have fields to look at."""
    if isinstance(value, (dict, list, set, frozenset, deque, tuple)):
        if id(value) in seen:
            return
        seen.add(id(value))
        if not isinstance(value, tuple):
            found[label] += len(value)
        for item in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from _inside(item, label + "[]", found, seen)
    elif isinstance(value, MethodType):
        yield from _inside(value.__self__, label, found, seen)
    elif isinstance(value, partial):
        yield from _inside((value.func, value.args, value.keywords), label, found, seen)
    elif hasattr(value, "cache_info"):
        found[label] += value.cache_info().currsize
    elif _is_ours(value):
        yield value


def _is_ours(value: object) -> bool:
    module = type(value).__module__
    # Some classes, of other packages, define an attribute of that name.
    return isinstance(module, str) and module.partition(".")[0] == "fusecache"


def _fields(each: object) -> Iterator[tuple[str, object]]:
    yield from getattr(each, "__dict__", {}).items()
    for kind in type(each).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(each, name):
                yield name, getattr(each, name)


def _tasks(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tasks(child)


def show(early: dict[str, int], late: dict[str, int]) -> None:
    """Print the largest tables."""
    sys.stdout.write(f"\n{'entries at most, first hours':>30} {'at least, last hours':>22}  table\n")
    for name in sorted(late, key=lambda each: -late[each])[:25]:
        sys.stdout.write(f"{early[name]:>30} {late[name]:>22}  {name}\n")


async def test_no_table_grows_with_time(
    bucket: Bucket, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest keeps records, with their exceptions and all that these hold.
    caplog.set_level(logging.CRITICAL, "fusecache")
    for shard in range(SHARDS):
        bucket.memory.put_bytes(f"data/{shard}", bytes(2000))
    keys = Refusing(bucket)
    async with running_node(keys, cache) as user, trio.open_nursery() as nursery:
        trainer = Trainer(bucket, user)
        nursery.start_soon(trainer.run)
        nursery.start_soon(disturb, bucket, keys)
        by_hour: list[Counter[str]] = []
        await trio.sleep(QUIET_SECONDS)
        for hour in range(HOURS):
            await trio.sleep(HOUR)
            if 0 < WARM_HOURS - hour <= COUNTED_HOURS or hour >= HOURS - COUNTED_HOURS:
                by_hour.append(counted(user.fs))
            for remembered in (bucket.states, bucket.requests, bucket.gets):
                remembered.clear()
        nursery.cancel_scope.cancel()
    names = by_hour[-1]
    early = {name: max(hour[name] for hour in by_hour[:COUNTED_HOURS]) for name in names}
    late = {name: min(hour[name] for hour in by_hour[-COUNTED_HOURS:]) for name in names}
    show(early, late)
    grown = {
        name: (early[name], late[name])
        for name in late
        if late[name] > early[name] + UNDER_WAY and late[name] > BOUNDED.get(name, 0)
    }
    assert {"AccessDenied", "Unavailable"} <= trainer.failed.keys(), trainer.failed
    assert grown == {}
