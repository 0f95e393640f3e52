"""Directories in use are listed ahead: lookups do not wait, what they see is never too old, and it costs few LISTs."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.namespace import lister
from fusecache.engine.namespace.nodes import LAST_NAME, Node, PageTimes
from fusecache.model.errors import NotFound
from fusecache.policy.listing_refresh import LISTS_PER_SECOND
from tests.engine.namespace.test_listing import FarOffload, fill, lists, read_all
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, running_node

FRESH = 1.0
# What the publisher and others may be ahead or behind of a lookup's own clock: nothing on the virtual one.
MOMENT = 0.001


@asynccontextmanager
async def far_node(bucket: Bucket, cache: Path, seconds: float = 0.1) -> AsyncIterator[User]:
    """Run a node whose bucket is so far away; it publishes nothing before the test's end."""
    async with running_node(
        bucket.memory, cache, offload=FarOffload(seconds), fresh_seconds=FRESH, settle_seconds=10_000.0
    ) as user:
        yield user


async def visit(user: User, path: str, name: str) -> tuple[float, int | None]:
    """Look a name up as the kernel does, its directory first; return what that took, and the size, None if missing."""
    began = trio.current_time()
    directory = await user.fs.resolve(path)
    try:
        size = (await user.fs.lookup.lookup(directory, name)).size
    except NotFound:
        size = None
    return trio.current_time() - began, size


def keep(user: User, *directories: Node) -> None:
    """Have the kernel know directories."""
    for directory in directories:
        directory.lookups += 1


# ---- small directories


async def test_creates_in_ten_directories_that_are_far_away_wait_for_no_listing_after_the_first(
    bucket: Bucket, cache: Path
) -> None:
    folders = [f"d{number}" for number in range(10)]
    for folder in folders:
        bucket.memory.put_bytes(f"{folder}/first", b"1")
    async with far_node(bucket, cache) as user:
        keep(user, *[await user.fs.resolve(folder) for folder in folders])
        began, before = trio.current_time(), lists(bucket)
        waits = []
        for number in range(600):
            waits.append((await visit(user, folders[number % 10], f"{number:05}"))[0])
            await user.write(f"{folders[number % 10]}/{number:05}", b"1")
            await trio.sleep(0.02)
        seconds = trio.current_time() - began
        # Thrice each, as two names are asked for one by one before a directory is listed, and the root.
        assert sum(waits) <= 10 * 3 * 0.1 + 0.6
        assert max(waits[100:]) < MOMENT
        assert lists(bucket) - before <= 11 * (seconds * LISTS_PER_SECOND + 2)


async def test_a_new_directory_that_is_filled_at_once_is_never_waited_for(
    bucket: Bucket, cache: Path
) -> None:
    async with far_node(bucket, cache) as user:
        await user.mkdir("made")
        made = await user.fs.resolve("made")
        keep(user, made)
        for number in range(300):
            began = trio.current_time()
            with pytest.raises(NotFound):
                await user.fs.lookup.lookup(made, f"{number:05}")
            assert trio.current_time() - began < MOMENT
            await trio.sleep(0.02)


async def test_a_directory_that_is_not_used_any_more_is_listed_a_few_times_and_never_again(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket, 5)
    async with far_node(bucket, cache) as user:
        keep(user, await user.fs.resolve("dir"))
        for number in range(100):
            await visit(user, "dir", f"new{number}")
            await trio.sleep(0.02)
        before = lists(bucket)
        await trio.sleep(5)
        assert lists(bucket) - before <= 2 * 5  # it, and the root
        before = lists(bucket)
        await trio.sleep(600)
        assert lists(bucket) == before


@pytest.mark.parametrize("pause", [1.5, 2.0, 4.0, 60.0])
async def test_one_who_looks_now_and_then_costs_the_listings_that_he_waits_for_and_no_more(
    bucket: Bucket, cache: Path, pause: float
) -> None:
    fill(bucket, 5)
    async with far_node(bucket, cache) as user:
        keep(user, await user.fs.resolve("dir"))
        await visit(user, "dir", "0000")
        before = lists(bucket)
        for _ in range(30):
            await trio.sleep(pause)
            assert await visit(user, "dir", "latest") == (pytest.approx(0.2), None)
        assert lists(bucket) - before == 60


async def test_directories_without_number_are_not_all_kept_fresh(bucket: Bucket, cache: Path) -> None:
    """A trainer's workers that open files at random in a hundred of them."""
    folders = [f"d{number:03}" for number in range(100)]
    for folder in folders:
        fill(bucket, 5, folder)
    chance = random.Random(1)
    async with far_node(bucket, cache) as user:
        keep(user, *[await user.fs.resolve(folder) for folder in folders])
        before, began, opened = lists(bucket), trio.current_time(), 0

        async def work() -> None:
            nonlocal opened
            while trio.current_time() < began + 20:
                await visit(user, chance.choice(folders), "0003")
                opened += 1
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(work)
        assert lists(bucket) - before <= opened + (32 + 1) * 20 * LISTS_PER_SECOND


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_seen_is_never_older_than_a_second_however_names_come_and_go(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Another client makes, replaces and removes files, in a small directory and in one of several pages."""
    monkeypatch.setattr(lister, "PAGE_NAMES", 20)
    chance = random.Random(seed)
    names = [f"{number:04}" for number in range(100)]
    history: dict[str, list[tuple[float, int | None]]] = {}

    def change(path: str) -> None:
        size = chance.choice([None, chance.randrange(1, 100)])
        if size is None:
            bucket.memory.remove(path)
        else:
            bucket.memory.put_bytes(path, b"x" * size)
        history.setdefault(path, []).append((trio.current_time(), size))

    async with far_node(bucket, cache, 0.05) as user:
        for folder, count in (("small", 10), ("large", 100)):
            fill(bucket, 10, folder)
            for name in names[:count]:
                bucket.memory.put_bytes(f"{folder}/{name}", b"x")
                history[f"{folder}/{name}"] = [(trio.current_time(), 1)]
        keep(user, await user.fs.resolve("small"), await user.fs.resolve("large"))
        await read_all(user, await user.fs.resolve("large"))
        for _ in range(1500):
            folder = chance.choice(["small", "large"])
            name = chance.choice(names[:10] if folder == "small" else names[80:])
            if chance.random() < 0.2:
                change(f"{folder}/{name}")
            await trio.sleep(chance.expovariate(100.0))
            began = trio.current_time()
            _, size = await visit(user, folder, name)
            past = history[f"{folder}/{name}"]
            allowed = {each for moment, each in past if moment >= began - FRESH}
            allowed.add(
                next(
                    each for moment, each in reversed(past) if moment <= began - FRESH or moment == past[0][0]
                )
            )
            assert size in allowed


async def test_what_is_published_or_removed_while_the_answer_is_under_way_is_shown_as_it_is(
    bucket: Bucket, cache: Path
) -> None:
    class LateAnswers(InlineOffload):
        async def network(self, call: Callable[..., Any], *args: object) -> Any:
            answer = call(*args)
            await trio.sleep(0.5)
            return answer

    made = fill(bucket, 5)
    late = LateAnswers()
    async with running_node(
        bucket.memory, cache, offload=late, settle_seconds=0.01, fresh_seconds=100.0
    ) as user:
        directory = await user.fs.resolve("dir")
        keep(user, directory)
        await read_all(user, directory)
        names = user.fs.lookup
        refresh = names.lister.refresh_pages(directory, "")
        await trio.sleep(0.1)
        await user.write("dir/mine", b"new")
        await user.write("dir/0003", b"longer")
        await user.unlink("dir/0004")
        with trio.fail_after(0.3):
            assert await user.drained() == "durable"
        assert not refresh.done
        while not refresh.done:
            await refresh.wait()
        began = trio.current_time()
        assert {each.name: each.size for each in await read_all(user, directory)} == {
            **{name: 4 for name in made[:3]}, "0003": 6, "mine": 3,
        }  # fmt: skip
        assert (await names.lookup(directory, "mine")).size == 3
        with pytest.raises(NotFound):
            await names.lookup(directory, "0004")
        assert trio.current_time() == began


# ---- large directories


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a listing has a hundred names."""
    monkeypatch.setattr(lister, "PAGE_NAMES", 100)


async def add_in_order(user: User, count: int, stem: str, pause: float = 0.005) -> list[float]:
    """Make files in the order of their names; return what each waited."""
    waits = []
    for number in range(count):
        waits.append((await visit(user, "dir", f"{stem}{number:05}"))[0])
        await user.write(f"dir/{stem}{number:05}", b"1")
        await trio.sleep(pause)
    return waits


@pytest.mark.parametrize("stem", ["zz", "0500-"], ids=["behind all others", "amidst the others"])
@pytest.mark.usefixtures("small_pages")
async def test_files_added_in_order_to_a_large_directory_wait_for_a_page_now_and_then(
    bucket: Bucket, cache: Path, stem: str
) -> None:
    fill(bucket, 1000)
    async with running_node(
        bucket.memory, cache, offload=FarOffload(), fresh_seconds=FRESH, settle_seconds=0.1
    ) as user:
        directory = await user.fs.resolve("dir")
        keep(user, directory)
        await read_all(user, directory)
        before, began = lists(bucket), trio.current_time()
        waits = await add_in_order(user, 600, stem)
        seconds = trio.current_time() - began
        # Eight times until it is known that one follows the other; then where one page ends and the next begins.
        assert sum(wait > MOMENT for wait in waits) <= 10 + 2 * 600 // 100
        assert lists(bucket) - before <= 20 + seconds * 3 * LISTS_PER_SECOND + 2 * 600 // 100
        assert await user.drained() == "durable"
        await trio.sleep(60)
        shown = [each.name for each in await read_all(user, directory)]
        assert len(shown) == len(set(shown)) == 1600


@pytest.mark.usefixtures("small_pages")
async def test_a_name_that_another_client_adds_shows_within_a_second_also_in_the_last_page(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket, 1000)
    async with far_node(bucket, cache) as user:
        directory = await user.fs.resolve("dir")
        keep(user, directory)
        await read_all(user, directory)
        await add_in_order(user, 300, "mine")
        for number in range(8):
            assert (await visit(user, "dir", f"other{number}"))[1] is None
            bucket.memory.put_bytes(f"dir/other{number}", b"theirs")
            await add_in_order(user, 30, f"mine{number:02}-", pause=FRESH / 30)
            assert (await visit(user, "dir", f"other{number}"))[1] == 6


@pytest.mark.usefixtures("small_pages")
async def test_scattered_lookups_in_a_large_directory_ask_for_one_name_each(
    bucket: Bucket, cache: Path
) -> None:
    made = fill(bucket, 5000)
    async with far_node(bucket, cache) as user:
        directory = await user.fs.resolve("dir")
        keep(user, directory)
        await read_all(user, directory)
        await trio.sleep(5)
        read = bucket.memory.statistics()
        for name in random.Random(1).sample(made, 40):
            await visit(user, "dir", name)
        assert lists(bucket) - read.lists <= 40 + 8  # and the root's
        assert all(number != directory.number for number, _ in user.fs.lookup._refresher._kept)


def test_marks_tell_the_time_of_each_part_and_of_no_other() -> None:
    chance = random.Random(3)
    alphabet = [f"{number:02}" for number in range(60)]
    for _ in range(200):
        ends = sorted(chance.sample(alphabet, 5))
        marks = PageTimes(list(ends), [float(number) for number in range(5)])
        model = {name: marks.of(name) for name in (*alphabet, LAST_NAME)}
        for moment in range(10, 20):
            start = chance.choice(["", *marks.ends[:-1], *alphabet])
            end = chance.choice([LAST_NAME, *(name for name in alphabet if name > start)])
            marks.renew(start, end, float(moment))
            model |= {name: float(moment) for name in model if start < name <= end}
            assert {name: marks.of(name) for name in model} == model
            assert marks.ends == sorted(set(marks.ends))
            for name in model:
                assert marks.start_of(name) < name
                assert marks.behind(marks.start_of(name)) == marks.of(name)
