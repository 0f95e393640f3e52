"""Access keys that expired or were revoked: names are served stale, saves go on, and no call waits too long."""

from pathlib import Path

import pytest
import trio

from fusecache.engine.runtime.metadata_client import DENIED_SECONDS
from fusecache.model.errors import AccessDenied, CredentialsMissing, NotFound, RemoteError
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, listed, running_node

REFUSED = AccessDenied("LIST: InvalidAccessKeyId (403)")


def refuse(store: FaultyStore, error: RemoteError = REFUSED) -> None:
    """From now on no request is granted."""
    store.script(Fault(error, "*", times=None))


async def seconds_until_refused(user: User, path: str) -> float:
    """Look up a name that nothing is known of; return after how long that fails."""
    began = trio.current_time()
    with pytest.raises(AccessDenied, match="InvalidAccessKeyId"):
        await user.fs.resolve(path)
    return trio.current_time() - began


@pytest.mark.case(30)
@pytest.mark.parametrize("error", [REFUSED, CredentialsMissing("no keys")], ids=["403", "none"])
async def test_a_trainer_saves_into_a_directory_that_was_listed_though_the_keys_are_refused(
    bucket: Bucket, cache: Path, error: RemoteError
) -> None:
    bucket.memory.put_bytes("run/step-1", b"old")
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await listed(user, "run")
        await trio.sleep(5)
        refuse(store, error)
        began = trio.current_time()
        await user.write("run/step-1", b"newer")
        await user.write("run/step-2", b"model")
        await user.mkdir("run/step-3")
        await user.write("run/step-3/model", b"model")
        with pytest.raises(NotFound):
            await user.fs.resolve("run/latest")
        assert trio.current_time() - began < 2
        await trio.sleep(300)
        began = trio.current_time()
        await user.write("run/step-4", b"model")
        assert trio.current_time() - began < 2
        store.heal()
        assert await user.drained() == "durable"
    assert bucket.shows() == {
        "run/step-1": b"newer",
        "run/step-2": b"model",
        "run/step-3/": b"",
        "run/step-3/model": b"model",
        "run/step-4": b"model",
    }


async def test_a_name_that_nothing_is_known_of_is_refused_soon_and_at_once_when_the_keys_have_been_for_long(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        refuse(store)
        assert await seconds_until_refused(user, "never/seen") <= DENIED_SECONDS
        await trio.sleep(DENIED_SECONDS)
        assert await seconds_until_refused(user, "never/asked") <= 1
        before = len(store.calls())
        for number in range(100):
            assert await seconds_until_refused(user, f"other-{number}") <= 1
            await trio.sleep(0.1)
        assert len(store.calls()) - before <= 25  # a bucket that refuses everything is not stormed
        store.heal()
        await trio.sleep(2)
        with pytest.raises(NotFound):
            await user.fs.resolve("never")


async def test_many_lookups_of_what_is_known_ask_a_bucket_that_refuses_the_keys_little(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("run/file", b"1")
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await listed(user, "run")
        refuse(store)
        await trio.sleep(2)
        before = len(store.calls())
        for _ in range(600):
            await user.fs.resolve("run/file")
            await trio.sleep(0.1)
        assert len(store.calls()) - before <= 150


async def test_what_the_keys_may_not_list_is_refused_though_it_was_known_as_long_as_they_may_list_the_mount(
    bucket: Bucket, cache: Path
) -> None:
    """Such a name may be there by now: it is not said to be missing, and nothing is made in its place."""
    bucket.memory.put_bytes("ours/secret/file", b"1")
    bucket.memory.put_bytes("ours/open/file", b"2")
    store = FaultyStore(bucket)
    async with running_node(store, cache, prefix="ours/") as user:
        await listed(user, "secret")
        await listed(user, "open")
        await trio.sleep(5)
        store.script(Fault(REFUSED, "*", "ours/secret*", times=None))
        for path in ("secret/file", "secret/new"):
            with pytest.raises(AccessDenied):
                await user.open(path)
        assert user.fs.statistics()["refused_seconds"] == 0
        await user.write("open/new", b"3")
        assert await user.drained() == "durable"


async def test_what_another_client_made_while_the_keys_were_refused_is_not_overwritten(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("run/file", b"1")
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await listed(user, "run")
        await trio.sleep(5)
        refuse(store)
        await user.write("run/new", b"ours")
        bucket.memory.put_bytes("run/new", b"theirs")
        store.heal()
        assert await user.drained() == "conflict"
    shown = bucket.shows()
    assert shown["run/new"] == b"theirs"
    assert sorted(shown.values()) == [b"1", b"ours", b"theirs"]


async def test_the_status_says_for_how_long_the_keys_are_refused(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("run/file", b"1")
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await listed(user, "run")
        await trio.sleep(5)
        assert user.fs.statistics()["refused_seconds"] == 0
        refuse(store)
        for _ in range(20):
            await user.fs.resolve("run/file")
            await trio.sleep(1)
        assert 18 <= user.fs.statistics()["refused_seconds"] <= 21
        with pytest.raises(AccessDenied, match=r"^never/seen: not known locally, and .*InvalidAccess"):
            await user.fs.paths.lookup_path("never/seen")
        store.heal()
        await trio.sleep(2)
        await user.fs.resolve("run/file")
        await trio.sleep(1)
        assert user.fs.statistics()["refused_seconds"] == 0


@pytest.mark.parametrize("size", [10, 70 << 20], ids=["whole", "parts"])
@pytest.mark.parametrize("who", ["reader", "daemon"])
async def test_uploads_go_on_as_soon_as_keys_are_seen_to_work_again(
    bucket: Bucket, cache: Path, size: int, who: str
) -> None:
    bucket.memory.put_bytes("run/file", b"1")
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await listed(user, "run")
        refuse(store)
        await user.write("run/new", b"x" * size)
        for _ in range(100):
            await trio.sleep(10)
            await user.fs.resolve("run/file")
        store.heal()
        began = trio.current_time()
        if who == "reader":
            await user.fs.resolve("run/file")
        else:
            await user.fs.try_again()
        assert await user.drained() == "durable"
        assert trio.current_time() - began < 5
