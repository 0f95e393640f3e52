"""Who reads the files of a directory in its order finds the next ones fetched; who does not causes no GET."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from fusecache.model.objects import KIB, MIB
from fusecache.policy.cache.sibling_readahead import MAX_WINDOW
from tests.support.block_caches import some_bytes
from tests.support.memory_store import MemoryStore
from tests.support.node import Bucket, User, running_node

COUNT = 120
FILE_BYTES = 100 * KIB
NAMES = [f"{number:04}" for number in range(COUNT)]


class GetLog:
    """Passes requests on to a bucket in memory; gets: how many GETs each key had."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.gets: Counter[str] = Counter()

    def fill(self, folder: str, size: int = FILE_BYTES) -> None:
        """Put COUNT files into a folder."""
        for name in NAMES:
            self.memory.put_bytes(f"{folder}/{name}", name.encode() * (size // len(name)))

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.memory, name)

        def passed(*args: Any, **options: Any) -> Any:
            if name == "get_into":
                self.gets[args[0].key] += 1
            return call(*args, **options)

        return passed


async def read(user: User, path: str, reader: int = 1) -> bytes:
    """Read a whole file as the thread `reader` does; then let everything else run."""
    node = await user.fs.resolve(path)
    handle = user.fs.file_io.open(node, writable=False, pid=reader)
    data = bytearray()
    while piece := await user.fs.file_io.read(handle, len(data), 128 * KIB):
        data += piece
    await user.fs.file_io.release(handle)
    await trio.testing.wait_all_tasks_blocked()
    return bytes(data)


@asynccontextmanager
async def reading(store: Any, cache: Path, **options: Any) -> AsyncIterator[User]:
    """Run a node in which the kernel knows the directory `d`."""
    async with running_node(store, cache, buffer_bytes=128 * MIB, **options) as user:
        (await user.fs.resolve("d")).lookups += 1
        yield user


def bytes_ahead(user: User) -> int:
    """Return how many bytes were fetched before a reader asked for them."""
    return user.fs.cache.statistics().bytes_by_cause["readahead"]


async def test_one_reader_in_order_waits_for_the_first_files_only(cache: Path) -> None:
    log = GetLog()
    log.fill("d")
    async with reading(log, cache) as user:
        for name in NAMES:
            assert await read(user, f"d/{name}") == name.encode() * (FILE_BYTES // 4)
        assert bytes_ahead(user) >= (COUNT - 6) * FILE_BYTES
    assert log.gets == {f"d/{name}": 1 for name in NAMES}


async def test_a_random_order_fetches_what_is_opened_and_nothing_else(cache: Path) -> None:
    log = GetLog()
    log.fill("d")
    opened = random.Random(1).sample(NAMES, COUNT // 3)
    async with reading(log, cache) as user:
        for turn, name in enumerate(opened):
            await read(user, f"d/{name}", reader=turn % 4)
        assert bytes_ahead(user) == 0
    assert log.gets == {f"d/{name}": 1 for name in opened}


async def test_threads_that_share_one_list_get_their_files_ahead(cache: Path) -> None:
    log = GetLog()
    log.fill("d")
    chance = random.Random(2)
    order = sorted(range(COUNT), key=lambda place: place + chance.random() * 6)
    async with reading(log, cache) as user:
        for place in order:
            await read(user, f"d/{NAMES[place]}", reader=chance.randrange(8))
        assert bytes_ahead(user) >= 0.9 * COUNT * FILE_BYTES
    assert set(log.gets.values()) == {1}


async def test_readers_in_several_places_of_one_directory_each_get_their_own(cache: Path) -> None:
    log = GetLog()
    log.fill("d")
    async with reading(log, cache) as user:
        for step in range(COUNT // 4):
            for reader in range(4):
                await read(user, f"d/{NAMES[reader * COUNT // 4 + step]}", reader)
        assert bytes_ahead(user) >= 0.85 * COUNT * FILE_BYTES
    assert set(log.gets.values()) == {1}


async def test_directories_between_the_files_do_not_end_a_scan(cache: Path) -> None:
    log = GetLog()
    log.fill("d")
    for name in NAMES[::3]:
        log.memory.put_bytes(f"d/{name}x/inner", b"inner")
    async with reading(log, cache) as user:
        for name in NAMES:
            await read(user, f"d/{name}")
        assert bytes_ahead(user) >= 0.9 * COUNT * FILE_BYTES


async def test_a_scan_that_ends_leaves_no_more_than_it_read(cache: Path) -> None:
    log = GetLog()
    log.fill("d")
    async with reading(log, cache) as user:
        for name in NAMES[:7]:
            await read(user, f"d/{name}")
    assert 7 < len(log.gets) <= 14


async def test_at_most_the_largest_window_is_ahead(cache: Path) -> None:
    log = GetLog()
    log.fill("d")
    async with reading(log, cache) as user:
        for count, name in enumerate(NAMES, 1):
            await read(user, f"d/{name}")
            assert len(log.gets) <= count + MAX_WINDOW


async def test_of_large_files_only_the_start_is_fetched_ahead(cache: Path) -> None:
    log = GetLog()
    data = some_bytes(5 * MIB)
    for name in NAMES[:6]:
        log.memory.put_bytes(f"d/{name}", data)
    async with reading(log, cache) as user:
        for name in NAMES[:4]:
            assert await read(user, f"d/{name}") == data
        assert log.gets[f"d/{NAMES[5]}"] == 1
        assert log.memory.statistics().bytes_read == 4 * len(data) + 2 * MIB


async def test_a_file_replaced_since_the_listing_is_read_as_it_is_now(cache: Path) -> None:
    log = GetLog()
    log.fill("d")
    async with reading(log, cache) as user:
        for name in NAMES[:3]:
            await read(user, f"d/{name}")
        log.memory.put_bytes(f"d/{NAMES[6]}", b"replaced")
        log.memory.remove(f"d/{NAMES[7]}")
        for name in NAMES[3:6]:
            await read(user, f"d/{name}")
        await trio.sleep(2)
        assert await read(user, f"d/{NAMES[6]}") == b"replaced"
        assert await read(user, f"d/{NAMES[8]}") == NAMES[8].encode() * (FILE_BYTES // 4)


async def test_files_written_here_are_neither_asked_for_nor_hide_the_others(
    bucket: Bucket, cache: Path
) -> None:
    for name in NAMES[:20]:
        bucket.memory.put_bytes(f"d/{name}", name.encode() * 1000)
    async with reading(bucket, cache, settle_seconds=10_000.0) as user:
        await user.write(f"d/{NAMES[10]}", b"newer")
        for name in NAMES[:20]:
            expected = b"newer" if name == NAMES[10] else name.encode() * 1000
            assert await read(user, f"d/{name}") == expected
    assert bucket.memory.statistics().gets == 19
