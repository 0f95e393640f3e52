"""Which keys of the bucket a mount still needs: commands that remove objects ask for them."""

from pathlib import Path

import trio

from fusecache.engine.durability.status import OPEN, PENDING, KeysInUse
from fusecache.model.errors import Unavailable
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, running_node

NEW = f"it {PENDING}"


async def test_open_and_pending_keys_are_needed(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, prefix="run/") as user:
        for name in ("open", "closed"):
            await user.write(name, b"data")
        assert await user.drained() == "durable"
        find = KeysInUse(user.fs.tree, user.fs.queue).find
        assert await find(["run/open", "run/closed", "run/", ""]) == {}
        handle = await user.open("open", truncate=False)
        keys = ["run/open", "run/closed", "run/other", "other/open", "open"]
        assert await find(keys) == {"run/open": f"it {OPEN}"}
        assert await find(["run/", "", "ru/", "other/"]) == dict.fromkeys(["run/", ""], f"run/open {OPEN}")
        await user.close(handle)
        assert await user.drained() == "durable"
        assert await find(["run/open", "run/", ""]) == {}


async def test_changes_of_names_are_needed_until_published(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await user.mkdir("a")
        for name in ("a/gone", "a/moved", "a/untouched"):
            await user.write(name, b"data")
        assert await user.drained() == "durable"
        for method in ("put", "copy", "delete"):
            store.script(Fault(Unavailable("no answer"), method, "*", times=None))
        await user.unlink("a/gone")
        await user.rename("a/moved", "b")
        await user.write("c", b"new")
        await trio.sleep(30)
        find = KeysInUse(user.fs.tree, user.fs.queue).find
        needed = ["a/gone", "a/moved", "b", "c"]
        assert await find([*needed, "a/untouched"]) == dict.fromkeys(needed, NEW)
        assert set(await find(["a/", "other/", ""])) == {"a/", ""}
        store.heal()
        assert await user.drained() == "durable"
        assert await find([*needed, "a/", ""]) == {}
