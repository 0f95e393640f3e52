"""Staging space of a mount with two buckets: one that takes nothing leaves the other what it is guaranteed."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from fusecache.engine.options import BucketAccess
from fusecache.model.errors import NoSpace, Unavailable
from fusecache.model.objects import MIB
from fusecache.policy.backoff import STANDSTILL_SECONDS
from tests.engine.publish.test_several_buckets import Two, good_is_published
from tests.support.faulty_store import Fault
from tests.support.node import User, photograph

CACHE = 100 * MIB  # 70 MiB of staging: 17.5 MiB for each bucket, half of it reserved for accepted writes
FILE = 2 * MIB
OUTAGE = Fault(Unavailable("503"), "put", times=None)


def held(user: User) -> int:
    """Bytes of files that wait for upload."""
    return user.fs.cache.statistics().staging_bytes


async def fill(user: User, bucket: str) -> int:
    """Write files until the bucket's next one is refused; return how many were closed."""
    for number in range(100):
        try:
            await user.write(f"{bucket}/{number}", b"1" * FILE)
        except NoSpace:
            return number
    raise AssertionError("never refused")


async def test_an_outage_leaves_space_to_the_other_bucket(cache: Path, autojump_clock: MockClock) -> None:
    two = Two()
    async with two.running(cache, cache_bytes=CACHE) as user:
        await user.tree()
        two.faults.script(OUTAGE)
        count = await fill(user, "bad")
        assert count * FILE >= 40 * MIB  # most of the space, as the other bucket needed none
        with trio.fail_after(1):
            await user.write("good/new", b"2" * 8 * MIB)  # its close waits for nothing, either
        await good_is_published(user, two, 10)
        with pytest.raises(NoSpace):
            await user.write("bad/more", b"1" * FILE)
        two.faults.heal()
        assert await user.drained() == "durable"
        assert len(two.bad.shows()) == count
        assert held(user) == 0


async def test_a_restart_knows_what_each_bucket_holds(
    cache: Path, tmp_path: Path, autojump_clock: MockClock
) -> None:
    two = Two()
    async with two.running(cache, cache_bytes=CACHE) as user:
        await user.tree()
        two.faults.script(OUTAGE)
        count = await fill(user, "bad")
        photograph(cache, tmp_path / "copy")
        two.faults.heal()
    two = Two(OUTAGE)
    async with two.running(tmp_path / "copy", cache_bytes=CACHE) as user:
        assert held(user) == count * FILE
        with pytest.raises(NoSpace):
            await user.write("bad/more", b"1" * FILE)
        await user.write("good/new", b"2" * 8 * MIB)
        await good_is_published(user, two, 10)
        two.faults.heal()
        assert await user.drained() == "durable"
        assert held(user) == 0


async def test_uploads_of_the_other_bucket_are_no_progress(cache: Path, autojump_clock: MockClock) -> None:
    """A close waits as long as uploads of its own bucket progress, and STANDSTILL_SECONDS more."""
    two = Two()
    async with two.running(cache, cache_bytes=CACHE) as user, trio.open_nursery() as nursery:
        await user.tree()
        two.faults.script(OUTAGE)

        async def write_to_the_other() -> None:
            for number in range(1000):
                await user.write(f"good/{number}", b"2")
                await trio.sleep(10)

        nursery.start_soon(write_to_the_other)
        while held(user) + FILE <= user.fs.cache.high_water_bytes("bad/"):
            await user.write(f"bad/{held(user)}", b"1" * FILE)
        began = trio.current_time()
        await user.write("bad/last", b"1" * FILE)
        assert STANDSTILL_SECONDS <= trio.current_time() - began < STANDSTILL_SECONDS + 20
        nursery.cancel_scope.cancel()
        two.faults.heal()
        assert await user.drained() == "durable"


async def test_a_bucket_that_is_not_written_to_keeps_nothing(cache: Path, autojump_clock: MockClock) -> None:
    two = Two(OUTAGE)
    counts = []
    for number, read_only in enumerate((False, True)):
        access = {"good": BucketAccess(read_only=read_only)}
        async with two.running(cache / str(number), cache_bytes=CACHE, access=access) as user:
            counts.append(await fill(user, "bad"))
            two.faults.heal()
            assert await user.drained() == "durable"
        two = Two(OUTAGE)
    # The guaranteed part of the other bucket: 17.5 MiB.
    assert counts[1] - counts[0] in (8, 9)
