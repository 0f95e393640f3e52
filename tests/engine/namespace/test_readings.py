"""One reading of a directory, in many small replies, returns each name once, whatever happens to the names meanwhile.

A name that is there during the whole reading is returned. One that comes or goes may be, but never twice.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from fusecache.engine.namespace import lister
from fusecache.engine.namespace.nodes import Kind
from fusecache.fs.kept_files import KeptFiles
from fusecache.fs.open_directories import EntryBuilder, OpenDirectories
from fusecache.fuse.kept_mount import KeptTable
from fusecache.fuse.values import EntryAttributes, RequestContext
from fusecache.model.errors import FusecacheError
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, photograph, running_node

# `a-1` and `a.b` sort between the file `a` and the directory `a/`.
NAMES = ("a", "a-1", "a.b", "b", "c", "z")
FOLDER, HANDLE = "dir", 7


class SlowLists(InlineOffload):
    """A LIST is answered at once, and the answer takes half a second: names change meanwhile."""

    async def network(self, call: Callable[..., Any], *args: object) -> Any:
        await trio.lowlevel.checkpoint()
        answer = call(*args)
        await trio.sleep(0.5)
        return answer


class Reply:
    """A reply with space for `size` entries."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.entries: list[tuple[str, int]] = []

    def add(self, name: bytes, entry: EntryAttributes, next_id: int) -> bool:
        if len(self.entries) == self.size:
            return False
        self.entries.append((os.fsdecode(name), next_id))
        return True


class Reading:
    """An open directory, read as the kernel reads it for a program.

    names: those that the program got. present: names that were there during the whole reading, as far as it went.
    """

    def __init__(self, present: set[str], folder: str = FOLDER) -> None:
        self.names: Counter[str] = Counter()
        self.present = present
        self._folder = folder
        self.position = 0
        self.is_at_end = False
        self._table = os.memfd_create("table")
        self._life = 0

    async def open(self, user: User) -> None:
        """Open the directory; on another node, go on with what the one before left."""
        kept = KeptFiles(
            SimpleNamespace(table=KeptTable(self._table), is_resumed=self._life > 0, unanswered=[])  # type: ignore[arg-type]
        )
        kept.settle(user.fs.journal, user.fs.tree.began_ns)
        node = await user.fs.resolve(self._folder)
        node.lookups += 1
        self._directories = OpenDirectories(user.fs, EntryBuilder(user.fs, read_only=False), kept)
        if kept.predecessor is not None:
            (handle,) = kept.predecessor.handles
            self._directories.adopt(handle, node)
        else:
            self._directories.open(HANDLE, node, RequestContext(0, 0, 1, 0))
        self._life += 1

    async def read(self, size: int, taken: int) -> None:
        """Have the next reply. The program's buffer takes so many of its entries; the kernel asks for others again."""
        reply = Reply(size)
        await self._directories.reply(HANDLE, self.position, reply)
        self.is_at_end = not reply.entries
        for name, position in reply.entries[:taken]:
            self.names[name] += name not in {".", ".."}
            self.position = position

    async def end(self) -> None:
        """Read to the end. The program got each name once, and each that was there."""
        while not self.is_at_end:
            await self.read(3, 3)
        os.close(self._table)
        assert {name: count for name, count in self.names.items() if count > 1} == {}
        assert self.present - set(self.names) == set()


names = st.sampled_from(NAMES)
steps = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.just("read"), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.just("write"), names),
    st.tuples(st.just("write"), names),
    st.tuples(st.just("unlink"), names),
    st.tuples(st.just("unlink"), names),
    st.tuples(st.just("mkdir"), names),
    st.tuples(st.just("rmdir"), names),
    st.tuples(st.just("symlink"), names),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("wait"), st.sampled_from([0.2, 1.5, 5.0])),
    st.tuples(st.just("wait"), st.sampled_from([0.2, 1.5, 5.0])),
    st.tuples(st.just("drain")),
    st.tuples(st.just("list")),
    st.tuples(st.just("other_puts"), st.sampled_from([*NAMES, *(f"{name}/x" for name in NAMES)])),
    st.tuples(st.just("other_removes"), st.sampled_from([*NAMES, *(f"{name}/x" for name in NAMES)])),
    st.tuples(st.just("kill")),
)
keys = st.sets(st.sampled_from([*NAMES, *(f"{name}/" for name in NAMES), *(f"{name}/x" for name in NAMES)]))


class Program:
    """Changes a directory, here and in the bucket, before and during one reading."""

    def __init__(self, place: Path, there: set[str]) -> None:
        self.bucket = Bucket()
        for key in ("keep", *sorted(there)):
            self.bucket.memory.put_bytes(f"{FOLDER}/{key}", b"1")
        self._place = place
        self._lives = 0
        self._reading: Reading | None = None
        # Another client removed one of the keys: this node may hear of it at any later time.
        self._uncertain: set[str] = set()

    async def run(self, before: list[tuple], during: list[tuple]) -> None:
        """Carry out the steps, each life of the node in turn, and read to the end."""
        rest = [*before, ("open",), *during]
        while True:
            place = self._place / str(self._lives)
            async with running_node(self.bucket, place, offload=SlowLists()) as user:
                self._user = user
                if self._reading is not None:
                    await self._reading.open(user)
                while rest and rest[0][0] != "kill":
                    word, *arguments = rest.pop(0)
                    await getattr(self, f"_{word}")(*arguments)
                if not rest:
                    assert self._reading is not None
                    await self._reading.end()
                    return
                rest.pop(0)
                self._lives += 1
                photograph(place, self._place / str(self._lives))
                self.bucket.is_cut_off = True
            self.bucket.come_back()

    async def _open(self) -> None:
        self._reading = Reading(await self._list() - self._uncertain)
        await self._reading.open(self._user)

    async def _read(self, size: int, taken: int) -> None:
        if self._reading is not None:
            await self._reading.read(size, min(size, taken))

    async def _change(self, change: Callable[..., Any], *args: object, gone: str = "") -> None:
        if self._reading is not None:
            self._reading.present.discard(gone)
        with suppress(FusecacheError):
            await change(*args)

    async def _write(self, name: str) -> None:
        node = (await self._user.fs.resolve(FOLDER)).children.get(name)
        if node is None or node.kind is Kind.FILE:  # the kernel opens no directory for writing
            await self._change(self._user.write, f"{FOLDER}/{name}", b"2")

    async def _unlink(self, name: str) -> None:
        await self._change(self._user.unlink, f"{FOLDER}/{name}", gone=name)

    async def _mkdir(self, name: str) -> None:
        await self._change(self._user.mkdir, f"{FOLDER}/{name}")

    async def _rmdir(self, name: str) -> None:
        await self._change(self._user.rmdir, f"{FOLDER}/{name}", gone=name)

    async def _symlink(self, name: str) -> None:
        await self._change(self._user.symlink, "target", f"{FOLDER}/{name}")

    async def _rename(self, old: str, new: str) -> None:
        await self._change(
            self._user.rename, f"{FOLDER}/{old}", f"{FOLDER}/{new}", gone=old if old != new else ""
        )

    async def _wait(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def _drain(self) -> None:
        await self._user.drained()

    async def _list(self) -> set[str]:
        """Another program lists the directory."""
        reading = Reading(set())
        await reading.open(self._user)
        await reading.end()
        return set(+reading.names)

    async def _other_puts(self, key: str) -> None:
        self._hear_of(key)
        self.bucket.memory.put_bytes(f"{FOLDER}/{key}", b"3")

    async def _other_removes(self, key: str) -> None:
        self._hear_of(key)
        self.bucket.memory.remove(f"{FOLDER}/{key}")

    def _hear_of(self, key: str) -> None:
        name = key.partition("/")[0]
        self._uncertain.add(name)
        if self._reading is not None:
            self._reading.present.discard(name)


@pytest.fixture(autouse=True)
def small_pages() -> Any:
    """A page of a listing has two names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lister, "PAGE_NAMES", 2)
        yield


def run_on_a_quick_clock(main: Callable[[Path], Awaitable[None]]) -> None:
    """Run on a clock that jumps whenever all wait."""
    memory = Path("/dev/shm")  # a life makes hundreds of folders: quick there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        trio.run(main, Path(name), clock=MockClock(autojump_threshold=0))


@given(keys, st.lists(steps, max_size=6), st.lists(steps, max_size=10))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_reading_returns_each_name_once(there: set[str], before: list[tuple], during: list[tuple]) -> None:
    async def main(place: Path) -> None:
        await Program(place, there).run(before, during)

    run_on_a_quick_clock(main)


async def test_a_name_that_is_removed_and_made_again_comes_once_in_every_order_of_what_happens(
    bucket: Bucket, cache: Path
) -> None:
    """The rows of a listing may be older than the removal, and the removal may reach the bucket before or after."""
    changes = ("unlink", "write", "drain", "list", "read")
    orders = [
        each
        for each in product(changes, repeat=4)
        if "unlink" in each and "write" in each[each.index("unlink") :]
    ]
    for number, name in product(range(len(orders)), "abc"):
        bucket.memory.put_bytes(f"dir{number}/{name}", b"1")
    async with running_node(bucket, cache, offload=SlowLists()) as user:
        for number, words in enumerate(orders):
            folder = f"dir{number}"
            readings = [Reading({"a", "c"}, folder)]
            await readings[0].open(user)
            for word in words:
                if word == "read":
                    await readings[0].read(1, 1)
                elif word == "list":
                    await trio.sleep(2)  # the listing is older than its TTL
                    readings.append(Reading({"a", "c"}, folder))
                    await readings[-1].open(user)
                    await readings[-1].read(1, 1)
                elif word == "drain":
                    await user.drained()
                else:
                    with suppress(FusecacheError):
                        await (
                            user.unlink(f"{folder}/b")
                            if word == "unlink"
                            else user.write(f"{folder}/b", b"2")
                        )
            for reading in readings:
                await reading.end()


async def test_a_name_that_is_replaced_by_the_rename_of_another_comes_once(
    bucket: Bucket, cache: Path
) -> None:
    """Both are fetched, and wait for the next reply, when the log is rotated."""
    async with running_node(bucket, cache) as user:
        await user.mkdir(FOLDER)
        for name in ("first", "log", "log.1"):
            await user.write(f"{FOLDER}/{name}", name.encode())
        reading = Reading({"first", "log.1"})
        await reading.open(user)
        await reading.read(3, 3)
        await user.rename(f"{FOLDER}/log", f"{FOLDER}/log.1")
        await reading.end()
        assert +reading.names == Counter(["first", "log.1"])


async def test_a_name_that_only_memory_forgets_is_returned(bucket: Bucket, cache: Path) -> None:
    """The kernel forgets inodes whenever it needs memory, also of names that wait for the next reply."""
    for name in ("a", "b", "c"):
        bucket.memory.put_bytes(f"{FOLDER}/{name}", b"1")
    async with running_node(bucket, cache) as user:
        node = await user.fs.resolve(f"{FOLDER}/c")
        node.lookups += 1
        reading = Reading({"a", "b", "c"})
        await reading.open(user)
        await reading.read(3, 3)
        user.fs.tree.forget(node.number, 1)
        await reading.end()
