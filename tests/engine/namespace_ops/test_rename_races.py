"""Renames beside what goes on meanwhile: writes, uploads and removals in what is moved, and writes right after."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from fusecache.model.objects import MIB
from tests.support.node import Bucket, User, running_node


async def _write_new(user: User) -> None:
    await user.write("p/new", b"new")


async def _write_again(user: User) -> None:
    await user.write("p/x", b"again")


async def _replace(user: User) -> None:
    await user.unlink("p/x")
    await user.write("p/x", b"again")


async def _truncate(user: User) -> None:
    await user.fs.file_io.truncate(await user.fs.resolve("p/x"), 0)


async def _link(user: User) -> None:
    await user.symlink("x", "p/link")


MEANWHILE = {
    _write_new: {"x": b"old", "new": b"new"},
    _write_again: {"x": b"again"},
    _replace: {"x": b"again"},
    _truncate: {"x": b""},
    _link: {"x": b"old", "link": b"-> x"},
}


def slow_to_list(user: User, prefix: str, seconds: float) -> None:
    """Have the answer of a listing of a prefix come late: it is of before."""
    requests = user.fs.lookup._client
    ask = requests.call

    async def slow(call: Callable[..., object], *args: object, **named: object) -> object:
        answer = await ask(call, *args, **named)
        if args and args[0] == prefix:
            await trio.sleep(seconds)
        return answer

    requests.call = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("change", MEANWHILE)
async def test_what_is_published_while_its_directory_is_looked_through_moves_with_it(
    bucket: Bucket, cache: Path, change: Callable[[User], Awaitable[None]]
) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("p")
        await user.write("p/x", b"old")
        assert await user.drained() == "durable"
        await trio.sleep(30)
        slow_to_list(user, "p/", 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(user.rename, "p", "q")
            await trio.sleep(0.1)
            await change(user)
            assert await user.drained() == "durable"
        expected = {f"q/{name}": data for name, data in MEANWHILE[change].items()}
        assert await user.tree() == {"q": None, **expected}
        assert await user.drained() == "durable"
        assert await user.tree() == {"q": None, **expected}
    assert bucket.shows() == {"q/": b"", **expected}


async def test_a_directory_is_moved_beside_the_removal_of_what_its_listing_still_shows(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("p/empty", b"")
    bucket.memory.put_bytes("p/x", b"old")
    async with running_node(bucket, cache) as user:
        slow_to_list(user, "p/", 8)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(user.rename, "p", "q")
            await trio.sleep(0.1)
            await user.unlink("p/empty")
        assert await user.tree() == {"q": None, "q/x": b"old"}
        assert await user.drained() == "durable"
    assert bucket.shows() == {"q/": b"", "q/x": b"old"}


@pytest.mark.parametrize(("keep", "offset"), [(8, 8), (8, 1), (4, None)])
async def test_what_is_changed_while_its_object_moves_keeps_the_rest(
    bucket: Bucket, cache: Path, keep: int, offset: int | None
) -> None:
    """keep: MiB of the object's eight; offset: in MiB, where a byte is written, None: nowhere, it is cut."""
    content = b"".join(bytes([number]) * MIB for number in range(8))
    bucket.memory.put_bytes("a", content)
    async with running_node(bucket, cache) as user:
        await user.rename("a", "b")
        fetch = user.fs.cache.read

        async def fetched(*args: object) -> object:
            """Answer once the object is under its new name, but for the first MiB."""
            if args[1]:
                await trio.sleep(10)
                assert list(bucket.shows()) == ["b"]
            return await fetch(*args)  # type: ignore[arg-type]

        user.fs.cache.read = fetched  # type: ignore[method-assign,assignment]
        handle = await user.open("b", truncate=False)
        if offset is None:
            await user.fs.file_io.truncate(handle.node, keep * MIB)
        else:
            await user.fs.file_io.write(handle, offset * MIB, b"!")
        await user.close(handle)
        assert await user.drained() == "durable"
    expected = bytearray(content[: keep * MIB])
    if offset is not None:
        expected[offset * MIB : offset * MIB + 1] = b"!"
    assert bucket.shows() == {"b": bytes(expected)}
