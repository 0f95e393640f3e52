"""Directories too large to wait for: looked into, read and read again while they are listed, without a node a name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.namespace import lister, reconciler
from fusecache.engine.namespace.nodes import DirectoryHandle, ListedName, Node, Shown
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.model.errors import NotFound, Unavailable
from fusecache.model.objects import ObjectInfo
from fusecache.policy.backoff import RequestLimit
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, running_node

PAGE = 10


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a listing has ten names."""
    monkeypatch.setattr(lister, "PAGE_NAMES", PAGE)


class FarOffload(InlineOffload):
    """Each request takes so long; `log` holds those that were sent."""

    def __init__(self, seconds: float = 0.1) -> None:
        self.seconds = seconds

    async def network(self, call: Callable[..., Any], *args: object) -> Any:
        await trio.sleep(self.seconds)
        return call(*args)


def fill(bucket: Bucket, count: int, directory: str = "dir") -> list[str]:
    """Put files into a directory; return their names."""
    made = [f"{index:04}" for index in range(count)]
    for name in made:
        bucket.memory.put_bytes(f"{directory}/{name}", name.encode())
    return made


async def read_all(user: User, directory: Node, process: int = 0) -> list[Shown]:
    """Read a directory to its end."""
    handle = DirectoryHandle(directory, process)
    found: list[Shown] = []
    while entries := await user.fs.lookup.reader.next_entries(handle, 7):
        found += [each.shown for each in entries]
    return found


def lists(bucket: Bucket) -> int:
    """Return how many LISTs were made."""
    return bucket.memory.statistics().lists


# ---- lookups


async def test_a_lookup_in_an_unlisted_directory_is_one_request_and_the_third_begins_a_listing(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket, 100)
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        directory = await user.fs.resolve("dir")
        for number, name in enumerate(("0050", "0070"), 1):
            before, began = lists(bucket), trio.current_time()
            assert (await user.fs.lookup.lookup(directory, name)).size == 4
            assert (number, lists(bucket) - before) == (number, 1)
            assert trio.current_time() - began == pytest.approx(0.1)
        began = trio.current_time()
        assert (await user.fs.lookup.lookup(directory, "0090")).size == 4
        assert trio.current_time() - began == pytest.approx(0.2)  # of ten pages it waited for one
        await trio.sleep(5)
        assert directory.listing.epoch


async def test_the_same_name_opened_again_and_again_does_not_list_its_directory(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket, 100)
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        before = lists(bucket)
        for _ in range(20):
            await user.fs.resolve("dir/0050")
            await trio.sleep(2)
        assert not (await user.fs.resolve("dir")).listing.epoch
        # Its own directory is small: it is listed for the price of a question.
        assert lists(bucket) - before <= 21 * 2


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (["name"], "file"),
        (["name/x"], "directory"),
        (["name/"], "directory"),
        (["name", "name-1", "name.txt"], "file"),
        (["name-1", "name.txt", "name0"], None),
        (["name-1", "name.txt", "name/x"], "directory"),
        (["name", "name!", "name-1", "name/x"], "directory"),
        (["name", "name!", "name0"], "file"),
        (["name-1/a", "name-1/b", "name-2/c", "name/x"], "directory"),
        (["nam", "nameless"], None),
    ],
)
async def test_one_name_is_found_among_those_that_begin_like_it(
    bucket: Bucket, cache: Path, keys: list[str], kind: str | None
) -> None:
    for key in keys:
        bucket.memory.put_bytes(f"dir/{key}", b"1")
    async with running_node(bucket, cache) as user:
        directory = await user.fs.resolve("dir")
        try:
            found = (await user.fs.lookup.lookup(directory, "name")).kind.value
        except NotFound:
            found = None
        assert found == kind


async def test_several_who_ask_for_one_name_share_a_request(bucket: Bucket, cache: Path) -> None:
    fill(bucket, 3)
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        directory = await user.fs.resolve("dir")
        before = lists(bucket)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(user.fs.lookup.lookup, directory, "0001")
        assert lists(bucket) - before == 1


async def test_a_directory_that_takes_long_to_list_is_not_listed_for_ever(
    bucket: Bucket, cache: Path
) -> None:
    """Its listing is older than a second when it ends: what is opened then is asked for by its name."""
    made = fill(bucket, 300)  # thirty pages: three seconds
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        directory = await user.fs.resolve("dir")
        await read_all(user, directory)
        before = lists(bucket)
        for name in made[:50]:
            await trio.sleep(1)
            began = trio.current_time()
            await user.fs.lookup.lookup(directory, name)
            assert trio.current_time() - began <= 0.21
        # Fifty questions, and a listing once thirty of them were spent.
        assert lists(bucket) - before <= 50 + 30


async def test_every_lookup_sees_what_was_changed_a_second_ago_while_a_listing_runs(
    bucket: Bucket, cache: Path
) -> None:
    made = fill(bucket, 300)
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        directory = await user.fs.resolve("dir")
        user.fs.lookup.lister.start(directory)
        await trio.sleep(1)
        for number, name in enumerate(made[::40]):
            bucket.memory.put_bytes(f"dir/{name}", b"x" * (number + 10))
            await trio.sleep(1.05)
            assert (await user.fs.lookup.lookup(directory, name)).size == number + 10


async def test_names_are_looked_up_in_the_last_listing_while_the_bucket_does_not_answer(
    bucket: Bucket, cache: Path
) -> None:
    made = fill(bucket, 30)
    store = FaultyStore(bucket)
    async with running_node(store, cache, offload=FarOffload()) as user:
        directory = await user.fs.resolve("dir")
        await read_all(user, directory)
        await trio.sleep(5)
        store.script(Fault(Unavailable("503"), "list_page", times=None))
        began = trio.current_time()
        for name in made:
            assert (await user.fs.lookup.lookup(directory, name)).size == 4
        assert len(await read_all(user, directory)) == 30
        assert trio.current_time() - began < 5
        store.heal()
        await trio.sleep(60)
        bucket.memory.put_bytes("dir/0003", b"newer")
        assert (await user.fs.lookup.lookup(directory, "0003")).size == 5


async def test_a_trainer_saves_into_a_directory_made_here_though_the_bucket_has_gone_silent(
    bucket: Bucket, cache: Path
) -> None:
    """No request fails: they are not answered. Nobody had listed the mount's root."""
    offload = FarOffload()
    async with running_node(bucket, cache, offload=offload) as user:
        await user.mkdir("run")
        (await user.fs.resolve("run")).lookups += 1  # as the kernel does
        assert await user.drained() == "durable"
        await trio.sleep(60)
        offload.seconds = 300.0
        began = trio.current_time()
        for step in range(5):
            await user.write(f"run/step-{step}", b"model")
            await trio.sleep(2)
        assert trio.current_time() - began < 40
        assert user.fs.statistics()["unanswered_seconds"] > 5
        offload.seconds = 0.1
        await trio.sleep(400)
        assert await user.drained() == "durable"
        assert user.fs.statistics()["unanswered_seconds"] == 0
    assert len(bucket.shows()) == 6


class UnevenOffload(InlineOffload):
    """Requests take these seconds, one after the other, and the last of them for ever after."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    async def network(self, call: Callable[..., Any], *args: object) -> Any:
        await trio.sleep(self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0])
        return call(*args)


async def seconds_of_failing(user: User, name: str) -> float:
    """Look up a name that fails; return after how long."""
    began = trio.current_time()
    with pytest.raises(Unavailable, match="has not answered"):
        await user.fs.lookup.lookup(user.fs.tree.root, name)
    return trio.current_time() - began


@pytest.mark.parametrize(
    ("seconds", "answered"),
    [([120.0], 0.0), ([30.0, 120.0], 30.0), ([0.1, 120.0], 0.1)],
    ids=["LIST", "slow", "HEAD"],
)
async def test_a_name_never_seen_is_asked_for_until_the_bucket_was_silent_for_a_minute_whatever_the_requests(
    bucket: Bucket, cache: Path, seconds: list[float], answered: float
) -> None:
    """A request would end by itself after two minutes; that of an empty object takes a LIST, and then a HEAD."""
    bucket.memory.put_bytes("empty", b"")
    offload = UnevenOffload(0.1)
    async with running_node(bucket, cache, offload=offload) as user:
        offload.seconds = seconds
        assert 59 < await seconds_of_failing(user, "empty") - answered < 61
        assert await seconds_of_failing(user, "empty") < 61  # nor is there anything left that delays the next


async def test_however_many_names_are_asked_for_at_once_each_waits_a_minute_for_a_silent_bucket(
    bucket: Bucket, cache: Path
) -> None:
    offload = UnevenOffload(0.1)
    async with running_node(bucket, cache, offload=offload) as user:
        offload.seconds = [120.0]
        waited: list[float] = []

        async def ask(number: int) -> None:
            waited.append(await seconds_of_failing(user, f"name-{number}"))

        async with trio.open_nursery() as nursery:
            for number in range(300):
                nursery.start_soon(ask, number)
        assert len(waited) == 300
        assert max(waited) < 61


async def test_a_request_that_is_never_answered_is_made_again_within_the_minute(
    bucket: Bucket, cache: Path
) -> None:
    """Its connection may be dead while the bucket is well."""
    bucket.memory.put_bytes("file", b"12")
    offload = UnevenOffload(0.1)
    async with running_node(bucket, cache, offload=offload) as user:
        offload.seconds = [120.0, 0.1]
        with trio.fail_after(59):
            assert (await user.fs.resolve("file")).size == 2


async def test_of_a_bucket_that_takes_long_for_each_answer_names_are_found_and_listed(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket, 30)
    bucket.memory.put_bytes("empty", b"")
    async with running_node(bucket, cache, offload=FarOffload(25.0)) as user:
        assert (await user.fs.resolve("empty")).size == 0
        assert (await user.fs.resolve("dir/0007")).size == 4
        assert len(await read_all(user, await user.fs.resolve("dir"))) == 30


async def test_who_only_looks_hears_within_seconds_that_the_bucket_is_silent(
    bucket: Bucket, cache: Path
) -> None:
    offload = FarOffload()
    async with running_node(bucket, cache, offload=offload) as user:
        await user.write("known", b"1")
        (await user.fs.resolve("known")).lookups += 1  # as the kernel does
        offload.seconds = 120.0
        for longest in (10.5, 2.5):
            began = trio.current_time()
            with pytest.raises(Unavailable, match=r"^never/seen: not known locally, and the bucket"):
                await user.fs.status.path_status("never/seen")
            assert trio.current_time() - began < longest
        assert (await user.fs.status.path_status("known"))["path"] == "known"
        offload.seconds = 0.1
        await trio.sleep(60)
        with pytest.raises(NotFound):
            await user.fs.status.path_status("never/seen")


async def test_a_removal_does_not_wait_for_a_listing_of_a_bucket_that_has_gone_silent(
    bucket: Bucket, cache: Path
) -> None:
    """The kernel knows the name, and asks for nothing else."""
    offload = FarOffload()
    async with running_node(bucket, cache, offload=offload) as user:
        bucket.memory.put_bytes("file", b"-")
        (await user.fs.resolve("file")).lookups += 1
        assert not user.fs.tree.root.is_listed
        offload.seconds = 300.0
        began = trio.current_time()
        await user.fs.namespace_ops.unlink(user.fs.tree.root, "file")
        assert trio.current_time() - began < 40
        offload.seconds = 0.1
        await trio.sleep(400)
        assert await user.drained() == "durable"
    assert bucket.shows() == {}


# ---- reading


async def test_names_stream_out_while_the_listing_goes_on(bucket: Bucket, cache: Path) -> None:
    made = fill(bucket, 100)
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        directory = await user.fs.resolve("dir")
        handle, began, moments = DirectoryHandle(directory), trio.current_time(), []
        found: list[str] = []
        while entries := await user.fs.lookup.reader.next_entries(handle, 1000):
            found += [each.shown.name for each in entries]
            moments.append(trio.current_time() - began)
        assert found == made
        assert moments[0] == pytest.approx(0.1)
        assert moments[-1] == pytest.approx(1.0)


async def test_a_listed_name_costs_no_node_until_it_is_used_and_then_keeps_its_inode(
    bucket: Bucket, cache: Path
) -> None:
    made = fill(bucket, 100)
    bucket.memory.put_bytes("dir/sub/file", b"1")
    async with running_node(bucket, cache) as user:
        directory = await user.fs.resolve("dir")
        nodes = len(user.fs.tree.nodes)
        shown = await read_all(user, directory)
        assert [each.name for each in shown] == [*made, "sub"]
        assert len(user.fs.tree.nodes) == nodes
        assert len({each.number for each in shown}) == 101
        for each in (shown[5], shown[50], shown[100]):
            assert isinstance(each, ListedName)
            node = user.fs.lookup.node_by_inode(each.number)
            assert node is not None
            facts = (node.name, node.kind, node.size, node.mode, node.uid, node.mtime_ns)
            assert facts == (each.name, each.kind, each.size, each.mode, each.uid, each.mtime_ns)
            assert await user.fs.lookup.lookup(directory, each.name) is node
        await trio.sleep(5)
        again = await read_all(user, directory)
        assert [each.number for each in again] == [each.number for each in shown]


async def test_a_replaced_object_has_another_inode_and_the_old_one_is_stale(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket, 30)
    async with running_node(bucket, cache) as user:
        directory = await user.fs.resolve("dir")
        before = {each.name: each.number for each in await read_all(user, directory)}
        bucket.memory.put_bytes("dir/0005", b"another version")
        bucket.memory.remove("dir/0006")
        await trio.sleep(5)
        after = {each.name: each.number for each in await read_all(user, directory)}
        assert after.pop("0005") != before.pop("0005")
        gone = before.pop("0006")
        assert after == before
        assert user.fs.lookup.node_by_inode(gone) is None


async def test_nodes_that_nobody_uses_make_room_and_come_back_with_their_inode(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "NODES_KEPT", 50)
    made = fill(bucket, 400)
    async with running_node(bucket, cache) as user:
        directory = await user.fs.resolve("dir")
        await read_all(user, directory)
        numbers = {}
        for name in made:
            node = await user.fs.lookup.lookup(directory, name)
            node.lookups += 1  # the kernel remembers each
            numbers[name] = node.number
        written = await user.open("dir/0000", truncate=False)
        for name in made[::-1]:
            recalled = user.fs.lookup.node_by_inode(numbers[name])
            assert recalled is not None
            assert recalled.name == name
        assert len(user.fs.tree.nodes) <= 60
        assert written.node is user.fs.tree.nodes[numbers["0000"]]
        await user.close(written)
        for name in made:
            user.fs.tree.forget(numbers[name], 1)
        assert len(user.fs.tree.nodes) < 10


async def test_inode_numbers_take_no_more_memory_however_often_a_directory_changes(
    bucket: Bucket, cache: Path
) -> None:
    made = fill(bucket, 100)
    async with running_node(bucket, cache) as user:
        directory = await user.fs.resolve("dir")
        for round_number in range(30):
            for name in made[round_number::10]:
                bucket.memory.put_bytes(f"dir/{name}", f"{round_number}".encode())
            await trio.sleep(5)
            await read_all(user, directory)
        # One for each page and what became of it, at most.
        assert len(user.fs.lookup.lister._inode_ranges) <= 100
        for each in await read_all(user, directory):
            assert user.fs.lookup.node_by_inode(each.number) is not None
        directory.lookups = 1
        user.fs.tree.forget(directory.number, 1)
        for name in made:
            node = directory.children.get(name)
            if node is not None:
                user.fs.tree.forget(node.number, node.lookups)
        await trio.sleep(1)
        assert not directory.children
        assert all(
            chunk.directory != directory.number for chunk in user.fs.lookup.lister._inode_ranges.values()
        )


async def test_a_key_that_is_also_a_prefix_shows_once_wherever_its_pages_end(
    bucket: Bucket, cache: Path
) -> None:
    others = [f"both-{index:02}" for index in range(25)]
    for name in ("both", *others):
        bucket.memory.put_bytes(f"dir/{name}", b"1")
    bucket.memory.put_bytes("dir/both/file", b"1")
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        directory = await user.fs.resolve("dir")
        shown = await read_all(user, directory)
        assert sorted(each.name for each in shown) == ["both", *others]
        await trio.sleep(0.5)
        shown = await read_all(user, directory)  # from the complete listing
        assert sorted((each.name, each.kind.value) for each in shown)[0] == ("both", "directory")


async def test_what_is_published_or_removed_while_a_listing_runs_is_shown_as_it_is(
    bucket: Bucket, cache: Path
) -> None:
    made = fill(bucket, 200)
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        directory = await user.fs.resolve("dir")
        handle = DirectoryHandle(directory)
        found = [each.shown.name for each in await user.fs.lookup.reader.next_entries(handle, 5)]
        await user.write("dir/0000-new", b"1")
        await user.write("dir/0150-new", b"2")
        await user.unlink("dir/0160")
        await user.unlink("dir/0170")
        while entries := await user.fs.lookup.reader.next_entries(handle, 1000):
            found += [each.shown.name for each in entries]
        assert len(found) == len(set(found))
        assert set(found) >= set(made) - {"0160", "0170"} | {"0150-new"}
        assert not {"0160", "0170"} & set(found)
        assert await user.drained() == "durable"
        await trio.sleep(0.5)
        names_now = {each.name for each in await read_all(user, directory)}
        assert names_now == set(made) - {"0160", "0170"} | {"0150-new", "0000-new"}
        assert await user.read("dir/0150-new") == b"2"


async def test_a_queued_name_that_is_unlinked_or_renamed_before_it_is_given_out_shows_as_it_is_then(
    bucket: Bucket, cache: Path
) -> None:
    fill(bucket, 5)
    async with running_node(bucket, cache) as user:
        directory = await user.fs.resolve("dir")
        directory.handles += 1  # open
        queue = await user.fs.lookup.reader.next_entries(DirectoryHandle(directory), 100)
        await user.unlink("dir/0001")
        await user.rename("dir/0002", "dir/renamed")
        await user.write("dir/0003", b"longer than before")
        current = [user.fs.lookup.reader.current(directory, each) for each in queue]
        assert [each and each.name for each in current] == ["0000", None, None, "0003", "0004"]
        assert current[3] is not None
        assert current[3].size == 18


async def test_who_walks_through_directories_finds_the_next_ones_listed(bucket: Bucket, cache: Path) -> None:
    folders = [f"d{index:02}" for index in range(20)]
    for folder in folders:
        fill(bucket, 5, f"tree/{folder}")
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        tree = await user.fs.resolve("tree")
        before, began = lists(bucket), trio.current_time()
        for each in await read_all(user, tree, process=7):
            node = user.fs.lookup.node_by_inode(each.number)
            assert node is not None
            assert len(await read_all(user, node, process=7)) == 5
        assert trio.current_time() - began < 1.0  # twenty listings of 0.1 s, and the tree's of two pages
        assert lists(bucket) - before == 22
        await trio.sleep(60)
        # Another one who comes upon two neighbours gets what is there then, and lists no third.
        before = lists(bucket)
        for folder in folders[3:6]:
            assert len(await read_all(user, await user.fs.resolve(f"tree/{folder}"), process=8)) == 5
        assert lists(bucket) - before <= 3 + 3 + 3


async def test_a_large_directory_is_not_listed_ahead_beyond_its_first_page(
    bucket: Bucket, cache: Path
) -> None:
    for folder in ("a", "b"):
        fill(bucket, 5, f"tree/{folder}")
    fill(bucket, 200, "tree/c")
    async with running_node(bucket, cache, offload=FarOffload()) as user:
        shown = await read_all(user, await user.fs.resolve("tree"), process=7)
        for each in shown[:2]:
            node = user.fs.lookup.node_by_inode(each.number)
            assert node is not None
            await read_all(user, node, process=7)
        before = lists(bucket)
        await trio.sleep(30)
        assert lists(bucket) - before <= 2
        last = user.fs.lookup.node_by_inode(shown[2].number)
        assert last is not None
        assert len(await read_all(user, last, process=7)) == 200


async def test_a_failed_listing_is_an_error_for_its_readers_and_is_tried_again_by_the_next(
    bucket: Bucket, cache: Path
) -> None:
    made = fill(bucket, 50)
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        directory = await user.fs.resolve("dir")
        handle = DirectoryHandle(directory)
        store.script(Fault(Unavailable("503"), "list_page", times=None))
        with pytest.raises(Unavailable):
            await user.fs.lookup.reader.next_entries(handle, 1000)
        store.heal()
        assert [each.name for each in await read_all(user, directory)] == made


async def test_an_empty_file_is_asked_about_once_however_often_its_directory_is_listed(
    bucket: Bucket, cache: Path
) -> None:
    """HTTP tells the time of an object in whole seconds, LIST in fractions: both are the same version."""

    class Coarse:
        def __getattr__(self, name: str) -> Any:
            return getattr(bucket, name)

        def head(self, key: str) -> ObjectInfo:
            info = bucket.head(key)
            return replace(info, modified=float(int(info.modified)))

    for index in range(5):
        bucket.memory.put_bytes(f"dir/empty{index}", b"")
    async with running_node(Coarse(), cache) as user:
        directory = await user.fs.resolve("dir")
        directory.lookups += 1
        assert len(await read_all(user, directory)) == 5
        await user.write("dir/mine", b"")
        assert await user.drained() == "durable"
        before = bucket.memory.statistics().heads
        for _ in range(10):
            await trio.sleep(2)
            assert len(await read_all(user, directory)) == 6
        assert bucket.memory.statistics().heads - before <= 1
        # Another version of it may be a symlink.
        bucket.memory.put_bytes("dir/empty3", b"")
        before = bucket.memory.statistics().heads
        await trio.sleep(2)
        await read_all(user, directory)
        assert bucket.memory.statistics().heads - before == 1


async def test_who_waits_for_his_turn_while_the_bucket_answers_others_is_answered(bucket: Bucket) -> None:
    names = fill(bucket, 300)
    requests = MetadataClient(bucket, FarOffload(30.0), RequestLimit(1))  # one at a time
    began = trio.current_time()
    found: list[int] = []

    async def ask(name: str) -> None:
        found.append((await requests.call(bucket.head, f"dir/{name}")).size)

    async with trio.open_nursery() as nursery:
        for name in names[:10]:
            nursery.start_soon(ask, name)
    assert found == [4] * 10
    assert trio.current_time() == pytest.approx(began + 300)


class LateLists(InlineOffload):
    """The bucket answers a LIST at once; the answer arrives `seconds` later."""

    seconds = 0.0

    async def network(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run the call inline; hold the answer back if it is a page."""
        await trio.lowlevel.checkpoint()
        answer = call(*args)
        if self.seconds and getattr(call, "func", None) is lister.fetch_page:
            await trio.sleep(self.seconds)
        return answer

    disk = rows = upload = publish = InlineOffload.network


async def test_what_was_published_while_an_older_page_was_on_its_way_shows(
    bucket: Bucket, cache: Path
) -> None:
    offload = LateLists()
    async with running_node(bucket, cache, offload=offload) as user:
        await user.write("file", b"old")
        assert await user.drained() == "durable"
        await trio.sleep(10)
        await user.write("file", b"newer")
        await trio.sleep(0.95)
        offload.seconds = 0.5
        async with trio.open_nursery() as nursery:
            nursery.start_soon(user.tree)
            await trio.sleep(0.6)
        offload.seconds = 0.0
        assert bucket.shows() == {"file": b"newer"}
        assert await user.tree() == {"file": b"newer"}


async def test_what_a_restarted_node_publishes_while_it_is_read_shows_as_it_is(
    bucket: Bucket, cache: Path
) -> None:
    """The cache outlives a kill: an older version could be read whose object is gone."""
    async with running_node(bucket, cache) as user:
        await user.write("file", b"old")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("file", b"newer")
    bucket.come_back()
    offload = LateLists()
    async with running_node(bucket, cache, offload=offload) as user:
        await trio.sleep(0.9)
        offload.seconds = 0.4
        assert await user.tree() == {"file": b"newer"}
        assert await user.tree() == {"file": b"newer"}
