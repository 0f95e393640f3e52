"""Random programs over the real read path on a real disk: every read is the bytes of its version, or says why not.

A program reads at random, lets another client replace and delete, evicts, restarts in order and by a kill, damages
cache files and lets requests fail. Three programs of FUSECACHE_TEST_STEPS steps [1000]; a failure names seed and step.
"""

import contextlib
import os
import random
from pathlib import Path

import pytest
import trio

from fusecache.engine.cache.block_cache import BlockCache, ReadHandle
from fusecache.engine.cache.block_table import BlockTable
from fusecache.model.errors import (
    NoSpace,
    ObjectChanged,
    ObjectMissing,
    RemoteError,
    Throttled,
    Unavailable,
)
from fusecache.model.objects import KIB, MIB
from tests.reference.bucket import KEYS, LARGE_SIZE, SIZES, ReferenceBucket
from tests.support.block_caches import running_cache
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.memory_store import MemoryStore

STEPS = int(os.environ.get("FUSECACHE_TEST_STEPS", "1000"))
LIMIT = 20 * MIB
LENGTHS = (1, 4096, 65_536, MIB, 3 * MIB, 20 * MIB)
# Each heals when it is asked again: see `engine/cache/fetcher.py` on denials and on what is retried.
PASSING_FAULTS: tuple[tuple[RemoteError, int], ...] = (
    (Unavailable("reset"), 0),
    (Unavailable("short body"), 300 * KIB),
    (Throttled("429"), 0),
    (ObjectMissing("a lie"), 0),
    (ObjectChanged("a lie"), 100 * KIB),
)


class Program:
    """One random program and what it knows."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.directory = directory
        memory = MemoryStore()
        self.store = FaultyStore(memory)
        self.bucket = ReferenceBucket(self.rng, memory)
        self.handles: list[ReadHandle] = []
        self.pauses: tuple[float, ...] = (0.3, 1.5)
        self.step = 0
        self.reads = self.gone = self.damages = self.evicted_bytes = self.failures = 0
        for key, size in zip(KEYS, (LARGE_SIZE, *SIZES), strict=False):
            self.bucket.put(key, size)

    # ---- one step each

    async def read(self, cache: BlockCache) -> None:
        """Read a few neighbouring ranges by a handle that is open, or a new one."""
        rng = self.rng
        handle = self._handle(cache)
        if handle is None:
            return
        data = self.bucket.versions[handle.object_id]
        start = rng.choice((0, rng.randrange(len(data) + 1)))
        length = rng.choice(LENGTHS)
        for _ in range(rng.choice((1, 1, 2, 5))):
            self.reads += 1
            try:
                found = bytes(await cache.read(handle, start, length))
            except (ObjectChanged, ObjectMissing):
                assert not self.bucket.shows(handle.object_id), "the version is there, and was called gone"
                self.gone += 1
                return
            assert found == data[start : start + length], f"other bytes at {start} of {handle.object_id}"
            start += length

    def _handle(self, cache: BlockCache) -> ReadHandle | None:
        if self.handles and self.rng.random() < 0.7:
            return self.rng.choice(self.handles)
        if not self.bucket.newest:
            return None
        object_id = self.rng.choice(sorted(self.bucket.newest.values(), key=lambda known: known.key))
        handle = cache.open(object_id, len(self.bucket.versions[object_id]))
        self.handles.append(handle)
        return handle

    async def change_the_bucket(self, cache: BlockCache) -> None:
        """Another client replaces or deletes."""
        key = self.rng.choice(KEYS)
        if self.rng.random() < 0.2:
            self.bucket.remove(key)
        else:
            self.bucket.put(key, self.rng.choice((*SIZES, LARGE_SIZE)))
        self.bucket.forget_unused({handle.object_id for handle in self.handles})

    async def crowd(self, cache: BlockCache) -> None:
        """Evict by asking for room; where all of it is being written just now, there is none."""
        nbytes = self.rng.randrange(4 * MIB, 13 * MIB)
        with contextlib.suppress(NoSpace):
            await cache.reserve_staging(nbytes)
            cache.release_staging(nbytes)

    async def forget(self, cache: BlockCache) -> None:
        """Drop a version, open or not."""
        await cache.forget(self.rng.choice(list(self.bucket.versions)))

    async def close_some(self, cache: BlockCache) -> None:
        """Close handles."""
        self.rng.shuffle(self.handles)
        while self.handles and self.rng.random() < 0.6:
            cache.close(self.handles.pop())

    async def fail_soon(self, cache: BlockCache) -> None:
        """Let the next requests fail in a way that passes."""
        error, deliver_bytes = self.rng.choice(PASSING_FAULTS)
        times = self.rng.choice((1, 1, 2))
        self.store.heal()  # three lies in a row are believed
        self.store.script(
            Fault(
                error, method="get_into", skip=self.rng.randrange(3), times=times, deliver_bytes=deliver_bytes
            )
        )

    async def let_time_pass(self, cache: BlockCache) -> None:
        """Rows are written once a second."""
        await trio.sleep(self.rng.choice(self.pauses))

    # ---- whole runs

    async def run(self, cache: BlockCache, steps: int) -> None:
        """Take steps in one run of the daemon, readers side by side."""
        others = (
            self.change_the_bucket,
            self.crowd,
            self.forget,
            self.close_some,
            self.close_some,
            self.fail_soon,
            self.fail_soon,
            self.let_time_pass,
        )
        for _ in range(steps):
            self.step += 1
            async with trio.open_nursery() as nursery:
                for _ in range(self.rng.choice((1, 1, 3))):
                    nursery.start_soon(self.read, cache)
                if self.rng.random() < 0.4:
                    # Beside the reads, which began with the bucket as it was: they may say either.
                    nursery.start_soon(self.rng.choice(others), cache)
            facts = cache.statistics()
            assert facts.used_bytes + facts.reserved_bytes + facts.staging_bytes <= LIMIT
        self.store.heal()
        self.handles.clear()
        self.evicted_bytes += facts.evicted_bytes
        self.failures += facts.checksum_failures

    def damage(self) -> None:
        """Spoil what lies on the disk while no daemon runs: flip, cut, remove, swap."""
        files = sorted(path for path in (self.directory / "files").glob("*/*") if path.stat().st_size)
        for _ in range(min(2, len(files))):
            self.damages += 1
            victim = self.rng.choice(files)
            kind = self.rng.randrange(4)
            if kind == 0:
                with victim.open("r+b") as file:
                    file.seek(self.rng.randrange(victim.stat().st_size))
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 255]))
            elif kind == 1:
                os.truncate(victim, self.rng.randrange(victim.stat().st_size))
            elif kind == 2 and victim.exists():
                victim.unlink()
                files.remove(victim)
            else:
                other = self.rng.choice(files)
                aside = victim.with_name("aside")
                victim.rename(aside)
                if other != victim:
                    other.rename(victim)
                aside.rename(other)


def _killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next stop leave what kill -9 leaves: no last rows, no clean mark."""
    monkeypatch.setattr(BlockTable, "close", lambda table: table._index.close(clean=False))


async def _execute(program: Program, steps: int, monkeypatch: pytest.MonkeyPatch, *, threads: bool) -> None:
    try:
        while program.step < steps:
            with monkeypatch.context() as patch:
                if program.rng.random() < 0.4:
                    _killed(patch)
                async with running_cache(
                    program.store,
                    program.directory,
                    limit_bytes=LIMIT,
                    buffer_bytes=32 * MIB,
                    threads=threads,
                ) as cache:
                    await program.run(cache, program.rng.randrange(20, 90))
            if program.rng.random() < 0.5:
                program.damage()
    except BaseException as exc:
        exc.add_note(f"seed {program.seed}, step {program.step}")
        raise


@pytest.mark.parametrize("seed", range(3))
async def test_programs_under_a_virtual_clock(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(seed, tmp_path)
    await _execute(program, STEPS, monkeypatch, threads=False)
    assert program.reads > STEPS
    assert program.gone > 0
    assert program.evicted_bytes > 0
    assert program.damages > 0


@pytest.mark.real_time
async def test_a_program_with_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(99, tmp_path)
    # Real seconds: failures would wait for many of them.
    program.pauses = (0.05,)
    monkeypatch.setattr(Program, "fail_soon", Program.let_time_pass)
    await _execute(program, STEPS // 2, monkeypatch, threads=True)
    assert program.evicted_bytes > 0
