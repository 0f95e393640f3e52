"""Names stay true while other clients, renames, refusals and crashes change what is behind them."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.nodes import DirectoryHandle, Kind, Node, attributes_of
from fusecache.model.errors import (
    AccessDenied,
    FusecacheError,
    NotFound,
)
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, files_in, files_of, running_node


async def enter(user: User, path: str) -> Node:
    """Be a process that has its current directory there."""
    directory = await user.fs.resolve(path)
    directory.lookups += 1
    directory.handles += 1
    return directory


# ---- directories that other clients empty


async def test_a_removed_directory_does_not_become_the_root_for_who_is_in_it(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("name", b"in the root")
    bucket.memory.put_bytes("dir/name", b"in the directory")
    async with running_node(bucket, cache) as user:
        directory = await enter(user, "dir")
        bucket.memory.remove("dir/name")
        await trio.sleep(3)
        with pytest.raises(NotFound):
            await user.fs.resolve("dir")
        with pytest.raises(NotFound):
            await user.fs.lookup.lookup(directory, "name")
        with pytest.raises(NotFound):
            await user.fs.namespace_ops.unlink(directory, "name")
        with pytest.raises(NotFound):
            await user.fs.namespace_ops.create(directory, "new", 0o644)
        with pytest.raises(NotFound):
            await user.fs.namespace_ops.mkdir(directory, "folder", 0o755)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"name": b"in the root"}


async def test_what_is_being_written_keeps_its_place_in_an_emptied_directory(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("dir/file", b"old")
    async with running_node(bucket, cache) as user:
        await enter(user, "dir")
        handle = await user.open("dir/file", truncate=False)
        bucket.memory.remove("dir/file")
        await trio.sleep(3)
        assert (await user.fs.resolve("dir/file")) is handle.node
        await user.fs.file_io.truncate(handle.node, 0)
        await user.fs.file_io.write(handle, 0, b"ours")
        await user.close(handle)
        await user.drained()
        shown = bucket.shows()
        # The deletion was another client's change of the same file: ours is kept under a name that says so.
        assert list(shown.values()) == [b"ours"]
        assert all(key.startswith("dir/file") for key in shown)
        assert await user.tree("dir") == shown


async def test_a_directory_renamed_while_it_is_new_keeps_its_empty_directories(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.mkdir("checkpoint.tmp")
        await user.mkdir("checkpoint.tmp/logs")
        await user.write("checkpoint.tmp/model", b"1")
        await user.rename("checkpoint.tmp", "checkpoint")
        assert await user.tree() == {"checkpoint": None, "checkpoint/logs": None, "checkpoint/model": b"1"}
        bucket.come_back()
        assert await user.drained() == "durable"
    assert bucket.shows() == {"checkpoint/": b"", "checkpoint/logs/": b"", "checkpoint/model": b"1"}


# ---- what the bucket refuses to tell


async def test_a_refused_head_is_an_error_of_that_listing_and_of_nothing_else(
    bucket: Bucket, cache: Path
) -> None:
    """An empty object may be a symlink: only a HEAD tells."""
    bucket.memory.put_bytes("dir/empty", b"")
    bucket.memory.put_bytes("dir/full", b"1")
    bucket.memory.put_bytes("other/file", b"2")
    store = FaultyStore(bucket, Fault(AccessDenied("403"), "head", "dir/empty", times=None))
    async with running_node(store, cache) as user:
        with pytest.raises(AccessDenied):
            await user.tree("dir")
        await trio.sleep(5)
        assert await user.tree("other") == {"other/file": b"2"}
        await user.write("other/new", b"3")
        assert await user.drained() == "durable"
        store.heal()
        assert await user.tree("dir") == {"dir/empty": b"", "dir/full": b"1"}


# ---- names that change hands


async def test_a_directory_is_renamed_with_what_other_clients_replaced_in_it(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("dir/file", b"old")
    bucket.memory.put_bytes("dir/other", b"1")
    async with running_node(bucket, cache) as user:
        (await user.fs.resolve("dir/file")).lookups += 1
        bucket.memory.put_bytes("dir/file", b"newer")
        await trio.sleep(5)
        await user.rename("dir", "renamed")
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"renamed/file": b"newer", "renamed/other": b"1"}


async def test_attributes_of_a_published_file_survive_its_rename_and_a_remount(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("script", b"1")
    async with running_node(bucket, cache) as user:
        node = await user.fs.resolve("script")
        user.fs.file_io.set_attributes(node, replace(attributes_of(node), mode=0o755))
        await user.rename("script", "renamed")
        assert await user.drained() == "durable"
    async with running_node(bucket, cache) as user:
        assert (await user.fs.resolve("renamed")).mode == 0o755


# ---- what another client puts under the new name while it is renamed


class Meanwhile(InlineOffload):
    """Before the first request that lists one of `prefixes`, lets something else happen."""

    prefixes: tuple[str, ...] = ()

    def __init__(self, happening: Callable[[], Awaitable[None]]) -> None:
        self._happening = happening

    async def network(self, call, *args):
        if self.prefixes and not {*self.prefixes}.isdisjoint(call.args):
            self.prefixes = ()
            await self._happening()
        return await super().network(call, *args)


async def rename_while(bucket: Bucket, cache: Path, puts: dict[str, bytes], *, replace: bool = True) -> str:
    """Rename `from/name` to `to/name` while another client puts objects, and a process here looks.

    Return the name of what is raised, "" for success.
    """

    async def happening() -> None:
        for key, data in puts.items():
            bucket.memory.put_bytes(key, data)
        await trio.sleep(5)  # what was known of the name is old by then
        await user.fs.resolve("to/name")

    bucket.memory.put_bytes("from/other", b"")
    bucket.memory.put_bytes("to/other", b"")
    offload, raised = Meanwhile(happening), ""
    async with running_node(bucket, cache, offload=offload) as user:
        old, new = await enter(user, "from"), await enter(user, "to")
        await user.tree()
        await trio.sleep(5)
        is_directory = (await user.fs.resolve("from/name")).kind is Kind.DIRECTORY
        # A file is looked for once more, after the new name; of a directory everything is asked for, last of all.
        await trio.sleep(5)
        offload.prefixes = ("from/name/",) if is_directory else ("from/", "from/name")
        try:
            await user.fs.namespace_ops.rename(old, "name", new, "name", replace=replace)
        except FusecacheError as exc:
            raised = type(exc).__name__
        assert not offload.prefixes
        assert await user.drained() == "durable"
        assert files_of(await user.tree()) == files_in(bucket.shows())
    return raised


@pytest.mark.parametrize("before", [{}, {"to/name": b"older"}], ids=["none", "another"])
async def test_a_file_that_another_client_puts_under_the_new_name_meanwhile_is_replaced(
    bucket: Bucket, cache: Path, before: dict[str, bytes]
) -> None:
    for key, data in {"from/name": b"ours", **before}.items():
        bucket.memory.put_bytes(key, data)
    assert not await rename_while(bucket, cache, {"to/name": b"theirs"})
    assert files_in(bucket.shows()) == {"from/other": b"", "to/other": b"", "to/name": b"ours"}


@pytest.mark.parametrize(
    ("ours", "theirs", "flag", "error"),
    [
        ("from/name", "to/name", "RENAME_NOREPLACE", "AlreadyExists"),
        ("from/name", "to/name/in it", "", "IsADirectory"),
        ("from/name/in it", "to/name", "", "NotADirectory"),
        ("from/name/in it", "to/name/in it", "", "NotEmpty"),
        ("from/name/in it", "to/name/", "RENAME_NOREPLACE", "AlreadyExists"),
    ],
)
async def test_what_must_not_be_replaced_is_not_although_it_came_meanwhile(
    bucket: Bucket, cache: Path, ours: str, theirs: str, flag: str, error: str
) -> None:
    bucket.memory.put_bytes(ours, b"ours")
    assert await rename_while(bucket, cache, {theirs: b"theirs"}, replace=not flag) == error
    assert bucket.shows() == {ours: b"ours", theirs: b"theirs", "from/other": b"", "to/other": b""}


async def test_an_empty_directory_that_another_client_makes_meanwhile_is_replaced(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("from/name/in it", b"ours")
    assert not await rename_while(bucket, cache, {"to/name/": b""})
    assert files_in(bucket.shows()) == {"from/other": b"", "to/other": b"", "to/name/in it": b"ours"}


# ---- order and numbers


async def test_sync_waits_for_what_is_renamed_meanwhile(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, settle_seconds=5.0) as user:
        bucket.takes_nothing = True
        await user.write("first", b"0")
        await user.write("before", b"1")
        shown: list[dict[str, bytes]] = []

        async def sync() -> None:
            assert (await user.fs.wait_durable("", None)).result == "durable"
            shown.append(bucket.shows())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync)
            await trio.sleep(3)
            await user.rename("before", "after")
            bucket.come_back()
    assert shown == [{"first": b"0", "after": b"1"}]


async def test_a_name_is_not_removed_in_the_bucket_before_the_journal_knows_of_it(
    bucket: Bucket, cache: Path
) -> None:
    class SlowJournal(InlineOffload):
        is_slow = False

        async def rows(self, call, *args):
            if self.is_slow:
                await trio.sleep(5)
            result = call(*args)
            if self.is_slow:
                seen.append(bucket.shows())
            return result

    offload, seen = SlowJournal(), []
    bucket.memory.put_bytes("file", b"1")
    async with running_node(bucket, cache, offload=offload) as user:
        await user.fs.resolve("file")
        offload.is_slow = True
        await user.unlink("file")
        assert await user.drained() == "durable"
    assert seen[0] == {"file": b"1"}
    assert bucket.shows() == {}


async def test_no_number_of_a_file_kept_aside_is_given_out_again(bucket: Bucket, cache: Path) -> None:
    """A kill may come between the making of a file and its row: then only the file's name tells its number."""
    (cache / "staging").mkdir(parents=True)
    (cache / "staging" / f"{1:016d}").write_bytes(b"first")
    async with running_node(bucket, cache) as user:
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"second")  # never closed
    async with running_node(bucket, cache):
        kept = sorted(path.read_bytes() for path in (cache / "orphans").iterdir())
    assert kept == [b"first", b"second"]


async def test_a_change_that_the_engine_did_not_foresee_holds_no_other_back(
    bucket: Bucket, cache: Path
) -> None:
    """An exception that is no FusecacheError is a mistake of ours; the others' files must not wait for its repair."""

    class Mistaken(InlineOffload):
        async def upload(self, call, *args):
            if getattr(args[0], "key", "") == "odd":
                raise ZeroDivisionError("a mistake")
            return await super().upload(call, *args)

    async with running_node(bucket, cache, offload=Mistaken()) as user:
        await user.write("odd", b"1")
        await user.write("good", b"2")
        answer = await user.fs.wait_durable("", 600)
        assert (answer.result, "a mistake" in answer.message) == ("error", True)
        assert await user.read("odd") == b"1"
    assert bucket.shows() == {"good": b"2"}


# ---- large directories


async def test_names_asked_for_one_by_one_while_their_directory_is_listed_hide_none_of_the_others(
    bucket: Bucket, cache: Path
) -> None:
    names = [f"{number:05}" for number in range(5000)]
    for name in names:
        bucket.memory.put_bytes(f"dir/{name}", b"1")
    async with running_node(bucket, cache, fresh_seconds=1000.0) as user:
        directory = await enter(user, "dir")
        async with trio.open_nursery() as nursery:
            for name in names[::-97]:
                nursery.start_soon(user.fs.lookup.lookup, directory, name)
                await trio.lowlevel.checkpoint()
        await user.fs.lookup.reader.next_entries(DirectoryHandle(directory), 1)
        await trio.testing.wait_all_tasks_blocked()
        for name in names:
            assert (await user.fs.lookup.lookup(directory, name)).name == name


async def test_what_another_client_put_in_the_place_of_what_was_removed_shows_though_listings_are_believed_for_long(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("d/a", b"old")
    lost: list[tuple[str, str]] = []

    class Kernel(Events):
        def on_name_lost(self, parent: Node, name: str) -> None:
            lost.append((parent.name, name))

    async with running_node(bucket, cache, fresh_seconds=1000.0, kernel=Kernel()) as user:
        assert await user.tree() == {"d": None, "d/a": b"old"}
        (await user.fs.resolve("d")).lookups += 1  # the kernel knows it
        await user.unlink("d/a")
        bucket.memory.put_bytes("d/a", b"theirs")
        assert await user.drained() == "conflict"
        assert lost == [("d", "a")]  # the kernel may remember that there was none
        assert await user.tree() == {"d": None, "d/a": b"theirs"}
