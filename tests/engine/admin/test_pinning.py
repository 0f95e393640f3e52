"""A pinned object stays in the cache, whatever else is read or written, while it is the current version."""

from pathlib import Path

import pytest
import trio

from fusecache.model.objects import MIB
from fusecache.policy.name_patterns import PinnedKeys
from tests.support.block_caches import until
from tests.support.node import Bucket, User, running_node

CACHE = 100 * MIB
PINNED = 20 * MIB


async def gets_of(user: User, bucket: Bucket, path: str) -> int:
    """Return how many GETs of a file it costs to read it; what is read ahead of others may come meanwhile."""
    before = bucket.gets.count(path)
    await user.read(path)
    return bucket.gets.count(path) - before


async def write_pinned(user: User) -> None:
    await user.write("model.ckpt", b"p" * PINNED)
    assert await user.drained() == "durable"


@pytest.mark.real_time
async def test_a_pinned_checkpoint_outlives_reads_of_much_more_than_the_cache_holds(
    bucket: Bucket, cache: Path
) -> None:
    for number in range(60):
        bucket.memory.put_bytes(f"data-{number}", bytes([number]) * (4 * MIB))
    async with running_node(bucket, cache, cache_bytes=CACHE, buffer_bytes=24 * MIB, pin=("*.ckpt",)) as user:
        await write_pinned(user)
        for _ in range(20):
            for number in range(60):
                await user.read(f"data-{number}")
            if user.fs.cache.statistics().evicted_bytes > CACHE // 2:
                break
        assert user.fs.cache.statistics().evicted_bytes > CACHE // 2
        assert bucket.gets.count("data-0") > 0
        assert await gets_of(user, bucket, "model.ckpt") == 0


@pytest.mark.parametrize("pattern", ["model", "/model", "model/", "/model/", "model/*"])
def test_the_name_of_a_directory_pins_what_is_below_it(pattern: str) -> None:
    pinned = PinnedKeys((pattern,), "runs/")
    assert "runs/model/big" in pinned
    assert "runs/models/big" not in pinned
    assert "runs/other/model/big" not in pinned


async def test_what_is_written_takes_the_room_of_others_first(bucket: Bucket, cache: Path) -> None:
    for number in range(15):
        bucket.memory.put_bytes(f"data-{number}", bytes([number]) * (4 * MIB))
    async with running_node(bucket, cache, cache_bytes=CACHE, buffer_bytes=24 * MIB, pin=("*.ckpt",)) as user:
        await write_pinned(user)
        for number in range(15):
            await user.read(f"data-{number}")
        bucket.takes_nothing = True
        for number in range(5):
            await user.write(f"file-{number}", bytes(8 * MIB))
        assert user.fs.cache.statistics().evicted_bytes > 0
        assert await gets_of(user, bucket, "model.ckpt") == 0
        bucket.come_back()
        assert await user.drained() == "durable"


async def test_a_version_that_was_replaced_or_removed_holds_no_room(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, cache_bytes=CACHE, pin=("*.ckpt",)) as user:
        for _ in range(3):
            await write_pinned(user)
            await user.write("other.ckpt", b"o" * MIB)
            assert await user.drained() == "durable"
            await user.write("model.ckpt", b"q" * PINNED)
            await user.unlink("other.ckpt")
            assert await user.drained() == "durable"
            await user.rename("model.ckpt", "moved.ckpt")
            assert await user.drained() == "durable"
            await user.unlink("moved.ckpt")
            assert await user.drained() == "durable"
        # A task forgets them, long before the next look at what other clients did.
        await until(lambda: user.fs.cache.statistics().used_bytes < MIB, timeout_seconds=60)


async def test_what_other_clients_replace_or_remove_holds_no_room(bucket: Bucket, cache: Path) -> None:
    """Nobody here need look at it: a rotation on another node takes the checkpoint before this one away."""
    for number in range(2500):
        bucket.memory.put_bytes(f"step-1/{number:04}", b"-")
    async with running_node(bucket, cache, cache_bytes=CACHE, pin=("*.ckpt",)) as user:
        await user.mkdir("step-2")
        for path in ("step-1/0000.ckpt", "step-1/1500.ckpt", "step-1/2400.ckpt", "step-2/model.ckpt"):
            await user.write(path, b"p" * MIB)
        assert await user.drained() == "durable"
        assert user.fs.cache.statistics().used_bytes >= 4 * MIB
        bucket.memory.delete("step-1/0000.ckpt")
        bucket.memory.delete("step-1/2400.ckpt")
        bucket.memory.put_bytes("step-2/model.ckpt", b"q")
        lists = bucket.statistics().lists
        await trio.sleep(700)
        assert MIB <= user.fs.cache.statistics().used_bytes < 2 * MIB
        assert bucket.statistics().lists - lists <= 4
        assert await gets_of(user, bucket, "step-1/1500.ckpt") == 0
        assert await user.read("step-2/model.ckpt") == b"q"
