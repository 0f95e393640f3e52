"""The load of a model goes on until a program has all of it, whatever is slow. Its bytes come once."""

import json
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from fusecache.engine.namespace.nodes import FileHandle, Node
from fusecache.engine.prefetch import model_loads
from fusecache.engine.prefetch.kernel_pages import KernelPages
from fusecache.model.objects import KIB, MIB, Extent
from tests.support.node import Bucket, User, running_node

TENSOR_BYTES = 4 * MIB
MODEL = "model.safetensors"
PAGE = 4 * KIB
# Of the kernel's read-ahead, in pages.
WINDOW = MIB // PAGE


def weights(tensors: int) -> bytes:
    """Return a safetensors file."""
    places = {
        f"{number:02}": {
            "dtype": "U8",
            "shape": [TENSOR_BYTES],
            "data_offsets": [number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES],
        }
        for number in range(tensors)
    }
    header = json.dumps(places).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes(tensors * TENSOR_BYTES)


class SlowReader:
    """A page reader of a busy machine: long to start, to open a file, to read, without memory for some time.

    told: how many bytes the kernel read.
    """

    def __init__(
        self,
        *,
        start_seconds: float = 0,
        open_seconds: float = 0,
        read_seconds: float = 0,
        full_seconds: float = 0,
    ) -> None:
        self.start_seconds = start_seconds
        self.open_seconds = open_seconds
        self.read_seconds = read_seconds
        self.full_seconds = full_seconds
        self.full_until = 0.0
        self.reading: Node | None = None
        self.told = 0

    @asynccontextmanager
    async def reader(self) -> AsyncIterator["SlowReader"]:
        await trio.sleep(self.start_seconds)
        self.full_until = trio.current_time() + self.full_seconds
        yield self

    def has_memory(self, nbytes: int) -> bool:
        return trio.current_time() >= self.full_until

    async def read(self, node: Node, parts: Sequence[Extent]) -> bool:
        self.reading = node
        await trio.sleep(self.open_seconds)
        node.handles += 1
        await trio.sleep(self.read_seconds)
        node.handles -= 1
        self.told += sum(each.size for each in parts)
        self.reading = None
        return True


async def begin(user: User, name: str = MODEL) -> FileHandle:
    """Read two tensors far apart, as a program does that loads a model, and hold the file open."""
    node = await user.fs.resolve(name)
    handle = user.fs.file_io.open(node, writable=False, pid=1)
    await user.fs.file_io.read(handle, 0, 128 * KIB)
    for start in (80 * MIB, 40 * MIB):
        for offset in range(start, start + TENSOR_BYTES, MIB):
            await user.fs.file_io.read(handle, offset, MIB)
    return handle


@pytest.mark.parametrize("what", ["start_seconds", "open_seconds", "read_seconds", "full_seconds"])
async def test_the_kernel_is_told_of_all_of_a_model_on_a_busy_machine_too(
    what: str, bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, slow = weights(24), SlowReader(**{what: 10})
    bucket.memory.put_bytes(MODEL, data)
    monkeypatch.setattr(KernelPages, "reader", lambda _: slow.reader())
    async with running_node(bucket, cache, whole_files=("*.safetensors",)) as user:
        handle = await begin(user)
        with trio.fail_after(600):
            while slow.told < len(data):  # noqa: ASYNC110  # polled on a virtual clock
                await trio.sleep(1)
        await user.fs.file_io.release(handle)


async def test_a_load_without_memory_ends_though_its_program_reads_on(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its end, a second model has only the space that the first one leaves."""
    data = weights(24)
    for name in (MODEL, "second.safetensors"):
        bucket.memory.put_bytes(name, data)
    monkeypatch.setattr(KernelPages, "reader", lambda _: SlowReader(full_seconds=math.inf).reader())
    async with running_node(
        bucket, cache, whole_files=("*.safetensors",), cache_bytes=160 * MIB, buffer_bytes=64 * MIB
    ) as user:
        handle = await begin(user)
        for _ in range(20):
            await trio.sleep(10)
            await user.fs.file_io.read(handle, 40 * MIB, PAGE)
        before = sum(user.fs.cache.statistics().bytes_by_cause.values())
        second = await begin(user, "second.safetensors")
        await trio.sleep(30)
        assert sum(user.fs.cache.statistics().bytes_by_cause.values()) - before >= len(data)
        for each in (handle, second):
            await user.fs.file_io.release(each)


class Kernel:
    """Reads for a program that has a file mapped: around a page fault, ahead of reads in order, each page once."""

    def __init__(self, user: User, handle: FileHandle) -> None:
        self._user = user
        self._handle = handle
        self._has = bytearray(-(-handle.node.size // PAGE))
        self._ahead = range(0)

    async def fault(self, page: int) -> None:
        """Have a page."""
        is_next = page == self._ahead.start + 3 * WINDOW // 4 and self._has[page]
        if self._has[page] and not is_next:
            return
        start = self._ahead.stop if is_next or page == self._ahead.stop else max(0, page - WINDOW // 2)
        self._ahead = range(start, min(start + WINDOW, len(self._has)))
        missing = [each for each in self._ahead if not self._has[each]]
        while missing:
            stop = next(
                (index for index, each in enumerate(missing) if each != missing[0] + index), len(missing)
            )
            await self._user.fs.file_io.read(self._handle, missing[0] * PAGE, stop * PAGE)
            await trio.testing.wait_all_tasks_blocked()
            for each in missing[:stop]:
                self._has[each] = 1
            del missing[:stop]


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_model_larger_than_the_cache_comes_once(bucket: Bucket, cache: Path, seed: int) -> None:
    data, count = weights(48), 48
    start = len(data) - count * TENSOR_BYTES
    async with running_node(
        bucket, cache, whole_files=("*.safetensors",), cache_bytes=64 * MIB, buffer_bytes=64 * MIB
    ) as user:
        for name in ("first.safetensors", "second.safetensors"):  # the cache is full from then on
            bucket.memory.put_bytes(name, data)
            before = sum(user.fs.cache.statistics().bytes_by_cause.values())
            node = await user.fs.resolve(name)
            handle = user.fs.file_io.open(node, writable=False, pid=1)
            kernel = Kernel(user, handle)
            await kernel.fault(0)
            for tensor in random.Random(seed).sample(range(count), count):
                place = start + tensor * TENSOR_BYTES
                for page in range(place // PAGE, (place + TENSOR_BYTES - 1) // PAGE + 1):
                    await kernel.fault(page)
            await user.fs.file_io.release(handle)
            came = sum(user.fs.cache.statistics().bytes_by_cause.values()) - before
            # And the first read-ahead, which begins before it is known where tensors end.
            assert came <= 1.02 * len(data) + 16 * MIB


async def test_a_model_whose_shard_ends_within_its_header_is_read(bucket: Bucket, cache: Path) -> None:
    """It is too large for the cache, so its headers are read for the ends of tensors."""
    whole, damaged = (f"model-{number:05}-of-00002.safetensors" for number in (1, 2))
    index = json.dumps({"weight_map": {"a": whole, "b": damaged}}).encode()
    data, size = weights(24), 20 * MIB
    bucket.memory.put_bytes(whole, data)
    bucket.memory.put_bytes(damaged, (size - 4).to_bytes(8, "little") + b"{" + bytes(size - 9))
    bucket.memory.put_bytes("model.safetensors.index.json", index)
    async with running_node(
        bucket, cache, whole_files=("*.safetensors",), cache_bytes=64 * MIB, buffer_bytes=64 * MIB
    ) as user:
        opened = [
            user.fs.file_io.open(await user.fs.resolve(each), writable=False, pid=1)
            for each in (damaged, whole)
        ]
        for handle in opened:
            await user.fs.file_io.read(handle, 0, 128 * KIB)
        for start in (80 * MIB, 40 * MIB, 60 * MIB):
            for offset in range(start, start + TENSOR_BYTES, MIB):
                await user.fs.file_io.read(opened[1], offset, MIB)
        await trio.testing.wait_all_tasks_blocked()
        for handle in opened:
            await user.fs.file_io.release(handle)


def fetched(user: User) -> int:
    return sum(user.fs.cache.statistics().bytes_by_cause.values())


async def test_what_comes_waits_in_memory_for_the_kernel(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else buffers would be used again before the kernel has read them, and it would wait for the disk."""
    data, slow, buffer_bytes = weights(56), SlowReader(read_seconds=math.inf), 128 * MIB
    bucket.memory.put_bytes(MODEL, data)
    monkeypatch.setattr(KernelPages, "reader", lambda _: slow.reader())
    monkeypatch.setattr(model_loads, "_PAGES_SECONDS", math.inf)
    async with running_node(bucket, cache, whole_files=("*.safetensors",), buffer_bytes=buffer_bytes) as user:
        handle = await begin(user)
        came, rounds = 0, 0
        while rounds < 50:  # without another byte, each as long as a GET and a store
            rounds = rounds + 1 if fetched(user) == came else 0
            came = fetched(user)
            await user.fs.file_io.read(handle, 40 * MIB, PAGE)
            await trio.sleep(1)
        assert slow.reading is not None
        assert 32 * MIB <= fetched(user) <= buffer_bytes
        await user.fs.file_io.release(handle)


@pytest.mark.parametrize("seconds", [0.5, math.inf])
async def test_a_slow_kernel_is_not_waited_for(
    seconds: float, bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, slow = weights(56), SlowReader(read_seconds=seconds)
    bucket.memory.put_bytes(MODEL, data)
    monkeypatch.setattr(KernelPages, "reader", lambda _: slow.reader())
    async with running_node(bucket, cache, whole_files=("*.safetensors",), buffer_bytes=64 * MIB) as user:
        handle = await begin(user)
        with trio.fail_after(600):
            while fetched(user) < len(data):
                await user.fs.file_io.read(handle, 40 * MIB, PAGE)
                await trio.sleep(1)
        assert slow.told <= len(data) // 2
        await user.fs.file_io.release(handle)


class MountReader(SlowReader):
    """A page reader whose reads come to the daemon as those of programs do, as on a mount."""

    user: User

    async def read(self, node: Node, parts: Sequence[Extent]) -> bool:
        handle = self.user.fs.file_io.open(node, writable=False, pid=2)
        for each in parts:
            for offset in range(each.start, each.stop, MIB):
                await self.user.fs.file_io.read(handle, offset, min(MIB, each.stop - offset))
            self.told += each.size
        await self.user.fs.file_io.release(handle)
        return True


@pytest.mark.parametrize("model", ["new", "cached"])
async def test_what_the_kernel_reads_lets_no_more_be_fetched(
    model: str, bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that reads one tensor, and holds the file open, gets 16 times as much and 128 MiB."""
    reader = MountReader()
    bucket.memory.put_bytes(MODEL, weights(96))
    async with running_node(bucket, cache, whole_files=("*.safetensors",), buffer_bytes=128 * MIB) as user:
        if model == "cached":
            await user.read(MODEL)
            await trio.sleep(100)
        reader.user = user
        monkeypatch.setattr(KernelPages, "reader", lambda _: reader.reader())
        before = fetched(user)
        handle = user.fs.file_io.open(await user.fs.resolve(MODEL), writable=False, pid=1)
        await user.fs.file_io.read(handle, 0, 128 * KIB)
        for offset in (80 * MIB, 81 * MIB):
            await user.fs.file_io.read(handle, offset, MIB)
        while reader.told < 64 * MIB:  # noqa: ASYNC110  # polled on a virtual clock
            await trio.sleep(1)
        await trio.sleep(50)
        assert fetched(user) - before <= (128 + 16 * 2 + 16) * MIB
        assert reader.told <= (128 + 16 * 2 + 16) * MIB
        await user.fs.file_io.release(handle)


async def test_a_shard_is_fetched_though_the_kernel_has_not_read_the_one_before(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, slow = weights(24), SlowReader(read_seconds=1)
    first, second = names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        bucket.memory.put_bytes(name, data)
    index = json.dumps({"weight_map": {"a": first, "b": second}}).encode()
    bucket.memory.put_bytes("model.safetensors.index.json", index)
    monkeypatch.setattr(KernelPages, "reader", lambda _: slow.reader())
    async with running_node(bucket, cache, whole_files=("*.safetensors",), buffer_bytes=64 * MIB) as user:
        closed, handle = await begin(user, first), await begin(user, second)
        with trio.fail_after(600):
            while not slow.told:  # noqa: ASYNC110  # polled on a virtual clock
                await trio.sleep(0.1)
            await user.fs.file_io.release(closed)
            while slow.told < 2 * len(data):  # noqa: ASYNC110  # polled on a virtual clock
                await trio.sleep(1)
        await user.fs.file_io.release(handle)


class RecoveringReader(SlowReader):
    """A page reader that stands still in its first job, and then is quick. ahead: most bytes fetched before it."""

    user: User

    def __init__(self) -> None:
        super().__init__(read_seconds=10)
        self.ahead = 0

    async def read(self, node: Node, parts: Sequence[Extent]) -> bool:
        self.ahead = max(self.ahead, fetched(self.user) - self.told)
        await super().read(node, parts)
        self.read_seconds = 0.1
        return True


async def test_the_fetch_waits_again_for_a_kernel_that_was_slow_once(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, reader, allowed = weights(48), RecoveringReader(), [24 * MIB]
    bucket.memory.put_bytes(MODEL, data)
    monkeypatch.setattr(KernelPages, "reader", lambda _: reader.reader())
    monkeypatch.setattr(model_loads, "allowed_bytes", lambda _: allowed[0])
    async with running_node(bucket, cache, whole_files=("*.safetensors",), buffer_bytes=64 * MIB) as user:
        reader.user = user
        handle = await begin(user)
        while reader.told < 24 * MIB:  # noqa: ASYNC110  # polled on a virtual clock
            await trio.sleep(1)
        reader.ahead, allowed[0] = 0, len(data)
        await user.fs.file_io.read(handle, 160 * MIB, PAGE)
        while reader.told < len(data):  # noqa: ASYNC110  # polled on a virtual clock
            await trio.sleep(1)
        assert reader.ahead <= len(data) // 2
        await user.fs.file_io.release(handle)


async def test_buffers_are_free_once_the_kernel_has_what_they_hold(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, quick = weights(24), SlowReader()
    bucket.memory.put_bytes(MODEL, data)
    monkeypatch.setattr(KernelPages, "reader", lambda _: quick.reader())
    async with running_node(bucket, cache, whole_files=("*.safetensors",), buffer_bytes=256 * MIB) as user:
        handle = await begin(user)
        while quick.told < len(data):  # noqa: ASYNC110  # polled on a virtual clock
            await trio.sleep(1)
        assert user.fs.cache._buffer_pool.in_use <= 3  # the program itself reads from these
        await user.fs.file_io.release(handle)
